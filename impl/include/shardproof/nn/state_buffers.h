// Which buffers of a module are state, so that checkpoints hold them and a transfer moves them. In PyTorch those are the
// persistent ones, which state_dict has. LibTorch's register_buffer knows no others, so a module says here which are not.
#pragma once

#include <torch/nn/module.h>

#include <functional>
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

// For a module that stands for a tree of modules elsewhere, such as Python's. These may get other buffers at any time, so they
// are asked whenever somebody wants them.
class StandsForModules {
 public:
  virtual ~StandsForModules() = default;
  virtual ModuleBuffers present_buffers() const = 0;
  // What they keep beside tensors, by name, as bytes that only `reads_extra_state` understands.
  virtual std::map<std::string, std::string> extra_state() const = 0;
  // Looks at such bytes, and returns what puts them into place. Throws when it cannot read them, before anything is changed.
  virtual std::function<void()> reads_extra_state(const std::map<std::string, std::string>& entries) const = 0;
};
// Empty where the module stands for none.
std::map<std::string, std::string> extra_state_of(const torch::nn::Module& module);
std::function<void()> reads_extra_state(const torch::nn::Module& module, const std::map<std::string, std::string>& entries);

}  // namespace shardproof
