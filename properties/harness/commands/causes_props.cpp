// Failures of one cause are one failure, and failures of two causes are two.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <memory>

#include "harness/commands/causes.h"
#include "harness/commands/merge.h"
#include "harness/commands/shrink.h"
#include "harness/commands/verify.h"
#include "harness/run/property.h"
#include "properties/kit/harness_env.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/threads/threads.h"

using namespace harness;

namespace {

const std::atomic<bool> kGoOn{false};

Verdict failed(const std::string& value) {
  return {.outcome = Verdict::Outcome::values, .step = 0, .difference = {.value = value, .says = "planted"}};
}

Verdict failed_but_for(bool holds) {
  return holds ? held_verdict() : failed("gradient");
}

// What the error that a body throws is known by.
std::string kind_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return verdict_on(error).kind();
  }
  return "held";
}

void require_small(int64_t number, const std::string& name) {
  SHARD_REQUIRE(number < 10, "bucket", "{} of {} is too large", number, name);
  SHARD_REQUIRE(number != 3, "bucket", "{} of {} is three", number, name);
  SHARD_CHECK(number != 4, "bucket", "{} of {}", number, name);
}

// As if two bugs were in the tree: averages are wrong, and so is clipping. Registration is for good.
class TwoBugs {
 public:
  TwoBugs() {
    static const bool registered = [] {
      register_property({.name = "two_bugs",
                         .applies = [](const Case&) { return planted_.load(); },
                         .finished = [](const FinishedRun& run) -> Complaint {
                           return run.c.options.ema != 0 || run.c.clip_norm != 0 ? Complaint("planted") : Complaint();
                         }});
      return true;
    }();
    planted_ = registered;
  }
  ~TwoBugs() { planted_ = false; }

 private:
  static inline std::atomic<bool> planted_{false};
};

VerifyOptions options_in(const harness_env::Folder& folder) {
  VerifyOptions options;
  options.cases = 150;
  options.python = false;
  options.shrink_seconds = 600;
  options.shrink_runs = 400;
  options.limits.world_max = 4;
  options.failures_directory = folder / "failures";
  options.json = folder / "report.json";
  return options;
}

}  // namespace

TEST(Causes, errors_are_known_by_where_they_come_from) {
  const auto kind = [](int64_t number, const char* name) { return kind_of([=] { require_small(number, name); }); };
  EXPECT_EQ(kind(10, "a"), kind(11, "b"));
  EXPECT_EQ(kind(10, "a"), "error [bucket] number < 10");
  EXPECT_EQ(kind(4, "a"), "error [bucket] number != 4");
  EXPECT_NE(kind(10, "a"), kind(3, "a"));
  const auto thrown = [](const std::string& text) { return kind_of([=] { throw shardproof::Error(text); }); };
  EXPECT_EQ(thrown("[a] one"), thrown("[b] two"));
  EXPECT_NE(thrown("[a] one"), kind_of([] { throw shardproof::NonFiniteError("[a] one"); }));
}

TEST(Causes, an_error_that_goes_through_a_world_is_known_by_where_it_began) {
  const std::string alone = kind_of([] { require_small(3, "a"); });
  EXPECT_EQ(alone, kind_of([] {
              shardproof::run_threads(2, [](const std::shared_ptr<shardproof::Comm>& comm) {
                if (comm->rank() == 1) require_small(3, "b");
              });
            }));
}

TEST(Causes, foreign_errors_with_other_numbers_names_and_paths_are_of_one_kind) {
  const auto kind = [](const char* what) { return kind_of([=] { throw std::runtime_error(what); }); };
  EXPECT_EQ(kind("rank 0 of 2: /tmp/a.1: is missing"), kind("rank 13 of 20: /tmp/b.2: is missing"));
  EXPECT_EQ(kind("start (0) + length (1) exceeds\nmore"), kind("start (2) + length (3) exceeds\nelse"));
  EXPECT_NE(kind("rank 0: a file is missing"), kind("rank 0: a file is torn"));
}

TEST(Causes, wrong_values_are_of_one_kind_and_properties_are_of_their_own) {
  const auto of_property = [](const char* name) {
    return Verdict{.outcome = Verdict::Outcome::property, .origin = name}.kind();
  };
  EXPECT_EQ(failed("gradient").kind(), failed("parameter").kind());
  EXPECT_FALSE(fails_alike(failed("gradient"), failed("parameter")));
  EXPECT_NE(of_property("a"), of_property("b"));
  EXPECT_NE(failed("gradient").kind(), verdict_on(std::runtime_error("gradient")).kind());
}

TEST(Causes, a_case_has_all_that_its_simpler_variants_of_one_model_have) {
  for (int64_t i = 0; i < 60; ++i) {
    const Case c = generate(3, i, {});
    EXPECT_TRUE(has_all_of(c, c)) << c.str();
    for (const Case& variant : simpler(c))
      if (variant.model.kind == c.model.kind && variant.data_ranks() <= c.data_ranks())
        EXPECT_TRUE(has_all_of(c, variant)) << c.str() << "\n" << variant.str();
  }
}

