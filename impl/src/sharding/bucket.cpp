#include "sharding/bucket.h"

#include <algorithm>

namespace shardproof {

bool Bucket::trainable() const {
  for (const at::Tensor& view : views())
    if (view.requires_grad()) return true;
  return false;
}

bool Bucket::trains(const std::string& parameter) const {
  const auto& slots = layout().slots();
  return trains(std::find_if(slots.begin(), slots.end(), [&](const Slot& slot) { return slot.name == parameter; }) -
                slots.begin());
}

bool Bucket::all_train() const {
  for (const at::Tensor& view : views())
    if (!view.requires_grad()) return false;
  return true;
}

}  // namespace shardproof
