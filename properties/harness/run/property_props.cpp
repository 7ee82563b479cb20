// Registered properties: when they are asked, and what becomes of a complaint.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "harness/commands/verify.h"
#include "harness/run/property.h"
#include "harness/run/step_bytes.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"

using namespace harness;
using shardproof::expect_error;

namespace {

const std::atomic<bool> kGoOn{false};

// A property that is asked as long as this object lives. Registration is for good, and other tests may share the process.
class Registered {
 public:
  explicit Registered(Property property) : alive_(std::make_shared<std::atomic<bool>>(true)) {
    const auto applies = property.applies;
    property.applies = [alive = alive_, applies](const Case& c) { return *alive && (!applies || applies(c)); };
    register_property(std::move(property));
  }
  ~Registered() { *alive_ = false; }
  Registered(const Registered&) = delete;

 private:
  std::shared_ptr<std::atomic<bool>> alive_;
};

Case two_steps() {
  return Case::parse("mlp(widths=3-4-2) mesh(dp_shard=3) zero3(units=leaf) sgd(lr=0.1) ordered seed=7 : accumulate(2) step*2");
}

}  // namespace

TEST(Property, that_complains_fails_the_case_by_its_name_with_step_and_rank) {
  const Registered registered({.name = "planted_live", .live = [](const LiveRun& run) -> Complaint {
                                 const bool here = run.step == 1 && run.moment == Moment::stepped && run.sharded.rank() == 2;
                                 return here ? Complaint("two eggs") : Complaint();
                               }});
  const Verdict verdict = run_case(two_steps());
  EXPECT_FALSE(verdict.held());
  EXPECT_EQ(verdict.kind(), "property planted_live");
  EXPECT_EQ(verdict.str(), "property planted_live: step 2, rank 2, after the update: two eggs");
}

TEST(Property, that_has_no_complaint_lets_a_case_hold_and_is_counted) {
  const Registered everywhere({.name = "content", .finished = [](const FinishedRun&) -> Complaint { return {}; }});
  const Registered nowhere({.name = "not_about_this",
                            .applies = [](const Case& c) { return c.mesh.size() > 100; },
                            .finished = [](const FinishedRun&) -> Complaint { return "asked"; }});
  const harness_env::Folder folder;
  VerifyOptions options;
  options.cases = 6;
  options.python = false;
  options.failures_directory = folder / "failures";
  const VerifyResult result = verify(options, kGoOn);
  EXPECT_TRUE(result.failures.empty());
  EXPECT_EQ(result.coverage.properties().at("content"), 6);
  EXPECT_EQ(result.coverage.properties().at("not_about_this"), 0);
  EXPECT_NE(result.coverage.properties_summary().find("content 6"), std::string::npos) << result.coverage.properties_summary();
}

TEST(Property, is_asked_on_every_rank_at_every_moment_and_begins_again_after_a_load) {
  std::mutex mutex;
  std::vector<std::vector<std::pair<size_t, Moment>>> asked(3);
  const Registered registered({.name = "listener", .live = [&](const LiveRun& run) -> Complaint {
                                 const std::lock_guard lock(mutex);
                                 asked[static_cast<size_t>(run.sharded.rank())].push_back({run.step, run.moment});
                                 return {};
                               }});
  const Verdict verdict = run_case(
      Case::parse("mlp(widths=3-4) mesh(dp_shard=3) zero3 sgd(lr=0.1) ordered seed=7 : step save load@strategy(zero2) step"));
  EXPECT_TRUE(verdict.held()) << verdict.str();
  using enum Moment;
  const std::vector<std::pair<size_t, Moment>> expected = {{0, begun}, {0, backward}, {0, stepped},
                                                           {1, begun}, {1, backward}, {1, stepped}};
  for (const auto& of_rank : asked) EXPECT_EQ(of_rank, expected);
}

TEST(Property, of_a_finished_run_sees_what_both_sides_trained) {
  bool seen = false;
  const Registered registered({.name = "norms_agree", .finished = [&](const FinishedRun& run) -> Complaint {
                                 seen = true;
                                 for (size_t s = 0; s < run.sharded.size(); ++s)
                                   for (const RankStep& rank : run.sharded[s])
                                     if (rank.gradient_norm != run.golden[s].gradient_norm) return "they do not";
                                 return {};
                               }});
  const Verdict verdict = run_case(two_steps());
  EXPECT_TRUE(verdict.held()) << verdict.str();
  EXPECT_TRUE(seen);
}

TEST(Property, that_complains_is_shrunk_and_its_minimal_case_replays) {
  const Registered registered({.name = "planted_on_three", .finished = [](const FinishedRun& run) -> Complaint {
                                 if (run.c.mesh.size() < 3 || run.c.steps[0].rounds < 2) return {};
                                 return "three ranks and two rounds";
                               }});
  const harness_env::Folder folder;
  VerifyOptions options;
  options.cases = 200;
  options.python = false;
  options.failures_max = 1;
  options.limits.mode = Mode::ordered;
  options.failures_directory = folder / "failures";
  const VerifyResult result = verify(options, kGoOn);
  ASSERT_EQ(result.failures.size(), 1u);
  const Failure& failure = result.failures[0];
  EXPECT_EQ(failure.what, "property planted_on_three: three ranks and two rounds");
  EXPECT_EQ(failure.minimal.mesh.size(), 3) << failure.minimal.str();
  EXPECT_EQ(failure.minimal.steps, std::vector<StepPlan>{{.rounds = 2}}) << failure.minimal.str();
  EXPECT_EQ(run_case(Case::parse(failure.minimal.str())).str(), failure.what);
}

TEST(Property, complaints_travel_between_processes) {
  RankStep step;
  step.complaints = {{"some_property", "step 0, rank 1: a word"}, {"another", ""}};
  const std::vector<RankStep> back = steps_from(to_bytes({RankStep{}, step}));
  ASSERT_EQ(back.size(), 2u);
  EXPECT_TRUE(back[0].complaints.empty());
  ASSERT_EQ(back[1].complaints.size(), 2u);
  EXPECT_EQ(back[1].complaints[0].property, "some_property");
  EXPECT_EQ(back[1].complaints[0].what, "step 0, rank 1: a word");
  EXPECT_EQ(back[1].complaints[1].property, "another");
}

TEST(Property, of_a_bad_name_a_taken_name_or_without_a_check_is_refused) {
  const auto content = [](const FinishedRun&) -> Complaint { return {}; };
  expect_error([&] { register_property({.name = "two words", .finished = content}); }, {"[property]", "word", "two words"});
  expect_error([&] { register_property({.name = "", .finished = content}); }, {"[property]", "word"});
  const Registered first({.name = "taken", .finished = content});
  expect_error([&] { register_property({.name = "taken", .finished = content}); }, {"[property]", "'taken' already"});
  expect_error([&] { register_property({.name = "empty"}); }, {"[property]", "'empty' checks nothing", "`finished`"});
}
