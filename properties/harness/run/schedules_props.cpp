// Cases under schedules of their threads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "harness/case/failures.h"
#include "harness/case/generate.h"
#include "harness/case/problem.h"
#include "harness/commands/shrink.h"
#include "harness/commands/verify.h"
#include "harness/run/policies.h"
#include "harness/run/property.h"
#include "harness/run/run_case.h"
#include "harness/run/schedules.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/scheduled.h"
#include "shardproof/shardproof.h"

using namespace harness;
using scheduled::some_of_each;
using shardproof::expect_error;

namespace {

using Kind = Interleaving::Kind;

// Has a save in the background, offloaded gradients, gathers ahead, and two worlds, one after the other.
constexpr const char* kBusy =
    "mlp(widths=5-7-6-3) mesh(dp_shard=3) zero3(units=leaf,prefetch_forward=1,prefetch_backward=1,offload=pinned) "
    "adamw(lr=0.01,clip=1) ordered seed=7 : "
    "step save step load@mesh(dp_shard=2) step";

std::string trace(const Case& c, const Interleaving& schedule) {
  const auto policy = std::make_shared<RecordedPolicy>(make_policy(schedule), /*with_text=*/true);
  run_sharded({c, make_run(c), on_threads(policy)});
  return policy->text();
}

// Ranks come to their first step in their order. That holds or not by the schedule alone.
class RanksInOrder {
 public:
  void of(uint64_t seed) { seed_ = seed; }
  Property property() {
    return {.name = "ranks_come_in_order",
            .applies = [this](const Case& c) { return c.seed == seed_; },
            .finished = {},
            .live = [this](const LiveRun& run) -> Complaint {
              if (run.moment != Moment::begun) return {};
              const int64_t place = come_++;
              if (come_ == run.comms.world().size()) come_ = 0;
              if (place == run.sharded.rank()) return {};
              return fmt::format("it is number {}", place);
            }};
  }

 private:
  uint64_t seed_ = 0;
  int64_t come_ = 0;
};

}  // namespace

TEST(Schedules, the_same_seed_gives_the_same_interleaving_byte_for_byte) {
  const Case c = Case::parse(kBusy);
  std::set<std::string> traces;
  for (const Interleaving& schedule : some_of_each()) {
    SCOPED_TRACE(schedule.str());
    const std::string once = trace(c, schedule);
    EXPECT_EQ(once, trace(c, schedule));
    traces.insert(once);
  }
  EXPECT_EQ(traces.size(), some_of_each().size());
  EXPECT_NE(trace(c, {.kind = Kind::random, .seed = 5}), trace(c, {.kind = Kind::random, .seed = 6}));
}

TEST(Schedules, saves_and_copies_in_the_background_take_part) {
  const std::string seen = trace(Case::parse(kBusy), {.kind = Kind::random, .seed = 1});
  for (const char* actor : {"rank 2\n", "rank 0 thread 1\n", "rank 1 call 0\n", "rank 1 copy 1\n"})
    EXPECT_NE(seen.find(actor), std::string::npos) << actor;
}

TEST(Schedules, background_work_comes_at_once_when_eager_and_at_the_latest_when_it_is_waited_for) {
  const Case c = Case::parse(kBusy);
  const auto save_begins = [&](Kind kind) {
    const std::string text = trace(c, {.kind = kind});
    return static_cast<double>(text.find("rank 0 thread 1\n")) / static_cast<double>(text.size());
  };
  EXPECT_LT(save_begins(Kind::eager), save_begins(Kind::latest));
}

TEST(Schedules, those_of_a_case_are_of_every_kind_and_drawn_from_its_seed) {
  Case c = Case::parse(kBusy);
  std::map<std::string, int64_t> kinds;
  std::set<std::string> different;
  for (int64_t number = 0; number < 100; ++number) {
    const Interleaving drawn = drawn_interleaving(c, number, 700);
    EXPECT_EQ(drawn, drawn_interleaving(c, number, 700));
    ++kinds[drawn.kind == Kind::pct ? fmt::format("pct{}", drawn.depth) : drawn.kind == Kind::random ? "random" : drawn.str()];
    different.insert(drawn.str());
  }
  EXPECT_EQ(kinds, (std::map<std::string, int64_t>{
                       {"threads(eager)", 1}, {"threads(latest)", 1}, {"random", 33}, {"pct2", 33}, {"pct3", 32}}));
  EXPECT_EQ(different.size(), 100u);
  ++c.seed;
  EXPECT_FALSE(different.contains(drawn_interleaving(c, 5, 700).str()));
}

