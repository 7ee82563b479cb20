#include "sharding/bucket.h"

#include <algorithm>

namespace shardproof {

bool Bucket::trainable() const {
  for (const at::Tensor& view : views())
    if (view.requires_grad()) return true;
  return false;
}

bool Bucket::trains(const std::string& parameter) const {
  const auto& members = layout().members();
  return trains(
      std::find_if(members.begin(), members.end(), [&](const BucketParameter& member) { return member.name == parameter; }) -
      members.begin());
}

}  // namespace shardproof
