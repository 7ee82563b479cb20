#include "storage.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include "shardproof/check.h"

namespace shardproof {

void release_storage(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(0);
}

void restore_storage(const at::Tensor& tensor) {
  SHARD_CHECK(storage_is_released(tensor), "storage", "restoring a storage of {} bytes that was never released",
              tensor.storage().nbytes());
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = tensor.nbytes();
  storage->set_data_ptr_noswap(c10::GetAllocator(tensor.device().type())->allocate(bytes));
  storage->set_nbytes(bytes);
}

bool storage_is_released(const at::Tensor& tensor) { return tensor.storage().nbytes() == 0; }

}  // namespace shardproof
