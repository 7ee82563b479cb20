// How a program becomes ranks: started by mpirun, torchrun or srun, which set variables of the environment, or by nobody, and
// then it can start its ranks itself. No Torch here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shardproof {

enum class Launcher { none, mpirun, torchrun, slurm };
const char* to_string(Launcher launcher);

// What the launcher says of this process.
struct Launch {
  Launcher launcher = Launcher::none;
  int64_t rank = 0, world = 1, local_rank = 0, local_world = 1;
  std::string master = {};  // "host:port", of torchrun
  int64_t starts = 0;       // above 0: nobody has started the ranks, and the caller is to start so many (nccl_launch.h)
};

// The value of a variable of the environment, or null.
using Environment = std::function<const char*(const char*)>;
Environment process_environment();

// Of several launchers the innermost: mpirun, torchrun, srun. Throws Error that names what is set and what is missing where an
// environment is set by half, or contradicts itself.
Launch read_launch(const Environment& environment);

struct LaunchOptions {
  std::string backend = "threads";  // threads, mpi, nccl
  std::string device = "cpu";       // or cuda: threads share one GPU, ranks of nccl have one each
  int64_t ranks = 0;                // above 0: start so many processes
  int64_t gpus = 0;                 // that this machine has
};

// Checks the choice against the build, the machine and the launcher, and returns what this process is. Where ranks of `mpi` are
// to be started it replaces this process by mpirun, with `arguments` (argv, without the option that asked for it) for each
// rank, and does not return; those of `nccl` are the caller's to start. Throws Error that says what to do instead.
Launch launch(const LaunchOptions& options, const std::vector<std::string>& arguments,
              const Environment& environment = process_environment());
// What launch would run.
std::vector<std::string> mpirun_command(int64_t ranks, const std::vector<std::string>& arguments, bool is_root);

}  // namespace shardproof
