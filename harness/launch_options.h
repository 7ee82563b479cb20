// --backend, --device and --ranks of the commands that train.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/launch.h"
#include "shardproof/mpi.h"

namespace CLI {
class App;
}

namespace harness {

struct Launched {
  shardproof::LaunchOptions options;
  shardproof::MpiOptions mpi;

  // `ranks_option`: with --ranks, where a command has no such option of its own.
  void add_to(CLI::App& command, bool ranks_option = true);
  // This process' part: null for threads. Does not return where it starts processes. Before the first collective every process
  // has shown that it runs the same program with the same arguments and `mesh`.
  std::unique_ptr<shardproof::MpiWorld> start(const std::string& mesh);
};

// argv of this process, for `start`.
void remember_arguments(int argc, char** argv);

}  // namespace harness
