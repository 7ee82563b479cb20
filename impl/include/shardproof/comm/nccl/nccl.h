// The backend for GPU clusters, whose ranks are processes with one GPU each. It uses NCCL directly. Every group has three pairs
// of a communicator and a stream, for gathers, for reductions and for messages, so that none of these waits for another.
// `Work::wait` makes the caller's stream wait, not the host. The exception are tensors in host memory, which are copied to the
// device and back.
//
// Sums have the bits of the threads backend, because ranks exchange the terms and add them in rank order. NCCL's own
// reductions, whose order NCCL chooses, are an option.
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

  Sum sum = Sum::rank_order;  // on a GPU `rank_order` needs the kernels of device/kernels/cuda.h
  // The kind of memory of the buffers in which the terms of ordered sums arrive, and of what Comm::allocate lends. Any kind but
  // `plain` is registered with NCCL. `symmetric` becomes `registered` where NcclApi::why_no_windows has a reason. With
  // `symmetric`, native sums take no factor (Comm::premultiplies), because NCCL's symmetric kernels take none.
  NcclApi::Memory buffers = NcclApi::Memory::plain;
  // The world ends when a call takes longer than this, when a rank gives no sign of life for so long, or when making a
  // communicator takes longer.
  double timeout_seconds = 300;
  // When something ends the world, each rank writes its last calls to rank_N.jsonl in this directory. Empty: it writes none.
  std::string flight_directory = {};
  int64_t flight_calls_max = 256;
};

class NcclWorld final : public ProcessWorld {
 public:
  // This process is rank `rank` of `size` processes that share the store. (They may be threads of one process, each with its
  // own `api`.) The constructor waits for no other rank; the first body makes the communicators. Throws Error unless 0 <= rank
  // < size, unless the time-out is above 0 s, or when `rank_order` is asked for and the api cannot add in that order.
  NcclWorld(int64_t rank, int64_t size, std::shared_ptr<NcclStore> store, std::shared_ptr<NcclApi> api,
            const NcclOptions& options = {});
  // Destroys the communicators. Collective, except where the world is lost or an exception is being thrown: they are then
  // aborted, as they are where another rank does not come within 10 s, or the time-out where that is shorter.
  ~NcclWorld() override;
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  int64_t rank() const override;
  int64_t size() const override;
  // Does what ProcessWorld::run says. When the body ends with an exception on one rank, every rank aborts its communicators,
  // and the next body makes new ones. When `run` returns, no work is left on the backend's streams. It is an error when a body
  // keeps memory of Comm::allocate. A communicator may be used by one thread at a time.
  void run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks = 0) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
