// The products of rows with the matrices of their experts, in groups and one by one.
#include <gtest/gtest.h>

#include <numeric>

#include "properties/kit/bits.h"
#include "internal/parallel/experts/products.h"

using namespace shardproof;
using kit::same_bits;

namespace {

struct Found {
  at::Tensor y, dx, dw;
};

// Of three experts, whose matrices are [16, 8].
Found products(const std::vector<int64_t>& blocks, at::ScalarType dtype, bool grouped) {
  torch::manual_seed(7);
  const int64_t rows = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
  const auto drawn = [&](at::IntArrayRef sizes) { return at::randn(sizes).to(dtype); };
  const at::Tensor x = drawn({rows, 8}).requires_grad_(), weight = drawn({3, 16, 8}).requires_grad_();
  const at::Tensor dy = drawn({rows, 16}), y = expert_products(x, weight, blocks, grouped);
  y.backward(dy);
  return {y.detach(), x.grad(), weight.grad()};
}

// Of each source the rows of the three experts.
const std::vector<std::vector<int64_t>> kBlocks = {
    {3, 1, 2}, {0, 4, 0}, {0, 0, 0}, {5, 0, 0, 0, 2, 1}, {0, 0, 0, 1, 1, 1}, {1, 2, 3, 3, 2, 1, 0, 4, 2}};

}  // namespace

// The backwards too: one expert may have all rows, an expert, a source or all of them none.
TEST(GroupedProducts, have_the_bits_of_products_one_by_one) {
  for (const auto& blocks : kBlocks)
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Found grouped = products(blocks, dtype, true), loop = products(blocks, dtype, false);
      EXPECT_TRUE(same_bits(grouped.y, loop.y)) << at::IntArrayRef(blocks) << ' ' << dtype;
      EXPECT_TRUE(same_bits(grouped.dx, loop.dx)) << at::IntArrayRef(blocks) << ' ' << dtype;
      EXPECT_TRUE(same_bits(grouped.dw, loop.dw)) << at::IntArrayRef(blocks) << ' ' << dtype;
    }
}

TEST(GroupedProducts, are_those_of_each_row_with_its_experts_matrix) {
  const Found found = products({2, 0, 3, 1, 1, 0}, at::kFloat, true);
  torch::manual_seed(7);
  const at::Tensor x = at::randn({7, 8}), weight = at::randn({3, 16, 8}), dy = at::randn({7, 16});
  const std::vector<int64_t> experts = {0, 0, 2, 2, 2, 0, 1};
  at::Tensor dw = at::zeros({3, 16, 8});
  for (int64_t row = 0; row < 7; ++row) {
    const int64_t expert = experts[static_cast<size_t>(row)];
    EXPECT_TRUE(at::allclose(found.y[row], weight[expert].mv(x[row]), 1e-5, 1e-5)) << row;
    EXPECT_TRUE(at::allclose(found.dx[row], weight[expert].t().mv(dy[row]), 1e-5, 1e-5)) << row;
    dw[expert] += at::outer(dy[row], x[row]);
  }
  EXPECT_TRUE(at::allclose(found.dw, dw, 1e-5, 1e-5));
}

// A kernel reads 16 bytes at a time.
TEST(GroupedProducts, take_rows_of_bfloat16_that_begin_at_multiples_of_16_bytes) {
  const auto of = [](at::IntArrayRef sizes, at::ScalarType dtype = at::kBFloat16) { return at::zeros(sizes, dtype); };
  EXPECT_TRUE(suit_groups(of({5, 8}), of({3, 16, 8})));
  EXPECT_TRUE(suit_groups(of({0, 8}), of({3, 16, 8})));
  EXPECT_FALSE(suit_groups(of({5, 12}), of({3, 16, 12})));
  EXPECT_FALSE(suit_groups(of({5, 8}), of({3, 12, 8})));
  EXPECT_FALSE(suit_groups(of({5, 8}), of({3, 0, 8}))) << "a slice of an expert that is empty";
  EXPECT_FALSE(suit_groups(of({5, 8}), of({0, 16, 8})));
  EXPECT_FALSE(suit_groups(of({5, 8}, at::kFloat), of({3, 16, 8}, at::kFloat)));
  EXPECT_FALSE(suit_groups(of({41}).narrow(0, 1, 40).view({5, 8}), of({3, 16, 8})));
  EXPECT_FALSE(suit_groups(of({8, 5}).t(), of({3, 16, 8})));
  EXPECT_FALSE(suit_groups(of({5, 8}), of({3, 8, 16}).transpose(1, 2)));
}
