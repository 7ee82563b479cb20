// Memory that NCCL was told of, and buffers of it for the tensors of a lane's calls.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "shardproof/comm/nccl/nccl_api.h"

namespace shardproof::nccl {

// `finish(communicator, result)` throws unless the result is success, at once or when the communicator's progress is over.
using Finish = std::function<void(NcclApi::Communicator, NcclResult)>;

// Destroyed with its owner; CUDA keeps what still waits for it.
class Event {
 public:
  explicit Event(std::shared_ptr<NcclApi> api) : api_(std::move(api)), event_(api_->make_event()) {}
  ~Event() { api_->destroy_event(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  NcclApi::Event get() const { return event_; }

 private:
  std::shared_ptr<NcclApi> api_;
  NcclApi::Event event_;
};

struct RegisteredMemory {
  void* memory = nullptr;
  int64_t bytes = 0;
  NcclApi::Memory kind = NcclApi::Memory::plain;
  void* handle = nullptr;  // null where nothing was registered
};

// Rounds up to what can be registered. What is symmetric all ranks of the communicator register together.
void allocate_registered(NcclApi& api, NcclApi::Communicator communicator, int64_t bytes, NcclApi::Memory kind,
                         RegisteredMemory& made, const Finish& finish);
// A null communicator was aborted, and knows of no registrations.
void deregister(NcclApi& api, NcclApi::Communicator communicator, RegisteredMemory& memory);

// Buffers that are lent and come back. They stay registered until `close`: a window for a buffer is made once, not once a step.
// All ranks take and give back in one order, and each takes the first free one that fits, so that what ranks use in one call
// are parts of one window. Whoever takes one comes behind what the stream was given that gave it back. Those of captured steps
// stay with such steps.
class BufferPool {
 public:
  ~BufferPool();
  // May be given back on any thread, also after `close`.
  c10::DataPtr take(std::shared_ptr<NcclApi> api, NcclApi::Communicator communicator, int64_t bytes, NcclApi::Memory kind,
                    c10::Device device, const Finish& finish);
  int64_t lent() const;
  // Whether the memory is in one of the buffers.
  bool holds(const void* memory) const;
  // With nothing on its way; as `deregister`. What is lent is freed when it comes back.
  void close(NcclApi::Communicator communicator);

 private:
  struct Shared;
  struct Loan;
  std::shared_ptr<Shared> shared_;
};

}  // namespace shardproof::nccl
