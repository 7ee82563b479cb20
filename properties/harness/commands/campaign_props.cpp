// Running cases: verdicts, shrinking, the failure database, campaigns.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "harness/case/failures.h"
#include "harness/commands/merge.h"
#include "harness/commands/shrink.h"
#include "harness/commands/verify.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"

using namespace harness;
using shardproof::expect_error;

namespace {

const std::atomic<bool> kGoOn{false};

Verdict fails(const std::string& value) {
  return {.outcome = Verdict::Outcome::values, .step = 0, .difference = {.value = value, .says = "planted"}};
}

Case large() {
  return Case::parse(
      "gpt(layers=3,hidden=24,heads=4,vocab=37,positions=9,tied) mesh(dp_shard=8) zero3(units=some,bucket_bytes_max=64) "
      "adamw(lr=0.01,decay=0.1,clip=0.5) ordered seed=7 : accumulate(4) step*2 accumulate(2) step");
}

std::vector<nlohmann::json> lines_of(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

VerifyOptions options_in(const harness_env::Folder& folder, int64_t cases) {
  VerifyOptions options;
  options.cases = cases;
  options.python = false;
  options.failures_directory = folder / "failures";
  options.json = folder / "report.json";
  return options;
}

}  // namespace

TEST(Verdict, is_the_same_every_time) {
  for (int64_t i = 0; i < 20; ++i) {
    const Case c = generate(2, i, {});
    const Verdict a = run_case(c), b = run_case(c);
    EXPECT_TRUE(a.held() && b.held()) << c.str() << a.str();
    EXPECT_EQ(a.values_compared, b.values_compared);
    EXPECT_EQ(a.ratio_max, b.ratio_max);
  }
}

TEST(Verdict, a_loss_that_is_not_finite_names_step_and_rank) {
  const Verdict verdict = run_case(Case::parse("mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=1e+30) ordered seed=1 : step*3"));
  EXPECT_FALSE(verdict.held());
  EXPECT_TRUE(verdict.diverged());
  EXPECT_NE(verdict.str().find("rank "), std::string::npos) << verdict.str();
  EXPECT_NE(verdict.str().find("step 2"), std::string::npos) << verdict.str();
}

TEST(Shrink, reaches_the_smallest_case_that_still_fails) {
  // Fails with at least three ranks, two rounds in some step, and a bucket limit.
  const auto run = [](const Case& c) {
    const bool rounds = std::any_of(c.steps.begin(), c.steps.end(), [](const StepPlan& step) { return step.rounds >= 2; });
    const bool fault = c.mesh.size() >= 3 && rounds && c.options.of("bucket_bytes_max") > 0;
    return fault ? fails("gradient") : held_verdict();
  };
  const Shrunk shrunk = shrink(large(), fails("gradient"), {.time = std::chrono::minutes(1)}, run);
  const Case& c = shrunk.minimal;
  EXPECT_EQ(c.mesh.size(), 3);
  EXPECT_EQ(c.steps, std::vector<StepPlan>{{.rounds = 2}});
  EXPECT_GT(c.options.of("bucket_bytes_max"), 0);
  EXPECT_EQ(str(c.model), "mlp(widths=1-1,act=identity,bias=0)");
  EXPECT_EQ(c.clip_norm, 0);
  EXPECT_EQ(c.optimizer.kind, golden::Optimizer::Kind::sgd);
  EXPECT_EQ(c.options.units, units_root);
}

TEST(Shrink, keeps_to_the_value_that_was_wrong) {
  // Below four ranks something else goes wrong.
  const auto run = [](const Case& c) { return fails(c.mesh.size() >= 4 ? "gradient" : "loss"); };
  const Shrunk shrunk = shrink(large(), fails("gradient"), {.time = std::chrono::minutes(1)}, run);
  EXPECT_EQ(shrunk.minimal.mesh.size(), 4);
  EXPECT_EQ(shrunk.verdict.difference.value, "gradient");
}

TEST(Shrink, tries_valid_cases_only_and_each_is_simpler) {
  for (int64_t i = 0; i < 200; ++i) {
    const Case c = generate(9, i, {});
    for (const Case& candidate : simpler(c)) {
      EXPECT_NO_THROW(validate(candidate)) << candidate.str();
      EXPECT_FALSE(candidate == c) << c.str();
    }
  }
}

TEST(Shrink, tries_as_many_cases_as_it_may) {
  std::atomic<int64_t> runs{0};
  const auto run = [&](const Case& c) {
    ++runs;
    return c.mesh.size() >= 3 ? fails("gradient") : held_verdict();
  };
  std::set<std::string> minimal;
  for (const int64_t threads : {1, 3}) {
    runs = 0;
    const ShrinkBudget budget{.time = std::chrono::minutes(1), .runs = 7, .threads = threads};
    const Shrunk shrunk = shrink(large(), fails("gradient"), budget, run);
    minimal.insert(shrunk.minimal.str());
    EXPECT_EQ(shrunk.tried, 7) << threads << " threads";
    if (threads == 1) {
      EXPECT_EQ(runs, 7);
    }
  }
  EXPECT_EQ(minimal.size(), 1u) << "with several threads other cases count";
}

TEST(Shrink, on_several_threads_ends_at_the_same_case_as_on_one) {
  const auto run = [](const Case& c) {
    return c.mesh.size() >= 3 && c.model.gpt.vocab >= 5 && c.steps.size() >= 2 ? fails("gradient") : held_verdict();
  };
  const auto minimal = [&](int64_t threads) {
    const ShrinkBudget budget{.time = std::chrono::minutes(1), .threads = threads};
    return shrink(large(), fails("gradient"), budget, run).minimal.str();
  };
  EXPECT_EQ(minimal(4), minimal(1));
}

TEST(Shrink, tries_the_smallest_model_of_each_kind_first_with_the_options_that_fit) {
  const Case c = Case::parse(
      "llama(layers=2,hidden=24,heads=4,kv_heads=2,intermediate=9,vocab=37,positions=9) mesh(dp_shard=2,tp=2) "
      "zero3(sp=1,bucket_bytes_max=64) sgd(lr=0.1) fast seed=7 : step");
  const std::vector<Case> candidates = simpler(c);
  ASSERT_GE(candidates.size(), 3u);
  const std::string rest = " sgd(lr=0.1) fast seed=7 : step";
  EXPECT_EQ(candidates[0].str(), "mlp(widths=2-2,act=identity) mesh(dp_shard=2,tp=2) zero3(bucket_bytes_max=64)" + rest);
  EXPECT_EQ(candidates[1].str(),
            "gpt(layers=1,hidden=2,heads=2,vocab=2,positions=2) mesh(dp_shard=2,tp=2) zero3(bucket_bytes_max=64,sp=1)" + rest);
  EXPECT_EQ(candidates[2].str(),
            "llama(layers=1,hidden=4,heads=2,kv_heads=1,intermediate=2,vocab=2,positions=2) mesh(dp_shard=2,tp=2) "
            "zero3(bucket_bytes_max=64,sp=1)" +
                rest);
}

TEST(Shrink, lets_heads_follow_the_ranks_that_divide_them) {
  const Case c = Case::parse(
      "llama(layers=1,hidden=6,heads=3,kv_heads=1,intermediate=3,vocab=3,positions=1) mesh(tp=3) zero3 sgd(lr=0.1) fast "
      "seed=7 : step");
  std::set<std::string> texts;
  for (const Case& candidate : simpler(c)) texts.insert(candidate.str());
  EXPECT_TRUE(
      texts.contains("llama(layers=1,hidden=4,heads=2,kv_heads=1,intermediate=3,vocab=3,positions=1) mesh(tp=2) zero3 "
                     "sgd(lr=0.1) fast seed=7 : step"));
  EXPECT_TRUE(texts.contains(str(c.model) + " mesh(dp_shard=2) zero3 sgd(lr=0.1) fast seed=7 : step"));
}

TEST(Shrink, lowers_every_axis_of_a_mesh_that_a_load_goes_on_with) {
  const Case c = Case::parse(
      "mlp(widths=1-1) mesh() zero3 sgd(lr=0.1) ordered seed=1 : save step load@mesh(dp_replicate=4,dp_shard=3) step");
  std::set<std::string> texts;
  for (const Case& candidate : simpler(c)) texts.insert(candidate.str());
  const std::string before = "mlp(widths=1-1) mesh() zero3 sgd(lr=0.1) ordered seed=1 : save step load@mesh(";
  EXPECT_TRUE(texts.contains(before + "dp_replicate=2,dp_shard=3) step"));
  EXPECT_TRUE(texts.contains(before + "dp_replicate=4,dp_shard=1) step"));
}

TEST(Shrink, goes_on_with_other_data_where_a_smaller_case_fails_with_some_data_only) {
  // With fewer than four ranks one seed in two shows the failure, and that of the case does not.
  const auto run = [](const Case& c) { return c.mesh.size() >= 4 || c.seed % 2 == 0 ? fails("gradient") : held_verdict(); };
  const Shrunk shrunk = shrink(large(), fails("gradient"), {.time = std::chrono::minutes(1)}, run);
  EXPECT_EQ(shrunk.minimal.mesh.size(), 1);
  EXPECT_EQ(shrunk.minimal.seed % 2, 0u);
}

TEST(Shrink, tries_no_case_twice) {
  std::vector<std::string> tried;
  const auto run = [&](const Case& c) {
    tried.push_back(c.str());
    return c.mesh.size() >= 3 && c.steps.size() >= 2 ? fails("gradient") : held_verdict();
  };
  shrink(large(), fails("gradient"), {.time = std::chrono::minutes(1)}, run);
  EXPECT_EQ(std::set<std::string>(tried.begin(), tried.end()).size(), tried.size());
}

TEST(Shrink, leaves_out_steps_in_the_middle_and_what_came_before_a_load) {
  const Case c = Case::parse(
      "mlp(widths=3-4) mesh(dp_shard=4) zero3 sgd(lr=0.1) ordered seed=1 : save step step load@mesh(dp_shard=3) "
      "load@strategy(zero2) step eval step");
  std::set<std::string> texts;
  for (const Case& candidate : simpler(c)) texts.insert(candidate.str());
  const std::string before = "mlp(widths=3-4) mesh(dp_shard=4) zero3 sgd(lr=0.1) ordered seed=1 : ";
  EXPECT_TRUE(texts.contains(before + "save step load@mesh(dp_shard=3) load@strategy(zero2) step eval step"));
  EXPECT_TRUE(texts.contains("mlp(widths=3-4) mesh(dp_shard=3) zero2 sgd(lr=0.1) ordered seed=1 : step eval step"));
}

TEST(Shrink, tries_what_held_a_moment_ago_again_only_when_all_else_was_tried) {
  // It takes 39 tries, and 193 where each variant that failed is followed by all variants from the first on.
  const auto run = [](const Case& v) { return v.mesh.size() >= 6 && v.steps.size() >= 2 ? fails("gradient") : held_verdict(); };
  const Shrunk shrunk = shrink(large(), fails("gradient"), {.time = std::chrono::minutes(1)}, run);
  EXPECT_LT(shrunk.tried, 80);
}

TEST(Shrink, a_size_takes_those_with_it_that_are_multiples_of_it) {
  const Case c = Case::parse(
      "llama(layers=1,hidden=48,heads=6,kv_heads=2,intermediate=1,vocab=1,positions=1) mesh(dp_shard=1) zero3 sgd(lr=0.1) "
      "ordered seed=1 : step");
  std::set<std::string> models;
  for (const Case& candidate : simpler(c)) models.insert(str(candidate.model));
  const auto llama = [](int64_t hidden, int64_t heads, int64_t kv_heads) {
    return fmt::format("llama(layers=1,hidden={},heads={},kv_heads={},intermediate=1,vocab=1,positions=1)", hidden, heads,
                       kv_heads);
  };
  EXPECT_TRUE(models.contains(llama(24, 3, 1))) << "fewer key heads: as many queries for each, of the same size";
  EXPECT_TRUE(models.contains(llama(16, 2, 2))) << "fewer queries for each key head";
  EXPECT_TRUE(models.contains(llama(12, 6, 2))) << "smaller heads";
}

TEST(Shrink, stops_when_its_time_is_up) {
  const Shrunk shrunk =
      shrink(large(), fails("gradient"), {.time = std::chrono::milliseconds(0)}, [](const Case&) { return fails("gradient"); });
  EXPECT_EQ(shrunk.tried, 0);
  EXPECT_TRUE(shrunk.minimal == large());
}

TEST(Failures, are_kept_until_they_hold) {
  const harness_env::Folder folder;
  const Failures failures(folder / "failures");
  EXPECT_TRUE(failures.all().empty());
  failures.store(large(), "gradient: planted\nin two lines");
  failures.store(large(), "again");
  failures.store(generate(1, 1, {}), "other");
  const std::vector<Case> all = failures.all();
  EXPECT_EQ(all.size(), 2u);
  EXPECT_EQ(std::ranges::count(all, large()), 1);
  failures.forget(large());
  ASSERT_EQ(failures.all().size(), 1u);
  EXPECT_TRUE(failures.all()[0] == generate(1, 1, {}));
}

TEST(Failures, a_folder_that_cannot_be_written_is_an_error) {
  const harness_env::Folder folder;
  std::ofstream(folder / "file") << "no folder";
  expect_error([&] { Failures(folder / "file").store(large(), "x"); }, {"cannot write", "--failures"});
}

TEST(Verify, counts_its_cases_and_reports_them_as_json) {
  const harness_env::Folder folder;
  const VerifyResult result = verify(options_in(folder, 40), kGoOn);
  EXPECT_EQ(result.coverage.cases(), 40);
  EXPECT_TRUE(result.failures.empty());
  const auto lines = lines_of(folder / "report.json");
  EXPECT_EQ(std::ranges::count(lines, "case", [](const auto& line) { return line["type"]; }), 40);
  EXPECT_EQ(lines.back()["type"], "summary");
  EXPECT_EQ(lines.back()["cases"], 40);
  EXPECT_EQ(lines.back()["failures"], 0);
  EXPECT_GT(lines.back()["values_compared"], 10'000);
}

TEST(Verify, runs_earlier_failures_first_and_finds_those_that_still_fail) {
  const harness_env::Folder folder;
  const Case bad = Case::parse("mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=1e+30) ordered seed=1 : step*3");
  const Case good = generate(1, 3, {});
  Failures(folder / "failures").store(bad, "nonfinite");
  Failures(folder / "failures").store(good, "mended");
  VerifyOptions options = options_in(folder, 5);
  options.jobs = 1;
  options.shrink_seconds = 0;
  options.failures_max = 100;
  const VerifyResult result = verify(options, kGoOn);
  EXPECT_EQ(result.replayed, 2);
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_TRUE(result.failures[0].minimal == bad);
  EXPECT_LE(result.failures[0].cases, 2) << "not among the first";
  EXPECT_EQ(result.coverage.cases(), 7);
  const auto left = Failures(folder / "failures").all();
  ASSERT_EQ(left.size(), 1u) << "what holds now is forgotten";
  EXPECT_TRUE(left[0] == bad);
}

TEST(Verify, an_interrupt_leaves_the_rest) {
  const harness_env::Folder folder;
  const std::atomic<bool> interrupted{true};
  const VerifyResult result = verify(options_in(folder, 1'000'000), interrupted);
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(result.coverage.cases(), 0);
}

TEST(Verify, the_table_and_the_coverage_add_up) {
  const harness_env::Folder folder;
  const Coverage coverage = verify(options_in(folder, 60), kGoOn).coverage;
  const auto& features = coverage.features();
  const auto sum = [&](std::initializer_list<const char*> names) {
    int64_t cases = 0;
    for (const char* name : names) cases += features.at(name);
    return cases;
  };
  EXPECT_EQ(sum({"mode exact", "mode ordered", "mode canonical", "mode fast"}), 60);
  EXPECT_EQ(sum({"optimizer sgd", "optimizer adam", "optimizer adamw", "optimizer lion", "optimizer muon"}), 60);
  EXPECT_GT(features.at("clip above the norm"), 0);
  EXPECT_GT(features.at("clip below the norm"), 0);
  EXPECT_NE(coverage.table().find("all                            60         0"), std::string::npos) << coverage.table();
}

// Minimal cases of bugs that random campaigns found in this library, so that they stay found.
TEST(Verdict, bugs_found_before_stay_mended) {
  const char* const found[] = {// Reductions began when gradients arrived, which ranks saw in different orders.
                               "odd(width=1,gain=0,cube=0,empty=0,never=0) mesh(dp_shard=3) "
                               "zero3(units=leaf,bucket_count=2,alignment_bytes=64,loss=sum) sgd(lr=0.1) "
                               "canonical seed=774434 : freeze(6) step",
                               // A unit was freed with its last gradient, before the backward had read a frozen parameter.
                               "mlp(widths=1-1-1-1,act=identity,bias=0) mesh(dp_shard=2) "
                               "zero3(units=some,alignment_bytes=64,loss=sum) sgd(lr=0.1) ordered "
                               "seed=921239 : freeze(1) step"};
  for (const char* line : found) {
    const Verdict verdict = run_case(Case::parse(line));
    EXPECT_TRUE(verdict.held()) << line << "\n" << verdict.str();
  }
}

TEST(Verdict, a_run_that_diverges_is_compared_up_to_there_and_refused) {
  const Verdict verdict = run_case(
      Case::parse("gpt(layers=2,hidden=2,heads=2,vocab=35,positions=5) mesh(dp_replicate=4,dp_shard=1) "
                  "zero3(units=root,alignment_bytes=64,compute=fp16) sgd(lr=0.3,momentum=0.9) ordered seed=862898 : step*4"));
  EXPECT_FALSE(verdict.held());
  EXPECT_TRUE(verdict.diverged()) << verdict.str();
  EXPECT_GT(verdict.values_compared, 0);
}

// The steps that are compared are the first ones of the whole history, with its learning rates.
TEST(Verdict, a_run_that_diverges_under_a_schedule_is_compared_up_to_there) {
  const Verdict verdict = run_case(
      Case::parse("llama(layers=1,hidden=54,heads=9,kv_heads=3,intermediate=1,vocab=2,positions=2,tied) mesh(dp_shard=1) "
                  "zero3(units=root,alignment_bytes=64,loss=sum,arithmetic=canonical,schedule=cosine) lion(lr=0.1) canonical "
                  "seed=740494 : step*6"));
  EXPECT_TRUE(verdict.diverged()) << verdict.str();
  EXPECT_GT(verdict.values_compared, 90'000) << "three steps, of which the third is behind the warm-up";
}

TEST(Verify, shards_of_a_run_draw_its_cases_once_between_them_and_merge_into_it) {
  const harness_env::Folder folder;
  const auto cases_of = [&](int64_t shard, int64_t count, const std::string& report) {
    VerifyOptions options = options_in(folder, 30);
    options.shard = shard, options.shard_count = count, options.json = report;
    verify(options, kGoOn);
    std::vector<std::string> cases;
    for (const auto& line : lines_of(report))
      if (line["type"] == "case") cases.push_back(line["case"]);
    return cases;
  };
  std::vector<std::string> whole = cases_of(0, 1, folder / "whole.json"), parts, reports;
  for (int64_t shard = 0; shard < 4; ++shard) {
    reports.push_back(folder / ("part" + std::to_string(shard) + ".json"));
    for (std::string& text : cases_of(shard, 4, reports.back())) parts.push_back(std::move(text));
  }
  std::ranges::sort(whole);
  std::ranges::sort(parts);
  EXPECT_EQ(parts, whole);
  const MergedReports merged = merge_reports(reports), alone = merge_reports({folder / "whole.json"});
  EXPECT_EQ(merged.reports, 4);
  EXPECT_EQ(merged.cases, 30);
  EXPECT_EQ(merged.values_compared, alone.values_compared);
  EXPECT_EQ(merged.features, alone.features);
  EXPECT_TRUE(merged.held());
}

namespace {

// The last line of a report.
nlohmann::json summary_of(const std::string& drawn_from, int64_t part = 1, int64_t parts = 1, const char* asked = "9 cases") {
  return {{"type", "summary"},       {"drawn_from", drawn_from}, {"asked", asked},         {"part", part},
          {"parts", parts},          {"cases", 5},               {"failures", 1},          {"seconds", 1.5},
          {"covered", {{"tp", 2}}},  {"oracle_differences", 0},  {"values_compared", 9},   {"interrupted", false}};
}

}  // namespace

TEST(Verify, reports_are_merged_only_when_all_parts_are_there_and_no_case_is_in_two_of_them) {
  const harness_env::Folder folder;
  const auto report = [&](const std::string& name, const nlohmann::json& summary) {
    std::ofstream(folder / name) << summary.dump() << "\n";
    return std::string(folder / name);
  };
  const std::string first = report("first.json", summary_of("seed 1", 1, 2));
  const std::string second = report("second.json", summary_of("seed 1", 2, 2));
  const std::string whole = report("whole.json", summary_of("seed 1"));
  const std::string longer = report("longer.json", summary_of("seed 1", 1, 1, "80 cases"));
  const std::string other = report("other.json", summary_of("seed 2"));
  const auto refused = [](const std::vector<std::string>& paths, std::initializer_list<std::string> words) {
    expect_error([&] { merge_reports(paths); }, words);
  };
  EXPECT_EQ(merge_reports({first, other, second}).cases, 15);
  refused({first}, {"part 2 of 2 of 9 cases from seed 1 is missing", "verify --shard 2/2", "first.json"});
  refused({other, second}, {"part 1 of 2", "is missing", "second.json"});
  refused({first, second, first}, {"first.json is part 1 of 2", "cases in common"});
  refused({first, second, whole}, {"first.json", "whole.json is part 1 of 1", "cases in common"});
  refused({whole, longer}, {"of 9 cases", "of 80 cases", "cases in common", "another --seed"});
}

TEST(Verify, a_report_that_did_not_end_is_not_merged) {
  const harness_env::Folder folder;
  std::ofstream(folder / "cut.json") << R"({"type":"case","case":"x","held":true})"
                                     << "\n";
  std::ofstream(folder / "other.json") << "no report\n";
  expect_error([&] { merge_reports({folder / "cut.json"}); }, {"cut.json has no summary"});
  expect_error([&] { merge_reports({folder / "other.json"}); }, {"other.json, line 1"});
  expect_error([&] { merge_reports({folder / "absent.json"}); }, {"cannot read", "absent.json"});
}

TEST(Verify, merged_failures_are_listed_once_and_escaped_for_junit) {
  const harness_env::Folder folder;
  const nlohmann::json failure{
      {"type", "failure"}, {"case", "mlp(widths=1-1) : step"}, {"what", "a < b & \"c\""}, {"where", "step 0"}, {"guess", "it"}};
  for (const char* name : {"a.json", "b.json"})
    std::ofstream(folder / name) << failure.dump() << "\n" << summary_of(name).dump() << "\n";
  const MergedReports merged = merge_reports({folder / "a.json", folder / "b.json"});
  EXPECT_FALSE(merged.held());
  EXPECT_EQ(merged.minimal.size(), 1U);
  EXPECT_EQ(merged.features.at("tp"), 4);
  const std::string said = describe(merged, /*everything=*/false);
  EXPECT_NE(said.find("FAILED: 8 of 10 cases held, in 2 reports"), std::string::npos) << said;
  EXPECT_EQ(said.find("tp 4"), std::string::npos) << said;
  EXPECT_NE(describe(merged, /*everything=*/true).find("  tp 4\n"), std::string::npos);
  EXPECT_NE(junit(merged).find("message=\"a &lt; b &amp; &quot;c&quot;\""), std::string::npos) << junit(merged);
  EXPECT_NE(junit(merged).find("tests=\"2\" failures=\"1\""), std::string::npos) << junit(merged);
}

TEST(Verify, merged_failures_of_two_engines_are_two_each_with_the_line_that_replays_it) {
  const harness_env::Folder folder;
  std::vector<std::string> paths;
  for (const std::string engine : {"", "torch-ddp"}) {
    const std::string option = engine.empty() ? "" : "--engine " + engine + " ";
    const std::string line = "own/program replay " + option + "'mlp() : step'";
    const nlohmann::json failure{
        {"type", "failure"}, {"case", "mlp() : step"}, {"engine", engine}, {"what", "a loss"}, {"replay", line}};
    paths.push_back(folder / (engine + "x.json"));
    std::ofstream(paths.back()) << failure.dump() << "\n" << summary_of(engine).dump() << "\n";
  }
  const MergedReports merged = merge_reports(paths);
  ASSERT_EQ(merged.minimal.size(), 2U);
  for (const char* line : {"own/program replay 'mlp() : step'", "own/program replay --engine torch-ddp 'mlp() : step'"}) {
    const std::string said = describe(merged, /*everything=*/false);
    EXPECT_NE(said.find("  replay   " + std::string(line)), std::string::npos) << said;
    EXPECT_NE(junit(merged).find("replay: " + std::string(line)), std::string::npos) << junit(merged);
  }
}

TEST(Verify, earlier_failures_with_more_ranks_than_there_are_are_left_out_and_counted) {
  const harness_env::Folder folder;
  VerifyOptions options = options_in(folder, 1);
  const Failures before(options.failures_directory);
  for (const char* text : {"mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=0.1) ordered seed=1 : step",
                           "mlp(widths=3-4) mesh(dp_shard=3) zero3 sgd(lr=0.1) ordered seed=1 : step",
                           "mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=0.1) ordered seed=1 : "
                           "step save load@mesh(dp_shard=3) step"})
    before.store(Case::parse(text), "a loss");
  options.ranks_max = 2;
  const VerifyResult result = verify(options, kGoOn);
  EXPECT_EQ(result.replayed, 1);
  EXPECT_EQ(result.left_out, 2);
  EXPECT_EQ(before.all().size(), 2U) << "they stay for a run with more ranks";
}

TEST(Verify, a_folder_of_failures_that_was_there_stays) {
  const harness_env::Folder folder;
  VerifyOptions options = options_in(folder, 1);
  options.failures_directory = folder / "mine";
  std::filesystem::create_directory(options.failures_directory);
  verify(options, kGoOn);
  EXPECT_TRUE(std::filesystem::exists(options.failures_directory));
  options.failures_directory = folder / "new";
  EXPECT_EQ(verify(options, kGoOn).coverage.failures(), 0);
  EXPECT_FALSE(std::filesystem::exists(options.failures_directory));
}

TEST(Verify, the_corpus_runs_first_and_all_of_it_must_parse) {
  const harness_env::Folder folder;
  VerifyOptions options = options_in(folder, 1);
  options.corpus_directory = folder / "corpus";
  for (const int64_t i : {3, 4, 5}) Failures(options.corpus_directory).store(generate(1, i, {}), "rare");
  EXPECT_EQ(verify(options, kGoOn).from_corpus, 3);
  options.cases = 2, options.shard_count = 2;
  std::vector<int64_t> of_parts;
  for (options.shard = 0; options.shard < 2; ++options.shard) of_parts.push_back(verify(options, kGoOn).from_corpus);
  EXPECT_EQ(of_parts, (std::vector<int64_t>{2, 1})) << "each case in one part";
  std::ofstream(folder / "corpus/broken.case") << "mlp(widths=) mesh() zero3 sgd ordered seed=1 : step\n";
  expect_error([&] { verify(options, kGoOn); }, {"broken.case"});
}
