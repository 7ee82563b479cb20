// What the two halves of a bucket, its parameters and its gradient, see alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sharding/bucket_layout.h"
#include "sharding/bucket_rules.h"
#include "sharding/late_checks.h"
#include "sharding/memory_ledger.h"
#include "shardproof/comm/mesh_comm.h"
#include "internal/device/host_transfers.h"

namespace shardproof {

// Where the run is, which all ranks must agree on: a part of what each collective of a bucket says it is for (CallLabel).
struct Progress {
  int64_t steps = 0;  // that are over
  std::string last;   // what was done in the last of them, e.g. " after clip_gradients(1, 2); AdamW(lr=0.1)"
};

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
  std::shared_ptr<const Progress> progress;
  std::shared_ptr<LateChecks> checks;
};

// One half of a bucket. The context outlives it.
class BucketPart {
 protected:
  // `holds` is for messages: parameter, gradient.
  BucketPart(const BucketContext& context, const char* holds);

  const std::string& first_name() const { return layout_.members().front().name; }
  at::TensorOptions options(at::ScalarType dtype) const;                        // where the bucket is
  Place place() const { return rules_.offload ? Place::host : Place::device; }  // of what the optimizer works on
  // "step 3, gather of h.3.weight": what a collective is for, besides the unit.
  std::string occasion(std::string_view what) const;
  // What lies in the buffer that units compute in, as it lies in the bucket: the same memory unless it is interleaved.
  at::Tensor packed(const at::Tensor& compute, MemoryKind kind) const;
  // Throws Error when the padding in `local`, which `view` describes, is not zero; of a device where its answers are read.
  void check_padding(const LocalView& view, const at::Tensor& local, const char* what) const;

  const std::string& label_;
  const std::vector<at::Tensor>& views_;
  const BucketLayout& layout_;
  const std::shared_ptr<MeshComm>& comms_;
  const std::shared_ptr<MemoryLedger>& memory_;
  const std::shared_ptr<HostTransfers>& transfers_;
  const BucketRules& rules_;
  const std::shared_ptr<const Progress>& progress_;
  const std::shared_ptr<LateChecks>& checks_;

 private:
  const size_t padding_;  // its slot among the checks
};

}  // namespace shardproof
