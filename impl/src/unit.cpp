#include "shardproof/unit.h"

#include "unit_attachment.h"

namespace shardproof {

// A module keeps its hooks in a hidden child, so that nothing global maps modules to units and a copy of the module's
// pointer is enough to find them.
UnitHooks* unit_hooks(const torch::nn::Module& module) {
  for (const auto& child : module.named_children())
    if (child.key() == kAttachmentName) return static_cast<const UnitAttachment&>(*child.value()).hooks();
  return nullptr;
}

void attach_hooks(torch::nn::Module& module, UnitHooks& hooks) {
  module.register_module(kAttachmentName, std::make_shared<UnitAttachment>(hooks));
}

void detach_hooks(torch::nn::Module& module) { module.unregister_module(kAttachmentName); }

}  // namespace shardproof
