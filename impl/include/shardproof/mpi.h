// Ranks as processes of an MPI job: the backend for CPU clusters. Sums have the bits of the threads backend, in every dtype:
// the same kernels in the same order. MPI itself only carries bytes.
//
// Every collective begins with a word between each two ranks: what the call is, how large, the how-manieth. Ranks that disagree
// all get an Error that names both calls; ranks that died, are stopped or come too late are found by a watch beside MPI.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "shardproof/check.h"
#include "shardproof/comm.h"

namespace shardproof {

struct MpiOptions {
  // A rank that others wait for, or that gives no sign of life, for longer than this ends the world.
  double timeout_seconds = 300;
  // Each rank writes its last calls to rank_N.jsonl here when something ends the world; empty: nowhere.
  std::string flight_directory = {};
  int64_t flight_calls_max = 256;
};

// Whether this library was built with MPI; else MpiWorld's constructor says so.
bool mpi_available();

// A process died, stopped or came too late, or this one was told to end. Nothing can be communicated any more; the process
// should end.
class WorldLostError : public Error {
 public:
  using Error::Error;
};

class MpiWorld {
 public:
  // Collective over all processes of the job; one at a time, once in a process. A process that no launcher started is a world
  // of one.
  explicit MpiWorld(const MpiOptions& options = {});
  ~MpiWorld();
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  int64_t rank() const;
  int64_t size() const;

  // Collective over all processes. Runs body(comm) on the first `ranks` of them (0: all) and returns, on all, when it has ended
  // everywhere. A body that throws ends it on every rank, and every process throws the first real error, prefixed with its
  // rank; another body may run afterwards. Throws WorldLostError where that is not possible. What was made from `comm` must not
  // be used after the body: groups, works, shared memory. Also an error: a body that returns while collectives it started were
  // never waited for.
  void run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks = 0);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
