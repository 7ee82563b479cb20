// Training on the fake device while one policy decides when ranks, their threads and the device's streams go on. Nothing that a
// policy may do changes a bit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <span>

#include "harness/case/network.h"
#include "harness/case/problem.h"
#include "harness/run/policies.h"
#include "harness/run/property.h"
#include "harness/run/schedules.h"
#include "harness/run/sharded_options.h"
#include "harness/run/sharded_run.h"
#include "properties/doubles/fake_device.h"
#include "properties/kit/checkpoint_trained.h"
#include "properties/kit/harness_env.h"
#include "shardproof/base/host_work.h"

using namespace harness;
using shardproof::checkpoint::Place;
using shardproof::checkpoint::Recipe;
using shardproof::checkpoint::Trained;

namespace {

using Policy = std::shared_ptr<shardproof::SchedulePolicy>;
using Rank = std::shared_ptr<shardproof::Comm>;

// Families, since a race is between two things that not every case has. Among them are gathers ahead, accumulation, tensor
// parallelism and low precision.
constexpr std::array kOffload = {
    "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(units=leaf,prefetch_forward=1,prefetch_backward=1,offload=pinned) "
    "adamw(lr=0.01,clip=1) ordered seed=8 : "
    "step*2",
    "mlp(widths=4-6-3) mesh(dp_shard=2) zero2(offload=pinned) sgd(lr=0.1,momentum=0.9) ordered seed=2 : accumulate(2) "
    "step save step load@mesh(dp_shard=3) step",
    "mlp(widths=5-6-3) mesh(dp_shard=2) zero3(compute=bf16,reduce=bf16,offload=pageable) adamw(lr=0.01) ordered seed=9 : "
    "step*2",
    "mlp(widths=4-6-2) mesh(dp_shard=2,tp=2) zero3(granularity=tensor,offload=pinned) sgd(lr=0.1) fast seed=4 : step*2",
    "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(units=leaf,granularity=row,prefetch_forward=1,prefetch_backward=1,offload=pinned)"
    " adamw(lr=0.01,clip=1) ordered seed=8 : step*2",
    "mlp(widths=4-6-3) mesh(dp_shard=3) zero1(units=leaf,granularity=row,publish=at_first_use,offload=pinned) "
    "sgd(lr=0.1,momentum=0.9) ordered seed=2 : accumulate(2) step*2"};
// Of seeds whose saves are in the background.
constexpr std::array kSaves = {
    "mlp(widths=5-6-4) mesh(dp_replicate=2,dp_shard=2) hsdp(units=leaf,prefetch_forward=2,prefetch_backward=2) adamw(lr=0.01) "
    "ordered seed=7 : step save "
    "step load@mesh(dp_replicate=2,dp_shard=3) step",
    "mlp(widths=4-5-3) mesh(dp_shard=3) zero1 adamw(lr=0.01) ordered seed=1 : step save step load@mesh(dp_shard=2) step",
    "mlp(widths=6-3) mesh(dp_shard=2) ddp sgd(lr=0.1,momentum=0.9) ordered seed=2 : step save step load@mesh(dp_shard=1) step",
    "mlp(widths=3-7-2) mesh(dp_shard=2) zero3(units=leaf) lion(lr=0.01) ordered seed=15 : step save step save step "
    "load@mesh(dp_shard=2) step"};

// Sums over replicas of one unit are under way while another one runs backwards.
constexpr std::array kReplicas = {
    "mlp(widths=4-6-5-3) mesh(dp_shard=3) ddp(units=leaf) adamw(lr=0.01) ordered seed=4 : step*2",
    "mlp(widths=5-4-4-2) mesh(dp_shard=4) ddp(units=leaf,reduce=bf16) sgd(lr=0.1,momentum=0.9) ordered seed=6 : accumulate(2) "
    "step*2",
    "mlp(widths=5-6-4-3) mesh(dp_replicate=2,dp_shard=2) hsdp(units=leaf,prefetch_forward=1,prefetch_backward=1) "
    "adamw(lr=0.01) ordered seed=2 : step*2",
    "mlp(widths=3-7-5-2) mesh(dp_replicate=3,dp_shard=2) hsdp(units=leaf) lion(lr=0.01) ordered seed=3 : step*2"};

// While one lives, the policy decides when the device's streams run.
class StreamsBy {
 public:
  explicit StreamsBy(const Policy& policy) { fake_device::schedule_by(policy); }
  ~StreamsBy() { fake_device::schedule_by(nullptr); }
  StreamsBy(const StreamsBy&) = delete;
};

// As many schedules, drawn from the seed, as SHARDPROOF_SCHEDULES says. A race that a table is to have is found by the number
// that the failure prints.
void expect_right_under_each(const std::string& name, uint64_t seed, const Scheduled& program) {
  const char* asked = std::getenv("SHARDPROOF_SCHEDULES");
  const int64_t count = asked ? std::atoll(asked) : 8;
  int64_t number = 0;
  fmt::print("{}\n", name);
  const Schedules found = try_schedules(Case{.seed = seed}, count, [&](const Policy& policy) -> Complaint {
    // A fault of memory ends the program, which then has said under which schedule.
    fmt::print("schedule {}\n", ++number);
    std::fflush(stdout);
    const StreamsBy streams(policy);
    try {
      return program(policy);
    } catch (const std::exception& error) {
      return error.what();
    }
  });
  EXPECT_FALSE(found.failing) << name << "\nschedule " << found.runs << ", " << found.failing->str() << "\n" << found.what;
  EXPECT_GE(found.distinct, count * 9 / 10) << name;  // two draws of a small program may be one schedule
}

shardproof::ThreadsOptions on_device(const Policy& policy) {
  shardproof::ThreadsOptions options{.schedule = shardproof::ThreadsOptions::Schedule::serial};
  options.device = fake_device::device();
  options.policy = policy;
  return options;
}

// Trains on the device.
Steps train(const Case& c, const golden::Run& run, const Policy& policy) {
  const auto run_world = [&](const Case& now, const RankBody& body) {
    shardproof::ThreadsOptions options = on_device(policy);
    options.sum = threads_options(now).sum;
    shardproof::run_threads(now.mesh.size(), body, options);
  };
  return run_sharded({c, run, run_world, fake_device::device()});
}

golden::Run run_of(const Case& c) {
  golden::Run run = make_run(c);
  run.device = fake_device::device();
  return run;
}

void expect_the_bits_of_the_cpu_under_each(std::span<const char* const> cases) {
  fake_device::install();
  for (const char* text : cases) {
    const Case c = Case::parse(text);
    const golden::Run run = run_of(c);
    const Steps on_cpu = run_sharded({c, make_run(c)});
    expect_right_under_each(text, c.seed, [&](const Policy& policy) { return first_change(on_cpu, train(c, run, policy)); });
  }
}

// Beside cases a small model is trained in each of these places. `body` says on each rank what is wrong.
const std::vector<Place> kSmallPlaces = {
    {"dp_shard=2", "zero3"}, {"dp_shard=3", "zero1"}, {"dp_shard=2", "ddp"}, {"dp_replicate=2,dp_shard=2", "hsdp"}};
const Recipe kSmall{.move = &move_to};

void expect_right_in_each_place(shardproof::Offload offload, const std::function<Complaint(const Place&, const Rank&)>& body) {
  fake_device::install();
  for (Place place : kSmallPlaces) {
    place.device = fake_device::device(), place.offload = offload;
    expect_right_under_each(place.mesh + " " + place.strategy, 1, [&](const Policy& policy) {
      Complaint first;
      const auto of_rank = [&](const Rank& comm) {
        if (const Complaint wrong = body(place, comm); wrong && !first)
          first = fmt::format("rank {}: {}", comm->rank(), *wrong);
      };
      shardproof::run_threads(shardproof::Mesh::parse(place.mesh).size(), of_rank, on_device(policy));
      return first;
    });
  }
}

// What a device has yet to do when a save begins: the values are changed, and then what they were again.
void change_and_restore(const shardproof::Sharded& sharded) {
  const at::NoGradGuard no_grad;
  for (const shardproof::Piece& piece : sharded.main_parameters()) {
    piece.data.neg_();
    piece.data.neg_();
  }
}

}  // namespace

