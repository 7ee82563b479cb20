// How a program becomes the ranks of a job. Either mpirun, torchrun or srun starts it once a rank and says so in environment
// variables, or a person starts it, and then it can start its ranks itself. This header does not include Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shardproof {

enum class Launcher { none, mpirun, torchrun, slurm, pmi };
const char* to_string(Launcher launcher);

// What the launcher says about this process.
struct Launch {
  Launcher launcher = Launcher::none;
  int64_t rank = 0, world = 1;
  // Among the ranks of its host. Not every launcher says them: the rank is then -1, and the world 0.
  int64_t local_rank = 0, local_world = 1;
  std::string master = {};  // "host:port" of torchrun's store
  int64_t starts = 0;       // above 0: no launcher started the ranks, and the caller has to start so many (nccl_launch.h)
};

// Returns the value of an environment variable, or null when it is not set.
using Environment = std::function<const char*(const char*)>;
Environment process_environment();

// Reads what the launcher says. When several launchers have set their variables, they must agree on rank and world, or one must
// be known to run inside of the other, of which srun or another with PMI has started one process a host. The inner one counts.
// Throws Error, which names the variables, in any other case: when launchers disagree, when only a part of a launcher's
// variables is set, when they contradict each other, and in a heterogeneous job of Slurm.
Launch read_launch(const Environment& environment);

struct LaunchOptions {
  std::string backend = "threads";  // "threads", "mpi" or "nccl"
  std::string device = "cpu";       // "cpu" or "cuda"; with cuda, rank-threads share one GPU, and ranks of nccl have one each
  int64_t ranks = 0;                // above 0: so many processes are to be started
  int64_t gpus = 0;                 // how many GPUs this machine has
};

// Checks the options against the build, the machine and the launcher, and returns what this process is. Where ranks of `mpi`
// are to be started, it replaces this process by mpirun and does not return; each rank gets `arguments`, which are argv without
// the option that asked for ranks. Ranks of `nccl` have to be started by the caller. Throws Error, which says what to do
// instead, when the options are impossible here.
Launch launch(const LaunchOptions& options, const std::vector<std::string>& arguments,
              const Environment& environment = process_environment());
// Throws Error unless MPI has joined all processes that the launcher started, with the launcher's ranks: each that it cannot
// join is a world of its own. `rank` and `joined` are what MPI says.
void require_joined(int64_t rank, int64_t joined, const Environment& environment = process_environment());
// The command by which `launch` replaces this process.
std::vector<std::string> mpirun_command(int64_t ranks, const std::vector<std::string>& arguments, bool is_root);

}  // namespace shardproof
