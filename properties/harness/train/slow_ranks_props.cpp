// Which ranks are said to hold up the others, by clocks that the tests move.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <fstream>

#include "harness/case/case.h"
#include "harness/train/slow_ranks.h"
#include "harness/train/timed_comm.h"
#include "harness/train/train.h"
#include "properties/kit/harness_env.h"
#include "shardproof/comm/decorated.h"
#include "shardproof/comm/threads/threads.h"

using namespace harness;
using shardproof::Comm;

namespace {

std::vector<int64_t> named(const std::vector<SlowRank>& slow) {
  std::vector<int64_t> ranks;
  for (const SlowRank& rank : slow) ranks.push_back(rank.rank);
  return ranks;
}

using Ranks = std::vector<int64_t>;

// Moves the clock by 10 in each call, and by 5 in each wait.
class Dawdling final : public shardproof::DecoratedComm {
 public:
  Dawdling(std::shared_ptr<Comm> inner, std::shared_ptr<double> clock)
      : DecoratedComm(std::move(inner)), clock_(std::move(clock)) {}

 private:
  struct Waits final : shardproof::Work::State {
    Waits(shardproof::Work given, std::shared_ptr<double> moved) : work(std::move(given)), clock(std::move(moved)) {}
    void wait() override {
      work.wait();
      *clock += 5;
    }
    shardproof::Work work;
    std::shared_ptr<double> clock;
  };
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override {
    return std::make_shared<Dawdling>(std::move(group), clock_);
  }
  shardproof::Work start(shardproof::Call call) override {
    *clock_ += 10;
    return shardproof::Work(std::make_shared<Waits>(inner().issue(std::move(call)), clock_));
  }
  std::shared_ptr<double> clock_;
};

}  // namespace

TEST(SlowRanks, are_named_when_they_take_twice_the_median_in_five_steps_in_a_row) {
  SlowRanks ranks;
  for (int64_t step = 1; step <= 8; ++step) {
    const std::vector<SlowRank> slow = ranks.add({1, 1.1, 2.5, 1, 1.9});
    EXPECT_EQ(named(slow), step < kSlowSteps ? Ranks{} : Ranks{2}) << step;
    if (slow.empty()) continue;
    EXPECT_EQ(slow[0].steps, step);
    EXPECT_EQ(slow[0].seconds, 2.5);
    EXPECT_EQ(slow[0].median, 1.1);
  }
  EXPECT_EQ(named(ranks.add({1, 1, 1, 1, 1})), Ranks{}) << "it is as fast as the others";
  EXPECT_EQ(named(ranks.add({1, 1, 9, 1, 1})), Ranks{}) << "once is an accident";
}

TEST(SlowRanks, of_two_the_faster_is_the_median_and_one_alone_is_never_slow) {
  SlowRanks two, one;
  for (int64_t step = 1; step <= kSlowSteps; ++step) {
    EXPECT_EQ(named(two.add({3, 1})), step < kSlowSteps ? Ranks{} : Ranks{0});
    EXPECT_EQ(named(one.add({3})), Ranks{});
  }
}

TEST(CallTime, is_what_calls_and_waits_take_in_the_group_and_in_those_split_from_it) {
  shardproof::run_threads(2, [](std::shared_ptr<Comm> world) {
    const auto clock = std::make_shared<double>(0);
    const auto time = std::make_shared<CallTime>([clock] { return *clock; });
    const auto comm = timed(std::make_shared<Dawdling>(world, clock), time);
    comm->barrier().wait();
    EXPECT_EQ(time->seconds(), 15);
    *clock += 100;  // it computes
    const std::shared_ptr<Comm> group = comm->split(0, comm->rank(), "all");
    shardproof::Work work = group->all_reduce(at::ones({2}));
    *clock += 1000;
    EXPECT_EQ(time->seconds(), 25);
    work.wait();
    EXPECT_EQ(time->seconds(), 30);
    EXPECT_EQ(time->now(), 1130);
  });
}

// One rank's clock runs three times as fast as the others', which is as if it computed so much longer.
TEST(SlowRanks, of_a_training_run_are_named_in_its_steps) {
  const harness_env::Folder folder;
  std::ofstream(folder / "text.txt") << std::string(400, 'a') + std::string(400, 'b');
  const TrainingData data({.paths = {folder.path()}, .sequence_length = 4});
  TrainOptions options;
  options.model = parse_model("gpt(layers=1,hidden=8,heads=2,vocab=256,positions=4)");
  options.mesh = shardproof::Mesh::parse("dp_shard=3");
  options.global_batch = 6;
  options.steps = kSlowSteps + 2;
  std::array<std::atomic<int64_t>, 3> asked{};
  options.clock = [&](int64_t rank) { return static_cast<double>(++asked[static_cast<size_t>(rank)]) * (rank == 1 ? 3 : 1); };
  int64_t steps = 0;
  train(options, data, [&](const TrainStep& step) {
    EXPECT_EQ(named(step.slow_ranks), ++steps < kSlowSteps ? Ranks{} : Ranks{1}) << "step " << step.step;
  });
  EXPECT_EQ(steps, options.steps);
}
