#include "harness/compare/step_difference.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace harness {
namespace {

template <class Bits, class Float>
bool same(Float golden, Float sharded) {
  return std::bit_cast<Bits>(golden) == std::bit_cast<Bits>(sharded) && std::isfinite(golden);
}

template <class Bits, class Float>
std::string both(Float golden, Float sharded) {
  return fmt::format("golden {:.17g} (0x{:x}), sharded {:.17g} (0x{:x})", golden, std::bit_cast<Bits>(golden),
                     sharded, std::bit_cast<Bits>(sharded));
}

FoundDifference evaluations(const golden::StepTrace& golden, const std::vector<RankStep>& ranks, const Copies& copies,
                            int64_t* compared) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<double>& sharded = ranks[rank].evaluated;
    if (sharded.empty() != golden.evaluated.empty())
      return number_on(rank, "evaluation", fmt::format("only the {} run has one", sharded.empty() ? "golden" : "sharded"));
    if (sharded.empty()) continue;
    ++*compared;
    const double expected = golden.evaluated.at(copies.data_rank(rank));
    if (!same<uint64_t>(expected, sharded[0])) return number_on(rank, "evaluation", both<uint64_t>(expected, sharded[0]));
  }
  return {};
}

FoundDifference losses(const golden::StepTrace& golden, const std::vector<RankStep>& ranks, const Copies& copies,
                       int64_t* compared) {
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].losses.size() != golden.losses.size())
      return other_rounds(rank, ranks[rank].losses.size(), golden.losses.size());
  for (size_t round = 0; round < golden.losses.size(); ++round)
    for (size_t rank = 0; rank < ranks.size(); ++rank, ++*compared) {
      const double expected = golden.losses[round].at(copies.data_rank(rank));
      if (same<uint64_t>(expected, ranks[rank].losses[round])) continue;
      Difference difference = number_on(rank, "loss", both<uint64_t>(expected, ranks[rank].losses[round]));
      difference.round = static_cast<int64_t>(round);
      return difference;
    }
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].skipped != golden.skipped || ranks[rank].loss_scale != golden.loss_scale)
      return number_on(rank, "loss scale",
                       fmt::format("golden {}{}, sharded {}{}", golden.loss_scale, golden.skipped ? ", skipped" : "",
                                   ranks[rank].loss_scale, ranks[rank].skipped ? ", skipped" : ""));
  for (size_t rank = 0; rank < ranks.size(); ++rank, ++*compared)
    if (!same<uint64_t>(golden.gradient_norm, ranks[rank].gradient_norm))
      return number_on(rank, "gradient norm", both<uint64_t>(golden.gradient_norm, ranks[rank].gradient_norm));
  return {};
}

// The first value that differs or is not finite; `length` if there is none. With `zeros_alike` +0 is -0.
int64_t first_difference(const float* golden, const float* sharded, int64_t length, bool zeros_alike) {
  constexpr uint32_t kExponent = 0x7f800000;
  bool suspicious = std::memcmp(golden, sharded, static_cast<size_t>(length) * sizeof(float)) != 0;
  for (int64_t i = 0; i < length; ++i) suspicious |= (std::bit_cast<uint32_t>(golden[i]) & kExponent) == kExponent;
  if (!suspicious) return length;
  int64_t i = 0;
  while (i < length && (same<uint32_t>(golden[i], sharded[i]) || (zeros_alike && golden[i] == 0 && sharded[i] == 0))) ++i;
  return i;
}

// The lowest element that differs on any rank.
FoundDifference tensor(const TensorKind& kind, const std::string& name, const at::Tensor& golden,
                       const std::vector<HeldPiece>& pieces, bool zeros_alike, int64_t* compared) {
  const at::Tensor whole = golden.contiguous();
  const float* values = whole.const_data_ptr<float>();
  const HeldPiece* worst = nullptr;
  int64_t element = whole.numel();
  for (const HeldPiece& held : pieces) {
    const shardproof::Interval run = held.piece->run;
    const int64_t here = run.begin + first_difference(values + run.begin, held.piece->data.const_data_ptr<float>(), run.size(),
                                                        zeros_alike);
    if (here < run.end && here < element) worst = &held, element = here;
    *compared += run.size();
  }
  if (!worst) return {};
  const float sharded = worst->piece->data.const_data_ptr<float>()[element - worst->piece->run.begin];
  return element_on(worst->rank, kind.name, name, index_of(element, whole), both<uint32_t>(values[element], sharded));
}

FoundDifference buffers(const golden::StepTrace& golden, const std::vector<RankStep>& ranks, const Copies& copies,
                        int64_t* compared) {
  for (size_t rank = 0; rank < ranks.size() && !golden.buffers.empty(); ++rank)
    for (const auto& [name, expected] : golden.buffers.at(copies.data_rank(rank))) {
      const auto held = std::ranges::find(ranks[rank].buffers, name, [](const auto& item) { return item.first; });
      if (held == ranks[rank].buffers.end()) return element_on(rank, "buffer", name, "", "the sharded run has none");
      const float* values = expected.const_data_ptr<float>();
      const float* sharded = held->second.const_data_ptr<float>();
      const int64_t element = first_difference(values, sharded, expected.numel(), /*zeros_alike=*/false);
      *compared += expected.numel();
      if (element < expected.numel())
        return element_on(rank, "buffer", name, index_of(element, expected), both<uint32_t>(values[element], sharded[element]));
    }
  return {};
}

}  // namespace

FoundDifference first_difference(const golden::StepTrace& golden, const std::vector<RankStep>& ranks, Copies copies,
                                 int64_t* compared) {
  if (copies.buffers)
    if (auto difference = evaluations(golden, ranks, copies, compared)) return difference;
  if (auto difference = losses(golden, ranks, copies, compared)) return difference;
  if (copies.buffers)
    if (auto difference = buffers(golden, ranks, copies, compared)) return difference;
  std::vector<TensorKind> kinds;
  if (auto difference = tensor_kinds(golden, ranks, copies, kinds)) return difference;
  // A product over one sample is -0 in one kernel and +0 in another, and a cut product takes another kernel. Canonical products
  // are our own.
  const bool zeros_alike = copies.tensor_ranks > 1 && copies.compute != at::kDouble;
  std::vector<std::vector<HeldPiece>> sorted;
  for (const TensorKind& kind : kinds) {
    if (auto difference = sort_pieces(kind, sorted)) return difference;
    for (size_t i = 0; i < sorted.size(); ++i)
      if (auto difference = tensor(kind, kind.golden[i].first, kind.golden[i].second, sorted[i], zeros_alike, compared))
        return difference;
  }
  return {};
}

}  // namespace harness
