// The backend for CPU clusters, whose ranks are processes of an MPI job. Sums have the bits of the threads backend in every
// dtype, because the same kernels add in the same order. MPI itself only carries bytes.
//
// At the start of a collective each two ranks exchange a header, which says what the call is, how large it is and its number in
// the sequence of calls. When ranks disagree, all of them throw an Error that names both calls. A watch beside MPI finds ranks
// that died, were stopped or come too late.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "shardproof/comm/process/process_world.h"

namespace shardproof {

struct MpiOptions {
  // The world ends when ranks wait for another one longer than this, or when a rank gives no sign of life for so long.
  double timeout_seconds = 300;
  // When something ends the world, each rank writes its last calls to rank_N.jsonl in this directory. Empty: it writes none.
  std::string flight_directory = {};
  int64_t flight_calls_max = 256;
};

// Whether this library was built with MPI. Without MPI the constructor of MpiWorld throws Error.
bool mpi_available();

class MpiWorld final : public ProcessWorld {
 public:
  // Initializes MPI. Collective over all processes of the job, and possible once in a process. A process that no launcher
  // started is a world of one rank. Throws Error when MPI is in use already, cannot be called from several threads, or is not
  // in this build.
  explicit MpiWorld(const MpiOptions& options = {});
  // Ends MPI. Collective, except where the world is lost or an exception of this rank alone is being thrown: it then waits for
  // no other rank.
  ~MpiWorld() override;
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  int64_t rank() const override;
  int64_t size() const override;
  // Does what ProcessWorld::run says. Groups that the body made are freed when it ends.
  void run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks = 0) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
