#include "shardproof/sharding/hand_over.h"

#include <ATen/ATen.h>

#include <set>

#include "sharding/sharded_impl.h"
#include "internal/base/call_label.h"

namespace shardproof {
namespace {

std::vector<Shard> held(const Sharded& sharded, Sharded::Impl::Kind kind) {
  std::vector<Shard> shards = sharded.impl().shards(kind);
  std::erase_if(shards, [](const Shard& shard) { return shard.data.numel() == 0; });
  return shards;
}

}  // namespace

std::vector<Shard> main_shards(const Sharded& sharded) { return held(sharded, Sharded::Impl::Kind::main); }
std::vector<Shard> gradient_shards(const Sharded& sharded) {
  sharded.impl().checks->read(&sharded.impl().comms->world());
  return held(sharded, Sharded::Impl::Kind::gradient);
}

HandedGradients hand_over_gradients(Sharded& sharded) {
  Sharded::Impl& state = sharded.impl();
  state.schedule.require_no_backward("hand_over_gradients");
  std::vector<std::pair<Bucket*, size_t>> trained;
  for (Bucket* bucket : state.schedule.buckets())
    for (size_t member = 0; bucket->gradient.final() && member < bucket->views().size(); ++member)
      if (bucket->views()[member].requires_grad()) trained.emplace_back(bucket, member);
  at::Tensor reached = at::zeros({std::ssize(trained)}, at::kLong);
  auto* marks = reached.mutable_data_ptr<int64_t>();
  for (const auto& [bucket, member] : trained) *marks++ = bucket->gradient.was_reached(member);
  if (reached.numel() > 0) {
    const CallLabel label("which parameters a backward has reached");
    state.comms->world().all_reduce(reached, Reduce::max).wait();
  }
  HandedGradients handed;
  std::set<std::string> used;
  for (size_t i = 0; i < trained.size(); ++i) {
    if (reached[static_cast<int64_t>(i)].item<int64_t>() == 0) continue;
    const auto& [bucket, member] = trained[i];
    handed.used.push_back(bucket->layout().members()[member].name);
    used.insert(handed.used.back());
  }
  for (Shard& shard : gradient_shards(sharded))
    if (used.contains(shard.name)) handed.shards.push_back(std::move(shard));
  for (Bucket* bucket : state.schedule.buckets())
    if (bucket->gradient.final()) bucket->gradient.zero_gradients();
  state.schedule.note_taken("the .grad of its parameters");
  state.tokens = 0;
  return handed;
}

void end_updated_step(Sharded& sharded, const std::string& done) {
  sharded.impl().schedule.note(done);
  sharded.main_parameters_changed();
  sharded.impl().schedule.begin_next_step();
}

void watch_backwards(Sharded& sharded, std::function<void(bool begins)> told) {
  sharded.impl().schedule.set_watcher(std::move(told));
}

}  // namespace shardproof
