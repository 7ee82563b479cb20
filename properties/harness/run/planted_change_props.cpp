// The change that every case plants into its own result.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "harness/run/planted_change.h"

using namespace harness;

namespace {

// What is left of these values, which one rank has, after the change.
at::Tensor changed(const char* mode, const at::Tensor& values) {
  const Case c = Case::parse(std::string("mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=0.1) ") + mode + " seed=3 : step");
  std::vector<RankStep> ranks(2);
  ranks[1].parameters.push_back({.name = "layers.0.bias", .shape = {4}, .run = {0, values.numel()}, .data = values.clone()});
  plant_change(c, "layers.0.bias", ranks);
  return ranks[1].parameters[0].data;
}

}  // namespace

TEST(PlantedChange, moves_every_element_away_from_0_by_a_hundredth_of_it_and_of_1) {
  const at::Tensor values = at::tensor({-2.0F, -1.0F, -0.99F, 0.0F, 1.0F, 50.0F});
  const at::Tensor moved = changed("fast", values);
  const at::Tensor expected = at::tensor({-2.03F, -1.02F, -1.0099F, 0.01F, 1.02F, 50.51F});
  EXPECT_TRUE(at::allclose(moved, expected, 1e-6)) << moved;
}

TEST(PlantedChange, flips_one_bit_where_bits_are_compared) {
  const at::Tensor values = at::tensor({-2.0F, -1.0F, 0.0F, 50.0F});
  const at::Tensor moved = changed("ordered", values);
  EXPECT_EQ((moved != values).sum().item<int64_t>(), 1);
  EXPECT_TRUE(at::allclose(moved, values, 1e-6, 1e-30)) << moved;
}
