#include "shardproof/optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "sharded_state.h"
#include "shardproof/check.h"

namespace shardproof {
namespace {

std::vector<Bucket*> trainable_buckets(Sharded& sharded) {
  std::vector<Bucket*> buckets = sharded.state().schedule().buckets();
  std::erase_if(buckets, [](const Bucket* bucket) { return !bucket->trainable(); });
  return buckets;
}

}  // namespace

Optimizer::Optimizer(Sharded& sharded, std::unique_ptr<UpdateRule> rule) : sharded_(sharded), rule_(std::move(rule)) {
  SHARD_REQUIRE(rule_ != nullptr, "optimizer", "needs an update rule, got null");
  for (const Bucket* bucket : trainable_buckets(sharded_)) {
    std::vector<at::Tensor> slots;
    for (size_t i = 0; i < rule_->slots().size(); ++i)
      slots.push_back(at::zeros({bucket->layout().state().size()}, bucket->parameter().options()));
    state_.push_back(std::move(slots));
  }
}

void Optimizer::step() {
  Schedule& schedule = sharded_.state().schedule();
  schedule.require_final("Optimizer::step");
  const std::vector<Bucket*> buckets = trainable_buckets(sharded_);
  for (size_t b = 0; b < buckets.size(); ++b) {
    Bucket& bucket = *buckets[b];
    float* parameter = bucket.state_parameter().mutable_data_ptr<float>();
    const float* gradient = bucket.gradient().const_data_ptr<float>();
    for (const Segment& segment : bucket.layout().state().segments) {
      const auto count = static_cast<size_t>(segment.run.size());
      std::vector<std::span<float>> state;
      for (const at::Tensor& slot : state_[b]) state.emplace_back(slot.mutable_data_ptr<float>() + segment.local, count);
      rule_->update({parameter + segment.local, count}, {gradient + segment.local, count}, state, schedule.step() + 1);
    }
    bucket.publish();
  }
  schedule.parameters_changed();
}

std::vector<Piece> Optimizer::state(const std::string& slot) const {
  const std::vector<std::string> names = rule_->slots();
  const auto found = std::find(names.begin(), names.end(), slot);
  SHARD_REQUIRE(found != names.end(), "optimizer", "no state called '{}': there are {}", slot, fmt::join(names, ", "));
  std::vector<Piece> pieces;
  const std::vector<Bucket*> buckets = trainable_buckets(sharded_);
  for (size_t b = 0; b < buckets.size(); ++b)
    append_pieces(buckets[b]->layout(), buckets[b]->layout().state(), state_[b][found - names.begin()], pieces);
  return pieces;
}

}  // namespace shardproof
