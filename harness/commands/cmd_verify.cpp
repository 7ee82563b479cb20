#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <set>

#include "harness/commands/allocator.h"
#include "harness/commands/causes.h"
#include "harness/commands/choices.h"
#include "harness/commands/commands.h"
#include "harness/commands/crash_report.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/judge.h"
#include "harness/commands/launch_options.h"
#include "harness/commands/merge.h"
#include "harness/commands/report.h"
#include "harness/commands/usage.h"
#include "harness/commands/verify.h"
#include "harness/run/process_ranks.h"
#include "harness/run/verbosity.h"
#include "harness/train/train_progress.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/threads/threads.h"

namespace harness {
namespace {

std::atomic<bool> interrupted{false};

struct Arguments {
  VerifyOptions options;
  std::string strategy, mesh, mode, shard, junit, report, faults, engine = "shardproof";
  std::vector<std::string> merge;
  bool world_max_given = false;
  Launched launched;
};

void prepare(Arguments& arguments) {
  VerifyOptions& options = arguments.options;
  if (!arguments.strategy.empty()) options.limits.strategy = chosen_strategy(arguments.strategy).name;
  for (const Mode mode : modes())
    if (arguments.mode == to_string(mode)) options.limits.mode = mode;
  SHARD_REQUIRE(arguments.mode.empty() || options.limits.mode, "verify",
                "--mode must be exact, ordered, canonical or fast, got '{}'", arguments.mode);
  if (!arguments.shard.empty()) {
    int read = 0;
    long long number = 0, count = 0;
    const bool parsed = std::sscanf(arguments.shard.c_str(), "%lld/%lld%n", &number, &count, &read) == 2 &&
                        static_cast<size_t>(read) == arguments.shard.size();
    SHARD_REQUIRE(parsed && number >= 1 && number <= count, "verify", "--shard must be I/N with 1 <= I <= N, as 2/8, got '{}'",
                  arguments.shard);
    options.shard = number - 1;
    options.shard_count = count;
  }
  if (!arguments.mesh.empty()) options.limits.mesh = chosen_mesh(arguments.mesh);
  const auto& mesh = options.limits.mesh;
  SHARD_REQUIRE(!mesh || !arguments.world_max_given || mesh->size() <= options.limits.world_max, "verify",
                "--mesh {} has {} ranks, more than --world-max {}; leave one of them out", mesh->str(), mesh->size(),
                options.limits.world_max);
  SHARD_REQUIRE(options.cases >= 1, "verify", "--cases must be at least 1, got {}", options.cases);
  SHARD_REQUIRE(options.minutes >= 0, "verify", "--minutes must not be negative, got {}", options.minutes);
  SHARD_REQUIRE(options.jobs >= 0, "verify", "--jobs must not be negative, got {}", options.jobs);
  SHARD_REQUIRE(options.shrink_runs >= 0, "verify", "--shrink-runs must not be negative, got {}", options.shrink_runs);
  SHARD_REQUIRE(options.shrink_seconds >= 0, "verify", "--shrink-seconds must not be negative, got {}", options.shrink_seconds);
  SHARD_REQUIRE(options.schedules >= 0, "verify", "--schedules must not be negative, got {}", options.schedules);
  SHARD_REQUIRE(options.failures_max >= 1, "verify", "--failures-max must be at least 1, got {}", options.failures_max);
  SHARD_REQUIRE(options.limits.world_max >= 1 && options.limits.world_max <= shardproof::kThreadsWorldMax, "verify",
                "--world-max must be between 1 and {} (ranks are threads), got {}", shardproof::kThreadsWorldMax,
                options.limits.world_max);
}

// There is one engine and one world of processes, so cases take turns.
void require_one_job(const Arguments& arguments, const char* where) {
  SHARD_REQUIRE(arguments.options.jobs <= 1, "verify", "--jobs {} has no effect with {}: cases run one at a time; leave it out",
                arguments.options.jobs, where);
}

// Engines are compared within a tolerance, on ranks of their own, and with a golden run that is their model already.
std::unique_ptr<Engine> start_engine(Arguments& arguments) {
  VerifyOptions& options = arguments.options;
  SHARD_REQUIRE(!options.limits.mode && options.corpus_directory.empty(), "verify",
                "--engine {} trains within the tolerance of the mode fast; leave out --mode and --corpus", arguments.engine);
  SHARD_REQUIRE(options.schedules == 0, "verify",
                "--schedules takes the library's rank-threads, and --engine {} has ranks of its own; leave one of them out",
                arguments.engine);
  require_one_job(arguments, "--engine");
  arguments.launched.require_threads("--engine " + arguments.engine + " trains in Python, with ranks of its own");
  auto engine = std::make_unique<Engine>(arguments.engine);
  options.engine = engine.get();
  options.limits.mode = Mode::fast;
  options.python = false;
  std::string folder = arguments.engine;
  std::ranges::replace_if(folder, [](char letter) { return letter == ':' || letter == '/'; }, '_');
  options.failures_directory += "/" + folder;
  return engine;
}

void limit_to(const shardproof::ProcessWorld& world, Arguments& arguments) {
  Limits& limits = arguments.options.limits;
  SHARD_REQUIRE(!limits.mesh || limits.mesh->size() <= world.size(), "verify",
                "--mesh {} has {} ranks, and there are {} processes", limits.mesh->str(), limits.mesh->size(), world.size());
  SHARD_REQUIRE(!arguments.world_max_given || limits.world_max <= world.size(), "verify",
                "--world-max {} is more than the {} processes", limits.world_max, world.size());
  limits.world_max = std::min(limits.world_max, world.size());
  arguments.options.ranks_max = world.size();
}

constexpr const char* kWhereTheRestIs =
    "what the cases had: --verbose lists it, --report FILE shows it in a browser, --json FILE has all of it\n";

void print_refused(const VerifyResult& result, const Engine& engine) {
  fmt::print(
      "{} trained {} of {} drawn cases; each of the others has something that it cannot do, is not given, or is known to do "
      "wrong:\n",
      engine.name(),
      result.drawn - std::transform_reduce(result.refused.begin(), result.refused.end(), int64_t{0}, std::plus(),
                                           [](const auto& item) { return item.second; }),
      result.drawn);
  for (const auto& [reason, count] : result.refused) fmt::print("  {:>6}  {}\n", count, reason);
}

// Everything with --verbose, and else what fits in a few lines.
void print_coverage(const VerifyResult& result, const VerifyOptions& options) {
  const bool everything = verbosity() == Verbosity::verbose;
  if (everything) fmt::print("{}\n{}{}", result.coverage.table(), result.coverage.summary(), describe(result.combinations));
  fmt::print("{}{}", result.coverage.overview(), result.coverage.properties_summary());
  if (options.engine) print_refused(result, *options.engine);
  if (result.from_corpus > 0) fmt::print("ran {} cases of the corpus first\n", result.from_corpus);
  if (result.replayed > 0) fmt::print("replayed {} earlier failures first\n", result.replayed);
  if (result.left_out > 0)
    fmt::print("left out {} of these that need more ranks than there are, or functions that the device lacks\n",
               result.left_out);
  if (result.oracle_compared > 0)
    fmt::print("golden run against PyTorch in Python: {} kinds of cases, {} differences\n", result.oracle_compared,
               result.oracle_differences.size());
  if (options.schedules > 0)
    fmt::print("schedules: {} runs, {} of them distinct\n", result.schedules, result.schedules_distinct);
  if (!everything) fmt::print("{}", kWhereTheRestIs);
}

void print(const Failure& failure, const VerifyOptions& options) {
  fmt::print("\nFAILURE after {} case{}: {}\n{}  minimal  {}\n  found as {}\n  replay   {}\n", failure.cases,
             failure.cases == 1 ? "" : "s", failure.what, in_lines(failure.looks_like), failure.minimal.str(),
             failure.original.str(), replay_line(failure.minimal, options));
  if (failure.alike > 0)
    fmt::print("  alike    {}, as {}\n", alike_in_words(failure.alike), failure.some_alike.front().str());
}

void print(const VerifyResult& result, const VerifyOptions& options) {
  const bool is_quiet = verbosity() == Verbosity::quiet;
  if (!is_quiet) print_coverage(result, options);
  for (const std::string& difference : result.oracle_differences) fmt::print("\nORACLE {}\n", difference);
  for (const Failure& failure : result.failures) print(failure, options);
  const int64_t cases = result.coverage.cases();
  if (cases == 0) return;  // and no verdict
  const bool held = result.coverage.failures() == 0 && result.oracle_differences.empty();
  const std::string took = result.seconds < 60 ? fmt::format("{:.1f} s", result.seconds) : duration_text(result.seconds);
  fmt::print("{}{}{}: {} of {} cases held, in {} ({:.0f} cases a minute)\n", is_quiet ? "" : "\n",
             result.interrupted ? "INTERRUPTED, so far " : "", held ? "ALL HELD" : "FAILED", cases - result.coverage.failures(),
             cases, took, static_cast<double>(cases) * 60 / std::max(result.seconds, 1e-3));
}

// Files that are written when there is a verdict, from the lines of --json.
class Files {
 public:
  // Throws Error where one cannot be written, or the planted bugs cannot be read.
  explicit Files(const Arguments& arguments) : junit_(arguments.junit), report_(arguments.report) {
    SHARD_REQUIRE(arguments.faults.empty() || !report_.empty(), "verify",
                  "--faults is for the page of --report; give that too");
    for (const auto& [path, option] : {std::pair{junit_, "--junit"}, {report_, "--report"}})
      if (!path.empty()) require_written(std::ofstream(path, std::ios::app), path, option);
    if (!arguments.faults.empty()) page_.add_faults(arguments.faults);
  }

