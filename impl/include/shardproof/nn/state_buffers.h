// Which buffers of a module are state, so that checkpoints hold them and a transfer moves them. In PyTorch those are the
// persistent ones, which state_dict has. LibTorch's register_buffer knows no others, so a module says here which are not.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

namespace shardproof {

// For modules with buffers that are no state, such as tables that the constructor computes.
class HasTransientBuffers {
 public:
  virtual ~HasTransientBuffers() = default;
  // `buffer`: its name within this module, without dots. Buffers of modules that are no HasTransientBuffers are state.
  virtual bool is_transient(const std::string& buffer) const = 0;
};

struct ModuleBuffers {
  std::map<std::string, at::Tensor> state;      // by name, as named_buffers has them
  std::map<std::string, at::Tensor> transient;  // the others
};
ModuleBuffers buffers_of(const torch::nn::Module& module);

}  // namespace shardproof
