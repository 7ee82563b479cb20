// Training on the fake device while one policy decides when ranks, their threads and the device's streams go on. Nothing that a
// policy may do changes a bit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

#include "harness/case/problem.h"
#include "harness/run/policies.h"
#include "harness/run/schedules.h"
#include "harness/run/sharded_options.h"
#include "harness/run/sharded_run.h"
#include "properties/doubles/fake_device.h"
#include "properties/kit/harness_env.h"

using namespace harness;

namespace {

// Offload, saves in the background and loads of them, gathers ahead, accumulation, tensor parallelism, low precision.
constexpr std::array kCases = {
    "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(units=leaf,prefetch=1,offload=pinned) adamw(lr=0.01,clip=1) ordered seed=8 : "
    "step*2",
    "mlp(widths=4-6-3) mesh(dp_shard=2) zero2(offload=pinned) sgd(lr=0.1,momentum=0.9) ordered seed=2 : accumulate(2) "
    "step save step load@mesh(dp_shard=3) step",
    "mlp(widths=5-6-4) mesh(dp_replicate=2,dp_shard=2) hsdp(units=leaf,prefetch=2) adamw(lr=0.01) ordered seed=7 : step save "
    "step load@mesh(dp_replicate=2,dp_shard=3) step",
    "mlp(widths=5-6-3) mesh(dp_shard=2) zero3(compute=bf16,reduce=bf16,offload=pageable) adamw(lr=0.01) ordered seed=9 : "
    "step*2",
    "mlp(widths=4-6-2) mesh(dp_shard=2,tp=2) zero3(whole=1,offload=pinned) sgd(lr=0.1) fast seed=4 : step*2"};

// Trains on the device, under the policy if there is one.
Steps train(const Case& c, const golden::Run& run, const std::shared_ptr<shardproof::SchedulePolicy>& policy) {
  CaseCheckpoints checkpoints(c);
  fake_device::schedule_by(policy);
  const std::shared_ptr<void> over(nullptr, [](void*) { fake_device::schedule_by(nullptr); });
  const auto run_world = [&](const Case& now, const RankBody& body) {
    shardproof::ThreadsOptions options = threads_options(now);
    options.completion = shardproof::ThreadsOptions::Completion::eager;
    options.device = fake_device::device();
    options.policy = policy;
    shardproof::run_threads(now.mesh.size(), body, options);
  };
  return run_sharded(c, run, checkpoints, run_world, fake_device::device());
}

golden::Run run_of(const Case& c) {
  golden::Run run = make_run(c);
  run.device = fake_device::device();
  return run;
}

}  // namespace

TEST(DeviceSchedules, the_same_seed_gives_the_same_course_byte_for_byte) {
  fake_device::install();
  const Case c = Case::parse(kCases[1]);
  const golden::Run run = run_of(c);
  for (int64_t number = 0; number < 6; ++number) {
    std::array<std::string, 2> traces;
    for (std::string& trace : traces) {
      const auto policy = std::make_shared<RecordedPolicy>(make_policy(drawn_interleaving(c, number, 500)), /*with_text=*/true);
      train(c, run, policy);
      trace = policy->text();
    }
    EXPECT_EQ(traces[0], traces[1]);
    EXPECT_NE(traces[0].find("rank -1 thread 1\n"), std::string::npos) << "streams take part";
    EXPECT_NE(traces[0].find("rank 1 thread 1\n"), std::string::npos) << "saves take part";
  }
}

TEST(DeviceSchedules, cases_have_the_same_bits_under_each) {
  fake_device::install();
  const char* asked = std::getenv("SHARDPROOF_SCHEDULES");
  const int64_t count = asked ? std::atoll(asked) : 8;
  for (const char* text : kCases) {
    const Case c = Case::parse(text);
    const golden::Run run = run_of(c);
    const Steps before = run_sharded(c, make_run(c));  // on the CPU
    int64_t number = 0;
    const Schedules found = try_schedules(c, count, [&](const auto& policy) -> std::optional<std::string> {
      // A fault of memory ends the program, which then has said under which schedule.
      fmt::print("schedule {}\n", number++);
      std::fflush(stdout);
      try {
        return first_change(before, train(c, run, policy));
      } catch (const std::exception& error) {
        return error.what();
      }
    });
    EXPECT_FALSE(found.failing) << c.str() << "\nschedule " << found.runs << ", " << found.failing->str() << "\n" << found.what;
    EXPECT_GE(found.distinct, count - 1);
  }
}
