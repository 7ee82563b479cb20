#include "harness/tolerance.h"

#include <ATen/ATen.h>

#include <cmath>
#include <map>

#include "shardproof/check.h"

namespace harness {
namespace {

using shardproof::Piece;
using Difference = std::optional<std::string>;

double distance(const at::Tensor& truth, const at::Tensor& other) {
  const double size = truth.norm().item<double>();
  const double error = (other.to(at::kDouble) - truth).norm().item<double>();
  return size > 0 ? error / size : error;
}

// One tensor put together from the ranks' pieces.
struct Assembled {
  at::Tensor values;  // 1-D
  std::vector<bool> held;
};

Difference assemble(const std::string& what, const golden::Named& names, const std::vector<const std::vector<Piece>*>& ranks,
                    std::map<std::string, Assembled>& tensors) {
  for (const auto& [name, tensor] : names)
    tensors[name] = {at::empty({tensor.numel()}), std::vector<bool>(static_cast<size_t>(tensor.numel()), false)};
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (const Piece& piece : *ranks[rank]) {
      const auto found = tensors.find(piece.name);
      if (found == tensors.end()) return fmt::format("{} of {} on rank {}: the golden run has none", what, piece.name, rank);
      Assembled& target = found->second;
      float* values = target.values.mutable_data_ptr<float>();
      const float* source = piece.data.const_data_ptr<float>();
      for (int64_t i = piece.run.begin; i < piece.run.end; ++i) {
        const float value = source[i - piece.run.begin];
        const auto at = static_cast<size_t>(i);
        if (target.held[at] && values[i] != value)
          return fmt::format("{} of {}, element {}, on rank {}: {:.9g}, but {:.9g} on another rank", what, piece.name, i, rank,
                             value, values[i]);
        values[i] = value;
        target.held[at] = true;
      }
    }
  for (const auto& [name, tensor] : tensors)
    for (size_t i = 0; i < tensor.held.size(); ++i)
      if (!tensor.held[i]) return fmt::format("{} of {}, element {}: held by no rank", what, name, i);
  return {};
}

class Step {
 public:
  explicit Step(double* ratio_max) : ratio_max_(ratio_max) {}

  Difference compare(const std::string& what, const at::Tensor& truth, const at::Tensor& reference, const at::Tensor& sharded) {
    const double allowed = std::max(distance(truth, reference.reshape_as(truth)), kDistanceFloor);
    const double found = distance(truth, sharded.reshape_as(truth));
    *ratio_max_ = std::max(*ratio_max_, found / allowed);
    if (found <= kToleranceFactor * allowed) return {};  // false for NaN
    return fmt::format("{}: relative distance {:.3g} from the float64 run, {:.3g} times that of the unsharded float32 run "
                       "(allowed {})", what, found, found / allowed, kToleranceFactor);
  }

  Difference compare(const std::string& what, const golden::Named& truth, const golden::Named& reference,
                     const std::vector<const std::vector<Piece>*>& ranks) {
    std::map<std::string, Assembled> tensors;
    if (auto difference = assemble(what, truth, ranks, tensors)) return difference;
    for (size_t i = 0; i < truth.size(); ++i)
      if (auto difference = compare(fmt::format("{} of {}", what, truth[i].first), truth[i].second, reference[i].second,
                                    tensors[truth[i].first].values))
        return difference;
    return {};
  }

 private:
  double* ratio_max_;
};

template <class PiecesOf>
std::vector<const std::vector<Piece>*> all_ranks(const std::vector<RankStep>& ranks, const PiecesOf& pieces_of) {
  std::vector<const std::vector<Piece>*> all;
  for (const RankStep& rank : ranks) all.push_back(&pieces_of(rank));
  return all;
}

at::Tensor scalar(double value) { return at::full({1}, value, at::kDouble); }

}  // namespace

Difference first_beyond_tolerance(const golden::StepTrace& truth, const golden::StepTrace& reference,
                                  const std::vector<RankStep>& ranks, double* ratio_max) {
  Step step(ratio_max);
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (size_t round = 0; round < truth.losses.size(); ++round)
      if (auto difference = step.compare(fmt::format("loss of rank {}, round {}", rank, round),
                                         scalar(truth.losses[round][rank]), scalar(reference.losses[round][rank]),
                                         scalar(ranks[rank].losses.at(round))))
        return difference;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (auto difference = step.compare(fmt::format("gradient norm on rank {}", rank), scalar(truth.gradient_norm),
                                       scalar(reference.gradient_norm), scalar(ranks[rank].gradient_norm)))
      return difference;
  if (auto difference = step.compare("gradient", truth.gradients, reference.gradients,
                                     all_ranks(ranks, [](const RankStep& r) -> auto& { return r.gradients; })))
    return difference;
  if (auto difference = step.compare("parameter", truth.parameters, reference.parameters,
                                     all_ranks(ranks, [](const RankStep& r) -> auto& { return r.parameters; })))
    return difference;
  for (size_t slot = 0; slot < truth.state.size(); ++slot) {
    for (const RankStep& rank : ranks)
      SHARD_REQUIRE(slot < rank.state.size() && rank.state[slot].first == truth.state[slot].first, "harness",
                    "the sharded run lacks optimizer state {}", truth.state[slot].first);
    if (auto difference = step.compare(truth.state[slot].first, truth.state[slot].second, reference.state[slot].second,
                                       all_ranks(ranks, [slot](const RankStep& r) -> auto& { return r.state[slot].second; })))
      return difference;
  }
  return {};
}

}  // namespace harness
