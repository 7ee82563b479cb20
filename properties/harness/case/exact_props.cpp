// Mode exact: no sum of the step is rounded, so its order does not matter.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "harness/case/exact_data.h"
#include "harness/case/generate.h"
#include "harness/case/problem.h"
#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"

using namespace harness;
using kit::same_bits;

namespace {

// The gradient of a run's only step, with the ranks in another order, and the rounds inside or outside.
golden::Named gradient(golden::Run run, bool rounds_first, bool reversed) {
  run.steps[0].reduce_after = std::vector<bool>(run.steps[0].microbatches.size(), !rounds_first);
  if (reversed)
    for (auto& round : run.steps[0].microbatches) std::reverse(round.begin(), round.end());
  return golden::train(run)[0].gradients;
}

// Whether every order of sums gives the same bits.
bool order_matters(const golden::Run& run) {
  const golden::Named first = gradient(run, true, false);
  for (const bool rounds_first : {true, false})
    for (const bool reversed : {false, true}) {
      const golden::Named other = gradient(run, rounds_first, reversed);
      for (size_t i = 0; i < first.size(); ++i)
        if (!same_bits(first[i].second, other[i].second)) return true;
    }
  return false;
}

Case exact_case(int64_t i, int64_t world_max) {
  return generate(5, i, {.mode = Mode::exact, .world_max = world_max});
}

}  // namespace

TEST(Exact, every_order_of_sums_gives_the_same_bits) {
  for (int64_t i = 0; i < 150; ++i) {
    const Case c = exact_case(i, i % 10 == 0 ? 100 : 8);
    const golden::Run run = make_run(c);
    EXPECT_LE(bits_needed(run), 24) << c.str();
    EXPECT_FALSE(order_matters(run)) << c.str();
  }
}

TEST(Exact, float32_and_float64_agree_on_undivided_gradients) {
  for (int64_t i = 0; i < 100; ++i) {
    golden::Run run = make_run(exact_case(i, 8));
    run.steps[0].divide = 1;
    run.steps[0].clip_norm = 0;
    const golden::Named single = golden::train(run)[0].gradients, truth = golden::train(run, at::kDouble)[0].gradients;
    for (size_t k = 0; k < single.size(); ++k) EXPECT_TRUE(same_bits(single[k].second.to(at::kDouble), truth[k].second));
  }
}

TEST(Exact, ordinary_data_do_depend_on_the_order) {
  int depends = 0;
  for (int64_t i = 0; i < 100; ++i) {
    Case c = exact_case(i, 8);
    c.mode = Mode::ordered;
    depends += order_matters(make_run(c));
  }
  EXPECT_GE(depends, 30) << "the property above would hold of any data";
}

TEST(Exact, data_are_not_thinned_out_to_nothing) {
  int healthy = 0;
  constexpr int kCases = 300;
  for (int64_t i = 0; i < kCases; ++i) {
    const golden::Trace trace = golden::train(make_run(exact_case(i, 8)));
    int64_t nonzero = 0, all = 0;
    for (const auto& [name, tensor] : trace[0].gradients)
      nonzero += tensor.count_nonzero().item<int64_t>(), all += tensor.numel();
    healthy += 2 * nonzero >= all;
  }
  EXPECT_GE(healthy, kCases * 3 / 4);
}

TEST(Exact, a_model_that_no_thinning_makes_exact_is_refused) {
  Case c = Case::parse("mlp(widths=2-2,act=identity) mesh(dp_shard=2) zero3 sgd(lr=0.5) exact seed=1 : step");
  c.model.mlp.widths.assign(60, 1);
  shardproof::expect_error([&] { make_run(c); }, {"[case] exact", "fewer or narrower layers"});
}
