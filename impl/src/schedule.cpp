#include "schedule.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "shardproof/check.h"

namespace shardproof {
namespace {

using torch::autograd::Variable;
using torch::autograd::variable_list;

// A bucket in reduction holds a whole unit's gradient; more of them at a time only costs memory.
constexpr size_t kReducesInFlightMax = 2;

// Hands a parameter's gradient to its bucket instead of leaving it in `.grad`, so the next backward's is fresh as well.
class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(Unit& unit, Bucket& bucket, int64_t slot) : unit_(unit), bucket_(bucket), slot_(slot) {}
  void operator()(const Variable& parameter) override {
    const at::Tensor gradient = parameter.grad();
    parameter.mutable_grad().reset();
    unit_.on_gradient(bucket_, slot_, gradient);
  }

 private:
  Unit& unit_;
  Bucket& bucket_;
  int64_t slot_;
};

// Identity on a unit's input. Its backward runs after every node of the unit on the way to that input.
class WatchInput final : public torch::autograd::Node {
 public:
  explicit WatchInput(Unit& unit) : unit_(unit) {}
  variable_list apply(variable_list&& gradients) override {
    unit_.on_input_gradient();
    return std::move(gradients);
  }
  std::string name() const override { return "ShardproofWatchInput"; }

 private:
  Unit& unit_;
};

}  // namespace

Unit::Unit(Schedule& schedule, std::string name, std::vector<std::unique_ptr<Bucket>> buckets, bool keeps_after_forward)
    : schedule_(schedule), name_(std::move(name)), buckets_(std::move(buckets)), keeps_after_forward_(keeps_after_forward) {
  for (const auto& bucket : buckets_) {
    if (!bucket->trainable()) continue;
    trainable_count_ += static_cast<int64_t>(bucket->views().size());
    for (size_t slot = 0; slot < bucket->views().size(); ++slot)
      torch::autograd::impl::set_post_acc_grad_hooks(bucket->views()[slot],
                                                     std::make_unique<GradientHook>(*this, *bucket, slot));
  }
}

Unit::~Unit() {
  for (const auto& bucket : buckets_)
    for (const at::Tensor& view : bucket->views()) torch::autograd::impl::set_post_acc_grad_hooks(view, nullptr);
}

void Unit::before_forward() { finish_unshard(); }

at::Tensor Unit::watch_input(const at::Tensor& input) {
  if (!c10::GradMode::is_enabled() || !input.requires_grad()) return input;
  auto node = std::make_shared<WatchInput>(*this);
  node->add_next_edge(torch::autograd::impl::gradient_edge(input));
  node->add_input_metadata(input);
  at::Tensor watched = input.detach();
  torch::autograd::impl::set_gradient_edge(watched, {std::move(node), 0});
  ++inputs_watched_;
  return watched;
}

void Unit::watch_output(const at::Tensor& output) {
  if (output.requires_grad()) output.register_hook([this](const at::Tensor&) { before_backward(); });
}

void Unit::after_forward() {
  if (!c10::GradMode::is_enabled() || !keeps_after_forward_) reshard();
}

void Unit::start_unshard() {
  if (residency_ != Residency::sharded) return;
  residency_ = Residency::gathering;
  for (const auto& bucket : buckets_) bucket->start_unshard();
}

void Unit::finish_unshard() {
  start_unshard();
  if (residency_ == Residency::unsharded) return;
  for (const auto& bucket : buckets_) bucket->finish_unshard();
  residency_ = Residency::unsharded;
}

void Unit::reshard() {
  if (residency_ == Residency::sharded) return;
  SHARD_CHECK(residency_ == Residency::unsharded, "schedule", "unit {} is resharded while its gather is in flight", name_);
  for (const auto& bucket : buckets_) bucket->reshard();
  residency_ = Residency::sharded;
}

void Unit::before_backward() {
  schedule_.begin_backward();
  finish_unshard();
}

void Unit::on_gradient(Bucket& bucket, int64_t slot, const at::Tensor& gradient) {
  schedule_.begin_backward();
  bucket.add_gradient(slot, gradient);
  ++arrived_count_;
  if (bucket.complete()) schedule_.bucket_complete();
  reshard_when_done();
}

void Unit::on_input_gradient() {
  --inputs_watched_;
  reshard_when_done();
}

void Unit::reshard_when_done() {
  if (arrived_count_ == trainable_count_ && inputs_watched_ <= 0) reshard();
}

void Unit::end_backward() {
  arrived_count_ = 0;
  inputs_watched_ = 0;
  reshard();
}

std::vector<Bucket*> Schedule::buckets() const {
  std::vector<Bucket*> all;
  for (const auto& unit : units_)
    for (const auto& bucket : unit->buckets()) all.push_back(bucket.get());
  return all;
}

void Schedule::begin_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  to_reduce_.clear();
  for (Bucket* bucket : buckets())
    if (bucket->trainable()) to_reduce_.push_back(bucket);
  torch::autograd::Engine::get_default_engine().queue_callback([this] { end_backward(); });
}

void Schedule::bucket_complete() { start_ready_reduces(); }

void Schedule::start_ready_reduces() {
  while (!to_reduce_.empty() && to_reduce_.back()->complete()) {
    start_reduce(*to_reduce_.back());
    to_reduce_.pop_back();
  }
}

void Schedule::start_reduce(Bucket& bucket) {
  if (reducing_.size() == kReducesInFlightMax) {
    reducing_.front()->finish_reduce();
    reducing_.pop_front();
  }
  bucket.start_reduce(last_microbatch_, fmt::format("rank {}, step {}", rank_, step_));
  reducing_.push_back(&bucket);
}

void Schedule::end_backward() {
  for (Bucket* bucket : to_reduce_)
    if (!bucket->complete()) bucket->fill_missing();
  start_ready_reduces();
  SHARD_CHECK(to_reduce_.empty(), "schedule", "{} buckets were not reduced", to_reduce_.size());
  for (Bucket* bucket : reducing_) bucket->finish_reduce();
  reducing_.clear();
  for (const auto& unit : units_) unit->end_backward();
  in_backward_ = false;
}

void Schedule::require_final(const char* what) const {
  for (const Bucket* bucket : buckets())
    SHARD_REQUIRE(!bucket->trainable() || bucket->final(), "schedule",
                  "{} needs the gradients of the last backward of step {} (rank {}), but {} has none. Run a backward with "
                  "set_last_microbatch(true) first",
                  what, step_, rank_, bucket->layout().slots().front().name);
}

void Schedule::zero_gradients() {
  for (Bucket* bucket : buckets()) bucket->zero_gradients();
}

void Schedule::parameters_changed() {
  for (const auto& unit : units_) unit->reshard();
  zero_gradients();
  last_microbatch_ = true;
  ++step_;
}

}  // namespace shardproof
