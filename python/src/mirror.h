// A tree of C++ modules with the names, the parameters and the buffers of a tree of Python modules: the same tensors. The
// library shards and cuts the mirror, and so what Python computes with.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <set>
#include <string>

#include "held.h"
#include "shardproof/nn/dropout.h"
#include "shardproof/nn/state_buffers.h"

namespace shardproof::python {

// What Python says of the buffers that were registered with persistent=False.
struct BuffersOfPython : HasTransientBuffers {
  bool is_transient(const std::string& buffer) const override { return transient.contains(buffer); }
  std::set<std::string> transient;
};

// Of shardproof.Dropout. Styles of tensor parallelism tell it which part of the whole tensor this rank has.
struct DropoutImage final : DropoutImpl, BuffersOfPython {
  DropoutImage() : DropoutImpl(0) {}
  // Python may change the probability at any time.
  at::Tensor run(const at::Tensor& input, double probability, bool training) const;
};

class Mirror {
 public:
  // Of torch.nn.Module objects, which have to live as long as this.
  explicit Mirror(const py::object& module);

  const std::shared_ptr<torch::nn::Module>& root() const { return root_; }
  // Throws Error, naming its type, when the module is not below the root.
  std::shared_ptr<torch::nn::Module> find(const py::object& module) const;

 private:
  std::shared_ptr<torch::nn::Module> reflect(const py::object& module);
  std::map<PyObject*, std::shared_ptr<torch::nn::Module>> images_;
  std::shared_ptr<torch::nn::Module> root_;
};

}  // namespace shardproof::python
