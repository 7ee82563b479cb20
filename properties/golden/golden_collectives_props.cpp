// The collectives of the reference, which are what every backend is held to.
#include "golden/collectives.h"
#include "properties/kit/golden_runs.h"

namespace {

using namespace golden_runs;
using golden::Ranks;

Ranks random_inputs(int64_t ranks, int64_t numel) {
  Tensors tensors(*rc::gen::arbitrary<uint64_t>());
  Ranks inputs;
  for (int64_t r = 0; r < ranks; ++r) inputs.push_back(tensors.normal({numel}));
  return inputs;
}

RC_GTEST_PROP(GoldenCollectives, a_sum_adds_one_rank_after_the_other, ()) {
  const Ranks inputs = random_inputs(draw(1, 7), draw(0, 20));
  const at::Tensor sum = golden::combine(inputs);
  for (int64_t i = 0; i < sum.numel(); ++i) {
    float expected = inputs[0][i].item<float>();
    for (size_t r = 1; r < inputs.size(); ++r) expected += inputs[r][i].item<float>();
    RC_ASSERT(golden_runs::same_bits(sum[i], at::scalar_tensor(expected)));
  }
}

RC_GTEST_PROP(GoldenCollectives, reduce_scatter_then_all_gather_is_all_reduce, ()) {
  const int64_t ranks = draw(1, 6);
  const Ranks inputs = random_inputs(ranks, ranks * draw(0, 5));
  const auto op = pick({golden::Combine::sum, golden::Combine::max, golden::Combine::min});
  RC_ASSERT(
      same_bits(golden::all_gather(golden::reduce_scatter(inputs, op)), golden::all_reduce(inputs, op)));
}

RC_GTEST_PROP(GoldenCollectives, all_to_all_with_transposed_sizes_brings_everything_back, ()) {
  const size_t ranks = static_cast<size_t>(draw(1, 5));
  std::vector<std::vector<int64_t>> sizes(ranks, std::vector<int64_t>(ranks)), back = sizes;
  Ranks inputs;
  for (size_t s = 0; s < ranks; ++s) {
    int64_t total = 0;
    for (size_t r = 0; r < ranks; ++r) total += sizes[s][r] = back[r][s] = draw(0, 4);
    inputs.push_back(random_inputs(1, total)[0]);
  }
  RC_ASSERT(same_bits(golden::all_to_all(golden::all_to_all(inputs, sizes), back), inputs));
}

TEST(GoldenCollectives, what_lands_where) {
  const Ranks inputs = {at::tensor({1.f, 2.f}), at::tensor({3.f, 4.f})};
  EXPECT_TRUE(same_bits(golden::all_gather(inputs), Ranks(2, at::tensor({1.f, 2.f, 3.f, 4.f}))));
  EXPECT_TRUE(same_bits(golden::reduce_scatter(inputs), {at::tensor({4.f}), at::tensor({6.f})}));
  EXPECT_TRUE(same_bits(golden::all_reduce(inputs, golden::Combine::min), Ranks(2, inputs[0])));
  EXPECT_TRUE(same_bits(golden::broadcast(inputs, 1), Ranks(2, inputs[1])));
  EXPECT_TRUE(same_bits(golden::all_to_all(inputs, {{0, 2}, {1, 1}}),
                        {at::tensor({3.f}), at::tensor({1.f, 2.f, 4.f})}));
}

TEST(GoldenCollectives, a_group_of_one_keeps_the_sign_of_zero) {
  const Ranks inputs = {at::tensor({-0.0f})};
  EXPECT_TRUE(same_bits(golden::all_reduce(inputs), inputs));
  EXPECT_FALSE(same_bits(inputs, {at::tensor({0.0f})}));
}

TEST(GoldenCollectives, sizes_that_do_not_fit_are_refused) {
  EXPECT_THROW(golden::all_gather({at::zeros({2}), at::zeros({3})}), std::invalid_argument);
  EXPECT_THROW(golden::reduce_scatter({at::zeros({3}), at::zeros({3})}), std::invalid_argument);
  EXPECT_THROW(golden::all_to_all({at::zeros({3}), at::zeros({3})}, {{1, 1}, {2, 1}}), std::invalid_argument);
  EXPECT_THROW(golden::broadcast({at::zeros({3})}, 1), std::invalid_argument);
}

}  // namespace
