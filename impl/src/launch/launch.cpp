#include "shardproof/launch/launch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

struct Variables {
  Launcher launcher;
  const char* rank;
  const char* world;
  const char* local_rank;   // null: this launcher does not say it
  const char* local_world;  // may be missing
  std::vector<const char*> others = {};
};

const std::array<Variables, 4>& all_variables() {
  static const std::array<Variables, 4> all = {
      Variables{Launcher::mpirun, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"},
      Variables{Launcher::torchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", {"MASTER_ADDR", "MASTER_PORT"}},
      Variables{Launcher::slurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr},
      Variables{Launcher::pmi, "PMI_RANK", "PMI_SIZE", nullptr, nullptr}};
  return all;
}

// The script that sbatch runs and the shell that salloc opens have variables of tasks, but are none of them. Slurm numbers such
// steps down from the largest number of 32 bits.
bool is_slurm_step(const Environment& environment) {
  const char* step = environment("SLURM_STEP_ID");
  return step && *step >= '0' && *step <= '9' && std::strtoull(step, nullptr, 10) < 0xfffffff0;
}

int64_t number(const Environment& environment, const char* name, const char* launcher) {
  const std::string text = environment(name);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  SHARD_REQUIRE(error == std::errc() && end == text.data() + text.size() && value >= 0, "launch",
                "{} of {} must be a number of at least 0, got '{}'", name, launcher, text);
  return value;
}

std::optional<Launch> read(const Variables& v, const Environment& environment) {
  std::vector<std::string> set, missing;
  std::vector<const char*> required = {v.rank, v.world};
  if (v.local_rank) required.push_back(v.local_rank);
  required.insert(required.end(), v.others.begin(), v.others.end());
  for (const char* name : required) {
    const char* value = environment(name);
    (value && *value ? set : missing).emplace_back(name);
  }
  // An address alone is for whoever starts the ranks; it makes nobody a rank.
  const auto is_of_rank = [](const std::string& name) { return !name.starts_with("MASTER"); };
  if (std::none_of(set.begin(), set.end(), is_of_rank)) return std::nullopt;
  const char* launcher = to_string(v.launcher);
  SHARD_REQUIRE(missing.empty(), "launch",
                "the environment of {} is set by half: {} set, {} not. Start all ranks with {}, or unset all of these",
                launcher, fmt::join(set, ", "), fmt::join(missing, ", "), launcher);
  Launch launch{.launcher = v.launcher,
                .rank = number(environment, v.rank, launcher),
                .world = number(environment, v.world, launcher),
                .local_rank = number(environment, v.local_rank ? v.local_rank : v.rank, launcher)};
  launch.local_world =
      v.local_world && environment(v.local_world) ? number(environment, v.local_world, launcher) : launch.world;
  SHARD_REQUIRE(launch.rank < launch.world && launch.local_rank < launch.local_world && launch.local_world <= launch.world,
                "launch", "the environment of {} contradicts itself: rank {} of {}, {} of {} on this host", launcher,
                launch.rank, launch.world, launch.local_rank, launch.local_world);
  if (v.launcher == Launcher::torchrun)
    launch.master = fmt::format("{}:{}", environment("MASTER_ADDR"), environment("MASTER_PORT"));
  return launch;
}

[[noreturn]] void become(const std::vector<std::string>& command) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  throw Error(fmt::format("[launch] cannot run {}: {}. Install Open MPI (ci/setup does), or start the ranks yourself",
                          command[0], std::strerror(errno)));
}

void check_choice(const LaunchOptions& o) {
  SHARD_REQUIRE(o.backend == "threads" || o.backend == "mpi" || o.backend == "nccl", "launch",
                "--backend must be threads, mpi or nccl, got '{}'", o.backend);
  SHARD_REQUIRE(o.device == "cpu" || o.device == "cuda", "launch", "--device must be cpu or cuda, got '{}'", o.device);
  SHARD_REQUIRE(o.backend != "nccl" || o.gpus > 0, "launch",
                "--backend nccl needs a GPU and its driver, and this machine shows none; use --backend threads or mpi");
  SHARD_REQUIRE(
      o.device != "cuda" || o.backend != "mpi", "launch",
      "--backend mpi carries host memory; with --device cuda use --backend nccl (a GPU for each rank) or threads (one "
      "GPU for all)");
  SHARD_REQUIRE(o.ranks >= 0, "launch", "--ranks must be at least 1, got {}", o.ranks);
}

}  // namespace

