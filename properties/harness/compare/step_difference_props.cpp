// The comparison of a training step, and the hand-over of steps between threads.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "harness/compare/step_difference.h"
#include "harness/compare/step_exchange.h"

using namespace harness;
using shardproof::Piece;

namespace {

// A golden step with one 2x3 parameter and an optimizer with one slot, on two ranks that hold four and two
// elements.
golden::StepTrace golden_step() {
  golden::StepTrace trace;
  trace.losses = {{0.5, 0.25}};
  trace.evaluated = {1.5, 1.25};
  trace.gradient_norm = 2;
  trace.buffers = {{{"mean", at::arange(2, at::kFloat) + 30}}, {{"mean", at::arange(2, at::kFloat) + 40}}};
  trace.gradients = {{"w", at::arange(6, at::kFloat).view({2, 3})}};
  trace.parameters = {{"w", at::arange(6, at::kFloat).view({2, 3}) + 10}};
  trace.state = {{"exp_avg", {{"w", at::arange(6, at::kFloat).view({2, 3}) + 20}}}};
  return trace;
}

std::vector<Piece> piece(const at::Tensor& whole, int64_t begin, int64_t end) {
  return {{"w", {2, 3}, {begin, end}, whole.flatten().slice(0, begin, end).clone()}};
}

std::vector<RankStep> sharded_step(const golden::StepTrace& trace) {
  std::vector<RankStep> ranks(2);
  for (int64_t rank = 0; rank < 2; ++rank) {
    const int64_t begin = rank == 0 ? 0 : 4, end = rank == 0 ? 4 : 6;
    RankStep& step = ranks[rank];
    step.losses = {trace.losses[0][rank]};
    step.evaluated = {trace.evaluated[rank]};
    step.buffers = {{"mean", trace.buffers[rank][0].second.clone()}};
    step.gradient_norm = trace.gradient_norm;
    step.gradients = piece(trace.gradients[0].second, begin, end);
    step.parameters = piece(trace.parameters[0].second, begin, end);
    step.state = {{"exp_avg", piece(trace.state[0].second[0].second, begin, end)}};
  }
  return ranks;
}

float* values(std::vector<Piece>& pieces) {
  return pieces[0].data.mutable_data_ptr<float>();
}

// The difference that a change of either side makes.
std::string difference_after(const std::function<void(golden::StepTrace&, std::vector<RankStep>&)>& change,
                             Copies copies = {}) {
  golden::StepTrace trace = golden_step();
  std::vector<RankStep> ranks = sharded_step(trace);
  change(trace, ranks);
  int64_t compared = 0;
  const auto difference = first_difference(trace, ranks, copies, &compared);
  return difference ? difference->str() : "none";
}

void expect_prefix(const std::string& text, const std::string& prefix) {
  EXPECT_EQ(text.substr(0, prefix.size()), prefix) << text;
}

RankStep with_loss(double loss) {
  RankStep step;
  step.losses = {loss};
  return step;
}

}  // namespace

TEST(StepDifference, equal_steps_have_none_and_every_value_is_counted) {
  const golden::StepTrace trace = golden_step();
  int64_t compared = 0;
  EXPECT_FALSE(first_difference(trace, sharded_step(trace), {}, &compared));
  EXPECT_EQ(compared, 2 + 2 + 2 + 2 * 2 + 3 * 6);
}

TEST(StepDifference, one_bit_of_any_value_is_found_and_named) {
  const auto up = [](double x) { return std::nextafter(x, 100.0); };
  expect_prefix(difference_after([&](auto&, auto& ranks) { ranks[1].losses[0] = up(0.25); }),
                "loss on rank 1, round 0: golden 0.25 (0x3fd0000000000000), sharded 0.25000000000000006 "
                "(0x3fd0000000000001)");
  expect_prefix(difference_after([&](auto&, auto& ranks) { ranks[0].gradient_norm = up(2); }),
                "gradient norm on rank 0: golden 2");
  const auto nudge = [](float& x) { x = std::nextafterf(x, 100.f); };
  expect_prefix(difference_after([&](auto&, auto& ranks) { nudge(values(ranks[1].gradients)[1]); }),
                "gradient of w, element [1, 2], on rank 1: golden 5 (0x40a00000), sharded 5.00000");
  expect_prefix(difference_after([&](auto&, auto& ranks) { nudge(values(ranks[0].parameters)[3]); }),
                "parameter of w, element [1, 0], on rank 0: golden 13");
  expect_prefix(difference_after([&](auto&, auto& ranks) { nudge(values(ranks[1].state[0].second)[0]); }),
                "exp_avg of w, element [1, 1], on rank 1: golden 24");
}

