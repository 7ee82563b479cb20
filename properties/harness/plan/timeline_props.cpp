// The time of a step: a schedule worked by hand, and laws on random ones.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <limits>
#include <numeric>

#include "harness/plan/dry_run.h"
#include "harness/plan/timeline.h"
#include "properties/kit/harness_env.h"

using namespace harness;
using shardproof::Op;

namespace {

constexpr double kFree = std::numeric_limits<double>::infinity();

// A byte takes a second, and so does a multiplication; hosts of two ranks.
Machine slow() {
  return {.name = "slow",
          .source = "",
          .flops = {{"float32", 1}},
          .memory_bytes = 1,
          .memory_bytes_per_second = kFree,
          .ranks_per_host = 2,
          .inside = {0, 1},
          .between = {0, 0.5}};
}

std::vector<int64_t> ranks(int64_t count, int64_t stride = 1) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(i * stride);
  return all;
}

// Builds a record event by event.
struct Steps {
  StepRecorder recorder;
  size_t world = recorder.group("world", ranks(4));
  size_t pair = recorder.group("pair", ranks(2));       // on one host
  size_t apart = recorder.group("apart", ranks(2, 2));  // on two hosts
  Steps& compute(double flops) {
    recorder.compute({.flops = flops});
    return *this;
  }
  size_t start(size_t group, int64_t bytes, Op op = Op::all_gather) { return recorder.start({op, group, bytes}); }
  StepTime time(const Machine& machine) const { return walk(recorder.record(), machine); }
};

struct Drawn {
  StepRecord record;
  Machine machine;
};

