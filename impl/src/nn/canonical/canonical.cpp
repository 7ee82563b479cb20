#include "shardproof/nn/canonical/canonical.h"

#include <typeinfo>

#include "shardproof/base/check.h"

namespace shardproof {

void use_canonical_arithmetic(torch::nn::Module& root) {
  bool any = false;
  for (const auto& item : root.named_modules("", /*include_self=*/true)) {
    torch::nn::Module& module = *item.value();
    auto* part = dynamic_cast<CanonicalPart*>(&module);
    // A plain Module computes nothing; it only spells names.
    const bool computes = typeid(module) != typeid(torch::nn::Module) && !module.parameters(/*recurse=*/false).empty();
    SHARD_REQUIRE(part || !computes, "canonical",
                  "module '{}' ({}) has parameters and does not know canonical arithmetic. Use the layers of models.h, or "
                  "derive it from CanonicalPart and write it with the operations of canonical.h",
                  item.key(), module.name());
    if (!part) continue;
    part->use_canonical(item.key().empty() ? module.name() : item.key());
    any = true;
  }
  SHARD_REQUIRE(any, "canonical", "module {} has nothing below it that knows canonical arithmetic; see models.h", root.name());
}

bool uses_canonical_arithmetic(const torch::nn::Module& root) {
  for (const auto& item : root.named_modules("", /*include_self=*/true)) {
    const auto* part = dynamic_cast<const CanonicalPart*>(item.value().get());
    if (part && part->is_canonical()) return true;
  }
  return false;
}

}  // namespace shardproof
