#include "sharding/storage.h"

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>

#include "shardproof/base/check.h"

namespace shardproof {

void release_storage(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(0);
}

void restore_storage(const at::Tensor& tensor, MemoryLedger& memory, MemoryKind kind, Comm* group) {
  SHARD_CHECK(storage_is_released(tensor), "storage", "restoring a storage of {} bytes that was never released",
              tensor.storage().nbytes());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  c10::DataPtr data;
  if (group) data = memory.allocate_bytes_of(*group, Op::all_gather, kind, bytes);
  if (!data) data = memory.allocate_bytes(kind, bytes);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(static_cast<size_t>(bytes));
}

at::Tensor without_memory(int64_t numel, at::ScalarType dtype, c10::Device device) {
  const auto bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                       /*resizable=*/false);
  return tensor_of(std::move(storage), {numel}, dtype, device);
}

at::Tensor unreadable(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device, const std::string& message) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size_t{0},
                                                       c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                                                       /*resizable=*/false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  // As large as it says: views can be taken, and it is the read that fails, with the message.
  storage->set_nbytes(static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype));
  return tensor_of(c10::Storage(std::move(storage)), sizes, dtype, device);
}

bool storage_is_released(const at::Tensor& tensor) { return tensor.storage().nbytes() == 0; }

// set_data looks for what autograd has to forget when a dtype or a device changes. Here neither does.
void point_at(const at::Tensor& parameter, const at::Tensor& data) {
  c10::TensorImpl* impl = parameter.unsafeGetTensorImpl();
  const bool stays = parameter.scalar_type() == data.scalar_type() && parameter.device() == data.device();
  if (stays && impl->has_compatible_shallow_copy_type(data.key_set())) return impl->shallow_copy_from(data.getIntrusivePtr());
  parameter.set_data(data);
}

}  // namespace shardproof
