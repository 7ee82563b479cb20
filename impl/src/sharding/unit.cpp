#include "sharding/unit.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "shardproof/base/check.h"
#include "shardproof/nn/gradient_place.h"

namespace shardproof {
namespace {

using torch::autograd::Variable;
using torch::autograd::variable_list;

// Graphs may outlive the module's sharding.
std::shared_ptr<Unit> alive(const std::weak_ptr<Unit>& unit) {
  std::shared_ptr<Unit> held = unit.lock();
  SHARD_REQUIRE(held, "unit", "a backward reached a unit whose Sharded was destroyed; keep it until the backward is over");
  return held;
}

// Hands a parameter's gradient to its bucket instead of leaving it in `.grad`, so the next backward's is fresh as well.
class GradientHook final : public GradientTaker {
 public:
  GradientHook(Unit& unit, Bucket& bucket, int64_t member) : unit_(unit), bucket_(bucket), member_(member) {}
  void operator()(const Variable& parameter) override {
    const at::Tensor gradient = parameter.grad();
    if (!gradient.defined()) return;  // autograd was passed none: it is delayed
    parameter.mutable_grad().reset();
    unit_.on_gradient(bucket_, member_, gradient);
  }
  at::Tensor place() override { return unit_.place_of_gradient(bucket_, member_); }
  bool delay(const at::Tensor& dy, const at::Tensor& x) override { return unit_.delay_gradient(bucket_, member_, dy, x); }

 private:
  Unit& unit_;
  Bucket& bucket_;
  int64_t member_;
};

// Identity on a unit's input. Its backward runs after every node of the unit on the way to that input.
class WatchInput final : public torch::autograd::Node {
 public:
  explicit WatchInput(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}
  variable_list apply(variable_list&& gradients) override {
    alive(unit_)->on_input_gradient();
    return std::move(gradients);
  }
  std::string name() const override { return "ShardproofWatchInput"; }