Drawn drawn() {
  Steps steps;
  std::vector<size_t> under_way;
  for (int64_t i = *rc::gen::inRange(0, 40); i > 0; --i) {
    const int what = *rc::gen::inRange(0, 3);
    if (what == 0) steps.compute(*rc::gen::inRange(0, 100));
    if (what == 1) {
      const auto group = static_cast<size_t>(*rc::gen::inRange(0, 3));
      under_way.push_back(steps.start(group, *rc::gen::inRange(0, 1000), *rc::gen::element(Op::all_gather, Op::all_reduce)));
    }
    if (what == 2 && !under_way.empty()) {
      const auto at = static_cast<size_t>(*rc::gen::inRange<size_t>(0, under_way.size()));
      steps.recorder.wait(under_way[at]);
      under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
  Machine machine = slow();
  machine.inside = {0.1 * *rc::gen::inRange(0, 50), 1.0 * *rc::gen::inRange(1, 20)};
  machine.between = {0.1 * *rc::gen::inRange(0, 50), 1.0 * *rc::gen::inRange(1, 20)};
  machine.overlaps = *rc::gen::arbitrary<bool>();
  return {steps.recorder.record(), machine};
}

bool about(double a, double b) {
  return std::abs(a - b) <= 1e-9 * (1 + std::abs(a) + std::abs(b));
}
bool at_most(double a, double b) {
  return a <= b || about(a, b);
}

}  // namespace

TEST(Timeline, of_a_small_schedule_is_what_a_person_works_out) {
  // Two units, the second gathered while the first runs. A gather of 8 bytes by two ranks takes 4 s.
  Steps steps;
  const size_t first = steps.start(steps.pair, 8);
  steps.recorder.wait(first);                                      // 0 to 4: nothing hides the first gather
  const size_t second = steps.start(steps.pair, 8);                // 4 to 8
  steps.compute(3);                                                // 4 to 7
  steps.recorder.wait(second);                                     // 7 to 8 it waits
  steps.compute(5);                                                // 8 to 13
  const size_t sum = steps.start(steps.apart, 6, Op::all_reduce);  // twice 3 bytes at half a byte a second: 13 to 25
  steps.compute(2);                                                // 13 to 15
  steps.recorder.wait(sum);                                        // 15 to 25 it waits
  const StepTime time = steps.time(slow());
  EXPECT_EQ(time.seconds, 25);
  EXPECT_EQ(time.computing, 10);
  EXPECT_EQ(time.communicating, 20);
  EXPECT_EQ(time.waiting, 15);
  EXPECT_EQ(time.communicating_by_group, (std::map<std::string, double>{{"pair", 8}, {"apart", 12}}));

  Machine alone = slow();
  alone.overlaps = false;
  EXPECT_EQ(steps.time(alone).seconds, 30);
}

TEST(Timeline, collectives_of_one_link_follow_each_other_and_those_of_two_links_do_not) {
  Steps one, two;
  one.start(one.pair, 8);
  one.start(one.pair, 8);
  EXPECT_EQ(one.time(slow()).seconds, 8);
  two.start(two.pair, 8);   // 4 s inside of a host
  two.start(two.apart, 8);  // 8 s between hosts
  EXPECT_EQ(two.time(slow()).seconds, 8);
}

TEST(Timeline, what_was_started_before_a_step_and_is_awaited_in_it_is_no_part_of_it) {
  Steps steps;
  const size_t before = steps.start(steps.pair, 8);
  steps.recorder.clear();
  steps.recorder.wait(before);
  steps.compute(2);
  EXPECT_EQ(steps.time(slow()).seconds, 2);
}

TEST(Timeline, costs_of_collectives_are_what_a_person_works_out) {
  Machine machine = slow();
  machine.ranks_per_host = 4;
  machine.inside = {2, 10}, machine.between = {5, 1};
  const auto seconds = [&](Op op, std::vector<int64_t> of, int64_t bytes) {
    return collective_seconds({op, 0, bytes}, spread_of({"", std::move(of)}, machine), machine);
  };
  EXPECT_DOUBLE_EQ(seconds(Op::all_gather, ranks(4), 80), 3 * 2 + 60.0 / 10);  // three steps of a ring, 60 bytes each rank
  EXPECT_DOUBLE_EQ(seconds(Op::all_reduce, ranks(4), 80), 2 * (3 * 2 + 60.0 / 10));   // there and back
  EXPECT_DOUBLE_EQ(seconds(Op::all_gather, ranks(4, 4), 80), 2 * 5 + 60.0 / 1);       // four hosts: two steps of a tree
  EXPECT_DOUBLE_EQ(seconds(Op::all_gather, ranks(8), 80), 3 * 2 + 5 + 70.0 / 4);      // a host's four adapters together
  EXPECT_DOUBLE_EQ(seconds(Op::all_to_all, ranks(8), 80), 3 * 2 + 5 + 80.0 * 4 / 8);  // half of it leaves the host
  EXPECT_DOUBLE_EQ(seconds(Op::send, ranks(2), 80), 2 + 80.0 / 10);
  const auto of_a_ring = [&](int64_t size) {
    const Collective exchange{.op = Op::all_to_all, .bytes = 80, .to_one = true};
    return collective_seconds(exchange, spread_of({"", ranks(size)}, machine), machine);
  };
  EXPECT_DOUBLE_EQ(of_a_ring(4), 2 + 80.0 / 10);
  EXPECT_DOUBLE_EQ(of_a_ring(8), 5 + 80.0 / 1);
  EXPECT_EQ(seconds(Op::all_gather, ranks(1), 80), 0);
}

TEST(Timeline, operators_take_the_longest_of_products_memory_and_their_least_time_and_share_cores) {
  Machine machine = slow();
  machine.flops = {{"float32", 10}, {"bf16", 40}};
  machine.efficiency = 0.5;
  machine.memory_bytes_per_second = 4;
  machine.operator_seconds = 1;
  EXPECT_EQ(operator_seconds({.flops = 100}, machine, 1), 20);
  EXPECT_EQ(operator_seconds({.flops = 100, .dtype = at::kBFloat16}, machine, 1), 5);
  EXPECT_EQ(operator_seconds({.flops = 100, .bytes = 120}, machine, 1), 30);
  EXPECT_EQ(operator_seconds({.bytes = 2}, machine, 1), 1);
  machine.ranks_at_once = 2;
  EXPECT_EQ(operator_seconds({.flops = 100}, machine, 2), 20);
  EXPECT_EQ(operator_seconds({.flops = 100}, machine, 6), 60);
}

TEST(Timeline, the_efficiency_of_a_measured_step_predicts_that_step) {
  Machine machine = slow();
  machine.flops = {{"float32", 10}};
  machine.memory_bytes_per_second = 4;
  StepRecorder recorder;
  recorder.compute({.flops = 100});  // 10 s at full efficiency
  recorder.compute({.bytes = 12});   // 3 s at any
  const StepRecord record = recorder.record();
  machine.efficiency = efficiency_of(record, machine, 23);
  EXPECT_NEAR(machine.efficiency, 0.5, 1e-9);
  EXPECT_NEAR(walk(record, machine).seconds, 23, 1e-6);
  EXPECT_NEAR(efficiency_of(record, machine, 1), 1, 1e-9) << "no machine is faster than its products";
  EXPECT_NEAR(efficiency_of(record, machine, 1e6), 0.05, 1e-9) << "a measurement that no machine makes";
}

TEST(Timeline, ranks_that_take_turns_on_cores_take_turns_with_what_their_threads_carry) {
  Steps steps;
  steps.compute(3);
  steps.recorder.wait(steps.start(steps.pair, 8));  // 4 s for two ranks alone
  Machine machine = slow();
  machine.ranks_per_host = 4, machine.ranks_at_once = 1;
  EXPECT_EQ(steps.time(machine).seconds, 4 * 3 + 4);  // a network carries
  machine.overlaps = false;
  EXPECT_EQ(steps.time(machine).seconds, 4 * (3 + 4));
}

RC_GTEST_PROP(Timeline, a_free_network_leaves_the_operators_alone, ()) {
  Drawn d = drawn();
  d.machine.inside = d.machine.between = {0, kFree};
  const StepTime time = walk(d.record, d.machine);
  RC_ASSERT(about(time.seconds, time.computing));
  RC_ASSERT(time.waiting == 0);
}

RC_GTEST_PROP(Timeline, a_step_is_no_longer_than_the_sum_of_its_parts_and_no_shorter_than_the_longest, ()) {
  const Drawn d = drawn();
  const StepTime time = walk(d.record, d.machine);
  RC_ASSERT(about(time.seconds, time.computing + time.waiting));
  RC_ASSERT(at_most(time.seconds, time.computing + time.communicating));
  RC_ASSERT(at_most(time.computing, time.seconds));
  const auto of = [&](const char* group) {
    const auto found = time.communicating_by_group.find(group);
    return found == time.communicating_by_group.end() ? 0 : found->second;
  };
  RC_ASSERT(at_most(of("pair"), time.seconds));
  RC_ASSERT(at_most(of("world") + of("apart"), time.seconds));  // both lie on several hosts
  if (!d.machine.overlaps) RC_ASSERT(about(time.seconds, time.computing + time.communicating));
}

RC_GTEST_PROP(Timeline, a_better_machine_is_never_slower, ()) {
  const Drawn d = drawn();
  Machine better = d.machine;
  const double factor = *rc::gen::inRange(1, 10);
  switch (*rc::gen::inRange(0, 6)) {
    case 0:
      better.inside.bytes_per_second *= factor;
      break;
    case 1:
      better.between.bytes_per_second *= factor;
      break;
    case 2:
      better.inside.seconds /= factor;
      break;
    case 3:
      better.between.seconds /= factor;
      break;
    case 4:
      better.flops["float32"] *= factor;
      break;
    default:
      better.overlaps = true;
  }
  RC_ASSERT(at_most(walk(d.record, better).seconds, walk(d.record, d.machine).seconds));
}

TEST(Timeline, gathers_ahead_hide_the_network_of_a_real_step) {
  DryRun run;
  run.what.model = parse_model("llama(layers=4,hidden=256,heads=4,kv_heads=2,intermediate=512,vocab=64,positions=256)");
  run.what.mesh = shardproof::Mesh::parse("dp_shard=2");
  run.samples = 8;
  Machine machine = slow();
  machine.flops = {{"float32", 1e12}};
  machine.inside = {1e-6, 1e10};
  const StepTime late = walk(dry_run(run).record, machine);
  run.sharding = {"prefetch_forward=1", "prefetch_backward=1"};
  const StepTime ahead = walk(dry_run(run).record, machine);
  EXPECT_DOUBLE_EQ(late.communicating, ahead.communicating);
  EXPECT_LT(ahead.waiting, 0.5 * late.waiting);  // operators take longer than gathers here
  EXPECT_LT(ahead.seconds, late.seconds);
}
