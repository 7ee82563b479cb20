#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/checkpoint_contestant.h"
#include "harness/commands/bench_process.h"
#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "harness/run/beside_program.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// Of the next step's loss after a load on as many ranks as saved, where sums have the same order, none is allowed.
constexpr double kLossTolerance = 0x1p-14;

struct Arguments {
  std::string model = "gpt33m", directory, json, worker;
  bench::CheckpointTask task;
  int64_t rounds = 3;
};

struct Contestant {
  std::string name, command;
  std::map<std::string, std::vector<double>> milliseconds;  // by what was timed: the median of each round
  double disk_mib = 0;
};

const std::vector<std::string> kTimed = {"save", "async_blocking", "async_copied_later", "load", "load_once", "load_resharded"};
// Ours alone: a training step, and one with an asynchronous save before it.
const std::vector<std::string> kSteps = {"step", "step_with_save", "step_with_save_copied_later"};
// What of PyTorch's is compared with another name of ours.
const std::map<std::string, std::string> kPeers = {{"load_once", "load"}, {"async_copied_later", "async_blocking"}};

std::string peer_command(const Arguments& a, const std::string& folder) {
  json spec = model_spec(a.task.size);
  spec.update({{"ranks", a.task.ranks}, {"load_ranks", a.task.load_ranks}, {"repeats", a.task.repeats}, {"folder", folder}});
  return fmt::format("'{}/bin/python' '{}/bench/peers/checkpoint_peer.py' '{}'", beside_program(SHARDPROOF_VENV).string(),
                     beside_program(SHARDPROOF_SOURCE).string(), spec.dump());
}

std::string own_command(const Arguments& a, const std::string& folder) {
  return fmt::format("'{}' bench checkpoint --worker '{}' --model {} --ranks {} --load-ranks {} --repeats {}",
                     fs::read_symlink("/proc/self/exe").string(), folder, a.model, a.task.ranks, a.task.load_ranks,
                     a.task.repeats);
}

bool run_round(Contestant& contestant) {
  const json result = run_process(contestant.command, contestant.name);
  for (const auto* names : {&kTimed, &kSteps})
    for (const std::string& timed : *names)
      if (result.contains(timed)) contestant.milliseconds[timed].push_back(median(result[timed].get<std::vector<double>>()));
  contestant.disk_mib = result["disk_bytes"].get<double>() / 1048576;
  const auto losses = result["losses"].get<std::vector<double>>();
  const bool same = losses[0] == losses[1] && std::abs(losses[0] - losses[2]) <= kLossTolerance * std::abs(losses[0]);
  if (!same)
    fmt::print("{}: the loss after its loads is {} and {}, without them {}\n", contestant.name, losses[1], losses[2],
               losses[0]);
  return same;
}

void report(const Contestant& ours, const Contestant& theirs, JsonLines& out) {
  fmt::print("{:<19} {:>10} {:>10} {:>22}\n", "", "ours ms", "PyTorch ms", "times as fast (range)");
  for (const std::string& timed : kTimed) {
    const auto& mine = ours.milliseconds.at(timed);
    const auto& other = theirs.milliseconds.at(kPeers.contains(timed) ? kPeers.at(timed) : timed);
    std::vector<double> ratios;
    for (size_t i = 0; i < mine.size(); ++i) ratios.push_back(other[i] / mine[i]);
    const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
    fmt::print("{:<19} {:>10.1f} {:>10.1f} {:>8.2f} ({:.2f}-{:.2f})\n", timed, median(mine), median(other), median(ratios),
               *low, *high);
    out.write({{"type", "bench_checkpoint"},
               {"timed", timed},
               {"ours_ms", mine},
               {"pytorch_ms", other},
               {"ratio_median", median(ratios)},
               {"ratio_min", *low},
               {"ratio_max", *high}});
  }
  const double blocked = median(ours.milliseconds.at("async_blocking"));
  fmt::print("async blocks for {:.3f} of our save and {:.3f} of PyTorch's; {:.0f} MiB on disk, PyTorch's {:.0f}\n",
             blocked / median(ours.milliseconds.at("save")), blocked / median(theirs.milliseconds.at("save")), ours.disk_mib,
             theirs.disk_mib);
  std::vector<double> steps;
  for (const std::string& timed : kSteps) {
    steps.push_back(median(ours.milliseconds.at(timed)));
    out.write({{"type", "bench_checkpoint"}, {"timed", timed}, {"ours_ms", ours.milliseconds.at(timed)}});
  }
  fmt::print("a step takes {:.0f} ms; with an async save before it {:.0f}, and {:.0f} when that copies in the background\n",
             steps[0], steps[1], steps[2]);
}

