// What the two halves of a bucket, its parameters and its gradient, see alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "sharding/bucket_layout.h"
#include "sharding/bucket_rules.h"
#include "sharding/memory_ledger.h"
#include "shardproof/comm/mesh_comm.h"
#include "testing/device/host_transfers.h"

namespace shardproof {

// What a bucket is made from. It does not change afterwards.
struct BucketContext {
  std::string label;              // of its unit: messages, and a backend's errors and records, name it
  std::vector<at::Tensor> views;  // the module's parameters
  Strategy strategy;  // of the unit, on the mesh of `comms`
  BucketLayout layout;
  std::shared_ptr<MeshComm> comms;
  std::shared_ptr<MemoryLedger> memory;
  std::shared_ptr<HostTransfers> transfers;  // serves all buckets of a rank
  BucketRules rules;
};

// One half of a bucket. The context outlives it.
class BucketPart {
 protected:
  explicit BucketPart(const BucketContext& context)
      : label_(context.label),
        views_(context.views),
        layout_(context.layout),
        comms_(context.comms),
        memory_(context.memory),
        transfers_(context.transfers),
        rules_(context.rules) {}

  const std::string& first_name() const { return layout_.members().front().name; }
  at::TensorOptions options(at::ScalarType dtype) const;                        // where the bucket is
  Place place() const { return rules_.offload ? Place::host : Place::device; }  // of what the optimizer works on
  // Throws Error when the padding in `local`, which `view` describes, is not zero.
  void check_padding(const LocalView& view, const at::Tensor& local, const char* what) const;

  const std::string& label_;
  const std::vector<at::Tensor>& views_;
  const BucketLayout& layout_;
  const std::shared_ptr<MeshComm>& comms_;
  const std::shared_ptr<MemoryLedger>& memory_;
  const std::shared_ptr<HostTransfers>& transfers_;
  const BucketRules& rules_;
};

}  // namespace shardproof
