// A tree of C++ modules with the names and the parameters of a tree of Python modules: the same tensors. The library shards and
// cuts the mirror, and so what Python computes with. Python may give its modules other tensors and children at any time. So
// buffers are looked up anew whenever somebody wants them, and parameters must stay those that were mirrored.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "held.h"
#include "shardproof/nn/dropout.h"
#include "shardproof/nn/state_buffers.h"

namespace shardproof::python {

// The module of Python that an image stands for, as long as it lives.
struct StandsForPython : StandsForModules {
  ModuleBuffers present_buffers() const override;
  std::map<std::string, std::string> extra_state() const override;
  std::function<void()> reads_extra_state(const std::map<std::string, std::string>& entries) const override;

  py::object module() const;  // with Python's lock
  std::optional<Held> reference;  // a weak one
};

// Of shardproof.Dropout. Styles of tensor parallelism tell it which part of the whole tensor this rank has.
struct DropoutImage final : DropoutImpl, StandsForPython {
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
  // Throws Error, which names the first parameter that is not what it was when it was mirrored.
  void require_same_parameters() const;

  int64_t rank = 0;  // for messages

 private:
  std::shared_ptr<torch::nn::Module> reflect(const py::object& module);
  std::map<PyObject*, std::shared_ptr<torch::nn::Module>> images_;
  std::shared_ptr<torch::nn::Module> root_;
  std::map<std::string, const void*> parameters_;  // by name
  mutable std::vector<intptr_t> seen_;             // of the tree, when these were last compared with it
};

}  // namespace shardproof::python
