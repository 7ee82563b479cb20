#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "harness/commands/commands.h"
#include "harness/commands/crash_report.h"
#include "harness/commands/flight.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/judge.h"
#include "harness/commands/launch_options.h"
#include "harness/commands/program.h"
#include "harness/commands/shrink.h"
#include "harness/run/engine.h"
#include "harness/run/explain.h"
#include "harness/run/process_ranks.h"
#include "harness/run/run_case.h"
#include "harness/run/running_cases.h"
#include "harness/run/schedules.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

struct Arguments {
  std::string text, json, flight, engine = "shardproof";
  std::optional<int64_t> delays;
  int64_t most = 10'000;
  bool shrink = false;
  double shrink_seconds = 60;
  int64_t shrink_runs = 0;
  Launched launched;
};

int report(const Case& c, const Verdict& verdict, Ranks& ranks, const std::string& path) {
  JsonLines json(path);
  const Explanation looks_like = explain(c, verdict.outcome, ranks);
  fmt::print("{}\n", c.str());
  if (verdict.held())
    fmt::print("HELD: {} values compared\n", verdict.values_compared);
  else
    fmt::print("FAILED: {}\n{}", verdict.str(), in_lines(looks_like));
  json.write({{"type", "replay"},
              {"case", c.str()},
              {"held", verdict.held()},
              {"what", verdict.str()},
              {"where", looks_like.where},
              {"first", looks_like.first},
              {"guess", looks_like.guess},
              {"values_compared", verdict.values_compared}});
  std::fflush(stdout);
  return verdict.held() ? 0 : 1;
}

int run_on(shardproof::ProcessWorld& world, const Launched& launched, const Case& c, const std::string& json) {
  ProcessRanks ranks(world, launched.device(), launched.shares_memory());
  if (world.rank() != 0) return ranks.serve();
  const int exit_code = report(c, run_case(c, ranks), ranks, json);
  ranks.end(exit_code);
  return exit_code;
}

// Every schedule of the case's threads, or as many as may run.
int run_every_schedule(const Case& c, const Arguments& arguments) {
  JsonLines json(arguments.json);
  const Schedules found = every_schedule(c, *arguments.delays, arguments.most);
  Case failing = c;
  failing.interleaving = found.failing;
  fmt::print("{}\n{} schedules that differ from the first in at most {} choices, {} of them distinct{}\n", c.str(), found.runs,
             *arguments.delays, found.distinct, found.all ? "" : "; there are more, see --most");
  if (found.failing)
    fmt::print("FAILED: {}\n  replay   {} replay '{}'\n", found.what, program_name(), failing.str());
  else
    fmt::print("HELD: the same bits under each of them\n");
  json.write({{"type", "schedules"},
              {"case", failing.str()},
              {"held", !found.failing},
              {"what", found.what},
              {"schedules", found.runs},
              {"distinct", found.distinct},
              {"all", found.all}});
  return found.failing ? 1 : 0;
}

// 0 if the case does not crash, whatever its verdict is. Each simpler one runs in a worker, and those that crash by the same
// signal fail alike.
int run_and_shrink(const Case& c, const Arguments& arguments) {
  JsonLines json(arguments.json);
  const VerifyOptions options;
  Judge judge(options);
  const Verdict verdict = judge.verdict_of(c);
  if (verdict.outcome != Verdict::Outcome::crash) {
    fmt::print("{}\nno crash: in a process of its own this case ends with a verdict; replay it without --shrink\n", c.str());
    return 0;
  }
  const ShrinkBudget budget{.time = std::chrono::milliseconds(static_cast<int64_t>(arguments.shrink_seconds * 1000)),
                            .runs = arguments.shrink_runs,
                            .threads = judge.size()};
  const Shrunk shrunk = shrink(c, verdict, budget, [&](const Case& candidate) { return judge.verdict_of(candidate); });
  const std::string replay = fmt::format("{} replay '{}'", program_name(), shrunk.minimal.str());
  fmt::print("FAILURE: {}\n  minimal  {}\n  found as {}\n  replay   {}\n", verdict.str(), shrunk.minimal.str(), c.str(),
             replay);
  json.write({{"type", "failure"},
              {"what", verdict.str()},
              {"case", shrunk.minimal.str()},
              {"original", c.str()},
              {"tried", shrunk.tried},
              {"replay", replay}});
  return 1;
}

