#include "sharding/delayed_gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "shardproof/base/check.h"
#include "internal/device/streams.h"

namespace shardproof {

bool DelayedGradients::keep(const Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x, Make make) {
  if (MemoryLedger::owns(dy) || MemoryLedger::owns(x)) return false;
  const int64_t more = bytes_to_hold(dy) + (dy.is_alias_of(x) ? 0 : bytes_to_hold(x));
  if (bytes_ + more > bytes_max_) return false;
  hold(dy);
  hold(x);
  products_.push_back({&bucket, member, Kept(dy), Kept(x), std::move(make), current_stream(x.device())});
  return true;
}

int64_t DelayedGradients::bytes_to_hold(const at::Tensor& tensor) const {
  const at::Storage& storage = tensor.storage();
  return storages_.contains(storage.unsafeGetStorageImpl()) ? 0 : static_cast<int64_t>(storage.nbytes());
}

void DelayedGradients::hold(const at::Tensor& tensor) {
  const int64_t bytes = bytes_to_hold(tensor);
  Held& held = storages_[tensor.storage().unsafeGetStorageImpl()];
  if (held.uses++ > 0) return;
  held.bytes = bytes;
  held.counted = memory_->counted(MemoryKind::activation, bytes);
  bytes_ += bytes;
}

void DelayedGradients::release(const Product& product) {
  for (const at::Tensor& tensor : {product.dy.value, product.x.value}) {
    const auto storage = storages_.find(tensor.storage().unsafeGetStorageImpl());
    if (--storage->second.uses > 0) continue;
    bytes_ -= storage->second.bytes;
    storages_.erase(storage);
  }
}

void DelayedGradients::make(const Bucket& bucket, int64_t member) {
  const auto product =
      std::ranges::find_if(products_, [&](const Product& each) { return each.bucket == &bucket && each.member == member; });
  if (product != products_.end()) make(product);
}

void DelayedGradients::make_all() {
  while (!products_.empty()) make(products_.begin());
}

// Whatever fails, it is not made a second time.
void DelayedGradients::make(std::list<Product>::iterator kept) {
  std::list<Product> one;
  one.splice(one.begin(), products_, kept);
  const Product& product = one.front();
  const std::shared_ptr<void> released(nullptr, [&](void*) { release(product); });
  for (const Kept& tensor : {product.dy, product.x})
    SHARD_REQUIRE(
        tensor.value._version() == tensor.version, "unit",
        "the gradient of {} was delayed, and a tensor that it is made of was written in place in the meantime. Write a "
        "copy of it (x.clone()), or set delayed_gradient_bytes_max to 0",
        product.bucket->layout().members()[product.member].name);
  const at::NoGradGuard no_grad;
  const OnStream on(product.stream);
  product.make(product.dy.value, product.x.value);
}

void DelayedGradients::drop() {
  products_.clear();
  storages_.clear();
  bytes_ = 0;
}

}  // namespace shardproof
