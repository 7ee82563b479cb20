#include "shardproof/nn/state_buffers.h"

namespace shardproof {
namespace {

void collect(const torch::nn::Module& module, const std::string& prefix, ModuleBuffers& buffers) {
  const auto* says = dynamic_cast<const HasTransientBuffers*>(&module);
  for (const auto& buffer : module.named_buffers(/*recurse=*/false))
    if (buffer.value().defined())
      (says && says->is_transient(buffer.key()) ? buffers.transient : buffers.state)[prefix + buffer.key()] = buffer.value();
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", buffers);
}

}  // namespace

ModuleBuffers buffers_of(const torch::nn::Module& module) {
  ModuleBuffers buffers;
  collect(module, "", buffers);
  return buffers;
}

}  // namespace shardproof