TEST(StepDifference, evaluations_and_buffers_are_those_of_the_same_rank_of_the_golden_run) {
  expect_prefix(difference_after([&](auto&, auto& ranks) { ranks[1].evaluated[0] = 1.5; }),
                "evaluation on rank 1: golden 1.25 (0x3ff4000000000000), sharded 1.5");
  expect_prefix(difference_after([&](auto&, auto& ranks) { ranks[0].evaluated.clear(); }),
                "evaluation on rank 0: only the golden run has one");
  expect_prefix(difference_after([&](auto&, auto& ranks) { ranks[1].buffers = ranks[0].buffers; }),
                "buffer of mean, element [0], on rank 1: golden 40 (0x42200000), sharded 30");
  expect_prefix(difference_after([&](auto&, auto& ranks) { ranks[1].buffers.clear(); }),
                "buffer of mean on rank 1: the sharded run has none");
}

TEST(StepDifference, the_two_zeros_differ) {
  expect_prefix(difference_after([](auto&, auto& ranks) { values(ranks[0].gradients)[0] = -0.f; }),
                "gradient of w, element [0, 0], on rank 0: golden 0 (0x0), sharded -0 (0x80000000)");
}

TEST(StepDifference, values_that_are_not_finite_are_never_equal) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  expect_prefix(difference_after([&](golden::StepTrace& trace, auto& ranks) {
                  trace.gradients[0].second[0][1] = nan;
                  values(ranks[0].gradients)[1] = nan;
                }),
                "gradient of w, element [0, 1], on rank 0: golden nan");
}

TEST(StepDifference, an_element_that_no_rank_holds_is_found) {
  expect_prefix(difference_after([](const golden::StepTrace& trace, auto& ranks) {
                  ranks[0].parameters = piece(trace.parameters[0].second, 0, 3);
                }),
                "parameter of w, element [1, 0]: held by no rank");
  expect_prefix(difference_after([](auto&, auto& ranks) { ranks[1].gradients.clear(); }),
                "gradient of w, element [1, 1]: held by no rank");
}

TEST(StepDifference, a_tensor_or_a_state_that_one_side_lacks_is_found) {
  expect_prefix(difference_after([](auto&, auto& ranks) { ranks[1].gradients[0].name[0] = 'v'; }),
                "gradient of v on rank 1: the golden run has none");
  expect_prefix(difference_after([](auto&, auto& ranks) { ranks[1].state.clear(); }),
                "optimizer state exp_avg on rank 1: there is none");
  expect_prefix(difference_after([](golden::StepTrace& trace, auto&) { trace.state.clear(); }),
                "optimizer state exp_avg on rank 0: the golden run has none");
}

TEST(StepDifference, a_replica_that_drifts_is_found_though_another_rank_is_right) {
  expect_prefix(difference_after([](const golden::StepTrace& trace, auto& ranks) {
                  for (RankStep& rank : ranks) rank.parameters = piece(trace.parameters[0].second, 0, 6);
                  values(ranks[1].parameters)[2] = 7;
                }, {.holders = {{.parameter = 2}}}),
                "parameter of w, element [0, 2], on rank 1: golden 12 (0x41400000), sharded 7");
}

TEST(StepExchange, a_step_is_complete_when_every_rank_has_put_it) {
  StepExchange exchange(2);
  EXPECT_TRUE(exchange.put(1, with_loss(1)));
  EXPECT_TRUE(exchange.put(1, with_loss(3)));
  EXPECT_TRUE(exchange.put(0, with_loss(0)));
  const auto step = exchange.take();
  ASSERT_TRUE(step.has_value());
  EXPECT_EQ((*step)[0].losses, std::vector<double>{0});
  EXPECT_EQ((*step)[1].losses, std::vector<double>{1});
  exchange.close();
  EXPECT_FALSE(exchange.take().has_value());
}

TEST(StepExchange, a_rank_waits_for_a_reader_that_is_two_steps_behind) {
  StepExchange exchange(1);
  std::thread rank([&] {
    for (int step = 0; step < 50; ++step)
      EXPECT_TRUE(exchange.put(0, with_loss(static_cast<double>(step))));
  });
  for (int step = 0; step < 50; ++step) EXPECT_EQ((*exchange.take())[0].losses[0], step);
  rank.join();
}

TEST(StepExchange, closing_ends_every_wait) {
  StepExchange exchange(1);
  EXPECT_TRUE(exchange.put(0, {}));
  EXPECT_TRUE(exchange.put(0, {}));
  std::thread blocked([&] { EXPECT_FALSE(exchange.put(0, {})); });
  exchange.close();
  blocked.join();
  StepExchange other(1);
  std::thread reader([&] { EXPECT_FALSE(other.take().has_value()); });
  other.close();
  reader.join();
}
