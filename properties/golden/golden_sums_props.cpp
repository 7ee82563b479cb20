// How gradients are added: orders, dtypes, fixed-point numbers, loss scaling, norms.
#include <numeric>

#include "golden/norm.h"
#include "golden/sums.h"
#include "properties/kit/golden_runs.h"

namespace {

using namespace golden_runs;

constexpr auto kFloats = {at::kFloat, at::kBFloat16, at::kHalf};

bool same_parameters(const golden::Trace& a, const golden::Trace& b) {
  for (size_t s = 0; s < a.size(); ++s)
    for (size_t i = 0; i < a[s].parameters.size(); ++i)
      if (!same_bits(a[s].parameters[i].second, b[s].parameters[i].second)) return false;
  return a.size() == b.size();
}

// A run of one step and rounds x ranks microbatches, nothing divided or clipped.
golden::Run one_step_run(const golden::Model& model, int64_t rounds, int64_t ranks) {
  Tensors tensors(*rc::gen::arbitrary<uint64_t>());
  golden::Run run;
  run.model = model;
  run.parameters = random_parameters(model, tensors);
  run.order.shards = ranks;
  run.steps.emplace_back();
  for (int64_t k = 0; k < rounds; ++k) {
    run.steps[0].microbatches.emplace_back();
    for (int64_t i = 0; i < ranks; ++i) run.steps[0].microbatches.back().push_back(random_microbatch(model, tensors, 0.25));
  }
  return run;
}

// Gradients of each microbatch alone, [round][rank], in the compute dtype's values.
std::vector<std::vector<golden::Named>> alone(const golden::Run& run) {
  std::vector<std::vector<golden::Named>> parts;
  for (const auto& round : run.steps[0].microbatches) {
    parts.emplace_back();
    for (const golden::Microbatch& m : round) {
      golden::Run single = run;
      single.order = {};
      single.precision = {.compute = run.precision.compute};
      single.steps = {{.microbatches = {{m}}}};
      parts.back().push_back(golden::train(single)[0].gradients);
    }
  }
  return parts;
}

// The header's order as two nested loops over one element, rounded after each operation by a conversion of its own.
struct Reference {
  const golden::Run& run;
  const std::vector<std::vector<golden::Named>>& parts;
  size_t parameter;

