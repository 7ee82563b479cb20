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

using Traces = std::vector<const golden::StepTrace*>;
using Rank = std::vector<const std::vector<Piece>*>;

class Step {
 public:
  Step(const golden::StepTrace& truth, const Traces& references, double* ratio_max)
      : truth_(truth), references_(references), ratio_max_(ratio_max) {}

  // `get` takes a value out of a trace.
  template <class Get>
  Difference scalar(const std::string& what, double sharded, const Get& get) {
    const auto tensor = [](double value) { return at::full({1}, value, at::kDouble); };
    double allowed = 0;
    for (const auto* reference : references_)
      allowed = std::max(allowed, distance(tensor(get(truth_)), tensor(get(*reference))));
    return judge(what, allowed, distance(tensor(get(truth_)), tensor(sharded)));
  }

  // `get` takes named tensors out of a trace; `pieces` are all ranks' parts of them.
  template <class Get>
  Difference tensors(const std::string& what, const Rank& pieces, const Get& get) {
    const golden::Named& truth = get(truth_);
    std::map<std::string, Assembled> sharded;
    if (auto difference = assemble(what, truth, pieces, sharded)) return difference;
    for (size_t i = 0; i < truth.size(); ++i) {
      const auto& [name, values] = truth[i];
      double allowed = 0;
      for (const auto* reference : references_) allowed = std::max(allowed, distance(values, get(*reference)[i].second));
      const double found = distance(values, sharded[name].values.reshape_as(values));
      if (auto difference = judge(fmt::format("{} of {}", what, name), allowed, found)) return difference;
    }
    return {};
  }

 private:
  Difference judge(const std::string& what, double allowed, double found) {
    allowed = std::max(allowed, kDistanceFloor);
    *ratio_max_ = std::max(*ratio_max_, found / allowed);
    if (found <= kToleranceFactor * allowed) return {};  // false for NaN
    return fmt::format("{}: relative distance {:.3g} from the float64 run, {:.3g} times that of unsharded float32 runs "
                       "(allowed {})", what, found, found / allowed, kToleranceFactor);
  }

  const golden::StepTrace& truth_;
  const Traces& references_;
  double* ratio_max_;
};

template <class PiecesOf>
Rank all_ranks(const std::vector<RankStep>& ranks, const PiecesOf& pieces_of) {
  Rank all;
  for (const RankStep& rank : ranks) all.push_back(&pieces_of(rank));
  return all;
}

}  // namespace

Difference first_beyond_tolerance(const golden::StepTrace& truth, const Traces& references,
                                  const std::vector<RankStep>& ranks, double* ratio_max) {
  using Trace = golden::StepTrace;
  Step step(truth, references, ratio_max);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (size_t round = 0; round < truth.losses.size(); ++round)
      if (auto difference = step.scalar(fmt::format("loss of rank {}, round {}", rank, round), ranks[rank].losses.at(round),
                                        [&](const Trace& trace) { return trace.losses[round][rank]; }))
        return difference;
    if (auto difference = step.scalar(fmt::format("gradient norm on rank {}", rank), ranks[rank].gradient_norm,
                                      [](const Trace& trace) { return trace.gradient_norm; }))
      return difference;
  }
  if (auto difference = step.tensors("gradient", all_ranks(ranks, [](const RankStep& r) -> auto& { return r.gradients; }),
                                     [](const Trace& trace) -> auto& { return trace.gradients; }))
    return difference;
  if (auto difference = step.tensors("parameter", all_ranks(ranks, [](const RankStep& r) -> auto& { return r.parameters; }),
                                     [](const Trace& trace) -> auto& { return trace.parameters; }))
    return difference;
  for (size_t slot = 0; slot < truth.state.size(); ++slot) {
    for (const RankStep& rank : ranks)
      SHARD_REQUIRE(slot < rank.state.size() && rank.state[slot].first == truth.state[slot].first, "harness",
                    "the sharded run lacks optimizer state {}", truth.state[slot].first);
    const auto pieces = all_ranks(ranks, [slot](const RankStep& r) -> auto& { return r.state[slot].second; });
    if (auto difference = step.tensors(truth.state[slot].first, pieces,
                                       [slot](const Trace& trace) -> auto& { return trace.state[slot].second; }))
      return difference;
  }
  return {};
}

}  // namespace harness
