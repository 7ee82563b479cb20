#include "sharding/memory_ledger.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "shardproof/base/check.h"
#include "internal/device/streams.h"

namespace shardproof {

// What a tensor's storage points back to. It keeps the ledger alive, since tensors may outlive the module that made them.
struct MemoryLedger::Block {
  std::shared_ptr<MemoryLedger> ledger;
  c10::DataPtr memory;
  MemoryKind kind;
  Place place;
  int64_t bytes;
  bool is_kept;  // may stay here for the next request
};

const char* to_string(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::parameter: return "parameter";
    case MemoryKind::gathered: return "gathered";
    case MemoryKind::gradient: return "gradient";
    case MemoryKind::optimizer: return "optimizer";
    case MemoryKind::communication: return "communication";
    case MemoryKind::activation: return "activation";
  }
  return "?";
}

namespace {

void add(MemoryBytes& use, MemoryKind kind, int64_t bytes) {
  const auto index = static_cast<size_t>(kind);
  use.now_bytes[index] += bytes;
  use.peak_bytes[index] = std::max(use.peak_bytes[index], use.now_bytes[index]);
  use.peak_total_bytes = std::max(use.peak_total_bytes, use.now_total());
}

void forget_peaks(MemoryBytes& use) {
  use.peak_bytes = use.now_bytes;
  use.peak_total_bytes = use.now_total();
}

}  // namespace

int64_t MemoryBytes::now_total() const { return std::accumulate(now_bytes.begin(), now_bytes.end(), int64_t{0}); }

at::Tensor tensor_of(c10::Storage storage, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  const c10::DispatchKeySet keys = at::empty({0}, at::TensorOptions(dtype).device(device)).key_set();
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor part_of(const at::Tensor& whole, int64_t begin, at::IntArrayRef sizes) {
  const int64_t end = begin + c10::multiply_integers(sizes);
  SHARD_CHECK(whole.is_contiguous() && 0 <= begin && begin <= end && end <= whole.numel(), "memory",
              "elements {} to {} of a tensor that has {} and {} contiguous", begin, end, whole.numel(),
              whole.is_contiguous() ? "is" : "is not");
  at::Tensor part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
  part.unsafeGetTensorImpl()->set_storage_offset(whole.storage_offset() + begin);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return part;
}

at::Tensor MemoryLedger::tensor_over(c10::DataPtr memory, int64_t numel, at::ScalarType dtype) const {
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(numel) * c10::elementSize(dtype), std::move(memory),
                       /*allocator=*/nullptr, /*resizable=*/false);
  return tensor_of(std::move(storage), {numel}, dtype, device_);
}

at::Tensor MemoryLedger::allocate(MemoryKind kind, int64_t numel, at::ScalarType dtype, Place place) {
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  if (place == Place::host && device_.is_meta()) {
    const std::lock_guard lock(mutex_);
    return tensor_over(owned(c10::DataPtr(nullptr, device_), kind, place, bytes, /*is_kept=*/false), numel, dtype);
  }
  if (place == Place::host)
    return adopt(kind, at::empty({numel}, at::TensorOptions(dtype).pinned_memory(pins_host_)), bytes, place);
  return tensor_over(allocate_bytes(kind, bytes), numel, dtype);
}

at::Tensor MemoryLedger::allocate_of(Comm& group, Op op, MemoryKind kind, int64_t numel, at::ScalarType dtype) {
  c10::DataPtr memory = allocate_bytes_of(group, op, kind, numel * static_cast<int64_t>(c10::elementSize(dtype)));
  return memory ? tensor_over(std::move(memory), numel, dtype) : at::Tensor();
}

at::Tensor MemoryLedger::adopt(MemoryKind kind, const at::Tensor& tensor, int64_t bytes, Place place) {
  const std::lock_guard lock(mutex_);
  count(kind, place, bytes);
  const auto forget = [ledger = shared_from_this(), tensor, kind, bytes, place](void*) {
    const std::lock_guard held(ledger->mutex_);
    ledger->count(kind, place, -bytes);
  };
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), forget, tensor.options(), tensor.device());
}

std::shared_ptr<void> MemoryLedger::counted(MemoryKind kind, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  count(kind, Place::device, bytes);
  return {nullptr, [ledger = shared_from_this(), kind, bytes](void*) {
            const std::lock_guard held(ledger->mutex_);
            ledger->count(kind, Place::device, -bytes);
          }};
}

c10::DataPtr MemoryLedger::allocate_bytes(MemoryKind kind, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  c10::DataPtr memory;
  if (auto& kept = free_[bytes]; !kept.empty()) {
    order_streams(kept.back().behind, current_stream(device_));
    memory = std::move(kept.back().memory);
    kept.pop_back();
  } else {
    // Allocators ask for the current device.
    const c10::OptionalDeviceGuard on(device_.has_index() ? std::optional(device_) : std::nullopt);
    memory = c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(bytes));
  }
  return owned(std::move(memory), kind, Place::device, bytes, kind == MemoryKind::gathered);
}

// The group may wait for other ranks: not under the lock, which whoever frees a tensor takes.
c10::DataPtr MemoryLedger::allocate_bytes_of(Comm& group, Op op, MemoryKind kind, int64_t bytes) {
  c10::DataPtr memory = group.allocate(op, bytes, device_);
  if (!memory) return {};
  const std::lock_guard lock(mutex_);
  return owned(std::move(memory), kind, Place::device, bytes, /*is_kept=*/false);
}

// Under the lock.
c10::DataPtr MemoryLedger::owned(c10::DataPtr memory, MemoryKind kind, Place place, int64_t bytes, bool is_kept) {
  count(kind, place, bytes);
  void* data = memory.get();
  auto* block = new Block{shared_from_this(), std::move(memory), kind, place, bytes, is_kept};
  return {data, block, &free_block, device_};
}

void MemoryLedger::free_block(void* context) {
  auto* dead = static_cast<Block*>(context);
  const std::shared_ptr<MemoryLedger> ledger = dead->ledger;
  ledger->free(dead);
}

bool MemoryLedger::owns(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().get_deleter() == &free_block;
}

void MemoryLedger::free(Block* block) {
  const std::unique_ptr<Block> owned(block);
  const std::lock_guard lock(mutex_);
  count(block->kind, block->place, -block->bytes);
  try {
    use_here(block->memory);
  } catch (const c10::Error&) {  // the device failed, which its next call reports
  }
  if (!block->is_kept) return;
  auto& kept = free_[block->bytes];
  if (static_cast<int64_t>(kept.size()) < keep_free_) kept.push_back({std::move(block->memory), current_stream(device_)});
}

void MemoryLedger::count(MemoryKind kind, Place place, int64_t bytes) {
  add(place == Place::host ? use_.host : use_, kind, bytes);
  if (kind == MemoryKind::gathered) gathered_[std::abs(bytes)] += bytes > 0 ? 1 : bytes < 0 ? -1 : 0;
}

void MemoryLedger::drop_free() {
  const std::lock_guard lock(mutex_);
  free_.clear();
}

int64_t MemoryLedger::gathered_in_use(int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto found = gathered_.find(bytes);
  return found == gathered_.end() ? 0 : found->second;
}

MemoryUse MemoryLedger::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

void MemoryLedger::reset_peak() {
  const std::lock_guard lock(mutex_);
  forget_peaks(use_);
  forget_peaks(use_.host);
}

}  // namespace shardproof
