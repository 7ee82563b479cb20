#include "shardproof/hooks/module_watch.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <map>

#include "internal/hooks/attachments.h"
#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"

namespace shardproof {

struct ModuleWatch::State {
  std::function<std::string()> note;
  std::shared_ptr<std::vector<ModuleCall>> calls = std::make_shared<std::vector<ModuleCall>>();
  std::map<std::string, int64_t> numbers;  // calls so far of each module
  bool backward = false;
  AdapterAttachments attached;  // the last member, so that nobody is called any more when the others go
};

namespace {

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().clone();
}

class Watcher final : public AdapterHooks {
 public:
  Watcher(ModuleWatch::State& state, std::string name, torch::nn::Module& module)
      : state_(state), name_(std::move(name)), module_(module) {}

  at::Tensor add_to(const at::Tensor& output, const at::Tensor& input) override {
    if (state_.backward) return output;  // it is computed again
    const size_t index = state_.calls->size();
    see(output, input);
    if (output.requires_grad())
      output.register_hook(
          [calls = state_.calls, index](const at::Tensor& gradient) { calls->at(index).output_gradient = copy_of(gradient); });
    return output;
  }
  std::shared_ptr<void> held() const override { return nullptr; }
  bool only_looks() const override { return true; }

 private:
  void see(const at::Tensor& output, const at::Tensor& input) {
    ModuleCall call{.module = name_, .number = state_.numbers[name_]++, .input = copy_of(input), .output = copy_of(output)};
    for (const auto& item : module_.named_parameters(/*recurse=*/false))
      call.parameters.emplace_back(name_ + "." + item.key(), copy_of(item.value()));
    if (state_.note) call.note = state_.note();
    state_.calls->push_back(std::move(call));
  }

  ModuleWatch::State& state_;  // which owns this
  std::string name_;
  torch::nn::Module& module_;
};

}  // namespace

ModuleWatch::ModuleWatch(torch::nn::Module& root, std::function<std::string()> note) : state_(std::make_shared<State>()) {
  state_->note = std::move(note);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (item.value()->named_parameters(/*recurse=*/false).is_empty()) continue;
    AdapterHooks* const adapter = adapter_hooks(*item.value());
    SHARD_REQUIRE(!dynamic_cast<Watcher*>(adapter), "module_watch", "module '{}' is watched already", item.key());
    if (adapter) continue;
    state_->attached.attach(item.value(), std::make_shared<Watcher>(*state_, item.key(), *item.value()));
  }
}
ModuleWatch::~ModuleWatch() = default;

void ModuleWatch::begin() {
  state_->calls = std::make_shared<std::vector<ModuleCall>>();
  state_->numbers.clear();
  state_->backward = false;
}

void ModuleWatch::begin_backward() {
  state_->backward = true;
}

const std::vector<ModuleCall>& ModuleWatch::calls() const {
  return *state_->calls;
}

}  // namespace shardproof
