// --backend, --device and --ranks of the commands that train.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/comm/mpi/mpi.h"
#include "shardproof/comm/nccl/nccl.h"
#include "shardproof/launch/launch.h"

namespace CLI {
class App;
class Option;
}

namespace harness {

class Ranks;

struct Launched {
  shardproof::LaunchOptions options;
  shardproof::MpiOptions mpi;  // and, in time-out and records, of nccl
  std::string sum = "rank_order";
  bool registered_buffers = false;
  bool reproducible = true;  // on a GPU only operators whose bits are the same every time

  // `ranks_option`: with --ranks, where a command has no such option of its own.
  void add_to(CLI::App& command, bool ranks_option = true);
  // This process' part: null for threads. Does not return where it starts processes; where those are its children, as with
  // nccl, it exits with their code. Before the first collective every process has shown that it runs the same program with the
  // same arguments, `mesh` and `settings`, which are those from a file.
  std::unique_ptr<shardproof::ProcessWorld> start(const std::string& mesh, const std::string& settings = "");
  // Where ranks of this process compute; known once it has started.
  c10::Device device() const { return device_; }
  // Whether ranks can have memory side by side.
  bool shares_memory() const { return options.backend != "nccl"; }
  // The ranks that somebody has registered as --backend, without options of other ranks; null where it names ours. Throws
  // Error, which lists the names, where it names none.
  std::unique_ptr<Ranks> registered() const;
  // Throws Error when an option of ranks was given, since `what` has ranks of its own.
  void require_threads(const std::string& what) const;
  // Throws Error for options that were given and mean nothing to this backend.
  void refuse_without_effect() const;
  // Those that were given, for a process that this one starts.
  std::string given() const;

 private:
  std::unique_ptr<shardproof::ProcessWorld> start_nccl(const shardproof::Launch& launch);
  std::unique_ptr<shardproof::ProcessWorld> join_nccl(const shardproof::Launch& launch,
                                                      std::shared_ptr<shardproof::NcclStore> store);
  void use_gpu(int64_t index);

  std::vector<CLI::Option*> of_processes_, of_nccl_;
  c10::Device device_{c10::kCPU};
};

// --engine: whose training is run.
void add_engine_option(CLI::App& command, std::string& engine);

// The exit code of a command whose ranks ended with `code`: 75 where they were asked to stop, and 2 for every other code
// above 2.
int exit_code_of_ranks(int code);

// argv of this process, for `start`.
void remember_arguments(int argc, char** argv);

// What every process does by itself between the steps that they take together; without processes this one. What fails on one
// ends all of them, with its reason.
void on_each(shardproof::ProcessWorld* processes, const std::function<void(shardproof::Comm*)>& body);

}  // namespace harness
