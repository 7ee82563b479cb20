#include "shardproof/unit.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "shardproof/check.h"
#include "unit_attachment.h"

namespace shardproof {
namespace {

// By address, so that a module's children, names and copies stay what they were. Rank-threads share it.
struct Attachments {
  std::atomic<int64_t> count{0};
  std::shared_mutex mutex;
  std::unordered_map<const torch::nn::Module*, UnitHooks*> hooks;
};
Attachments& attachments() {
  static Attachments all;
  return all;
}

}  // namespace

UnitHooks* unit_hooks(const torch::nn::Module& module) {
  Attachments& all = attachments();
  if (all.count.load(std::memory_order_relaxed) == 0) return nullptr;
  const std::shared_lock lock(all.mutex);
  const auto found = all.hooks.find(&module);
  return found == all.hooks.end() ? nullptr : found->second;
}

void UnitAttachments::attach(std::shared_ptr<torch::nn::Module> module, UnitHooks& hooks) {
  Attachments& all = attachments();
  const std::unique_lock lock(all.mutex);
  const bool is_new = all.hooks.emplace(module.get(), &hooks).second;
  SHARD_CHECK(is_new, "unit", "module {} has hooks already", module->name());
  ++all.count;
  modules_.push_back(std::move(module));
}

UnitAttachments::~UnitAttachments() {
  Attachments& all = attachments();
  const std::unique_lock lock(all.mutex);
  for (const auto& module : modules_) all.count -= static_cast<int64_t>(all.hooks.erase(module.get()));
}

}  // namespace shardproof
