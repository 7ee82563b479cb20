// The hidden child module through which `call` finds a module's hooks.
#pragma once

#include <torch/nn/module.h>

#include "shardproof/unit.h"

namespace shardproof {

inline constexpr const char* kAttachmentName = "shardproof_unit";

class UnitAttachment final : public torch::nn::Module {
 public:
  explicit UnitAttachment(UnitHooks& hooks) : hooks_(hooks) {}
  UnitHooks* hooks() const { return &hooks_; }

 private:
  UnitHooks& hooks_;
};

// The hooks must outlive the attachment.
void attach_hooks(torch::nn::Module& module, UnitHooks& hooks);
void detach_hooks(torch::nn::Module& module);

}  // namespace shardproof
