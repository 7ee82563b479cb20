// Policies of schedules, on small programs: what they choose, and that nothing happens before it can.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <set>

#include "harness/case/case.h"
#include "harness/run/policies.h"
#include "harness/run/schedules.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/scheduled.h"
#include "shardproof/base/host_work.h"

using namespace harness;
using namespace scheduled;
using namespace shardproof;

namespace {

using Kind = Interleaving::Kind;

// Of which nothing can be wrong.
Scheduled program(int64_t world, const Body& body) {
  return [=](const Policy& policy) -> std::optional<std::string> {
    run_under(policy, world, body);
    return std::nullopt;
  };
}

// Each rank adds one to a number that all see, in two steps.
struct LostUpdate {
  int64_t value = 0;
  Scheduled program(int64_t ranks) {
    return [this, ranks](const Policy& policy) -> std::optional<std::string> {
      value = 0;
      run_under(policy, ranks, [&](std::shared_ptr<Comm>) {
        const int64_t read = value;
        pause_here();
        value = read + 1;
      });
      if (value == ranks) return std::nullopt;
      return fmt::format("{} instead of {}", value, ranks);
    };
  }
};

std::vector<SchedulePolicy::Choice> ranks_to_choose(int64_t count) {
  std::vector<SchedulePolicy::Choice> choices;
  for (int64_t rank = 0; rank < count; ++rank) choices.push_back({.actor = {.rank = rank}});
  return choices;
}

}  // namespace

// One thread at a time, whatever the policy: no two are between the same two places.
RC_GTEST_PROP(Policies, one_thread_runs_at_a_time_and_collectives_give_what_they_should, (uint64_t seed, bool random)) {
  const int64_t world = *rc::gen::inRange<int64_t>(1, 6), rounds = *rc::gen::inRange<int64_t>(1, 6);
  const Interleaving schedule = random ? Interleaving{.kind = Kind::random, .seed = seed}
                                       : Interleaving{.kind = Kind::pct, .seed = seed, .depth = 3, .steps = 50};
  std::atomic<int64_t> inside = 0;
  std::atomic<bool> right = true;
  const auto alone = [&](const std::function<void()>& action) {
    right = right && inside++ == 0;
    action();
    --inside;
  };
  run_under(make_policy(schedule), world, [&](std::shared_ptr<Comm> comm) {
    for (int64_t round = 0; round < rounds; ++round) {
      std::vector<at::Tensor> sums;
      std::vector<Work> works;
      int64_t written = 0;
      const auto job = start_host_job([&] { alone([&] { written = round + 1; }); });
      for (int64_t k = 0; k < 3; ++k) {
        alone([&] { sums.push_back(at::full({k + 1}, static_cast<float>(comm->rank() + k), at::kFloat)); });
        works.push_back(comm->all_reduce(sums.back()));
      }
      for (int64_t k = 2; k >= 0; --k) {
        works[static_cast<size_t>(k)].wait();
        alone([&] {
          const float sum = static_cast<float>(world * (world - 1) / 2 + k * world);
          right = right && (sums[static_cast<size_t>(k)] == sum).all().item<bool>();
        });
      }
      job->wait();
      right = right && written == round + 1 && job->is_over();
    }
  });
  RC_ASSERT(right);
}

// A choice is a thread that could run, or work that is under way: nobody goes on before what it waits for has happened.
TEST(Policies, whoever_waits_goes_on_after_what_it_waits_for) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto policy = std::make_shared<RecordedPolicy>(make_policy({.kind = Kind::random, .seed = seed}), true);
    std::string events;
    run_under(policy, 2, [&](std::shared_ptr<Comm> comm) {
      const at::Tensor value = at::full({1}, 1.0f);
      Work work = comm->all_reduce(value);
      work.wait();
      events += fmt::format("{} ", value.item<float>());
    });
    EXPECT_EQ(events, "2 2 ");
    for (const char* rank : {"rank 0", "rank 1"}) {
      const size_t effect = policy->text().find(fmt::format("{} call 0\n", rank));
      const size_t last = policy->text().rfind(fmt::format("{}\n", rank));
      EXPECT_LT(effect, last) << policy->text();
    }
  }
}