const char* to_string(Launcher launcher) {
  switch (launcher) {
    case Launcher::none:
      return "nobody";
    case Launcher::mpirun:
      return "mpirun";
    case Launcher::torchrun:
      return "torchrun";
    case Launcher::slurm:
      return "srun";
    case Launcher::pmi:
      return "a launcher with PMI";
  }
  return "?";
}

Environment process_environment() {
  return [](const char* name) { return static_cast<const char*>(std::getenv(name)); };
}

Launch read_launch(const Environment& environment) {
  for (const Variables& variables : all_variables()) {
    if (variables.launcher == Launcher::slurm && !is_slurm_step(environment)) continue;
    if (const auto launch = read(variables, environment)) return *launch;
  }
  return {};
}

std::vector<std::string> mpirun_command(int64_t ranks, const std::vector<std::string>& arguments, bool is_root) {
  std::vector<std::string> command = {"mpirun", "-n", fmt::format("{}", ranks), "--oversubscribe", "--bind-to", "none"};
  if (is_root) command.emplace_back("--allow-run-as-root");
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

Launch launch(const LaunchOptions& options, const std::vector<std::string>& arguments, const Environment& environment) {
  check_choice(options);
  const Launch launch = read_launch(environment);
  if (options.backend == "threads") {
    SHARD_REQUIRE(launch.world == 1, "launch",
                  "{} started {} processes, and --backend threads runs all ranks in each of them; use --backend mpi",
                  to_string(launch.launcher), launch.world);
    SHARD_REQUIRE(options.ranks == 0, "launch", "--ranks starts processes, and ranks are threads; use --backend mpi");
    return launch;
  }
  SHARD_REQUIRE(
      launch.launcher != Launcher::torchrun || options.backend == "nccl", "launch",
      "torchrun started this process (rank {} of {}, store {}), and MPI cannot join processes that it did not start. Use "
      "mpirun -n {}, srun, or --ranks {}",
      launch.rank, launch.world, launch.master, launch.world, launch.world);
  if (launch.launcher == Launcher::none) {
    SHARD_REQUIRE(options.ranks > 0, "launch", "--backend {} needs processes: {}, or --ranks N", options.backend,
                  options.backend == "mpi" ? "mpirun -n N, srun --mpi=pmix" : "torchrun, mpirun -n N, srun");
    if (options.backend == "nccl") {
      Launch own = launch;
      own.starts = options.ranks;
      return own;
    }
    std::vector<std::string> own = arguments;
    own[0] = std::filesystem::read_symlink("/proc/self/exe").string();
    become(mpirun_command(options.ranks, own, ::geteuid() == 0));
  }
  SHARD_REQUIRE(options.ranks == 0 || options.ranks == launch.world, "launch", "--ranks {}, but {} started {} processes",
                options.ranks, to_string(launch.launcher), launch.world);
  SHARD_REQUIRE(launch.launcher != Launcher::pmi || options.backend != "nccl", "launch",
                "PMI_RANK and PMI_SIZE do not say which of its host's GPUs a process has; use torchrun, mpirun or srun");
  // Whatever becomes of the launcher, its processes do not stay.
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  return launch;
}

void require_joined(int64_t joined, const Environment& environment) {
  const Launch launch = read_launch(environment);
  SHARD_REQUIRE(launch.launcher == Launcher::none || launch.world == joined, "launch",
                "{} started {} processes, and MPI has joined {} of them here, so each would train alone. It has to speak with "
                "this MPI: use the mpirun that belongs to it, or srun --mpi=pmix",
                to_string(launch.launcher), launch.world, joined);
}

}  // namespace shardproof