int run_in(const std::string& name, const Case& c, const std::string& json) {
  const Engine engine(name);
  const Engine::Fitted fitted = engine.fit(c);
  SHARD_REQUIRE(fitted.reason.empty(), "replay", "{} cannot train this case: {}", name, fitted.reason);
  return report(fitted.c, engine.run(fitted.c), engine.ranks(), json);
}

}  // namespace

void add_replay_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("replay", "run one case; the verdict is the same every time");
  command->add_option("case", arguments->text, "the case, as verify printed it");
  command->add_option("--flight", arguments->flight,
                      "instead of running a case, say where the flight records in this folder first disagree");
  command->add_option("--json", arguments->json, "also write one JSON object to this file");
  command->add_option("--every-schedule", arguments->delays,
                      "under every schedule of its threads that differs from the first in at most so many choices");
  command->add_option("--most", arguments->most, "stop --every-schedule after so many")->capture_default_str();
  command->add_flag("--shrink", arguments->shrink,
                    "if the case crashes, look for a smaller one that crashes too, each in a process of its own");
  command->add_option("--shrink-seconds", arguments->shrink_seconds, "how many seconds to look for it")->capture_default_str();
  command->add_option("--shrink-runs", arguments->shrink_runs, "how many smaller cases to try at most; 0: while there is time")
      ->capture_default_str();
  add_engine_option(*command, arguments->engine);
  arguments->launched.add_to(*command);
  command->callback([arguments, &exit_code] {
    SHARD_REQUIRE(arguments->text.empty() != arguments->flight.empty(), "replay", "give a case, or --flight DIR");
    if (!arguments->flight.empty()) {
      const auto flights = read_flights(arguments->flight);
      fmt::print("{}", describe(flights));
      exit_code = first_disagreement(flights).empty() ? 0 : 1;
      return;
    }
    const Case c = Case::parse(arguments->text);
    if (arguments->shrink) {
      SHARD_REQUIRE(arguments->engine == "shardproof" && !arguments->delays, "replay",
                    "--shrink runs a case as it is; leave out --engine and --every-schedule");
      SHARD_REQUIRE(arguments->shrink_runs >= 0, "replay", "--shrink-runs must not be negative, got {}",
                    arguments->shrink_runs);
      arguments->launched.require_threads("--shrink takes rank-threads on the CPU");
      exit_code = run_and_shrink(c, *arguments);
      return;
    }
    const RunningCase running(c.str());
    report_crashes(program_name() + " replay ");
    at::set_num_threads(1);
    if (c.interleaving || arguments->delays) {
      SHARD_REQUIRE(arguments->engine == "shardproof", "replay",
                    "schedules are of the library's rank-threads; leave out --engine");
      arguments->launched.require_threads("a case under a schedule takes rank-threads on the CPU");
    }
    if (arguments->delays) {
      SHARD_REQUIRE(*arguments->delays >= 0 && arguments->most >= 1, "replay",
                    "--every-schedule must not be negative, and --most at least 1, got {} and {}", *arguments->delays,
                    arguments->most);
      exit_code = run_every_schedule(c, *arguments);
      return;
    }
    if (arguments->engine != "shardproof") {
      arguments->launched.require_threads("--engine " + arguments->engine + " trains in Python, with ranks of its own");
      exit_code = run_in(arguments->engine, c, arguments->json);
      return;
    }
    if (const auto own = arguments->launched.registered()) {
      exit_code = report(c, run_case(c, *own), *own, arguments->json);
      return;
    }
    const auto world = arguments->launched.start(c.mesh.str());
    const c10::Device device = arguments->launched.device();
    if (world) {
      exit_code = run_on(*world, arguments->launched, c, arguments->json);
      return;
    }
    const auto on_device = device.is_cpu() ? nullptr : thread_ranks_on(device);
    Ranks& ranks = on_device ? *on_device : thread_ranks();
    exit_code = report(c, run_case(c, ranks), ranks, arguments->json);
  });
}

}  // namespace harness
