// The memory of one bucket: parameters of one unit, one dtype, one requires-grad state at first, in one flat buffer that
// modules see views of. Where the parameters live and how far their gradient is are states of their own, and classes of their
// own; a bucket is the two of them.
#pragma once

#include "sharding/bucket_gradient.h"
#include "sharding/bucket_parameters.h"
#include "sharding/bucket_part.h"

namespace shardproof {

// What the optimizer of this rank works on of one parameter. Buffers of main parameters, of final gradients and of the
// optimizer's state are laid out alike.
struct OwnPart {
  const BucketParameter* parameter;    // of the bucket's layout
  int64_t member = 0;                  // its number there
  Placement at;                        // of the parameter in such a buffer, on all ranks
  Interval local;                      // where this rank's part begins and ends there; empty where it has none
  std::vector<Interval> first_copies;  // of it, what counts where each element of the model that is trained is to count once

  at::Tensor of(const at::Tensor& buffer) const { return buffer.narrow(0, local.begin, local.size()); }
};

class Bucket {
 private:
  const BucketContext context_;

 public:
  // Copies the parameters' values into buffers, or fills those of meta parameters; see BucketParameters. Collective.
  Bucket(BucketContext context, const Initializer& initialize);
  Bucket(const Bucket&) = delete;

  const Strategy& strategy() const { return context_.strategy; }
  const std::shared_ptr<MeshComm>& comms() const { return context_.comms; }
  const BucketLayout& layout() const { return context_.layout; }
  const BucketRules& rules() const { return context_.rules; }
  const std::vector<at::Tensor>& views() const { return context_.views; }
  // One of every parameter, by offset.
  const std::vector<OwnPart>& parts() const { return parts_; }
  const OwnPart& part(int64_t member) const;
  // All of a buffer that parts lie in.
  std::vector<Shard> shards(const at::Tensor& buffer) const;

  // Whether any parameter requires a gradient now; they may be frozen and thawed between steps, the same on every rank.
  bool trainable() const;
  bool trains(int64_t member) const { return views()[member].requires_grad(); }
  bool trains(const std::string& parameter) const;

  BucketParameters parameters;
  BucketGradient gradient;

 private:
  const std::vector<OwnPart> parts_;
};

}  // namespace shardproof
