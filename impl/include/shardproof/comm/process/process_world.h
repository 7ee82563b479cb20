// Ranks as processes, whatever carries their bytes: MPI (mpi.h) or NCCL (nccl.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "shardproof/base/check.h"
#include "shardproof/comm/comm.h"

namespace shardproof {

// A process died, stopped or came too late, or this one was told to end. Nothing can be communicated any more; the process
// should end.
class WorldLostError : public Error {
 public:
  using Error::Error;
};

class ProcessWorld {
 public:
  virtual ~ProcessWorld() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;

  // Collective over all processes. Runs body(comm) on the first `ranks` of them (0: all) and returns, on all, when it has ended
  // everywhere. A body that throws ends it on every rank, and every process throws the first real error, prefixed with its
  // rank; another body may run afterwards. Throws WorldLostError where that is not possible. What was made from `comm` must not
  // be used after the body: groups, works, shared memory. Also an error: a body that returns while collectives it started were
  // never waited for.
  virtual void run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks = 0) = 0;
};

}  // namespace shardproof