  static at::Tensor plus(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
    const at::Tensor exact = a.to(at::kDouble) + b.to(at::kDouble);
    return exact.to(at::kFloat).to(dtype);  // 24 bits are more than twice 8 and 11 and two: rounding twice is rounding once
  }
  at::Tensor reduced(const std::vector<at::Tensor>& terms) const {
    const golden::Precision& p = run.precision;
    if (terms.size() == 1) return terms[0];
    at::Tensor sum = terms[0].to(p.reduce);
    if (p.float32_sums) sum = sum.to(at::kFloat);
    for (size_t i = 1; i < terms.size(); ++i) sum = plus(sum, terms[i].to(p.reduce), sum.scalar_type());
    return sum.to(p.reduce).to(p.gradient);
  }
  at::Tensor part(size_t round, int64_t rank) const {
    return parts[round][static_cast<size_t>(rank)][parameter].second.to(run.precision.gradient);
  }
  at::Tensor sum() const {
    const golden::Step& step = run.steps[0];
    const golden::SumOrder& o = run.order;
    std::vector<at::Tensor> of_replica(static_cast<size_t>(o.replicas)), local(static_cast<size_t>(o.shards * o.replicas));
    at::Tensor total;
    const auto add = [&](at::Tensor& to, const at::Tensor& term) {
      to = to.defined() ? plus(to, term, run.precision.gradient) : term;
    };
    for (size_t k = 0; k < parts.size(); ++k) {
      for (int64_t i = 0; i < o.shards * o.replicas; ++i) add(local[static_cast<size_t>(i)], part(k, i));
      if (k + 1 < parts.size() && (step.reduce_after.empty() || !step.reduce_after[k])) continue;
      std::vector<at::Tensor> sums;
      for (int64_t r = 0; r < o.replicas; ++r) {
        std::vector<at::Tensor> shards(local.begin() + r * o.shards, local.begin() + (r + 1) * o.shards);
        for (at::Tensor& t : shards) t = (t.to(at::kFloat) / step.divide_before).to(t.scalar_type());
        sums.push_back(reduced(shards));
      }
      local.assign(local.size(), {});
      if (o.replicas_last)
        for (size_t r = 0; r < sums.size(); ++r) add(of_replica[r], sums[r]);
      else
        add(total, reduced(sums));
    }
    return (o.replicas_last ? reduced(of_replica) : total).to(at::kFloat);
  }
};

RC_GTEST_PROP(GoldenSums, shards_replicas_rounds_and_dtypes_are_added_as_the_header_says, ()) {
  const int64_t shards = draw(1, 3), replicas = draw(1, 3), rounds = draw(1, 4);
  golden::Run run = one_step_run(any_model(), rounds, shards * replicas);
  run.order = {.shards = shards, .replicas = replicas, .replicas_last = pick({true, false})};
  run.precision = {
      .compute = pick(kFloats), .gradient = pick(kFloats), .reduce = pick(kFloats), .float32_sums = pick({true, false})};
  run.steps[0].divide_before = pick({1.0, 2.0, 4.0});
  if (pick({true, false}))
    for (int64_t k = 0; k < rounds; ++k) run.steps[0].reduce_after.push_back(pick({true, false}));
  const golden::Named gradients = golden::train(run)[0].gradients;
  const auto parts = alone(run);
  for (size_t p = 0; p < gradients.size(); ++p) {
    RC_PRE(at::isfinite(gradients[p].second).all().item<bool>());
    RC_ASSERT(same_bits(gradients[p].second, Reference{run, parts, p}.sum()));
  }
}

// Microbatches in another order, on another number of ranks and rounds.
golden::Run dealt_anew(golden::Run run) {
  for (golden::Step& step : run.steps) {
    std::vector<golden::Microbatch> all;
    for (auto& round : step.microbatches) all.insert(all.end(), round.begin(), round.end());
    all = *rc::gen::map(rc::gen::arbitrary<uint32_t>(), [all](uint32_t seed) {
      auto shuffled = all;
      for (size_t i = shuffled.size(); i > 1; --i)
        std::swap(shuffled[i - 1], shuffled[(seed = seed * 1664525u + 1013904223u) % i]);
      return shuffled;
    });
    size_t ranks = static_cast<size_t>(draw(1, static_cast<int64_t>(all.size())));
    while (all.size() % ranks != 0) --ranks;
    step.microbatches.clear();
    step.reduce_after.clear();
    for (size_t i = 0; i < all.size(); i += ranks)
      step.microbatches.emplace_back(all.begin() + static_cast<int64_t>(i), all.begin() + static_cast<int64_t>(i + ranks));
  }
  return run;
}

RC_GTEST_PROP(GoldenSums, canonical_does_not_depend_on_how_microbatches_are_dealt_to_ranks_and_rounds, ()) {
  golden::Run run = random_run(any_model());
  run.order.canonical = true;
  RC_ASSERT(same_parameters(golden::train(run), golden::train(dealt_anew(run))));
}

RC_GTEST_PROP(GoldenSums, canonical_is_within_half_a_unit_a_term_of_the_exact_sum, ()) {
  golden::Run run = one_step_run(any_model(), draw(1, 3), draw(1, 3));
  run.order.canonical = true;
  const golden::Named gradients = golden::train(run)[0].gradients;
  const auto parts = alone(run);
  for (size_t p = 0; p < gradients.size(); ++p) {
    at::Tensor exact = at::zeros_like(gradients[p].second, at::kDouble);
    double terms = 0;
    for (const auto& round : parts)
      for (const golden::Named& part : round) exact += part[p].second.to(at::kDouble), ++terms;
    const at::Tensor error = (gradients[p].second.to(at::kDouble) - exact).abs();
    RC_ASSERT((error <= terms * 0x1p-45 + exact.abs() * 0x1p-23).all().item<bool>());
  }
}

TEST(GoldenSums, a_canonical_sum_rounds_terms_to_even_and_has_no_room_for_nan_or_two_to_the_18) {
  golden::CanonicalSum sum;
  const float unit = 0x1p-44f;
  sum.add({at::tensor({0.5f * unit, 1.5f * unit, 0x1.8p-45f, 0x1p17f, NAN, 0x1p18f, -0x1p18f, -3 * unit})});
  sum.add({at::tensor({0.0f, 0.0f, 0x1.8p-45f, 0x1p17f, 1.0f, 0.0f, 0.0f, unit})});
  const at::Tensor expected = at::tensor({0.0f, 2 * unit, 2 * unit, 0x1p18f, NAN, NAN, NAN, -2 * unit});
  EXPECT_TRUE(at::allclose(sum.result()[0], expected, 0, 0, /*equal_nan=*/true)) << sum.result()[0];
}

RC_GTEST_PROP(GoldenSums, with_one_microbatch_a_rank_every_way_to_reduce_is_one, ()) {
  golden::Run run = random_run(any_model());
  const int64_t ranks = run.order.shards;
  for (golden::Step& step : run.steps) step.microbatches.resize(1), step.reduce_after.clear();
  const golden::Trace plain = golden::train(run);
  reduce(run, When::each_round);
  RC_ASSERT(same_parameters(plain, golden::train(run)));
  run.order = {.shards = 1, .replicas = ranks, .replicas_last = pick({true, false})};
  RC_ASSERT(same_parameters(plain, golden::train(run)));
}

TEST(GoldenSums, replicas_last_differs_from_replicas_each_time_and_from_one_flat_group) {
  Tensors tensors(5);
  golden::Run run = mlp_run({7, 6, 3}, 3, 9, tensors);
  reduce(run, When::each_round);
  run.order = {.shards = 9};
  const golden::Trace flat = golden::train(run);
  run.order = {.shards = 3, .replicas = 3, .replicas_last = true};
  const golden::Trace last = golden::train(run);
  run.order.replicas_last = false;
  const golden::Trace each = golden::train(run);
  EXPECT_FALSE(same_parameters(flat, last));
  EXPECT_FALSE(same_parameters(flat, each));
  EXPECT_FALSE(same_parameters(last, each));
}

RC_GTEST_PROP(GoldenSums, gradients_of_low_precision_lie_on_its_grid, ()) {
  golden::Run run = one_step_run(any_model(), draw(1, 3), draw(1, 3));
  const at::ScalarType low = pick({at::kBFloat16, at::kHalf});
  run.precision = {.compute = pick({low, at::kFloat}), .gradient = low, .reduce = pick({low, at::kFloat})};
  const golden::Named gradients = golden::train(run)[0].gradients;
  for (const auto& [name, g] : gradients) {
    RC_ASSERT(g.scalar_type() == at::kFloat);
    RC_ASSERT(at::equal(g, g.to(low).to(at::kFloat)));
  }
}

RC_GTEST_PROP(GoldenSums, the_truth_in_double_knows_no_precision_and_no_fixed_point, ()) {
  golden::Run run = random_run(any_model());
  const golden::Trace plain = golden::train(run, at::kDouble);
  golden::Run low = run;
  low.precision = {.compute = at::kBFloat16, .gradient = at::kHalf, .reduce = at::kHalf, .float32_sums = true};
  RC_ASSERT(same_parameters(plain, golden::train(low, at::kDouble)));
  low.order.canonical = true;
  RC_ASSERT(Widest(plain, golden::train(low, at::kDouble)).apart < 1e-6);
}

RC_GTEST_PROP(GoldenScaling, a_power_of_two_changes_no_bit_of_float32, ()) {
  golden::Run run = random_run(any_model());
  const golden::Trace plain = golden::train(run);
  run.scaling = {.initial = 1024};
  const golden::Trace scaled = golden::train(run);
  RC_ASSERT(same_parameters(plain, scaled));
  for (size_t s = 0; s < plain.size(); ++s) {
    RC_ASSERT(plain[s].losses == scaled[s].losses);
    RC_ASSERT(plain[s].gradient_norm == scaled[s].gradient_norm);
    RC_ASSERT(plain[s].loss_scale == 0 && scaled[s].loss_scale == 1024 && !scaled[s].skipped);
  }
}

// Float16 ends at 65504: a scale of 2^24 overflows, is halved until it fits, and is doubled after some good steps.
TEST(GoldenScaling, a_skipped_step_changes_nothing_but_the_scale) {
  golden::Run run = one_microbatch_run();
  run.optimizer = {.kind = golden::Optimizer::Kind::adamw, .lr = 1e-3};
  run.precision = {.compute = at::kHalf};
  run.scaling = {.initial = 0x1p24, .growth_interval = 3};
  run.steps.resize(30, run.steps.front());
  const golden::Trace trace = golden::train(run);
  golden::Named parameters = run.parameters;
  double scale = run.scaling.initial;
  int skipped = 0, good = 0, doubled = 0;
  for (size_t s = 0; s < trace.size(); ++s) {
    ASSERT_EQ(trace[s].loss_scale, scale);
    if (trace[s].skipped) {
      ++skipped, good = 0, scale /= 2;
      EXPECT_TRUE(trace[s].gradients.empty());
      EXPECT_EQ(trace[s].gradient_norm, 0);
      for (size_t i = 0; i < parameters.size(); ++i)
        EXPECT_TRUE(same_bits(trace[s].parameters[i].second, parameters[i].second));
      for (size_t slot = 0; s > 0 && slot < trace[s].state.size(); ++slot)
        for (size_t i = 0; i < parameters.size(); ++i)
          EXPECT_TRUE(same_bits(trace[s].state[slot].second[i].second, trace[s - 1].state[slot].second[i].second));
    } else if (++good == 3) {
      good = 0, scale *= 2, ++doubled;
    }
    parameters = trace[s].parameters;
  }
  EXPECT_TRUE(trace.front().skipped);
  EXPECT_GT(doubled, 1);
  EXPECT_GT(skipped, 2);
}

// Steps that were skipped do not count as updates: the first one that is not is the first of all.
TEST(GoldenScaling, a_skipped_step_does_not_count_as_an_update) {
  golden::Run run = one_microbatch_run();
  run.optimizer = {.kind = golden::Optimizer::Kind::adam};
  run.precision = {.compute = at::kHalf};
  run.scaling = {.initial = 0x1p24};
  run.steps.resize(30, run.steps.front());
  const golden::Trace trace = golden::train(run);
  size_t first = 0;
  while (first < trace.size() && trace[first].skipped) ++first;
  ASSERT_GT(first, 0u);
  ASSERT_LT(first, trace.size());
  run.scaling.initial = trace[first].loss_scale;
  run.steps.resize(1);
  EXPECT_TRUE(same_parameters({trace[first]}, golden::train(run)));
}

RC_GTEST_PROP(GoldenNorm, of_order_1_is_the_exact_sum_and_of_order_inf_the_largest, ()) {
  const auto values = *rc::gen::container<std::vector<float>>(rc::gen::map(
      rc::gen::inRange<int64_t>(-(1 << 23), 1 << 23), [](int64_t i) { return std::ldexp(static_cast<float>(i), -9); }));
  double sum = 0, largest = 0;  // exact: integers over 2^9, a hundred of them at most
  for (const float f : values) sum += std::abs(f), largest = std::max(largest, double{std::abs(f)});
  const std::vector<at::Tensor> tensors = {at::tensor(values), at::zeros({0})};
  RC_ASSERT(golden::norm(tensors, 1) == sum);
  RC_ASSERT(golden::norm(tensors, INFINITY) == largest);
  RC_ASSERT(golden::norm(tensors, 2) == std::sqrt(golden::sum_of_squares(tensors)));
}

TEST(GoldenNorm, of_any_order_is_not_a_number_when_an_element_is_not) {
  for (const double order : {1.0, 2.0, double{INFINITY}}) {
    EXPECT_TRUE(std::isnan(golden::norm({at::tensor({1.0f, NAN, 3.0f})}, order)));
    EXPECT_EQ(golden::norm({at::tensor({1.0f, -INFINITY})}, order), INFINITY);
    EXPECT_EQ(golden::norm({}, order), 0);
  }
}

}  // namespace
