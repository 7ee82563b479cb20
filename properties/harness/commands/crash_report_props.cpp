// What a crash of the code under test leaves: in `verify` a failure like others, else the replay lines of cases that ran.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>
#include <latch>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <thread>

#include "harness/case/failures.h"
#include "harness/commands/crash_report.h"
#include "harness/commands/program.h"
#include "harness/run/property.h"
#include "harness/run/running_cases.h"
#include "properties/kit/harness_env.h"
#include "shardproof/base/failed_check.h"

using namespace harness;

namespace {

using Crash = void (*)();

void refuse() {
  throw std::runtime_error("nobody catches this");
}
void throw_where_nothing_may() noexcept {
  refuse();
}

void write_nowhere() {
  volatile int* volatile nowhere = nullptr;
  *nowhere = 1;
}

int deeper(volatile const int* from) {
  volatile int here[1024] = {*from};
  return here[0] == 1 ? 0 : deeper(here) + here[1];
}
void use_up_the_stack() {
  volatile int zero = 0;
  deeper(&zero);
}

// As `shardproof ARGUMENTS...`, where a case on two ranks or more crashes on the thread of the last rank, after an update.
[[noreturn]] void run_and_crash(Crash crash, std::vector<std::string> arguments) {
  register_property({.name = "crashes", .live = [crash](const LiveRun& run) -> Complaint {
                       const int64_t ranks = run.c.mesh.size();
                       if (run.moment == Moment::stepped && ranks > 1 && run.sharded.rank() == ranks - 1) crash();
                       return {};
                     }});
  arguments.insert(arguments.begin(), "here/shardproof");
  std::vector<char*> words;
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  std::exit(run_program(static_cast<int>(arguments.size()), words.data()));
}

std::vector<nlohmann::json> lines_in(const std::string& path, const std::string& type) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (nlohmann::json object = nlohmann::json::parse(line); object.at("type") == type) lines.push_back(object);
  return lines;
}
std::vector<nlohmann::json> failures_in(const std::string& path) {
  return lines_in(path, "failure");
}

std::string crash_says(const std::string& signal) {
  return fmt::format("CRASH .{}. while a thread worked on this case:\n  replay   here/shardproof replay '", signal);
}

class CrashDeathTest : public testing::Test {
 protected:
  // Ranks are threads, and a child that is forked beside threads has none of them.
  void SetUp() override { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }

  // Of a run of verify, which goes on after a crash: each case on several ranks crashes, and they are alike.
  void expect_its_case_is_left(const std::string& signal, Crash crash) const {
    const harness_env::Folder folder;
    const std::string report = folder / "report", failures = folder / "failures";
    EXPECT_EXIT(run_and_crash(crash, {"verify", "--cases", "6", "--jobs", "2", "--no-python", "--world-max", "4", "--failures",
                                      failures, "--json", report, "--quiet", "--shrink-seconds", "600", "--shrink-runs", "30",
                                      "--failures-max", "9"}),
                testing::ExitedWithCode(1), "");
    const auto left = failures_in(report), summary = lines_in(report, "summary");
    ASSERT_GE(left.size(), 1u);
    const Case c = Case::parse(left[0].at("case").get<std::string>());
    EXPECT_GT(c.mesh.size(), 1);
    EXPECT_NE(left[0].at("case"), left[0].at("original")) << "it is shrunk";
    EXPECT_EQ(left[0].at("what"), fmt::format("crash ({})", signal));
    EXPECT_EQ(left[0].at("replay"), fmt::format("here/shardproof replay '{}'", c.str()));
    EXPECT_EQ(Failures(failures).all().size(), left.size());
    ASSERT_EQ(summary.size(), 1u);
    EXPECT_EQ(summary[0].at("cases"), 6);
  }
};

// Two threads have cases, and one of them crashes within an inner case, or the thread that started them does.
[[noreturn]] void crash_beside_others(const std::string& report, bool of_a_case) {
  report_crashes("here replay ", report);
  std::latch all_run(2), never(1);
  std::thread other([&] {
    const RunningCase running("other"), again("other");
    all_run.count_down();
    never.wait();
  });
  std::thread own([&] {
    const RunningCase outer("outer");
    { const RunningCase over("over"); }
    std::optional<RunningCase> inner;
    if (of_a_case) inner.emplace("in\"ner");
    all_run.arrive_and_wait();
    if (of_a_case) std::abort();
    never.wait();
  });
  all_run.wait();
  if (!of_a_case) std::abort();
  never.wait();
  std::exit(9);
}

// A report with one line in it.
std::string begun(const std::string& path) {
  std::ofstream(path) << "{\"type\":\"case\"}\n";
  return path;
}

}  // namespace

TEST_F(CrashDeathTest, an_abort_of_a_rank_leaves_its_case) {
  expect_its_case_is_left("SIGABRT", std::abort);
}

TEST_F(CrashDeathTest, an_exception_that_nobody_catches_leaves_the_case_of_its_rank) {
  expect_its_case_is_left("SIGABRT", throw_where_nothing_may);
}

