// A group that a node of the autograd graph needs in its backward, and keeps alive until then.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>

#include "shardproof/comm/comm.h"

namespace shardproof {

struct KeptGroup : torch::CustomClassHolder {
  explicit KeptGroup(std::shared_ptr<Comm> its_group) : group(std::move(its_group)) {}
  std::shared_ptr<Comm> group;
};

inline void keep_group(torch::autograd::AutogradContext* ctx, Comm& group) {
  ctx->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<KeptGroup>(group.shared()));
}

inline Comm& group_in(torch::autograd::AutogradContext* ctx) {
  return *c10::static_intrusive_pointer_cast<KeptGroup>(ctx->saved_data["group"].toCapsule())->group;
}

}  // namespace shardproof
