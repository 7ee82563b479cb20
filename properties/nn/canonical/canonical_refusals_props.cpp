// What canonical arithmetic cannot compute exactly is refused, and named.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "properties/kit/expect_error.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

TEST(Canonical, what_exact_sums_cannot_hold_is_refused_naming_the_tensor) {
  const at::Tensor one = at::ones({1, 1}, at::kDouble);
  for (const double bad : {128.0, -129.0, 4096.0, 1e300, static_cast<double>(INFINITY), static_cast<double>(NAN)})
    for (const auto& [x, weight] : {std::pair(one * bad, one), std::pair(one, one * bad), std::pair(one * bad / 16, one * 16)})
      EXPECT_THROW(canonical_ops::linear(x, weight, {}, "h.3.c_fc"), NonFiniteError) << bad;
  expect_error([&] { canonical_ops::linear(one * 1e4, one, {}, "h.3.c_fc"); }, {"h.3.c_fc", "128", "learning rate"});
  canonical_ops::linear(one * 127.9, one, {}, "fits");
  canonical_ops::linear(one * -128.0, one, {}, "fits");
  const at::Tensor many = at::zeros({1, 65536}, at::kDouble);
  expect_error([&] { canonical_ops::linear(many, many, {}, "lm_head"); }, {"lm_head", "65536", "65535"});
  expect_error([&] { canonical_ops::linear(one.to(at::kFloat), one, {}, "lm_head"); },
               {"lm_head", "float64", "Precision::compute"});
}

// The forward has terms of 50, and the backward one of 200.
TEST(Canonical, terms_that_only_the_backward_has_are_refused_by_it) {
  const auto differentiate = [](double input, double of_weight) {
    const at::Tensor x = at::full({1, 1}, input, at::kDouble).requires_grad_(),
                     weight = at::full({1, 1}, of_weight, at::kDouble).requires_grad_();
    canonical_ops::linear(x, weight, {}, "h.3.c_fc").backward(at::full({1, 1}, 2.0, at::kDouble));
  };
  differentiate(7, 7);
  expect_error([&] { differentiate(0.5, 100); }, {"h.3.c_fc, gradient of the input", "128"});
  expect_error([&] { differentiate(100, 0.5); }, {"h.3.c_fc, gradient of the weight", "128"});
}

// A key's gradient has a term for each query of each head that it serves.
TEST(Canonical, more_queries_than_a_sum_has_terms_are_refused_by_the_backward) {
  const auto attend = [](int64_t heads, int64_t queries) {
    const at::Tensor q = at::zeros({1, heads, queries, 1}, at::kDouble).requires_grad_(true);
    const at::Tensor key = at::zeros({1, 1, 2, 1}, at::kDouble);
    const std::vector<int64_t> positions(static_cast<size_t>(queries), 0);
    canonical_ops::attention(q, key, key, positions, /*causal=*/false, "h.1.attn").sum().backward();
  };
  attend(5, 13107);
  expect_error([&] { attend(16, 4096); }, {"h.1.attn", "gradients", "65536", "65535"});
}

TEST(Canonical, attention_between_tensors_that_do_not_fit_is_refused_with_the_name_of_the_module) {
  const auto zeros = [](std::vector<int64_t> sizes) { return at::zeros(sizes, at::kDouble); };
  const at::Tensor q = zeros({2, 4, 3, 8}), k = zeros({2, 2, 3, 8});
  const std::vector<int64_t> positions = {0, 1, 2};
  const auto attend = [&](const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                          const std::vector<int64_t>& at, const at::Tensor& mask = {}) {
    return canonical_ops::attention(queries, keys, values, at, /*causal=*/true, "h.0.attn", mask);
  };
  EXPECT_EQ(attend(q, k, k, positions).sizes(), q.sizes());
  for (const at::Tensor& keys : {zeros({2, 0, 3, 8}), zeros({2, 3, 3, 8}), zeros({1, 2, 3, 8}), zeros({2, 2, 3, 6}), k[0]})
    expect_error([&] { attend(q, keys, keys, positions); }, {"h.0.attn", "do not fit"});
  expect_error([&] { attend(q[0], k, k, positions); }, {"h.0.attn", "do not fit"});
  expect_error([&] { attend(q, k, zeros({2, 2, 4, 8}), positions); }, {"h.0.attn", "do not fit"});
  expect_error([&] { attend(q, k, k, {0, 1}); }, {"h.0.attn", "2 positions", "do not fit"});
  expect_error([&] { attend(q, k, k, {0, 1, 3}); }, {"h.0.attn", "a query at position 3 of 3"});
  expect_error([&] { attend(q, k, k, {-1, 1, 2}); }, {"h.0.attn", "a query at position -1 of 3"});
  expect_error([&] { attend(q, k, k, positions, zeros({2, 4, 3, 4})); }, {"h.0.attn", "a mask of sizes 2x4x3x4"});
}

// The share is 1, and the mask doubles it.
TEST(Canonical, a_mask_that_makes_a_term_of_attention_too_large_is_refused) {
  const at::Tensor zero = at::zeros({1, 1, 1, 2}, at::kDouble), mask = at::full({1, 1, 1, 1}, 2.0, at::kDouble);
  const auto attend = [&](double value) {
    canonical_ops::attention(zero, zero, at::full({1, 1, 1, 2}, value, at::kDouble), {0}, /*causal=*/true, "h.0.attn", mask);
  };
  attend(60);
  expect_error([&] { attend(100); }, {"h.0.attn", "128"});
}

TEST(Canonical, norms_of_no_features_or_of_other_features_than_there_are_weights_are_refused) {
  const auto zeros = [](std::vector<int64_t> sizes) { return at::zeros(sizes, at::kDouble); };
  for (const int64_t features : {0, 3})
    for (const int64_t weights : {0, 2}) {
      const at::Tensor x = zeros({4, features}), weight = zeros({weights});
      const std::string both = fmt::format("4x{}, and has {} weights", features, weights);
      expect_error([&] { canonical_ops::rms_norm(x, weight, 1e-5, "h.0.ln_1"); }, {"h.0.ln_1", both.c_str()});
      expect_error([&] { canonical_ops::layer_norm(x, weight, weight, 1e-5, "h.0.ln_1"); }, {"h.0.ln_1", both.c_str()});
    }
}
