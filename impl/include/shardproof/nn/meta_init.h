// Building a model without memory. While a MetaInit lives, tensors that this thread makes on the CPU are on the meta device
// instead: they have sizes and no values. Sharding such a model allocates what a rank owns and nothing else, and fills it with
// ShardOptions::initialize.
//
//   std::shared_ptr<Gpt> model;
//   { MetaInit meta; model = ...; }
//   fully_shard(model, comms, {.initialize = normal_initializer(seed), .broadcast_initial_values = false});
//
// Law: the bits are those of `initialize_parameters` on the unsharded model with the same seed, whatever the mesh.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include "shardproof/nn/initialize.h"

namespace shardproof {

class MetaInit {
 public:
  MetaInit();
  ~MetaInit();
  MetaInit(const MetaInit&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

// Buffers have values too, which meta tensors do not keep: a module that registers buffers computes them here. Called by
// fully_shard, on every rank, when one of its buffers is on the meta device; it must give them the same sizes (set_data works).
class HasBuffers {
 public:
  virtual ~HasBuffers() = default;
  virtual void reset_buffers() = 0;
};

// Gives a meta tensor memory on the device, contents undefined, while it stays the same tensor to everyone who holds it.
void materialize(const at::Tensor& tensor, c10::Device device = at::kCPU);

}  // namespace shardproof