TEST(Schedules, a_case_has_the_same_bits_under_each_and_most_are_distinct) {
  const Schedules found = try_schedules(Case::parse(kBusy), 20);
  EXPECT_FALSE(found.failing) << found.what;
  EXPECT_EQ(found.runs, 20);
  EXPECT_GE(found.distinct, 19);
}

TEST(Schedules, where_the_run_without_one_fails_the_first_one_fails_too) {
  const Case c = Case::parse("mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=1e+30) ordered seed=1 : step*3");
  const Schedules found = try_schedules(c, 3);
  ASSERT_TRUE(found.failing);
  EXPECT_EQ(found.failing->str(), "threads(eager)");
  EXPECT_EQ(found.runs, 1);
  EXPECT_EQ(found.what.rfind("error without a schedule: ", 0), 0u) << found.what;
}

TEST(Schedules, a_case_with_a_schedule_reads_back_and_holds) {
  for (const Interleaving& schedule : some_of_each()) {
    Case c = Case::parse(kBusy);
    c.interleaving = schedule;
    EXPECT_EQ(Case::parse(c.str()).interleaving, schedule) << c.str();
    const Verdict verdict = run_case(c);
    EXPECT_TRUE(verdict.held()) << c.str() << "\n" << verdict.str();
  }
}

TEST(Schedules, what_is_no_schedule_is_refused_at_its_column) {
  const auto refused = [](const std::string& threads, const std::string& says) {
    const std::string begin = "mlp(widths=5-3) mesh(dp_shard=2) zero3 sgd(lr=0.1) ordered seed=3 ";
    expect_error([&] { Case::parse(begin + threads + " : step"); }, {says});
  };
  refused("threads", "threads(eager)");
  refused("threads(sometimes)", "threads(eager)");
  refused("threads(eager=1)", "threads(eager)");
  refused("threads(eager,depth=2)", "nothing after the first argument");
  refused("threads(pct=3,depth=0)", "depth between 1 and 20");
  refused("threads(pct=3,steps=0)", "steps between 1");
  refused("threads(random=-1)", "random between 0");
  refused("threads(choices=0-x)", "integer");
  refused("then", "threads(...)");
}

TEST(Schedules, shrinking_tries_no_schedule_first_then_simpler_ones) {
  Case c = Case::parse(kBusy);
  c.interleaving = Interleaving{.kind = Kind::pct, .seed = 9, .depth = 3, .steps = 100};
  std::vector<std::string> simpler_ones;
  for (const Case& variant : simpler(c))
    if (variant.interleaving != c.interleaving)
      simpler_ones.push_back(variant.interleaving ? variant.interleaving->str() : "none");
  ASSERT_GE(simpler_ones.size(), 5u);
  EXPECT_EQ(simpler_ones[0], "none");
  EXPECT_EQ(simpler_ones[1], "threads(eager)");
  EXPECT_EQ(simpler_ones[2], "threads(latest)");
  EXPECT_EQ(simpler_ones[3], "threads(pct=9,depth=1,steps=100)");
}

TEST(Schedules, a_minimal_case_has_the_simplest_schedule_that_still_fails) {
  Case c = Case::parse(kBusy);
  c.interleaving = Interleaving{.kind = Kind::pct, .seed = 9, .depth = 3, .steps = 100};
  const auto minimal = [&](const std::function<bool(const Case&)>& fails) {
    const Verdict failed{.outcome = Verdict::Outcome::error, .says = "x"};
    return shrink(c, failed, {.time = std::chrono::seconds(20)},
                  [&](const Case& variant) { return fails(variant) ? failed : held_verdict(); })
        .minimal;
  };
  EXPECT_FALSE(minimal([](const Case&) { return true; }).interleaving);
  EXPECT_EQ(minimal([](const Case& variant) { return variant.interleaving.has_value(); }).interleaving->str(),
            "threads(eager)");
  const Case late =
      minimal([](const Case& variant) { return variant.interleaving && variant.interleaving->kind != Kind::eager; });
  EXPECT_EQ(late.interleaving->str(), "threads(latest)");
  EXPECT_EQ(late.steps.size(), 1u);
  const Case drawn = minimal([](const Case& variant) {
    return variant.interleaving && variant.interleaving->kind == Kind::pct && variant.interleaving->depth >= 2;
  });
  EXPECT_EQ(drawn.interleaving->str(), "threads(pct=9,depth=2,steps=1)");
}

