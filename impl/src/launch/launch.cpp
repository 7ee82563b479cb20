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
#include <ranges>
#include <sstream>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

using Names = std::vector<const char*>;

struct Variables {
  Launcher launcher;
  const char* rank;
  Names world;  // the first that is set counts
  const char* local_rank;
  const char* local_world;  // null: another function knows
  Names others = {};
};

// From the inside to the outside, as far as one can be in another.
const std::array<Variables, 4>& all_variables() {
  static const std::array<Variables, 4> all = {
      Variables{Launcher::mpirun,
                "OMPI_COMM_WORLD_RANK",
                {"OMPI_COMM_WORLD_SIZE"},
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE"},
      Variables{Launcher::torchrun, "RANK", {"WORLD_SIZE"}, "LOCAL_RANK", "LOCAL_WORLD_SIZE", {"MASTER_ADDR", "MASTER_PORT"}},
      // A step that was started inside of another, or of salloc's shell, may keep the number of that one's tasks.
      Variables{Launcher::slurm, "SLURM_PROCID", {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, "SLURM_LOCALID", nullptr},
      Variables{Launcher::pmi, "PMI_RANK", {"PMI_SIZE"}, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}};
  return all;
}

const char* set_value(const Environment& environment, const char* name) {
  const char* value = environment(name);
  return value && *value ? value : nullptr;
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

// How many tasks of the step are on this node, which is written like "8(x2),4"; 0 where Slurm does not say it.
int64_t tasks_on_node(const Environment& environment) {
  const char* const tasks = set_value(environment, "SLURM_STEP_TASKS_PER_NODE");
  if (!tasks || !set_value(environment, "SLURM_NODEID")) return 0;
  int64_t node = number(environment, "SLURM_NODEID", "srun");
  std::istringstream words(tasks);
  for (int64_t count = 0, times = 1; words >> count; times = 1) {
    if (words.peek() == '(' && words.ignore(2) >> times) words.ignore(1);
    if (node < times) return count;
    node -= times;
    words.ignore(1);
  }
  throw Error(
      fmt::format("[launch] the environment of srun contradicts itself: SLURM_STEP_TASKS_PER_NODE={} has no node {} "
                  "(SLURM_NODEID)",
                  tasks, environment("SLURM_NODEID")));
}

// What a launcher says, and in which words.
struct Said {
  Launch launch;
  std::string text = {};
};

std::optional<Said> read(const Variables& v, const Environment& environment) {
  const auto is_set = [&](const char* name) { return set_value(environment, name) != nullptr; };
  const auto found = std::ranges::find_if(v.world, is_set);
  const char* const world = found == v.world.end() ? v.world.back() : *found;
  std::vector<std::string> set, missing;
  Names required = {v.rank, world};
  required.insert(required.end(), v.others.begin(), v.others.end());
  for (const char* name : required) (is_set(name) ? set : missing).emplace_back(name);
  // An address alone is for whoever starts the ranks; it makes nobody a rank.
  const auto is_of_rank = [](const std::string& name) { return !name.starts_with("MASTER"); };
  if (std::none_of(set.begin(), set.end(), is_of_rank)) return std::nullopt;
  const char* launcher = to_string(v.launcher);
  SHARD_REQUIRE(missing.empty(), "launch",
                "the environment of {} is set by half: {} set, {} not. Start all ranks with {}, or unset all of these",
                launcher, fmt::join(set, ", "), fmt::join(missing, ", "), launcher);
  const auto number_or = [&](const char* name, int64_t otherwise) {
    return name && is_set(name) ? number(environment, name, launcher) : otherwise;
  };
  Launch launch{.launcher = v.launcher,
                .rank = number(environment, v.rank, launcher),
                .world = number(environment, world, launcher),
                .local_rank = number_or(v.local_rank, -1),
                .local_world = v.launcher == Launcher::slurm ? tasks_on_node(environment) : number_or(v.local_world, 0)};
  if (launch.world == 1) launch.local_rank = 0, launch.local_world = 1;
  const int64_t local_max = launch.local_world > 0 ? launch.local_world : launch.world;
  SHARD_REQUIRE(launch.rank < launch.world && launch.local_rank < local_max && local_max <= launch.world, "launch",
                "the environment of {} contradicts itself: rank {} of {}, {} of {} on this host", launcher, launch.rank,
                launch.world, launch.local_rank, launch.local_world);
  if (v.launcher == Launcher::torchrun)
    launch.master = fmt::format("{}:{}", environment("MASTER_ADDR"), environment("MASTER_PORT"));
  return Said{launch, fmt::format("{} says that this is rank {} of {} ({}={}, {}={})", launcher, launch.rank, launch.world,
                                  v.rank, environment(v.rank), world, environment(world))};
}

// srun, or another with PMI, starts torchrun itself, or the daemons by which mpirun starts ranks, once a host. Or a shell.
bool is_around(const Launch& outer, const Launch& inner, const Environment& environment) {
  const bool starts_all = outer.launcher == Launcher::slurm || outer.launcher == Launcher::pmi;
  if (!starts_all || outer.local_world != 1 || inner.world < outer.world) return false;
  const char* const agents = set_value(environment, "GROUP_WORLD_SIZE");
  return inner.launcher != Launcher::torchrun || !agents || std::to_string(outer.world) == agents;
}

Said innermost(Said first, Said second, const Environment& environment) {
  Launch &a = first.launch, &b = second.launch;
  if (a.rank == b.rank && a.world == b.world) {
    if (a.local_world == 0) a.local_rank = b.local_rank, a.local_world = b.local_world;
    return first;
  }
  if (is_around(b, a, environment)) return first;
  if (is_around(a, b, environment)) return second;
  throw Error(
      fmt::format("[launch] two launchers disagree: {}, and {}. Start the ranks with one of them only, or unset the "
                  "variables of the one that did not start this process",
                  first.text, second.text));
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
  std::optional<Said> inner;
  const char* const components = is_slurm_step(environment) ? set_value(environment, "SLURM_HET_SIZE") : nullptr;
  for (const Variables& variables : all_variables() | std::views::reverse) {
    if (variables.launcher == Launcher::slurm && (!is_slurm_step(environment) || components)) continue;
    if (const auto said = read(variables, environment)) inner = inner ? innermost(*said, *inner, environment) : said;
  }
  SHARD_REQUIRE(
      inner || !components, "launch",
      "srun started this process in a heterogeneous job of {} components (SLURM_HET_SIZE), each of which counts its "
      "own tasks, so that nothing says how many ranks there are. Use mpirun, or a job of one component. For a step in "
      "one component alone, unset SLURM_HET_SIZE",
      components ? components : "");
  if (inner) return inner->launch;
  for (const char* name : {"MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE",
                           "FLUX_TASK_RANK", "HOROVOD_RANK"})
    SHARD_REQUIRE(!set_value(environment, name), "launch",
                  "{}={}: a launcher that is not known here started this process, and each rank would train alone. Use mpirun, "
                  "srun or torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT yourself. Where this "
                  "process is alone, unset {}",
                  name, environment(name), name);
  return Launch{};
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
  // A step of one task, as `srun --pty bash`, is a place to start ranks.
  if (launch.launcher == Launcher::none || (launch.launcher == Launcher::slurm && launch.world == 1 && options.ranks > 0)) {
    SHARD_REQUIRE(options.ranks > 0, "launch", "--backend {} needs processes: {}, or --ranks N", options.backend,
                  options.backend == "mpi" ? "mpirun -n N, srun --mpi=pmix" : "torchrun, mpirun -n N, srun");
    if (options.backend == "nccl") {
      return {.starts = options.ranks};
    }
    std::vector<std::string> own = arguments;
    own[0] = std::filesystem::read_symlink("/proc/self/exe").string();
    become(mpirun_command(options.ranks, own, ::geteuid() == 0));
  }
  SHARD_REQUIRE(options.ranks == 0 || options.ranks == launch.world, "launch", "--ranks {}, but {} started {} processes",
                options.ranks, to_string(launch.launcher), launch.world);
  // Whatever becomes of the launcher, its processes do not stay.
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  return launch;
}

void require_joined(int64_t rank, int64_t joined, const Environment& environment) {
  const Launch launch = read_launch(environment);
  SHARD_REQUIRE(
      launch.launcher == Launcher::none || (launch.world == joined && launch.rank == rank), "launch",
      "{} started {} processes, and this is rank {}, but MPI has joined {} of them here as rank {}, so each would train "
      "alone. It has to speak with this MPI: use the mpirun that belongs to it, or srun --mpi=pmix",
      to_string(launch.launcher), launch.world, launch.rank, joined, rank);
}

}  // namespace shardproof
