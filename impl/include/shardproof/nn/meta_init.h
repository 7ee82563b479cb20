// Builds a model without memory. While a MetaInit lives, tensors that this thread makes on the CPU are on the meta device
// instead, so they have sizes and no values. Sharding such a model allocates only what this rank owns, and fills it with
// ShardOptions::initialize.
//
//   std::shared_ptr<Gpt> model;
//   { MetaInit meta; model = ...; }
//   fully_shard(model, comms, {.initialize = normal_initializer(seed), .broadcast_initial_values = false});
//
// Law: on every mesh the parameters have the bits of `initialize_parameters` on the unsharded model with the same seed.
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

// For modules that register buffers. Meta tensors do not keep the values of buffers, so the module computes them again here.
// fully_shard calls reset_buffers on every rank when one of the module's buffers is on the meta device. It must give the
// buffers memory and values and keep their sizes; set_data works.
class HasBuffers {
 public:
  virtual ~HasBuffers() = default;
  virtual void reset_buffers() = 0;
};

// Gives a meta tensor memory on the device. Its values are undefined then. It stays the same tensor for everyone who holds it.
void materialize(const at::Tensor& tensor, c10::Device device = at::kCPU);

}  // namespace shardproof
