#include "sharding/unit.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <unordered_set>
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

// Runs before a node of a backward. Gradients stay what they are.
class BeforeNode final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeNode(std::function<void()> told) : told_(std::move(told)) {}
  variable_list operator()(const variable_list& gradients) override {
    told_();
    return gradients;
  }

 private:
  const std::function<void()> told_;
};

// Whether nobody has the call's graph any more, so that it will have no backward.
bool is_gone(const std::shared_ptr<UnitCall>& call) {
  return !call->outputs.empty() && call.use_count() == 1;
}

torch::autograd::Node* node_of(const at::Tensor& tensor) { return tensor.grad_fn().get(); }

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
  return settings.activations && c10::GradMode::is_enabled() && schedule_.forgetting_forwards == 0 && !schedule_.in_backward();
}

void Unit::before_forward(const torch::nn::Module&) {
  if (passage_ == Passage::unused) pass(Passage::outside);
  if (keeps_activations_away()) settings.activations->begin_forward(label());
  if (settings.timeline) forward_spans_.push_back(begin_span(schedule_.in_backward() ? "recompute" : "forward"));
  gather();
  calls_.push_back(std::make_shared<UnitCall>(UnitCall{weak_from_this(), at::sequence_number::peek()}));
  if (has_graph()) schedule_.add_call(open(calls_.back()));
  if (!schedule_.in_backward()) schedule_.gather_ahead(settings.forward_prefetch);
}

// A graph that somebody goes back through.
bool Unit::has_graph() const { return c10::GradMode::is_enabled() && schedule_.recomputing_forwards == 0; }

// Another device's nodes have an order of their own.
bool Unit::is_here(const at::Tensor& tensor) const {
  return buckets_.empty() || buckets_.front()->views().front().device().type() == tensor.device().type();
}

at::Tensor Unit::watch_input(const at::Tensor& given) {
  UnitCall& call = *calls_.back();
  // Of the nodes before the unit the youngest that takes part in a backward is the first to run.
  if (has_graph() && given.requires_grad() && !given.is_leaf() && is_here(given)) watch_node(call, *node_of(given));
  if (!settings.input_dtype || !given.is_floating_point() || given.scalar_type() == *settings.input_dtype) return given;
  for (const auto& [tensor, cast] : call.casts)
    if (tensor.is_same(given)) return cast;
  return call.casts.emplace_back(given, given.to(*settings.input_dtype)).second;
}

void Unit::watch_node(UnitCall& call, torch::autograd::Node& node) {
  const uint64_t number = node.sequence_nr();
  if (number >= call.first_node || number < call.watched) return;
  call.watched = number;
  auto& hooks = node.tensor_pre_hooks();  // before that of another unit's output, which gathers
  hooks.insert(hooks.begin(), std::make_unique<BeforeNode>([unit = weak_from_this(), number] {
                 const auto held = unit.lock();
                 if (held && held->schedule_.in_backward()) held->schedule_.reached(number);
               }));
}

at::Tensor Unit::watch_output(const at::Tensor& given) {
  if (has_graph() && given.requires_grad()) {
    const UnitCall& call = *calls_.back();
    for (const SavedTensor& input : call.inputs) require_unchanged(input.is_changed(), label());
    watch_backward(given);
    // A write to a view replaces its node, but not that of what it looks into.
    const at::Tensor base = given.is_view() ? at::Tensor(given._base()) : at::Tensor();
    if (base.defined() && base.grad_fn() && node_of(base)->sequence_nr() >= call.first_node) watch_backward(base);
  }
  const bool casts = settings.output_dtype && given.is_floating_point() && given.scalar_type() != *settings.output_dtype;
  return casts ? given.to(*settings.output_dtype) : given;
}

// A tensor that was there before the call must not hold it, which may hold the tensor.
void Unit::watch_backward(const at::Tensor& output) {
  const std::shared_ptr<UnitCall>& call = calls_.back();
  if (output.is_leaf()) {
    output.register_hook([call = std::weak_ptr(call)](const at::Tensor&) {
      if (const auto held = call.lock()) alive(held->unit)->before_backward(*held, std::numeric_limits<uint64_t>::max());
    });
    return;
  }
  torch::autograd::Node& node = *node_of(output);
  const uint64_t number = node.sequence_nr();
  const bool is_own = number >= call->first_node;
  if (is_own) call->outputs.emplace_back(&node, number);
  node.add_tensor_pre_hook(std::make_unique<BeforeNode>([owned = is_own ? call : nullptr, call = std::weak_ptr(call), number] {
    if (const auto held = call.lock()) alive(held->unit)->before_backward(*held, number);
  }));
}

bool Unit::backward_is_seen() const {
  if (!has_graph() || settings.recompute || settings.reshard_after_forward.keeps_everything()) return true;
  const auto frees = [](const auto& bucket) { return bucket->parameters.frees_compute(); };
  return !calls_.back()->outputs.empty() || std::ranges::none_of(buckets_, frees);
}

void Unit::after_forward(const torch::nn::Module& module) {
  calls_.back()->casts.clear();
  calls_.back()->inputs.clear();
  calls_.pop_back();
  if (keeps_activations_away()) settings.activations->end_forward();
  if (settings.timeline) {
    end_span(forward_spans_.back());
    forward_spans_.pop_back();
  }
  // What autocast has rounded without a graph would be found by a forward that needs one.
  if (!c10::GradMode::is_enabled()) at::autocast::clear_cache();
  ran_.insert(&module);
  if (ran_.size() < modules_) return;
  ran_.clear();
  // Inside a backward this is a recomputation, and its backward comes next.
  if (!schedule_.in_backward()) reshard_after_forward();
}

