#include "sharding/bucket.h"

namespace shardproof {

bool Bucket::trainable() const {
  for (const at::Tensor& view : views())
    if (view.requires_grad()) return true;
  return false;
}

bool Bucket::all_train() const {
  for (const at::Tensor& view : views())
    if (!view.requires_grad()) return false;
  return true;
}

}  // namespace shardproof
