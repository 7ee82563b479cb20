#include "comm/nccl/nccl_buffers.h"

#include <algorithm>
#include <utility>

#include "shardproof/base/check.h"
#include "shardproof/device/device_graph.h"

namespace shardproof::nccl {
namespace {

// NCCL's windows begin and end at pages.
int64_t whole_pages(int64_t bytes) {
  constexpr int64_t kPage = 1 << 16;
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

void allocate_registered(NcclApi& api, NcclApi::Communicator communicator, int64_t bytes, NcclApi::Memory kind,
                         RegisteredMemory& made, const Finish& finish) {
  const int64_t pages_bytes = whole_pages(bytes);
  made.kind = kind;
  made.memory = api.allocate(pages_bytes, kind);
  if (kind != NcclApi::Memory::plain)
    finish(communicator, api.register_memory(communicator, made.memory, pages_bytes, kind, made.handle));
  made.bytes = pages_bytes;  // of use from here on; what failed before is only released
}

void deregister(NcclApi& api, NcclApi::Communicator communicator, RegisteredMemory& memory) {
  if (communicator && memory.handle) api.deregister_memory(communicator, memory.handle, memory.kind);
  memory.handle = nullptr;
}

struct BufferPool::Shared {
  struct Buffer {
    RegisteredMemory memory;
    bool is_lent = false;
    const bool is_captured = is_capturing();
    std::unique_ptr<Event> given_back = nullptr;  // of what is not captured
  };

  std::shared_ptr<NcclApi> api;
  std::mutex mutex;
  std::vector<std::unique_ptr<Buffer>> buffers;  // in the order in which they were made, the same on all ranks
  bool is_closed = false;

  Buffer* first_free(int64_t bytes) {
    const std::lock_guard lock(mutex);
    const auto fits = std::find_if(buffers.begin(), buffers.end(), [&](const auto& buffer) {
      return !buffer->is_lent && buffer->memory.bytes == whole_pages(bytes) && buffer->is_captured == is_capturing();
    });
    return fits == buffers.end() ? nullptr : fits->get();
  }

  void give_back(Buffer* buffer) {
    const std::lock_guard lock(mutex);
    buffer->is_lent = false;
    if (is_closed) {
      api->synchronize();
      return release(*buffer);
    }
    try {
      if (buffer->given_back) api->record(buffer->given_back->get(), api->current_stream());
    } catch (const Error&) {  // the device failed, which its next call reports
    }
  }

  void release(const Buffer& buffer) { api->release(buffer.memory.memory, buffer.memory.kind); }
};

// What a tensor's storage points back to.
struct BufferPool::Loan {
  std::shared_ptr<Shared> pool;
  Shared::Buffer* buffer;
};

BufferPool::~BufferPool() {
  close(nullptr);
}

c10::DataPtr BufferPool::take(std::shared_ptr<NcclApi> api, NcclApi::Communicator communicator, int64_t bytes,
                              NcclApi::Memory kind, c10::Device device, const Finish& finish) {
  if (!shared_) shared_ = std::make_shared<Shared>();
  shared_->api = std::move(api);
  Shared::Buffer* buffer = shared_->first_free(bytes);
  if (!buffer) {
    auto made = std::make_unique<Shared::Buffer>();
    buffer = made.get();
    if (!made->is_captured) made->given_back = std::make_unique<Event>(shared_->api);
    {
      // In the pool before it is registered: that may throw, and who closes frees it then.
      const std::lock_guard lock(shared_->mutex);
      shared_->buffers.push_back(std::move(made));
    }
    allocate_registered(*shared_->api, communicator, bytes, kind, buffer->memory, finish);
  }
  {
    const std::lock_guard lock(shared_->mutex);
    buffer->is_lent = true;
    if (buffer->given_back) shared_->api->wait(shared_->api->current_stream(), buffer->given_back->get());
  }
  const auto give_back = [](void* context) {
    const std::unique_ptr<Loan> loan(static_cast<Loan*>(context));
    loan->pool->give_back(loan->buffer);
  };
  return {buffer->memory.memory, new Loan{shared_, buffer}, give_back, device};
}

int64_t BufferPool::lent() const {
  if (!shared_) return 0;
  const std::lock_guard lock(shared_->mutex);
  return std::count_if(shared_->buffers.begin(), shared_->buffers.end(), [](const auto& buffer) { return buffer->is_lent; });
}

bool BufferPool::holds(const void* memory) const {
  if (!shared_) return false;
  const std::lock_guard lock(shared_->mutex);
  return std::any_of(shared_->buffers.begin(), shared_->buffers.end(), [memory](const auto& buffer) {
    const auto begin = reinterpret_cast<uintptr_t>(buffer->memory.memory), place = reinterpret_cast<uintptr_t>(memory);
    return begin <= place && place < begin + static_cast<uintptr_t>(buffer->memory.bytes);
  });
}

void BufferPool::close(NcclApi::Communicator communicator) {
  const std::shared_ptr<Shared> closing = std::exchange(shared_, nullptr);
  if (!closing) return;
  const std::lock_guard lock(closing->mutex);
  for (const auto& buffer : closing->buffers) {
    buffer->given_back.reset();
    deregister(*closing->api, communicator, buffer->memory);
    if (!buffer->is_lent && buffer->memory.memory) closing->release(*buffer);
  }
  closing->is_closed = true;
}

}  // namespace shardproof::nccl