TEST(Causes, what_a_minimal_case_has_and_the_case_lacks_is_no_explanation) {
  const auto with = [](const char* strategy, const char* optimizer, const char* steps) {
    return Case::parse(std::string("mlp(widths=1-1,act=identity,bias=0) mesh(dp_shard=2) ") + strategy + " " + optimizer +
                       " ordered seed=1 : " + steps);
  };
  const Case c = with("zero3(units=root,alignment_bytes=64,loss=sum)", "sgd(lr=0.1)", "step");
  EXPECT_FALSE(has_all_of(
      c, with("zero3(units=root,alignment_bytes=64,loss=sum,prefetch_forward=1,prefetch_backward=1)", "sgd(lr=0.1)", "step")));
  EXPECT_FALSE(has_all_of(c, with("zero3(units=root,alignment_bytes=64,loss=sum)", "adam(lr=0.1)", "step")));
  EXPECT_FALSE(has_all_of(c, with("zero3(units=root,alignment_bytes=64,loss=sum)", "sgd(lr=0.1)", "accumulate(2) step")));
  EXPECT_TRUE(has_all_of(
      with("zero2(units=leaf,prefetch_forward=2,prefetch_backward=2)", "adamw(lr=0.1,clip=1)", "accumulate(3) step*2"),
      with("zero3(units=root,alignment_bytes=64,loss=sum,prefetch_forward=1,prefetch_backward=1)", "adam(lr=0.1)",
           "accumulate(2) step")));
}

TEST(Causes, a_case_is_explained_when_it_fails_with_nothing_else) {
  const Case minimal = Case::parse(
      "mlp(widths=1-1,act=identity,bias=0) mesh(dp_shard=2) zero3(units=root,alignment_bytes=64,loss=sum) sgd(lr=0.1) exact "
      "seed=1 : "
      "accumulate(2) step");
  const Case c = Case::parse(
      "gpt(layers=1,hidden=4,heads=2,vocab=5,positions=3) mesh(dp_shard=4) zero2(prefetch_forward=2,prefetch_backward=2) "
      "adam(lr=0.1) "
      "ordered seed=7 : accumulate(3) step*2");
  std::vector<Case> tried;
  const auto only_there = [&](const Case& other) {
    tried.push_back(other);
    return failed("gradient");
  };
  EXPECT_TRUE(explains(minimal, "values", c, only_there));
  ASSERT_EQ(tried.size(), 2u);
  EXPECT_EQ(tried[0].model.kind, golden::Model::Kind::mlp);
  EXPECT_EQ(tried[0].mesh, c.mesh);
  EXPECT_EQ(tried[0].strategy, "zero2");
  EXPECT_EQ(tried[1].model.kind, golden::Model::Kind::gpt);
  EXPECT_EQ(tried[1].options.of("prefetch_forward"), 0) << "prefetch is no part of it";
  EXPECT_EQ(tried[1].optimizer.kind, golden::Optimizer::Kind::sgd);
  const auto nowhere = [](const Case&) { return held_verdict(); };
  EXPECT_FALSE(explains(minimal, "values", c, nowhere));
  EXPECT_FALSE(explains(minimal, "values", c, [](const Case&) { return verdict_on(std::runtime_error("another")); }));
}

TEST(Causes, neither_experiment_stands_for_the_other) {
  const auto at = [](const char* model, const char* rest) {
    return Case::parse(std::string(model) + " mesh(dp_shard=2) zero3(units=root,alignment_bytes=64,loss=sum" + rest);
  };
  const char* const mlp = "mlp(widths=1-1,act=identity,bias=0)";
  const Case minimal = at(mlp, ",prefetch_forward=1,prefetch_backward=1) sgd(lr=0.1) exact seed=1 : step");
  // On one mesh, under one strategy and in one mode; it needs another option than prefetch.
  const Case c = at(mlp, ",prefetch_forward=1,prefetch_backward=1,buffers=pooled) sgd(lr=0.1) exact seed=2 : step");
  const auto with_pooled = [](const Case& other) { return failed_but_for(other.options.has("buffers", "freed")); };
  EXPECT_FALSE(explains(minimal, "values", c, with_pooled));
  // Plain enough, but the minimal case holds where it is.
  const Case elsewhere =
      Case::parse(std::string(mlp) +
                  " mesh(dp_shard=3) zero3(units=root,alignment_bytes=64,loss=sum,prefetch_forward=1,prefetch_backward=1) "
                  "sgd(lr=0.1) exact seed=2 : step");
  const auto there_alone = [&](const Case& other) { return failed_but_for(other.seed == minimal.seed); };
  EXPECT_FALSE(explains(minimal, "values", elsewhere, there_alone));
}