int compete(Arguments& a) {
  SHARD_REQUIRE(a.task.ranks >= 1 && a.task.load_ranks >= 1 && a.task.size.batch % a.task.ranks == 0 &&
                    a.task.size.batch % a.task.load_ranks == 0,
                "bench", "--ranks and --load-ranks must divide the batch of {}, got {} and {}", a.task.size.batch, a.task.ranks,
                a.task.load_ranks);
  SHARD_REQUIRE(a.rounds >= 1 && a.task.repeats >= 1, "bench", "--rounds and --repeats must be at least 1");
  JsonLines out(a.json);
  std::string folder =
      (fs::path(a.directory.empty() ? fs::temp_directory_path().string() : a.directory) / "shardproof_bench_XXXXXX").string();
  SHARD_REQUIRE(mkdtemp(folder.data()), "bench", "cannot make a folder like {}", folder);
  const std::shared_ptr<void> removed(nullptr, [folder](void*) { fs::remove_all(folder); });
  for (const char* inner : {"/ours", "/pytorch"}) fs::create_directory(folder + inner);
  Contestant ours{"ours", own_command(a, folder + "/ours"), {}, 0};
  Contestant theirs{"pytorch", peer_command(a, folder + "/pytorch"), {}, 0};
  bool held = true;
  for (int64_t round = 0; round < a.rounds; ++round)
    for (Contestant* contestant : {&ours, &theirs}) held &= run_round(*contestant);
  report(ours, theirs, out);
  fmt::print("medians of {} rounds of {} repeats; {} ranks, resharded to {}; the time of the last rank; both flush files\n",
             a.rounds, a.task.repeats, a.task.ranks, a.task.load_ranks);
  return held ? 0 : 1;
}

}  // namespace

void add_bench_checkpoint_command(CLI::App& bench_command, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  Arguments* a = arguments.get();
  CLI::App* command =
      bench_command.add_subcommand("checkpoint", "time saves and loads against PyTorch's, in interleaved rounds");
  command->add_option("--model", a->model, "the model: gpt33m or tiny")->capture_default_str();
  command->add_option("--ranks", a->task.ranks, "how many ranks save, and load")->capture_default_str();
  command->add_option("--load-ranks", a->task.load_ranks, "how many ranks load what the --ranks ranks saved")
      ->capture_default_str();
  command->add_option("--repeats", a->task.repeats, "how many saves and loads a round times")->capture_default_str();
  command->add_option("--rounds", a->rounds, "how many rounds to run; each runs both contestants once")->capture_default_str();
  command->add_option("--directory", a->directory, "the folder to save in; by default that of temporary files");
  command->add_option("--json", a->json, "also write one JSON object for each figure to this file");
  command->add_option("--worker", a->worker, "run ours in this process and folder")->group("");
  command->callback([arguments, a, &exit_code] {
    a->task.size = bench::size_of(a->model);
    if (a->worker.empty()) {
      exit_code = compete(*a);
      return;
    }
    a->task.folder = a->worker;
    fmt::print("{}\n", bench::run_checkpoint(a->task).dump());
  });
}

}  // namespace harness