 private:
  std::weak_ptr<Unit> unit_;
};

}  // namespace

Unit::Unit(UnitEvents& schedule, std::string name, std::vector<std::unique_ptr<Bucket>> buckets, size_t modules)
    : schedule_(schedule), name_(std::move(name)), buckets_(std::move(buckets)), modules_(modules) {}

void Unit::hook_parameters() {
  for (const auto& bucket : buckets_)
    for (size_t member = 0; member < bucket->views().size(); ++member)
      torch::autograd::impl::set_post_acc_grad_hooks(bucket->views()[member],
                                                     std::make_unique<GradientHook>(*this, *bucket, member));
}

Unit::~Unit() {
  for (const auto& bucket : buckets_)
    for (const at::Tensor& view : bucket->views()) torch::autograd::impl::set_post_acc_grad_hooks(view, nullptr);
}

int64_t Unit::begin_span(const char* what) {
  return settings.timeline->begin(settings.rank, {.name = what, .unit = label()});
}

void Unit::end_span(int64_t number) { settings.timeline->end(settings.rank, number); }

// Inside a backward this is a recomputation, and its backward comes next.
bool Unit::keeps_activations_away() const {
  return settings.activations && c10::GradMode::is_enabled() && !schedule_.in_backward();
}

void Unit::before_forward(const torch::nn::Module&) {
  was_entered_ = true;
  if (keeps_activations_away()) settings.activations->begin_forward(label());
  if (settings.timeline) forward_spans_.push_back(begin_span(schedule_.in_backward() ? "recompute" : "forward"));
  gather();
  call_watched_ = false;
  if (!schedule_.in_backward()) schedule_.gather_ahead(settings.forward_prefetch);
}

at::Tensor Unit::watch_input(const at::Tensor& given) {
  const bool casts = settings.input_dtype && given.is_floating_point() && given.scalar_type() != *settings.input_dtype;
  const at::Tensor input = casts ? given.to(*settings.input_dtype) : given;
  if (!c10::GradMode::is_enabled() || !input.requires_grad()) return input;
  auto node = std::make_shared<WatchInput>(weak_from_this());
  node->add_next_edge(torch::autograd::impl::gradient_edge(input));
  node->add_input_metadata(input);
  at::Tensor watched = input.detach();
  torch::autograd::impl::set_gradient_edge(watched, {std::move(node), 0});
  ++inputs_watched_;
  call_watched_ = true;
  return watched;
}

at::Tensor Unit::watch_output(const at::Tensor& given) {
  if (given.requires_grad())
    given.register_hook([unit = weak_from_this()](const at::Tensor&) { alive(unit)->before_backward(); });
  const bool casts = settings.output_dtype && given.is_floating_point() && given.scalar_type() != *settings.output_dtype;
  return casts ? given.to(*settings.output_dtype) : given;
}

void Unit::after_forward(const torch::nn::Module& module) {
  if (c10::GradMode::is_enabled() && !call_watched_) leaves_unseen_ = true;
  if (keeps_activations_away()) settings.activations->end_forward();
  if (settings.timeline) {
    end_span(forward_spans_.back());
    forward_spans_.pop_back();
  }
  ran_.insert(&module);
  if (ran_.size() < modules_) return;
  ran_.clear();
  // Inside a backward this is a recomputation, and its backward comes next.
  if (!schedule_.in_backward()) reshard_after_forward();
}

void Unit::reshard_after_forward() {
  const Reshard& how = settings.reshard_after_forward;
  const bool trains = c10::GradMode::is_enabled() || schedule_.recomputed_forwards > 0;
  if (!trains || how == Reshard::always()) return reshard();
  if (how.keeps_everything() || residency() != Residency::whole) return;
  for (const auto& bucket : buckets_)
    if (how.asks_strategy()) bucket->parameters.reshard_between();
    else bucket->parameters.reshard_within(how.ranks());
}

void Unit::start_unshard() {
  for (const auto& bucket : buckets_) bucket->parameters.start_unshard();
}

void Unit::finish_unshard() {
  start_unshard();
  for (const auto& bucket : buckets_) bucket->parameters.finish_unshard();
}

void Unit::gather() {
  start_unshard();
  schedule_.before_wait();
  finish_unshard();
}

void Unit::reshard() {
  if (residency() == Residency::kept) return;
  for (const auto& bucket : buckets_) bucket->parameters.reshard();
}

void Unit::drop() {
  if (residency() == Residency::gathering) finish_unshard();
  for (const auto& bucket : buckets_) bucket->parameters.reshard();
}

void Unit::set_gradient_sync(bool sync, bool recurse) {
  SHARD_REQUIRE(!schedule_.in_backward(), "unit", "set_gradient_sync of unit '{}' inside a backward; call it before", name_);
  settings.gradient_sync = sync;
  if (!recurse) return;
  for (Unit* unit : settings.below) unit->settings.gradient_sync = sync;
}

void Unit::before_backward() {
  enter_backward();
  if (settings.unshard_in_backward)
    gather();
  else
    schedule_.before_wait();
  schedule_.gather_ahead(settings.backward_prefetch);
}

void Unit::enter_backward() {
  schedule_.begin_backward();
  if (passage_ == Passage::outside) pass(Passage::inside);
}

void Unit::pass(Passage next) {
  const bool was_inside = std::exchange(passage_, next) == Passage::inside;
  if (!settings.timeline || was_inside == (next == Passage::inside)) return;
  if (was_inside) end_span(backward_span_);
  else backward_span_ = begin_span("backward");
}

at::Tensor Unit::place_of_gradient(Bucket& bucket, int64_t member) {
  enter_backward();
  make_delayed(bucket, member);
  return expects_more() ? at::Tensor() : bucket.gradient.place(member);
}

// Terms of one gradient are added in the order in which the backward comes by.
void Unit::make_delayed(const Bucket& bucket, int64_t member) {
  if (settings.delayed) settings.delayed->make(bucket, member);
}

// Offloaded activations come back in one block, all of which one of them would keep.
bool Unit::delay_gradient(Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x) {
  if (!settings.delayed || settings.activations) return false;
  enter_backward();
  make_delayed(bucket, member);
  if (bucket.gradient.has_arrived(member)) return false;
  return settings.delayed->keep(bucket, member, dy, x,
                                [this, &bucket, member](const at::Tensor& later_dy, const at::Tensor& later_x) {
                                  make_gradient(bucket, member, later_dy, later_x);
                                });
}

// As direct::weight_gradient would have made it. Its unit may be on its way back by now, for a use without gradients.
void Unit::make_gradient(Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x) {
  at::Tensor place = expects_more() ? at::Tensor() : bucket.gradient.place(member);
  const at::Tensor gradient = place.defined() ? at::mm_out(place, dy.t(), x) : dy.t().mm(x);
  bucket.gradient.add_gradient(member, gradient, /*may_be_part=*/expects_more());
  if (residency() != Residency::gathering) reshard_when_done();
}

void Unit::on_gradient(Bucket& bucket, int64_t member, const at::Tensor& gradient) {
  enter_backward();
  make_delayed(bucket, member);
  bucket.gradient.add_gradient(member, gradient, /*may_be_part=*/expects_more());
  reshard_when_done();
}

void Unit::on_input_gradient() {
  --inputs_watched_;
  pass(inputs_watched_ == 0 ? Passage::left : Passage::inside);
  expect_no_more_when_left();
  if (left()) schedule_.unit_left();
  reshard_when_done();
}

bool Unit::complete() const {
  for (const auto& bucket : buckets_)
    if (!bucket->gradient.complete() || !bucket->all_train()) return false;
  return !expects_more() && inputs_watched_ <= 0;
}

// A gradient arrives after the last use of its parameter, but a frozen parameter has none.
void Unit::reshard_when_done() {
  if (settings.reshard_after_backward && (left() || complete())) reshard();
}

void Unit::end_backward() {
  ran_.clear();
  inputs_watched_ = 0;
  leaves_unseen_ = false;
  pass(Passage::outside);
  if (settings.reshard_after_backward || residency() == Residency::gathering) drop();
}

void Unit::begin_recomputation() {
  ++recomputations_;
  for (Unit* unit : settings.inside) ++unit->recomputations_;
  if (settings.root) settings.root->until_the_end_ = true;
  if (!settings.holder) return;
  ++settings.holder->recomputations_;
  settings.holder->until_left_ = true;
}

void Unit::end_recomputation() {
  --recomputations_;
  add_parts();
  for (Unit* unit : settings.inside) {
    --unit->recomputations_;
    unit->add_parts();
  }
  if (settings.holder) {
    --settings.holder->recomputations_;
    settings.holder->expect_no_more_when_left();
  }
  schedule_.unit_left();
  for (Unit* unit : settings.inside) unit->reshard_when_done();
  reshard_when_done();
}

void Unit::add_parts() {
  if (expects_more()) return;
  for (const auto& bucket : buckets_) bucket->gradient.add_parts();
}

// What was recomputed may share parameters with the rest of the unit.
void Unit::expect_no_more_when_left() {
  if (!until_left_ || passage_ != Passage::left || leaves_unseen_ || recomputations_ > 0) return;
  until_left_ = false;
  add_parts();
}

void Unit::expect_no_more() {
  recomputations_ = 0;
  until_left_ = until_the_end_ = false;
  add_parts();
}

}  // namespace shardproof
