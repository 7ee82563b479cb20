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

#include "shardproof/comm/process/process_world.h"

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

class MpiWorld final : public ProcessWorld {
 public:
  // Collective over all processes of the job, once in a process: it initializes MPI. A process that no launcher started is a
  // world of one. Throws Error where MPI is in use already, cannot be called from several threads, or is not in this build.
  explicit MpiWorld(const MpiOptions& options = {});
  // Collective, and ends MPI; where the world is lost, or an exception of this rank alone is under way, it waits for nobody.
  ~MpiWorld() override;
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  int64_t rank() const override;
  int64_t size() const override;
  // As ProcessWorld's. Its groups are freed with it.
  void run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks = 0) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
