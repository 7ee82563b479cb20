#include "shardproof/hooks/unit.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "internal/hooks/attachments.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

// By address, so that a module's children, names and copies stay what they were. Rank-threads share it.
template <class Hooks>
class Attachments {
 public:
  static Attachments& all() {
    static Attachments one;
    return one;
  }

  Hooks* find(const torch::nn::Module& module) {
    if (count_.load(std::memory_order_relaxed) == 0) return nullptr;
    const std::shared_lock lock(mutex_);
    const auto found = hooks_.find(&module);
    return found == hooks_.end() ? nullptr : found->second;
  }

  void add(const torch::nn::Module& module, Hooks& hooks) {
    const std::unique_lock lock(mutex_);
    const bool is_new = hooks_.emplace(&module, &hooks).second;
    SHARD_CHECK(is_new, "unit", "module {} has hooks already", module.name());
    ++count_;
  }

  void remove(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
    const std::unique_lock lock(mutex_);
    for (const auto& module : modules) count_ -= static_cast<int64_t>(hooks_.erase(module.get()));
  }

 private:
  std::atomic<int64_t> count_{0};
  std::shared_mutex mutex_;
  std::unordered_map<const torch::nn::Module*, Hooks*> hooks_;
};

}  // namespace

UnitHooks* unit_hooks(const torch::nn::Module& module) { return Attachments<UnitHooks>::all().find(module); }
ParallelHooks* parallel_hooks(const torch::nn::Module& module) { return Attachments<ParallelHooks>::all().find(module); }
AdapterHooks* adapter_hooks(const torch::nn::Module& module) { return Attachments<AdapterHooks>::all().find(module); }

void UnitAttachments::attach(std::shared_ptr<torch::nn::Module> module, UnitHooks& hooks) {
  Attachments<UnitHooks>::all().add(*module, hooks);
  modules_.push_back(std::move(module));
}
UnitAttachments::~UnitAttachments() { Attachments<UnitHooks>::all().remove(modules_); }

template <class Hooks>
void OwnedAttachments<Hooks>::attach(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Hooks> hooks) {
  Attachments<Hooks>::all().add(*module, *hooks);
  modules_.push_back(std::move(module));
  hooks_.push_back(std::move(hooks));
}
template <class Hooks>
OwnedAttachments<Hooks>::~OwnedAttachments() {
  Attachments<Hooks>::all().remove(modules_);
}
template class OwnedAttachments<ParallelHooks>;
template class OwnedAttachments<AdapterHooks>;

void detail::refuse_parallel_call(const torch::nn::Module& module) {
  throw Error(
      fmt::format("[tensor_parallel] module {} has a style and is called with something else than one tensor for one tensor; "
                  "give the style to "
                  "its parts",
                  module.name()));
}

void detail::refuse_adapted_call(const torch::nn::Module& module) {
  throw Error(
      fmt::format("[unit] module {} has an adapter and is called with something else than one tensor for one tensor. Give the "
                  "adapter to its parts",
                  module.name()));
}

}  // namespace shardproof
