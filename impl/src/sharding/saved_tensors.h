// Who keeps what autograd saves for backwards.
//
// LibTorch lets a program pack what autograd saves (torch/csrc/autograd/saved_variable_hooks.h), but asks Python which hooks
// apply. Its engine is the one that is asked, and it may be replaced. So here is an engine that asks the keeper of the thread,
// and leaves everything else to the engine that was there before, which is Python's in a process of Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <string>

namespace shardproof {

// A tensor as it was when autograd saved it. It has the same memory, without a graph.
struct SavedTensor {
  explicit SavedTensor(const at::Tensor& tensor);
  bool is_changed() const { return source._version() != version; }

  at::Tensor source;
  int64_t version;
};

// Throws Error, naming the unit whose forward had saved it, if a tensor was written to since.
void require_unchanged(bool is_changed, const std::string& unit);

class SavedTensorKeeper {
 public:
  virtual ~SavedTensorKeeper() = default;
  // For the next tensor that autograd saves on this thread. Null: autograd keeps it itself.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

// Of this thread; expired: autograd keeps everything itself. Hooks that Python has set come first.
std::weak_ptr<SavedTensorKeeper>& saved_tensor_keeper();

// From now on keepers are asked, until somebody else replaces the engine, as Python does when it is imported.
void ask_saved_tensor_keepers();

}  // namespace shardproof