// Shards lie beside each other, and nothing but the library itself keeps a rank from updating its own while another one reads
// it.
TEST(Schedules, an_evaluation_before_an_update_reads_the_old_weights_under_each) {
  using namespace shardproof;
  const Scheduled program = [](const scheduled::Policy& policy) -> Complaint {
    Complaint complaint;
    scheduled::run_under(policy, 2, [&](std::shared_ptr<Comm> comm) {
      Mlp model(MlpOptions{.widths = {4, 6, 3}});
      ShardOptions options;
      options.units = by_type<torch::nn::LinearImpl>();
      options.gather = Gather::side_by_side;
      Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})), options);
      Optimizer optimizer = sgd(sharded, {.lr = 0.1});
      const at::Tensor input = at::ones({2, 4});
      const auto evaluate = [&] {
        const at::NoGradGuard no_grad;
        return call(model, input);
      };
      const at::Tensor before = evaluate();
      call(model, input).square().sum().backward();
      if (!evaluate().equal(before)) complaint = fmt::format("rank {} evaluates with other weights", comm->rank());
      optimizer.step();
    });
    return complaint;
  };
  const Schedules found = try_schedules(Case::parse(kBusy), 100, program);
  EXPECT_FALSE(found.failing) << "schedule " << found.runs << ", " << found.failing->str() << ": " << found.what;
}

// Drawn cases, a few schedules each.
TEST(Schedules, random_cases_have_the_same_bits_under_each) {
  Limits limits;
  limits.world_max = 4;
  for (int64_t index = 0; index < 8; ++index) {
    const Case c = generate(77, index, limits);
    if (!run_case(c).held()) continue;  // diverged, as its golden run does
    const Schedules found = try_schedules(c, 5);
    EXPECT_FALSE(found.failing) << c.str() << "\n" << found.failing->str() << "\n" << found.what;
  }
}
TEST(Schedules, what_only_a_schedule_shows_is_found_stored_and_replayed_with_it) {
  static RanksInOrder order;
  register_property(order.property());
  Case c = Case::parse("mlp(widths=3-4-2) mesh(dp_shard=3) zero3(units=leaf) sgd(lr=0.1) ordered seed=1 : step*2");
  for (order.of(c.seed); !run_case(c).held(); order.of(++c.seed)) ASSERT_LT(c.seed, 100u);
  const harness_env::Folder folder;
  std::filesystem::create_directory(folder / "corpus");
  std::ofstream(folder / "corpus/one.case") << c.str() << "\n";
  VerifyOptions options;
  options.cases = 1;
  options.python = false;
  options.shrink_seconds = 0;
  options.corpus_directory = folder / "corpus";
  options.failures_directory = folder / "failures";
  options.schedules = 20;
  const std::atomic<bool> interrupted = false;
  const VerifyResult result = verify(options, interrupted);
  ASSERT_EQ(result.failures.size(), 1u);
  const Failure& failure = result.failures[0];
  EXPECT_EQ(failure.what.rfind("property ranks_come_in_order", 0), 0u) << failure.what;
  ASSERT_TRUE(failure.minimal.interleaving) << failure.minimal.str();
  const std::string line = replay_line(failure.minimal, options);
  EXPECT_NE(line.find(failure.minimal.interleaving->str()), std::string::npos) << line;
  for (int time = 0; time < 2; ++time) EXPECT_EQ(run_case(Case::parse(failure.minimal.str())).str(), failure.what);
  EXPECT_EQ(Failures(options.failures_directory).all().at(0), failure.minimal);
  order.of(0);
}