TEST(DeviceSchedules, the_same_seed_gives_the_same_course_byte_for_byte) {
  fake_device::install();
  const Case c = Case::parse(kOffload[1]);
  const golden::Run run = run_of(c);
  for (int64_t number = 0; number < 6; ++number) {
    std::array<std::string, 2> traces;
    for (std::string& trace : traces) {
      const auto policy = std::make_shared<RecordedPolicy>(make_policy(drawn_interleaving(c, number, 500)), /*with_text=*/true);
      const StreamsBy streams(policy);
      train(c, run, policy);
      trace = policy->text();
    }
    EXPECT_EQ(traces[0], traces[1]);
    EXPECT_NE(traces[0].find("rank -1 thread 1\n"), std::string::npos) << "streams take part";
    EXPECT_NE(traces[0].find("rank 1 thread 1\n"), std::string::npos) << "saves take part";
  }
}

TEST(DeviceSchedules, cases_that_offload_have_the_same_bits_under_each) {
  expect_the_bits_of_the_cpu_under_each(kOffload);
}

TEST(DeviceSchedules, cases_that_save_in_the_background_have_the_same_bits_under_each) {
  expect_the_bits_of_the_cpu_under_each(kSaves);
}

TEST(DeviceSchedules, cases_that_add_over_replicas_have_the_same_bits_under_each) {
  expect_the_bits_of_the_cpu_under_each(kReplicas);
}

TEST(DeviceSchedules, a_job_that_another_thread_writes_has_its_ranks_values_under_each) {
  using namespace shardproof::checkpoint;
  const Bits expected = trained(kSmall, kSmallPlaces[0], 2, "");
  const Scratch scratch;
  int64_t saves = 0;
  expect_right_in_each_place(shardproof::Offload::none, [&](const Place& place, const Rank& comm) -> Complaint {
    Trained run(kSmall, place, comm);
    run.train(0, 2);
    change_and_restore(*run.sharded);
    if (comm->rank() == 0) ++saves;
    comm->barrier().wait();
    const std::string folder = scratch / std::to_string(saves);
    SaveJob job(folder, *run.sharded, &*run.optimizer, {.step = 2}, {}, nullptr);
    shardproof::start_host_job([&] { job.write(); })->wait();
    job.commit();
    Trained other(kSmall, place, comm, 0.75);
    load(folder, *other.sharded, &*other.optimizer);
    if (other.bits() != expected) return "the checkpoint has other values";
    return {};
  });
}

// A step returns while the device still fetches its parameters from memory of the host.
TEST(DeviceSchedules, main_parameters_on_their_way_to_the_device_may_be_written_under_each) {
  expect_right_in_each_place(shardproof::Offload::pinned, [&](const Place& place, const Rank& comm) -> Complaint {
    Trained run(kSmall, place, comm);
    run.train(0, 1);
    for (const shardproof::Piece& piece : run.sharded->main_parameters()) piece.data.fill_(7);
    for (const shardproof::Piece& piece : run.sharded->parameters())
      if (piece.data.to(at::kCPU).eq(7).any().item<bool>()) return piece.name + " is what was written after the step";
    return {};
  });
}
