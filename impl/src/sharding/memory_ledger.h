// Allocates the memory of buckets, counts it until it is freed, and keeps some of it for reuse.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "shardproof/comm/comm.h"
#include "shardproof/sharding/memory.h"

namespace shardproof {

// On the device where the parameters are, or in the host's memory.
enum class Place { device, host };

// A contiguous tensor over the storage. Tensor::set_ wants storages on the meta device to be resizable.
at::Tensor tensor_of(c10::Storage storage, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

// As many elements of a contiguous tensor as the sizes say, from element `begin` on, in the same memory. They are what `narrow`
// and `view` give, for a tenth of the instructions: LibTorch's dispatcher and autograd know nothing of it.
at::Tensor part_of(const at::Tensor& whole, int64_t begin, at::IntArrayRef sizes);

// Safe to use from several threads: tensors may be freed anywhere.
class MemoryLedger : public std::enable_shared_from_this<MemoryLedger> {
 public:
  // `pins_host`: memory of the host is page-locked.
  explicit MemoryLedger(c10::Device device = at::kCPU, bool pins_host = false) : device_(device), pins_host_(pins_host) {}
  c10::Device device() const { return device_; }

  // 1-D, contents undefined. Beside a device without memory the host's is counted, and there is none either: the tensor is on
  // that device and has no address.
  at::Tensor allocate(MemoryKind kind, int64_t numel, at::ScalarType dtype, Place place = Place::device);
  // The same tensor, counted as `bytes` as long as its storage lives.
  at::Tensor adopt(MemoryKind kind, const at::Tensor& tensor, int64_t bytes, Place place = Place::device);
  // Counts bytes of the device that somebody else allocated, as long as the result lives.
  std::shared_ptr<void> counted(MemoryKind kind, int64_t bytes);
  c10::DataPtr allocate_bytes(MemoryKind kind, int64_t bytes);
  // Of the memory that the group has for tensors of such calls (Comm::allocate), to which it goes back; null where it has none.
  c10::DataPtr allocate_bytes_of(Comm& group, Op op, MemoryKind kind, int64_t bytes);
  at::Tensor allocate_of(Comm& group, Op op, MemoryKind kind, int64_t numel, at::ScalarType dtype);

  // How many free buffers of each size are kept for the next request of that size instead of going back to the allocator; what
  // is kept does not count as in use.
  void keep_free(int64_t buffers) { keep_free_ = buffers; }
  // Gives what is kept back to the allocator.
  void drop_free();
  // Buffers of this size in use, of kind `gathered`.
  int64_t gathered_in_use(int64_t bytes) const;

  MemoryUse use() const;
  void reset_peak();
  // Whether the tensor lies in memory that a ledger allocated and will free.
  static bool owns(const at::Tensor& tensor);

 private:
  struct Block;
  void count(MemoryKind kind, Place place, int64_t bytes);
  void free(Block* block);
  static void free_block(void* context);
  c10::DataPtr owned(c10::DataPtr memory, MemoryKind kind, Place place, int64_t bytes, bool is_kept);
  // Memory that is free, behind what this stream has been given.
  struct Free {
    c10::DataPtr memory;
    c10::Stream behind;
  };
  at::Tensor tensor_over(c10::DataPtr memory, int64_t numel, at::ScalarType dtype) const;

  const c10::Device device_;
  const bool pins_host_;
  mutable std::mutex mutex_;
  MemoryUse use_;
  int64_t keep_free_ = 0;
  std::map<int64_t, std::vector<Free>> free_;  // by bytes
  std::map<int64_t, int64_t> gathered_;        // by bytes
};

}  // namespace shardproof