TEST_F(CrashDeathTest, a_rank_that_writes_to_no_memory_leaves_its_case) {
  expect_its_case_is_left("SIGSEGV", write_nowhere);
}

TEST_F(CrashDeathTest, a_rank_without_room_on_its_stack_leaves_its_case) {
  expect_its_case_is_left("SIGSEGV", use_up_the_stack);
}

TEST_F(CrashDeathTest, of_a_replay_is_told_alike) {
  const std::string text = "mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=0.1) ordered seed=1 : step";
  EXPECT_EXIT(run_and_crash(write_nowhere, {"replay", text}), testing::ExitedWithCode(1),
              crash_says("SIGSEGV") + "mlp.widths=3-4. mesh.dp_shard=2. zero3 [^']* seed=1 : step'\n");
}

TEST_F(CrashDeathTest, of_a_replay_is_shrunk_in_processes_of_their_own) {
  const harness_env::Folder folder;
  const std::string report = folder / "report";
  const std::string text = "mlp(widths=3-4) mesh(dp_shard=3) zero3 sgd(lr=0.1) ordered seed=1 : step*3";
  EXPECT_EXIT(run_and_crash(write_nowhere,
                            {"replay", text, "--shrink", "--shrink-seconds", "600", "--shrink-runs", "300", "--json", report}),
              testing::ExitedWithCode(1), "");
  const auto left = failures_in(report);
  ASSERT_EQ(left.size(), 1u);
  const Case c = Case::parse(left[0].at("case").get<std::string>());
  EXPECT_EQ(c.mesh.size(), 2);
  EXPECT_EQ(c.steps.size(), 1u);
  EXPECT_EQ(left[0].at("what"), "crash (SIGSEGV)");
  EXPECT_EQ(left[0].at("original"), Case::parse(text).str());
}

TEST_F(CrashDeathTest, that_a_case_does_not_have_is_not_shrunk) {
  EXPECT_EXIT(
      run_and_crash(write_nowhere, {"replay", "mlp(widths=3-4) mesh() zero3 sgd(lr=0.1) ordered seed=1 : step", "--shrink"}),
      testing::ExitedWithCode(0), "");
}

TEST_F(CrashDeathTest, the_innermost_case_of_the_crashed_thread_comes_first_and_is_the_failure) {
  const harness_env::Folder folder;
  const std::string report = begun(folder / "report");
  EXPECT_EXIT(
      crash_beside_others(report, true), testing::ExitedWithCode(1),
      "CRASH .SIGABRT. while a thread worked on this case:\n  replay   here replay 'in\"ner'\n"
      "  shrink   here replay --shrink 'in\"ner'\nother cases that ran then:\n(  replay   here replay '(other|outer)'\n){2}$");
  const auto left = failures_in(report);
  ASSERT_EQ(left.size(), 1u);
  EXPECT_EQ(left[0].at("case"), "in\"ner");
}

TEST_F(CrashDeathTest, of_a_thread_of_no_case_leaves_all_cases_that_ran) {
  const harness_env::Folder folder;
  const std::string report = begun(folder / "report");
  EXPECT_EXIT(crash_beside_others(report, false), testing::ExitedWithCode(1),
              "CRASH .SIGABRT. on a thread of no case. These cases ran:\n(  replay   here replay '(other|outer)'\n){2}$");
  EXPECT_EQ(failures_in(report).size(), 2u);
}

TEST_F(CrashDeathTest, while_no_case_runs_ends_the_process_as_it_would_have) {
  const auto crash_afterwards = [] {
    report_crashes("here replay ");
    { const RunningCase over("over"); }
    std::abort();
  };
  EXPECT_EXIT(crash_afterwards(), testing::KilledBySignal(SIGABRT), "^[^C]*$");
}

TEST_F(CrashDeathTest, is_told_before_a_handler_that_was_there_is_called) {
  const auto crash_with_a_handler = [](Crash crash) {
    for (const int signal : {SIGSEGV, SIGABRT}) ::signal(signal, [](int) { ::_exit(7); });
    report_crashes("here replay ");
    const RunningCase running("some");
    crash();
  };
  for (const Crash crash : {Crash(write_nowhere), Crash(std::abort)})
    EXPECT_EXIT(crash_with_a_handler(crash), testing::ExitedWithCode(7), "replay   here replay 'some'\n");
}

TEST(Program, ends_with_1_for_a_check_that_failed_and_with_2_for_a_mistake) {
  const auto exit_code = [](const std::function<void()>& body) {
    char program[] = "here/shardproof", command[] = "own";
    char* words[] = {program, command, nullptr};
    return run_program(2, words, {[&](CLI::App& app, int&) { app.add_subcommand("own")->callback(body); }});
  };
  EXPECT_EQ(exit_code([] {}), 0);
  EXPECT_EQ(exit_code([] { throw shardproof::FailedCheck("replicas differ"); }), 1);
  EXPECT_EQ(exit_code([] { throw shardproof::Error("no such file"); }), 2);
}
