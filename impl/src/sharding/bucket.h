// The memory of one bucket: parameters of one unit, one dtype, one requires-grad state at first, in one flat buffer that
// modules see views of. Where the parameters live and how far their gradient is are states of their own, and classes of their
// own; a bucket is the two of them.
#pragma once

#include "sharding/bucket_gradient.h"
#include "sharding/bucket_parameters.h"
#include "sharding/bucket_part.h"

namespace shardproof {

class Bucket {
 private:
  const BucketContext context_;

 public:
  // Copies the parameters' values into buffers, or fills those of meta parameters; see BucketParameters. Collective.
  Bucket(BucketContext context, const Initializer& initialize)
      : context_(std::move(context)), parameters(context_, initialize), gradient(context_) {}
  Bucket(const Bucket&) = delete;

  const Strategy& strategy() const { return context_.strategy; }
  const std::shared_ptr<MeshComm>& comms() const { return context_.comms; }
  const BucketLayout& layout() const { return context_.layout; }
  const BucketRules& rules() const { return context_.rules; }
  const std::vector<at::Tensor>& views() const { return context_.views; }

  // Whether any parameter requires a gradient now; they may be frozen and thawed between steps, the same on every rank.
  bool trainable() const;
  bool trains(int64_t member) const { return views()[member].requires_grad(); }
  bool trains(const std::string& parameter) const;

  BucketParameters parameters;
  BucketGradient gradient;
};

}  // namespace shardproof
