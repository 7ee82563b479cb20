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
  if (const auto* stands = dynamic_cast<const StandsForModules*>(&module)) return stands->present_buffers();
  ModuleBuffers buffers;
  collect(module, "", buffers);
  return buffers;
}

std::map<std::string, std::string> extra_state_of(const torch::nn::Module& module) {
  const auto* stands = dynamic_cast<const StandsForModules*>(&module);
  return stands ? stands->extra_state() : std::map<std::string, std::string>();
}

std::function<void()> reads_extra_state(const torch::nn::Module& module, const std::map<std::string, std::string>& entries) {
  const auto* stands = dynamic_cast<const StandsForModules*>(&module);
  return stands && !entries.empty() ? stands->reads_extra_state(entries) : [] {};
}

}  // namespace shardproof