TEST(Policies, an_output_is_garbage_until_its_collective_takes_effect) {
  const auto seen = std::make_shared<std::vector<float>>();
  run_under(make_policy({.kind = Kind::latest}), 2, [&](std::shared_ptr<Comm> comm) {
    const at::Tensor value = at::full({1}, 1.0f);
    Work work = comm->all_reduce(value);
    seen->push_back(value.item<float>());
    work.wait();
    seen->push_back(value.item<float>());
  });
  ASSERT_EQ(seen->size(), 4u);
  EXPECT_EQ(std::ranges::count_if(*seen, [](float value) { return std::isnan(value); }), 2);
  EXPECT_EQ(std::ranges::count(*seen, 2.0f), 2);
}

TEST(Policies, tensors_that_change_in_flight_are_errors_that_name_the_rank) {
  for (const Kind kind : {Kind::latest, Kind::eager})
    expect_error(
        [&] {
          run_under(make_policy({.kind = kind}), 2, [](std::shared_ptr<Comm> comm) {
            const at::Tensor input = at::ones({2}), output = at::empty({4});
            Work work = comm->all_gather(output, input);
            if (comm->rank() == 1) input.add_(1);
            work.wait();
          });
        },
        {"rank 1", "changed element 0 of its input", "all_gather"});
}

// Two ranks of n + 1 stretches each: as many schedules as ways to merge them, and with few delays those counted here.
TEST(Policies, every_schedule_of_small_programs_is_counted_as_by_hand) {
  const auto pauses = [](int64_t times) {
    return program(2, [times](std::shared_ptr<Comm>) {
      for (int64_t i = 0; i < times; ++i) pause_here();
    });
  };
  EXPECT_EQ(every_schedule(pauses(0), 9, 1000).distinct, 2);
  EXPECT_EQ(every_schedule(pauses(1), 9, 1000).distinct, 6);    // 4 over 2
  EXPECT_EQ(every_schedule(pauses(2), 9, 1000).distinct, 20);   // 6 over 3
  EXPECT_EQ(every_schedule(pauses(3), 99, 1000).distinct, 70);  // 8 over 4
  EXPECT_EQ(every_schedule(pauses(2), 0, 1000).distinct, 1);    // rank 0, then rank 1
  // Or rank 1 runs to its end first, or where rank 0 pauses for the first or the second time.
  EXPECT_EQ(every_schedule(pauses(2), 1, 1000).distinct, 4);
  const Schedules some = every_schedule(pauses(3), 99, 10);
  EXPECT_EQ(some.runs, 10);
  EXPECT_FALSE(some.all);
  EXPECT_TRUE(every_schedule(pauses(3), 99, 70).all);
}

TEST(Policies, every_schedule_of_a_thread_and_its_waiter_is_counted_as_by_hand) {
  const Scheduled one = program(1, [](std::shared_ptr<Comm>) { start_host_job([] {})->wait(); });
  // The thread runs when it is started, when its rank comes to wait, or when the rank is blocked.
  const Schedules found = every_schedule(one, 9, 1000);
  EXPECT_EQ(found.distinct, 3);
  EXPECT_EQ(found.runs, 3);
}

TEST(Policies, a_lost_update_is_found_by_one_delay_and_replays_from_its_choices) {
  LostUpdate race;
  EXPECT_FALSE(every_schedule(race.program(2), 0, 1000).failing);
  const Schedules found = every_schedule(race.program(2), 1, 1000);
  ASSERT_TRUE(found.failing);
  EXPECT_EQ(found.what, "1 instead of 2");
  const Case c = Case::parse(
      fmt::format("mlp(widths=5-3) mesh(dp_shard=2) zero3 sgd(lr=0.1) ordered seed=3 {} : step", found.failing->str()));
  EXPECT_EQ(race.program(2)(make_policy(*c.interleaving)), "1 instead of 2");
}

