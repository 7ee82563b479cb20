#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/kernels.h"
#include "harness/commands/bench_process.h"
#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "shardproof/base/check.h"
#include "shardproof/device/kernels/cuda.h"

namespace harness {
namespace {

struct Arguments {
  bench::KernelsTask task;
  std::string device = "cuda", json;
  double at_least = 0;
};

int run(Arguments& a) {
  SHARD_REQUIRE(a.device == "cpu" || a.device == "cuda", "bench", "--device must be cpu or cuda, got '{}'", a.device);
  if (a.device == "cuda") {
    shardproof::use_cuda();
    a.task.device = c10::Device(c10::kCUDA, 0);
  }
  JsonLines out(a.json);
  bool held = true;
  fmt::print("{:<22} {:>9} {:>13}\n", "", "GB/s", "share of copy");
  for (const bench::KernelTimes& times : bench::time_kernels(a.task)) {
    const double gb_per_s = median(times.gb_per_s), share = median(times.share_of_copy);
    const bool fast = share >= a.at_least;
    held &= fast;
    fmt::print("{:<22} {:>9.1f} {:>13.2f}{}\n", times.name, gb_per_s, share, fast ? "" : "  BELOW");
    out.write({{"type", "kernel"},
               {"kernel", times.name},
               {"device", a.device},
               {"gb_per_s_median", gb_per_s},
               {"share_of_copy_median", share}});
  }
  fmt::print("{}; arrays of {} MiB in float32; bytes read and written; medians of {} rounds of {} calls\n",
             a.device == "cpu" ? "the CPU's arithmetic on one thread" : "kernels on the GPU", a.task.mib / 2, a.task.rounds,
             a.task.repeats);
  return held ? 0 : 1;
}

}  // namespace

void add_bench_kernels_command(CLI::App& bench, int& exit_code) {
  auto a = std::make_shared<Arguments>();
  CLI::App* command = bench.add_subcommand("kernels", "time the CUDA kernels against a copy of the GPU's memory");
  command->add_option("--device", a->device, "cuda, or cpu, where one thread computes")->capture_default_str();
  command->add_option("--mib", a->task.mib, "the size of the longest array in MiB")->capture_default_str();
  command->add_option("--repeats", a->task.repeats, "how many calls a round times")->capture_default_str();
  command->add_option("--rounds", a->task.rounds, "how many rounds to run; each times every kernel once")
      ->capture_default_str();
  command
      ->add_option("--at-least", a->at_least,
                   "end with exit code 1 when a kernel's share of the copy's bandwidth is below this")
      ->capture_default_str();
  command->add_option("--json", a->json, "also write one JSON object for each kernel to this file");
  command->callback([a, &exit_code] { exit_code = run(*a); });
}

}  // namespace harness
