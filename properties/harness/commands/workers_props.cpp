// Worker processes: what they answer, and what becomes of one that ends instead; and a campaign in them.
#include "harness/commands/workers.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "harness/case/failures.h"
#include "harness/commands/verify.h"
#include "harness/run/property.h"
#include "properties/kit/harness_env.h"
#include "shardproof/base/check.h"

using namespace harness;

namespace {

// The number of the process, unless the request asks for something else.
std::string serve(const std::string& request) {
  if (request == "throw") throw std::runtime_error("no answer");
  if (request == "exit") std::exit(3);
  if (request == "clerk") return std::to_string(::getppid());
  if (request.starts_with("signal ")) ::raise(std::stoi(request.substr(7)));
  return request.empty() ? std::to_string(::getpid()) : request;
}

// Averages make a case complain, unless they end its process: that depends on how many ranks it has.
void plant_complaints_and_crashes() {
  static const bool registered = [] {
    register_property({.name = "averages",
                       .applies = [](const Case& c) { return c.options.ema != 0; },
                       .finished = [](const FinishedRun& run) -> Complaint {
                         if (run.c.mesh.size() % 2 == 0) std::abort();
                         return "planted";
                       }});
    return true;
  }();
  ASSERT_TRUE(registered);
}

struct Said {
  std::vector<std::string> lines;      // of --json, without times
  std::map<std::string, int64_t> types;  // of lines
  std::set<std::string> database;
};

Said said_by(const VerifyOptions& usual, int64_t jobs) {
  const harness_env::Folder folder;
  VerifyOptions options = usual;
  options.jobs = jobs;
  options.failures_directory = folder / "failures";
  options.json = folder / "report.json";
  const std::atomic<bool> go_on{false};
  verify(options, go_on);
  Said said;
  std::ifstream file(options.json);
  for (std::string text; std::getline(file, text);) {
    nlohmann::json line = nlohmann::json::parse(text);
    line.erase("seconds");
    ++said.types[line.at("type")];
    said.lines.push_back(line.dump());
  }
  for (const Case& c : Failures(options.failures_directory).all()) said.database.insert(c.str());
  return said;
}

VerifyOptions with_failures() {
  VerifyOptions options;
  options.cases = 45;
  options.seed = 3;
  options.python = false;
  options.limits.world_max = 4;
  options.shrink_seconds = 600;
  options.shrink_runs = 15;
  return options;
}

}  // namespace

TEST(Workers, answer_in_processes_of_their_own_and_what_is_thrown_comes_back) {
  Workers workers(2, serve);
  EXPECT_EQ(workers.size(), 2);
  const std::string first = workers.ask("").text;
  EXPECT_NE(first, std::to_string(::getpid()));
  EXPECT_EQ(workers.ask("throw").error, "no answer");
  EXPECT_EQ(workers.ask("").text, first) << "the worker stays, whatever it throws";
  const std::string large(3 << 20, 'x');
  EXPECT_EQ(workers.ask(large).text, large);
  EXPECT_EQ(workers.ask("y").text, "y");
}

TEST(Workers, that_end_are_replaced_and_say_how_they_ended) {
  Workers workers(1, serve);
  std::set<std::string> processes;
  for (const auto& [request, end] : {std::pair{fmt::format("signal {}", SIGSEGV), "SIGSEGV"},
                                     {fmt::format("signal {}", SIGKILL), "SIGKILL"},
                                     {std::string("exit"), "exit code 3"}}) {
    EXPECT_TRUE(processes.insert(workers.ask("").text).second);
    EXPECT_EQ(workers.ask(request).crash, end);
    const Answer after = workers.ask("z");
    EXPECT_EQ(after.text, "z") << "after " << end;
    EXPECT_EQ(after.crash, "");
  }
}

TEST(Workers, that_are_killed_while_they_have_nothing_to_do_are_replaced_unseen) {
  Workers workers(1, serve);
  for (int time = 0; time < 20; ++time) {
    const std::string before = workers.ask("").text;
    while (::kill(std::stoi(before), SIGKILL) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Answer after = workers.ask("");
    EXPECT_EQ(after.crash, "");
    EXPECT_NE(after.text, before);
  }
}

TEST(Workers, that_nobody_can_replace_any_more_are_an_error_for_each_who_asks) {
  Workers workers(1, serve);
  ::kill(std::stoi(workers.ask("clerk").text), SIGKILL);
  const auto throws = [&] {
    try {
      workers.ask("x");
      return false;
    } catch (const shardproof::Error&) {
      return true;
    }
  };
  while (!throws()) continue;  // its worker is ended by the system, which may take a moment
  EXPECT_TRUE(throws());
}

TEST(Workers, none_of_them_are_this_process) {
  Workers workers(0, serve);
  EXPECT_EQ(workers.size(), 1);
  EXPECT_EQ(workers.ask("").text, std::to_string(::getpid()));
}

TEST(Workers, serve_many_threads_and_each_gets_its_own_answer) {
  Workers workers(3, serve);
  std::vector<std::thread> threads;
  std::atomic<int64_t> wrong{0}, crashes{0};
  for (int64_t thread = 0; thread < 8; ++thread)
    threads.emplace_back([&, thread] {
      for (int64_t i = 0; i < 30; ++i) {
        const std::string request = i % 10 == 9 ? fmt::format("signal {}", SIGABRT) : fmt::format("{} of {}", i, thread);
        const Answer answer = workers.ask(request);
        crashes += answer.crash == "SIGABRT";
        wrong += answer.crash.empty() && answer.text != request;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(crashes, 8 * 3);
}

TEST(Workers, a_campaign_says_the_same_however_many_there_are_but_for_times) {
  plant_complaints_and_crashes();
  VerifyOptions options = with_failures();
  options.failures_max = 100;
  options.schedules = 2;
  const Said one = said_by(options, 1), three = said_by(options, 3);
  EXPECT_EQ(one.lines, three.lines);
  EXPECT_EQ(one.database, three.database);
  EXPECT_EQ(one.types.at("case"), 45) << "a crash ends no other case";
  EXPECT_GE(one.types.at("failure"), 2) << "those that crash and those that complain";
  EXPECT_GE(one.types.at("alike"), 1);
  EXPECT_EQ(one.types.at("summary"), 1);
}

TEST(Workers, a_campaign_ends_at_the_same_case_however_many_there_are) {
  plant_complaints_and_crashes();
  VerifyOptions options = with_failures();
  options.failures_max = 1;
  const Said one = said_by(options, 1), four = said_by(options, 4);
  EXPECT_EQ(one.lines, four.lines);
  EXPECT_EQ(one.types.at("failure"), 1);
  EXPECT_LT(one.types.at("case"), 45);
}
