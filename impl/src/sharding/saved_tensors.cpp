#include "sharding/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <mutex>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

using torch::autograd::Engine;
using torch::autograd::GraphTask;
using torch::autograd::SavedVariableHooks;
// What owns a node is a std::shared_ptr or a c10::intrusive_ptr, as the version of torch has it.
using NodePtr = decltype(torch::autograd::Edge::function);

// It runs nothing itself, so it has no threads.
class AskingEngine final : public Engine {
 public:
  explicit AskingEngine(Engine& before) : before_(before) {}

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (auto theirs = before_.get_default_saved_variable_hooks()) return theirs;
    const std::shared_ptr<SavedTensorKeeper> keeper = saved_tensor_keeper().lock();
    return keeper ? keeper->hooks() : nullptr;
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots, const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return before_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<GraphTask>& task, NodePtr root,
                                                                 torch::autograd::InputBuffer&& buffer) override {
    return before_.execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)  // since torch 2.15 or shortly before
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override {
    return before_.get_node_creation_hooks();
  }
#endif
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override { return before_.make_anomaly_metadata(); }
  void thread_on_exception(const std::shared_ptr<GraphTask>& task, const NodePtr& node, std::exception& error) override {
    before_.thread_on_exception(task, node, error);
  }

 private:
  Engine& before_;
};

std::atomic<Engine*> asking_engine = nullptr;

// It shares the counter of writes.
at::Tensor alias_of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_python_dispatch()) return tensor.detach();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

}  // namespace

SavedTensor::SavedTensor(const at::Tensor& tensor) : source(alias_of(tensor)), version(source._version()) {}

void require_unchanged(bool is_changed, const std::string& unit) {
  SHARD_REQUIRE(!is_changed, "unit",
                "the backward of {} needs a tensor that was written in place after its forward had saved it. Write a copy of "
                "it (x.clone()) instead",
                unit);
}

std::weak_ptr<SavedTensorKeeper>& saved_tensor_keeper() {
  thread_local std::weak_ptr<SavedTensorKeeper> keeper;
  return keeper;
}

void ask_saved_tensor_keepers() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Engine& current = Engine::get_default_engine();
  if (&current == asking_engine) return;  // Python, imported meanwhile, would have put its own there
  asking_engine = new AskingEngine(current);  // lives as long as LibTorch's own, which may be asked last
  torch::autograd::set_default_engine_stub([]() -> Engine& { return *asking_engine; });
}

}  // namespace shardproof
