#include "harness/step_difference.h"

#include <ATen/ATen.h>

#include <bit>
#include <cmath>
#include <map>

namespace harness {
namespace {

using shardproof::Interval;
using shardproof::Piece;
using Difference = std::optional<std::string>;

template <class Bits, class Float>
bool same(Float golden, Float sharded) {
  return std::bit_cast<Bits>(golden) == std::bit_cast<Bits>(sharded) && std::isfinite(golden);
}

template <class Bits, class Float>
std::string both(Float golden, Float sharded) {
  return fmt::format("golden {:.17g} (0x{:x}), sharded {:.17g} (0x{:x})", golden, std::bit_cast<Bits>(golden),
                     sharded, std::bit_cast<Bits>(sharded));
}

std::string index_of(int64_t position, const at::Tensor& tensor) {
  std::vector<int64_t> index(tensor.dim());
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    index[dim] = position % tensor.size(dim);
    position /= tensor.size(dim);
  }
  return fmt::format("[{}]", fmt::join(index, ", "));
}

Difference losses(const golden::StepTrace& golden, const std::vector<RankStep>& ranks, int64_t* compared) {
  for (size_t round = 0; round < golden.losses.size(); ++round)
    for (size_t rank = 0; rank < ranks.size(); ++rank, ++*compared)
      if (!same<uint64_t>(golden.losses[round][rank], ranks[rank].losses.at(round)))
        return fmt::format("loss of rank {}, round {}: {}", rank, round,
                           both<uint64_t>(golden.losses[round][rank], ranks[rank].losses[round]));
  for (size_t rank = 0; rank < ranks.size(); ++rank, ++*compared)
    if (!same<uint64_t>(golden.gradient_norm, ranks[rank].gradient_norm))
      return fmt::format("gradient norm on rank {}: {}", rank,
                         both<uint64_t>(golden.gradient_norm, ranks[rank].gradient_norm));
  return {};
}

// The tensors of one kind (gradients, say), on all ranks.
class Kind {
 public:
  Kind(std::string name, const golden::Named& golden) : name_(std::move(name)) {
    for (const auto& [tensor_name, tensor] : golden) golden_.emplace(tensor_name, tensor.contiguous());
  }

  Difference compare(const std::vector<Piece>& pieces, size_t rank, int64_t* compared) {
    for (const Piece& piece : pieces) {
      const auto found = golden_.find(piece.name);
      if (found == golden_.end())
        return fmt::format("{} of {} on rank {}: the golden run has none", name_, piece.name, rank);
      const float* golden = found->second.const_data_ptr<float>();
      const float* sharded = piece.data.const_data_ptr<float>();
      for (int64_t i = piece.run.begin; i < piece.run.end; ++i, ++*compared)
        if (!same<uint32_t>(golden[i], sharded[i - piece.run.begin]))
          return fmt::format("{} of {}, element {}, on rank {}: {}", name_, piece.name,
                             index_of(i, found->second), rank,
                             both<uint32_t>(golden[i], sharded[i - piece.run.begin]));
      held_[piece.name].push_back(piece.run);
    }
    return {};
  }

  Difference missing() {
    for (const auto& [name, tensor] : golden_) {
      std::vector<Interval>& runs = held_[name];
      std::sort(runs.begin(), runs.end(),
                [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
      int64_t covered = 0;
      for (const Interval& run : runs)
        if (run.begin <= covered) covered = std::max(covered, run.end);
      if (covered < tensor.numel())
        return fmt::format("{} of {}, element {}: held by no rank", name_, name, index_of(covered, tensor));
    }
    return {};
  }

 private:
  std::string name_;
  std::map<std::string, at::Tensor> golden_;
  std::map<std::string, std::vector<Interval>> held_;
};

template <class PiecesOf>
Difference tensors(const std::string& name, const golden::Named& golden, const std::vector<RankStep>& ranks,
                   const PiecesOf& pieces_of, int64_t* compared) {
  Kind kind(name, golden);
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (auto difference = kind.compare(pieces_of(ranks[rank]), rank, compared)) return difference;
  return kind.missing();
}

}  // namespace

Difference first_difference(const golden::StepTrace& golden, const std::vector<RankStep>& ranks,
                            int64_t* compared) {
  if (auto difference = losses(golden, ranks, compared)) return difference;
  const auto gradients = [](const RankStep& step) -> auto& {
    return step.gradients;
  };
  if (auto difference = tensors("gradient", golden.gradients, ranks, gradients, compared)) return difference;
  const auto parameters = [](const RankStep& step) -> auto& {
    return step.parameters;
  };
  if (auto difference = tensors("parameter", golden.parameters, ranks, parameters, compared))
    return difference;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].state.size() > golden.state.size())
      return fmt::format("optimizer state {} on rank {}: the golden run has none",
                         ranks[rank].state[golden.state.size()].first, rank);
  for (size_t slot = 0; slot < golden.state.size(); ++slot) {
    const auto& [name, values] = golden.state[slot];
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      if (slot >= ranks[rank].state.size() || ranks[rank].state[slot].first != name)
        return fmt::format("optimizer state {} on rank {}: there is none", name, rank);
    const auto state = [slot](const RankStep& step) -> auto& {
      return step.state[slot].second;
    };
    if (auto difference = tensors(name, values, ranks, state, compared)) return difference;
  }
  return {};
}

}  // namespace harness