  void add(const nlohmann::json& line) {
    add_line(line, merged_);
    if (!report_.empty()) page_.add(line);
  }

  void write() const {
    if (!junit_.empty()) write(junit_, "--junit", junit(merged_));
    if (!report_.empty()) write(report_, "--report", page_.page());
  }

 private:
  static void require_written(const std::ofstream& file, const std::string& path, const char* option) {
    SHARD_REQUIRE(file.good(), "verify", "cannot write {}; give {} the path of a file, in a folder that exists", path, option);
  }
  static void write(const std::string& path, const char* option, const std::string& text) {
    std::ofstream file(path);
    file << text << std::flush;
    require_written(file, path, option);
  }

  std::string junit_, report_;
  MergedReports merged_;
  Report page_;
};

// Where nothing was compared, nothing has held.
void require_compared(const VerifyResult& result, const VerifyOptions& options) {
  if (result.coverage.cases() > 0) return;
  SHARD_REQUIRE(!result.interrupted, "verify", "interrupted before the first case had ended, so nothing was compared");
  SHARD_REQUIRE(!options.engine, "verify", "{} could train none of {} cases, so nothing was compared; draw more with --cases",
                options.engine->name(), result.drawn);
  throw shardproof::Error(fmt::format("[verify] part {} of {} has none of {} cases, so nothing was compared; draw more with "
                                      "--cases, or deal them to fewer parts",
                                      options.shard + 1, options.shard_count, options.cases));
}

// Whether the time that jemalloc saves is more than it takes to load the program again.
bool is_campaign(const VerifyOptions& options) {
  constexpr int64_t kManyCases = 100;
  return options.minutes > 0 || options.cases >= kManyCases;
}

// The options that mean something beside --merge.
void require_alone(const CLI::App& command) {
  const std::set<std::string> with_merge = {"--merge", "--junit", "--report", "--faults", "--json", "--verbose"};
  for (const CLI::Option* option : command.get_options())
    SHARD_REQUIRE(option->count() == 0 || with_merge.contains(option->get_name()), "verify",
                  "--merge runs no case, so {} has no effect; leave it out", option->get_name());
}

// An interrupted run has no answer for the cases that are left.
int exit_code_of(bool held, bool interrupted) { return !held ? 1 : interrupted ? 2 : 0; }

int merge(const Arguments& arguments) {
  for (const std::string& path : arguments.merge) {
    std::error_code ignored;
    SHARD_REQUIRE(!std::filesystem::equivalent(path, arguments.options.json, ignored), "verify",
                  "--merge reads {}, so --json must name another file", path);
  }
  Files files(arguments);
  JsonLines json(arguments.options.json);
  const MergedReports merged = merge_reports(arguments.merge, [&](const nlohmann::json& line) {
    files.add(line);
    json.write(line);
  });
  SHARD_REQUIRE(merged.cases > 0, "verify", "--merge: no case has run in the {} reports, so nothing was compared",
                merged.reports);
  fmt::print("{}", describe(merged, verbosity() == Verbosity::verbose));
  files.write();
  return exit_code_of(merged.held(), merged.interrupted);
}

int run(Arguments& arguments) {
  if (!has_workers(arguments.options)) report_crashes(replay_words(arguments.options), arguments.options.json);
  Files files(arguments);
  arguments.options.also = [&](const nlohmann::json& line) { files.add(line); };
  const VerifyResult result = verify(arguments.options, interrupted);
  print(result, arguments.options);
  require_compared(result, arguments.options);
  files.write();
  const bool held = result.coverage.failures() == 0 && result.oracle_differences.empty();
  return exit_code_of(held, result.interrupted);
}

// Rank 0 draws the cases and judges, the other processes train with it; all end alike.
int run_on(shardproof::ProcessWorld& world, Arguments& arguments) {
  limit_to(world, arguments);
  ProcessRanks ranks(world, arguments.launched.device(), arguments.launched.shares_memory());
  if (world.rank() != 0) {
    report_crashes(replay_words(arguments.options), arguments.options.json);
    return ranks.serve();
  }
  arguments.options.ranks = &ranks;
  const int exit_code = run(arguments);
  std::fflush(stdout);
  ranks.end(exit_code);
  return exit_code;
}

}  // namespace

void add_verify_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  VerifyOptions& options = arguments->options;
  CLI::App* command = app.add_subcommand("verify", "compare random sharded training with unsharded golden runs");
  command->add_option("--cases", options.cases, "how many random cases to run")->capture_default_str();
  command->add_option("--minutes", options.minutes, "run for so many minutes instead");
  command->add_option("--seed", options.seed, "the seed from which the cases are drawn")->capture_default_str();
  command
      ->add_option("--jobs", options.jobs,
                   "how many cases run at a time, each in a process of its own; 0: one for each processor, and one on a device")
      ->capture_default_str();
  command->add_option("--strategy", arguments->strategy,
                      "only this one: ddp, zero1, zero2, zero3, hsdp, hfsdp, hzero2, or a row_* (docs/strategies.md)");
  add_engine_option(*command, arguments->engine);
  command->add_option("--mesh", arguments->mesh, "run only on this mesh, axis=size,axis=size");
  command->add_option("--mode", arguments->mode, "run only this mode: exact, ordered, canonical or fast");
  command
      ->add_option("--world-max", options.limits.world_max,
                   "largest world; where it is not given, some cases that save have up to 14 ranks")
      ->capture_default_str();
  command->add_flag("--tiny", options.limits.tiny, "run only the MLP on 4 ranks that parity tests of other frameworks use");
  command->add_option("--failures-max", options.failures_max, "stop after so many failures of different causes")
      ->capture_default_str();
  command->add_option("--schedules", options.schedules,
                      "run each case under so many schedules of its threads, and demand the same bits");
  command->add_option("--failures", options.failures_directory, "the folder of the failure database")->capture_default_str();
  command->add_option("--shrink-seconds", options.shrink_seconds, "how many seconds to look for a smaller case")
      ->capture_default_str();
  command->add_option("--shrink-runs", options.shrink_runs, "how many smaller cases to try at most; 0: while there is time")
      ->capture_default_str();
  command->add_flag("!--no-python", options.python, "do not check the golden run against PyTorch in Python");
  command->add_option("--corpus", options.corpus_directory, "folder of cases that run first, as properties/corpus");
  command->add_option("--shard", arguments->shard, "only the I-th of N parts of the cases, as 2/8, for a job array");
  command->add_option("--merge", arguments->merge, "instead: put reports of --json together, of all parts of each campaign")
      ->expected(1, -1);
  command->add_option("--junit", arguments->junit, "also write JUnit's XML here");
  command->add_option("--report", arguments->report, "also write one HTML page of what was found and covered");
  command->add_option("--faults", arguments->faults, "a file of ci/faults --json, to be shown on the page of --report");
  command->add_option("--json", options.json, "also write JSON objects to this file, one a line");
  arguments->launched.add_to(*command);
  add_verbosity(*command, "say nothing but failures and the verdict",
                "say a line for each case, when it has been judged, and at the end what the cases had");
  command->callback([arguments, command, &exit_code] {
    if (!arguments->merge.empty()) {
      require_alone(*command);
      exit_code = merge(*arguments);
      return;
    }
    arguments->world_max_given = command->count("--world-max") > 0;
    prepare(*arguments);
    if (is_campaign(arguments->options)) start_again_on_jemalloc();
    std::signal(SIGINT, [](int) { interrupted = true; });
    if (arguments->engine != "shardproof") {
      const auto engine = start_engine(*arguments);
      exit_code = run(*arguments);
      return;
    }
    if (arguments->options.schedules > 0) arguments->launched.require_threads("--schedules takes rank-threads on the CPU");
    Launched& launched = arguments->launched;
    const bool is_registered = launched.registered() != nullptr;
    const bool on_threads = is_registered || launched.options.backend == "threads";
    const bool on_cpu = !is_registered && launched.options.device == "cpu";
    if (is_registered) arguments->options.backend = launched.options.backend;
    // Each worker makes its own, since a device that one process has begun to use is of no use to those that it forks.
    if (is_registered)
      arguments->options.make_ranks = [&] { return launched.registered(); };
    else if (on_threads && !on_cpu)
      arguments->options.make_ranks = [&, arguments] {
        launched.start(arguments->mesh);
        return thread_ranks_on(launched.device());
      };
    const auto world = arguments->options.make_ranks ? nullptr : launched.start(arguments->mesh);
    if (world) require_one_job(*arguments, "ranks that are processes");
    arguments->options.limits.above_ten = on_threads && on_cpu && !arguments->world_max_given;
    exit_code = world ? run_on(*world, *arguments) : run(*arguments);
  });
}

}  // namespace harness
