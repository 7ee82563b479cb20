#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include "internal/hooks/attachments.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

using torch::nn::AnyModule;

// Stands in a Sequential's list for a child that is a unit; the Sequential's children stay as registered.
class EntryImpl final : public torch::nn::Module {
 public:
  explicit EntryImpl(AnyModule child) : child_(std::move(child)) {}
  at::Tensor forward(at::Tensor input) {
    return call_as(*child_.ptr(), [this](at::Tensor value) { return run(std::move(value)); }, std::move(input));
  }

 private:
  at::Tensor run(at::Tensor value) {
    try {
      return child_.forward(std::move(value));
    } catch (const c10::Error& error) {
      if (std::string(error.what_without_backtrace()).find("to be of type") == std::string::npos) throw;
      throw Error(fmt::format("[unit] a unit in a Sequential must take one tensor and return one; module {} does not: {}",
                              child_.ptr()->name(), error.what_without_backtrace()));
    }
  }
  AnyModule child_;
};

}  // namespace

struct SequentialEntries::Replaced {
  std::shared_ptr<torch::nn::Module> parent;
  int64_t index;
  AnyModule original;
};

SequentialEntries::SequentialEntries(torch::nn::Module& root) {
  for (const std::shared_ptr<torch::nn::Module>& module : root.modules(/*include_self=*/true)) {
    auto* sequential = module->as<torch::nn::SequentialImpl>();
    if (!sequential) continue;
    int64_t index = 0;
    for (AnyModule& child : *sequential) {
      if (unit_hooks(*child.ptr()) || parallel_hooks(*child.ptr()) || adapter_hooks(*child.ptr())) {
        replaced_.push_back({module, index, child});
        child = AnyModule(std::make_shared<EntryImpl>(child));
      }
      ++index;
    }
  }
}

SequentialEntries::~SequentialEntries() {
  for (Replaced& replaced : replaced_)
    *(replaced.parent->as<torch::nn::SequentialImpl>()->begin() + replaced.index) = std::move(replaced.original);
}

}  // namespace shardproof