void Unit::reshard_after_forward() {
  const Reshard& how = settings.reshard_after_forward;
  if (!c10::GradMode::is_enabled() || how == Reshard::always()) return reshard();
  if (how.keeps_everything() || residency() != Residency::whole) return;
  for (const auto& bucket : buckets_)
    if (how.asks_strategy()) bucket->parameters.reshard_between();
    else bucket->parameters.reshard_within(how.ranks());
}

void Unit::start_unshard() {
  for (const auto& bucket : buckets_)
    if (bucket->parameters.start_unshard()) schedule_.gathers(name_);
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
  schedule_.require_outside("set_gradient_sync of " + label());
  settings.gradient_sync = sync;
  if (!recurse) return;
  for (Unit* unit : settings.below) unit->settings.gradient_sync = sync;
}

void Unit::before_backward(UnitCall& call, uint64_t node) {
  schedule_.begin_backward(node);
  schedule_.reached(node);
  if (torch::autograd::get_current_graph_task_id() != schedule_.backward_task) leave_when_it_ends(call);
  if (passage_ == Passage::left && has_calls()) pass(Passage::inside);
  prepare_backward();
  schedule_.gather_ahead(settings.backward_prefetch);
  if (call.recomputation) make_again(*call.recomputation);
}

void Unit::prepare_backward() {
  enter_backward();
  if (settings.unshard_in_backward)
    gather();
  else
    schedule_.before_wait();
}

// A backward within a backward, which some program runs that recomputes by itself. Its nodes are younger than all others.
void Unit::leave_when_it_ends(const UnitCall& call) {
  torch::autograd::Engine::get_default_engine().queue_callback([unit = weak_from_this(), first = call.first_node] {
    if (const auto held = unit.lock(); held && first > 0) held->schedule_.reached(first - 1);
  });
}

void Unit::enter_backward() {
  schedule_.begin_backward(std::numeric_limits<uint64_t>::max());
  if (passage_ == Passage::unused || passage_ == Passage::outside) pass(Passage::inside);
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
  return bucket.gradient.place(member);
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

// As direct::weight_gradient would have made it.
void Unit::make_gradient(Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x) {
  at::Tensor place = bucket.gradient.place(member);
  const at::Tensor gradient = place.defined() ? at::mm_out(place, dy.t(), x) : dy.t().mm(x);
  bucket.gradient.add_gradient(member, gradient);
}

void Unit::on_gradient(Bucket& bucket, int64_t member, const at::Tensor& gradient) {
  enter_backward();
  make_delayed(bucket, member);
  bucket.gradient.add_gradient(member, gradient);
}

void UnitEvents::reached(uint64_t node) {
  while (!calls.empty() && calls.back().call->first_node > node) {
    const std::shared_ptr<Unit> unit = calls.back().call->unit.lock();
    calls.pop_back();
    if (unit && !unit->has_calls()) unit->leave();
  }
}

void UnitEvents::add_call(OpenCall call) {
  if (calls.size() >= calls_max_) {
    std::erase_if(calls, [](const OpenCall& other) { return is_gone(other.call); });
    calls_max_ = std::max<size_t>(64, 2 * calls.size());
  }
  calls.push_back(std::move(call));
}

// A call without a node of its own is taken to be in every graph, because there is no telling.
void UnitEvents::set_calls_aside(uint64_t first, bool keeps_graph) {
  const std::unordered_set<torch::autograd::Node*>& nodes = *torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto is_in_graph = [&](const OpenCall& open) {
    // The root of a graph is in no set of its nodes. The number is compared as well, since a new node may lie where one was.
    const auto is_there = [&](const auto& output) {
      const auto found = nodes.find(output.first);
      return output.second == first || (found != nodes.end() && (*found)->sequence_nr() == output.second);
    };
    return open.call->outputs.empty() || std::ranges::any_of(open.call->outputs, is_there);
  };
  // A backward for chosen tensors stops at them, and one from what it has left there comes to the calls below.
  const auto& chosen = *torch::autograd::get_current_graph_task_exec_info();
  const auto is_run = [&](const auto& output) {
    const auto found = chosen.find(output.first);
    return found != chosen.end() && found->second.needed_;
  };
  const auto is_reached = [&](const OpenCall& open) {
    return chosen.empty() || open.call->outputs.empty() || std::ranges::any_of(open.call->outputs, is_run);
  };
  for (const OpenCall& open : calls)
    if (keeps_graph || !is_in_graph(open) || !is_reached(open)) waiting_.push_back(open.call);
  std::erase_if(calls, [&](const OpenCall& open) { return open.call->first_node > first && !is_in_graph(open); });
}

void UnitEvents::take_calls_back() {
  calls.clear();
  for (std::shared_ptr<UnitCall>& call : waiting_)
    if (const auto unit = call->unit.lock(); unit && !is_gone(call)) calls.push_back(unit->open(std::move(call)));
  waiting_.clear();
}

void UnitEvents::forget_calls() {
  calls.clear();
  waiting_.clear();
}

void Unit::leave() {
  pass(Passage::left);
  schedule_.unit_left();
  // What is on its way back, for a use without gradients or because it was its turn, stays until the end.
  if (settings.reshard_after_backward && !schedule_.makes_graph && residency() != Residency::gathering) reshard();
}

void Unit::end_backward() {
  ran_.clear();
  if (passage_ != Passage::unused) pass(Passage::outside);
  if (!schedule_.makes_graph && (settings.reshard_after_backward || residency() == Residency::gathering)) drop();
}

}  // namespace shardproof
