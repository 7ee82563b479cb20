// Ranks as processes with a GPU each: the backend for GPU clusters, on NCCL used directly. Every group has a communicator and a
// stream for gathers, for reductions and for messages, so that none of them waits for another; `Work::wait` makes the caller's
// stream wait and not the host, but for tensors in host memory, which are copied to the device and back.
//
// Sums have the bits of the threads backend: terms are exchanged and added in the order of ranks. NCCL's own reductions, in its
// own order, are an option.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "shardproof/comm/nccl/nccl_api.h"
#include "shardproof/comm/nccl/nccl_store.h"
#include "shardproof/comm/process/process_world.h"

namespace shardproof {

struct NcclOptions {
  enum class Sum { rank_order, native };

  Sum sum = Sum::rank_order;  // needs kernels (cuda.h) on a GPU
  // Of the buffers that ordered sums arrive in, and of what Comm::allocate lends; other than plain it is registered with NCCL.
  NcclApi::Memory buffers = NcclApi::Memory::plain;
  // A call that is not over after this, a rank that gives no sign of life for so long, and a communicator that is not there by
  // then end the world.
  double timeout_seconds = 300;
  // Each rank writes its last calls to rank_N.jsonl here when something ends the world; empty: nowhere.
  std::string flight_directory = {};
  int64_t flight_calls_max = 256;
};

class NcclWorld final : public ProcessWorld {
 public:
  // One of `size` processes (or threads, each with its own `api`) that share the store. Waits for nobody: communicators are
  // made by the first body. Throws Error when there is no such rank, the time-out is not above 0 s, or the api cannot add sums
  // in rank order where those are asked for.
  NcclWorld(int64_t rank, int64_t size, std::shared_ptr<NcclStore> store, std::shared_ptr<NcclApi> api,
            const NcclOptions& options = {});
  // Collective, unless the world is lost or an exception is under way: then its communicators are aborted.
  ~NcclWorld() override;
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  int64_t rank() const override;
  int64_t size() const override;
  // As ProcessWorld's. What ends a body on one rank aborts every communicator on all, and the next body makes new ones. When it
  // returns nothing is on its way on any stream of the backend. Also an error: a body that keeps memory of Comm::allocate.
  // Communicators are for one thread at a time.
  void run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks = 0) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
