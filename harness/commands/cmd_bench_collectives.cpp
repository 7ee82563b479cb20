#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/collectives_contestant.h"
#include "harness/commands/bench_process.h"
#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/launch_options.h"
#include "harness/run/beside_program.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using nlohmann::json;

struct Arguments {
  bench::CollectivesTask task;
  int64_t ranks = 2, rounds = 3;
  std::string json;
  bool worker = false;
};

std::string mpirun(const Arguments& a) {
  return fmt::format("{}", fmt::join(shardproof::mpirun_command(a.ranks, {}, ::geteuid() == 0), " "));
}

std::map<std::string, std::string> commands(const Arguments& a) {
  const std::string sizes = fmt::format("{}", fmt::join(a.task.sizes_mib, " "));
  return {{"ours", fmt::format("{} '{}' bench collectives --worker --repeats {} --mib {}", mpirun(a),
                               std::filesystem::read_symlink("/proc/self/exe").string(), a.task.repeats, sizes)},
          {"raw", fmt::format("{} '{}' {} {}", mpirun(a), beside_program(SHARDPROOF_RAW_MPI).string(), a.task.repeats,
                              sizes)},
          {"gloo", fmt::format("'{}/bin/python' '{}/bench/peers/collectives_peer.py' {} {} {}",
                               beside_program(SHARDPROOF_VENV).string(), beside_program(SHARDPROOF_SOURCE).string(), a.ranks,
                               a.task.repeats, sizes)}};
}

using Times = std::map<std::string, std::vector<double>>;  // by contestant: the median of each round

void print(const Arguments& a, const std::string& op, int64_t mib, const Times& times, double copy, JsonLines& out) {
  const double bytes = static_cast<double>(mib) * 1048576;
  const auto gb = [&](const std::string& name) { return bytes / median(times.at(name)) / 1e6; };
  fmt::print("{:<15} {:>4}  {:>8.3f} {:>7.2f}   {:>8.3f} {:>7.2f}   {:>8.3f} {:>7.2f}   {:>6.2f} {:>6.2f} {:>6.2f}\n", op, mib,
             median(times.at("ours")), gb("ours"), median(times.at("raw")), gb("raw"), median(times.at("gloo")), gb("gloo"),
             gb("ours") / gb("gloo"), gb("ours") / gb("raw"), gb("ours") / copy);
  out.write({{"type", "collective"},
             {"op", op},
             {"mib", mib},
             {"ranks", a.ranks},
             {"copy_gb_per_s", copy},
             {"ours_ms", times.at("ours")},
             {"raw_ms", times.at("raw")},
             {"gloo_ms", times.at("gloo")}});
}

void compete(const Arguments& a) {
  SHARD_REQUIRE(shardproof::mpi_available(), "bench",
                "this build has no MPI: CMake found none. Run ci/setup, then cmake again");
  SHARD_REQUIRE(a.ranks >= 2 && a.rounds >= 1 && a.task.repeats >= 1, "bench",
                "--ranks must be at least 2, --rounds and --repeats 1");
  JsonLines out(a.json);
  std::map<std::string, std::map<std::string, Times>> all;  // by op, by MiB
  const double copy = bench::copy_gb_per_s();
  for (int64_t round = 0; round < a.rounds; ++round)
    for (const auto& [name, command] : commands(a)) {
      const json result = run_process(command, name);
      for (const auto& [op, sizes] : result.items())
        for (const auto& [mib, times] : sizes.items()) all[op][mib][name].push_back(median(times.get<std::vector<double>>()));
    }
  fmt::print("{:<15} {:>4}  {:>16}   {:>16}   {:>16}   {:>20}\n{:<15} {:>4}  {:>16}   {:>16}   {:>16}   {:>20}\n", "", "MiB",
             "ours ms    GB/s", "MPI ms    GB/s", "gloo ms    GB/s", "ours over", "", "", "", "", "", "gloo    MPI   copy");
  for (const char* op : {"all_reduce", "all_gather", "reduce_scatter"})
    for (const int64_t mib : a.task.sizes_mib) print(a, op, mib, all[op][fmt::format("{}", mib)], copy, out);
  fmt::print(
      "{} ranks; medians of {} rounds of {} calls of the slowest rank; GB/s: of the whole buffer; one thread copies {:.1f} "
      "GB/s\n",
      a.ranks, a.rounds, a.task.repeats, copy);
}

void work(const Arguments& a) {
  Launched launched;
  launched.options.backend = "mpi";
  const auto world = launched.start("");
  world->run([&](std::shared_ptr<shardproof::Comm> comm) {
    const json result = bench::time_collectives(*comm, a.task);
    if (comm->rank() == 0) fmt::print("{}\n", result.dump());
  });
}

}  // namespace

void add_bench_collectives_command(CLI::App& bench, int& exit_code) {
  auto a = std::make_shared<Arguments>();
  CLI::App* command = bench.add_subcommand("collectives", "time collectives over MPI against Open MPI's own and gloo's");
  command->add_option("--ranks", a->ranks, "how many processes to start")->capture_default_str();
  command->add_option("--mib", a->task.sizes_mib, "sizes of the whole buffer in MiB")->capture_default_str();
  command->add_option("--repeats", a->task.repeats, "how many calls a round times")->capture_default_str();
  command->add_option("--rounds", a->rounds, "how many rounds to run; each runs every contestant once")->capture_default_str();
  command->add_option("--json", a->json, "also write JSON objects to this file, one a line");
  command->add_flag("--worker", a->worker, "run ours in this process")->group("");
  command->callback([a, &exit_code] {
    if (a->worker)
      work(*a);
    else
      compete(*a);
    exit_code = 0;
  });
}

}  // namespace harness