// The guarantee of the paper, for n = 2 threads, k steps and depth d: 1 / (n * k^(d-1)) of all runs.
TEST(Policies, pct_finds_a_lost_update_as_often_as_it_promises) {
  LostUpdate race;
  const auto counted = std::make_shared<RecordedPolicy>(make_policy({.kind = Kind::eager}));
  race.program(2)(counted);
  const int64_t steps = std::ssize(counted->points());
  const auto share = [&](int64_t depth) {
    int64_t found = 0;
    for (uint64_t seed = 0; seed < 1000; ++seed)
      found += race.program(2)(make_policy({.kind = Kind::pct, .seed = seed, .depth = depth, .steps = steps})) ? 1 : 0;
    return static_cast<double>(found) / 1000;
  };
  EXPECT_EQ(share(1), 0);  // priorities alone never preempt
  EXPECT_GE(share(2), 1.0 / static_cast<double>(2 * steps));
  EXPECT_GE(share(3), 1.0 / static_cast<double>(2 * steps * steps));
}

// Of threads that could all go on, the one with the highest priority runs, until a change point lowers it for good.
TEST(Policies, pct_changes_threads_at_its_change_points_only) {
  std::map<int64_t, int64_t> first;
  std::set<int64_t> places;
  for (uint64_t seed = 0; seed < 300; ++seed)
    for (const int64_t depth : {1, 2, 3}) {
      const Policy policy = make_policy({.kind = Kind::pct, .seed = seed, .depth = depth, .steps = 20});
      const auto choices = ranks_to_choose(5);
      std::vector<size_t> ran;
      for (int64_t step = 0; step < 40; ++step) ran.push_back(policy->choose(choices, -1));
      std::set<size_t> before;
      int64_t switches = 0;
      for (size_t step = 1; step < ran.size(); ++step) {
        if (ran[step] == ran[step - 1]) continue;
        ++switches;
        places.insert(static_cast<int64_t>(step));
        before.insert(ran[step - 1]);
        EXPECT_FALSE(before.contains(ran[step])) << "a lowered thread runs again";
      }
      EXPECT_LE(switches, depth - 1);
      // At the first step nobody has run yet whom a change could take off.
      EXPECT_GE(switches, depth - 2);
      if (depth == 1) ++first[static_cast<int64_t>(ran[0])];
    }
  EXPECT_EQ(first.size(), 5u);
  for (const auto& [rank, count] : first) EXPECT_GT(count, 30) << "of 300 runs, with priorities that are all alike";
  EXPECT_EQ(places.size(), 19u) << "change points lie anywhere in the first 20 steps";
  EXPECT_EQ(*places.rbegin(), 19);
}

TEST(Policies, ranks_that_wait_for_each_other_are_named_at_once) {
  for (const Interleaving& schedule : some_of_each())
    expect_error(
        [&] {
          run_under(make_policy(schedule), 3, [](std::shared_ptr<Comm> comm) {
            const at::Tensor value = at::ones({4});
            if (comm->rank() < 2)
              comm->all_reduce(value).wait();
            else
              comm->recv(value, 0, 7).wait();
          });
        },
        {"deadlock: none of the 3 ranks can go on", "rank 0 waits in all_reduce", "called by 0,1, not by 2",
         "rank 2 waits in recv"});
}

TEST(Policies, an_error_ends_all_ranks_and_lets_their_threads_end_first) {
  for (const Interleaving& schedule : some_of_each()) {
    std::atomic<int64_t> ended = 0;
    expect_error(
        [&] {
          run_under(make_policy(schedule), 3, [&](std::shared_ptr<Comm> comm) {
            const auto job = start_host_job([&] {
              pause_here();
              ++ended;
            });
            if (comm->rank() == 1) throw Error("[test] rank 1 has had enough");
            comm->barrier().wait();
          });
        },
        {"rank 1", "has had enough"});
    EXPECT_EQ(ended, 3);
  }
}

TEST(Policies, what_a_thread_throws_comes_out_of_the_wait_once_and_is_forgotten_without_one) {
  const auto throws = [] { throw Error("[test] the disk is full"); };
  const auto wait = [&] {
    const auto job = start_host_job(throws);
    EXPECT_THROW(job->wait(), Error);
    job->wait();
    start_host_job(throws).reset();
  };
  wait();
  run_under(make_policy({.kind = Kind::random, .seed = 3}), 2, [&](std::shared_ptr<Comm>) { wait(); });
}

TEST(Policies, a_policy_needs_ranks_that_run_one_at_a_time) {
  ThreadsOptions options;
  options.policy = make_policy({.kind = Kind::eager});
  expect_error(
      [&] {
        run_threads(
            2, [](std::shared_ptr<Comm>) {}, options);
      },
      {"one at a time", "serial"});
}
