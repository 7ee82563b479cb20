// A world whose ranks are processes. MPI (mpi.h) or NCCL (nccl.h) carries their bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "shardproof/base/check.h"
#include "shardproof/comm/comm.h"

namespace shardproof {

// A process died, was stopped or came too late, or this process was told to end. Nothing can be communicated any more, and the
// process should end.
class WorldLostError : public Error {
 public:
  using Error::Error;
};

class ProcessWorld {
 public:
  virtual ~ProcessWorld() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;

  // Runs body(comm) on the first `ranks` processes (0: on all) and returns on every process when the body has ended everywhere.
  // When the body throws on one rank it is ended on all ranks, and every process throws the first real error, prefixed with the
  // rank it came from. Another body may run afterwards. Where that is not possible it throws WorldLostError. What was made from
  // `comm` (groups, works, shared memory) must not be used after the body. It is an error when a body returns without having
  // waited for every collective that it started. Collective over all processes.
  virtual void run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks = 0) = 0;
};

}  // namespace shardproof
