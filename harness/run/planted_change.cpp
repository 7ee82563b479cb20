#include "harness/run/planted_change.h"

#include <ATen/ATen.h>

#include <bit>
#include <cstdint>

#include "harness/case/random.h"

namespace harness {
namespace {

// The longest piece of the named parameter, on any rank.
shardproof::Piece* longest_piece(std::vector<RankStep>& ranks, const std::string& name) {
  shardproof::Piece* longest = nullptr;
  for (RankStep& rank : ranks)
    for (shardproof::Piece& piece : rank.parameters)
      if (piece.name == name && (!longest || piece.run.size() > longest->run.size())) longest = &piece;
  return longest;
}

}  // namespace

void plant_change(const Case& c, const std::string& parameter, std::vector<RankStep>& ranks) {
  shardproof::Piece* piece = longest_piece(ranks, parameter);
  if (c.mode == Mode::fast) {
    // A hundredth is more than any useful tolerance. In low precision a step may move parameters as far, and is known to a
    // hundredth.
    const double share = c.options.compute == fp32 ? 0.01 : 0.5;
    const at::Tensor sign = at::where(piece->data < 0, -1.0, 1.0);
    piece->data.add_(sign * (piece->data.abs() + 1), share);
    return;
  }
  float* values = piece->data.mutable_data_ptr<float>();
  float& value = values[Draws(c.seed, "control").bits(0) % static_cast<uint64_t>(piece->run.size())];
  value = std::bit_cast<float>(std::bit_cast<uint32_t>(value) ^ 1u);
}

}  // namespace harness