TEST(Causes, a_minimal_case_on_an_axis_cp_explains_one_without_that_axis) {
  const Case minimal = Case::parse(
      "mlp(widths=1-1,act=identity,bias=0) mesh(cp=1) "
      "zero3(units=root,alignment_bytes=64,loss=sum,attention=gathered,context=contiguous,ema=50) sgd(lr=0.1) canonical seed=1 "
      ": step");
  const Case c = Case::parse(
      "mlp(widths=2-3) mesh(dp_shard=2) zero3(ema=99,prefetch_forward=1,prefetch_backward=1) sgd(lr=0.1) ordered seed=2 : "
      "step");
  const auto with_ema = [](const Case& other) { return failed_but_for(other.options.ema == 0); };
  EXPECT_TRUE(explains(minimal, "values", c, with_ema));
}

TEST(Causes, two_bugs_are_two_failures_however_many_cases_they_fail) {
  const TwoBugs planted;
  const harness_env::Folder folder;
  const VerifyResult result = verify(options_in(folder), kGoOn);
  std::string told;
  for (const Failure& failure : result.failures) told += failure.minimal.str() + "\n  of " + failure.original.str() + "\n";
  ASSERT_EQ(result.failures.size(), 2u) << told;
  int64_t with_ema = 0, explained = 0;
  for (const Failure& failure : result.failures) {
    EXPECT_NE(failure.minimal.options.ema != 0, failure.minimal.clip_norm != 0) << "one bug each: " << failure.minimal.str();
    with_ema += failure.minimal.options.ema != 0;
    explained += 1 + failure.alike;
    for (const Case& c : failure.some_alike) EXPECT_TRUE(has_all_of(c, failure.minimal)) << c.str();
  }
  EXPECT_EQ(with_ema, 1);
  EXPECT_GT(result.coverage.failures(), 20);
  EXPECT_EQ(explained, result.coverage.failures()) << "every failure is told, or counted with one that is";
  EXPECT_EQ(result.coverage.cases(), 150) << "two are fewer than --failures-max";
  const MergedReports merged = merge_reports({folder / "report.json"});
  ASSERT_EQ(merged.minimal.size(), 2u);
  EXPECT_EQ(merged.minimal[0].alike + merged.minimal[1].alike + 2, merged.failures);
  EXPECT_NE(describe(merged, false).find(alike_in_words(merged.minimal[0].alike)), std::string::npos);
}

TEST(Causes, a_campaign_ends_with_as_many_causes_as_are_asked_for) {
  const TwoBugs planted;
  const harness_env::Folder folder;
  VerifyOptions options = options_in(folder);
  options.failures_max = 1;
  const VerifyResult result = verify(options, kGoOn);
  EXPECT_EQ(result.failures.size(), 1u);
  EXPECT_LT(result.coverage.cases(), 150);
}

TEST(Causes, parts_of_a_campaign_that_found_one_bug_merge_into_one_failure) {
  const TwoBugs planted;
  const harness_env::Folder folder;
  std::vector<std::string> reports;
  int64_t failures = 0;
  for (int64_t part = 0; part < 3; ++part) {
    VerifyOptions options = options_in(folder);
    options.limits.mode = Mode::ordered;
    options.limits.strategy = "ddp";
    options.shard = part;
    options.shard_count = 3;
    options.failures_directory = folder / ("failures" + std::to_string(part));
    options.json = folder / ("report" + std::to_string(part) + ".json");
    reports.push_back(options.json);
    failures += std::ssize(verify(options, kGoOn).failures);
  }
  const MergedReports merged = merge_reports(reports);
  EXPECT_EQ(failures, 6);
  EXPECT_EQ(merged.minimal.size(), 2u);
  EXPECT_EQ(merged.minimal[0].alike + merged.minimal[1].alike + 2, merged.failures);
}

TEST(Causes, what_one_run_told_apart_stays_apart_when_it_is_merged) {
  const harness_env::Folder folder;
  const auto line = [](const std::string& minimal) {
    return nlohmann::json{{"type", "failure"}, {"case", minimal}, {"what", "w"}, {"kind", "values"}};
  };
  const std::string plain = "mlp(widths=1-1) mesh() zero3 sgd(lr=0.1) fast seed=";
  MergedReports merged;
  add_line(line(plain + "1 : step"), merged);
  add_line(line(plain + "2 : step"), merged);
  EXPECT_EQ(merged.minimal.size(), 2u);
  ++merged.reports;
  add_line(line(plain + "3 : step"), merged);
  add_line(line(plain + "1 : step"), merged);
  add_line(line("mlp(widths=1-1) mesh() zero3(prefetch_forward=1,prefetch_backward=1) sgd(lr=0.1) fast seed=4 : step"), merged);
  ASSERT_EQ(merged.minimal.size(), 3u);
  EXPECT_EQ(merged.minimal[0].alike, 2);
  EXPECT_EQ(merged.minimal[1].alike, 0);
}
