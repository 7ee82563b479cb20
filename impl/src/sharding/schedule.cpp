#include "sharding/schedule.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <bit>

#include "shardproof/base/check.h"
#include "shardproof/device/device_graph.h"

namespace shardproof {
namespace {

// Without a limit in the options, so many of the largest sums may be in flight. Each holds a whole bucket's gradient, and more
// of them at a time only cost memory.
constexpr int64_t kLargestSumsInFlight = 2;
// Buffers of one size that a pool keeps.
constexpr int64_t kPooledBuffers = 2;

}  // namespace

Schedule::Schedule(ScheduleOptions options, std::shared_ptr<MemoryLedger> memory)
    : options_(options), memory_(std::move(memory)) {
  if (options_.buffers == Buffers::pooled) memory_->keep_free(kPooledBuffers);
}

Schedule::~Schedule() = default;

void Schedule::add(std::shared_ptr<Unit> unit) {
  for (const auto& bucket : unit->buckets()) {
    largest_sum_bytes_ = std::max(largest_sum_bytes_, bucket->gradient.bytes_to_send());
    const auto& members = bucket->layout().members();
    for (size_t i = 0; i < members.size(); ++i) places_.emplace(members[i].name, Place{buckets_.size(), i});
    buckets_.push_back(bucket.get());
  }
  units_.push_back(std::move(unit));
}

const Schedule::Place* Schedule::find(const std::string& parameter) const {
  const auto found = places_.find(parameter);
  return found == places_.end() ? nullptr : &found->second;
}

void Schedule::set_last_microbatch(bool last) {
  require_outside("set_last_microbatch");
  last_microbatch_ = last;
}

void Schedule::set_gradient_sync(bool sync) {
  require_outside("set_gradient_sync");
  sync_ = sync;
}

// An exception inside a backward leaves it without its end.
Schedule::Phase Schedule::phase() const {
  return phase_ != Phase::outside && torch::autograd::get_current_graph_task_id() < 0 ? Phase::interrupted : phase_;
}

bool Schedule::in_backward() const {
  SHARD_REQUIRE(
      phase() != Phase::interrupted, "schedule",
      "the last backward of step {} ended in an exception (rank {}). Call zero_gradients on every rank to forget what "
      "it left, then go on",
      current_step(), rank());
  return phase_ != Phase::outside;
}

// Not where a backward has ended in an exception: what a caller changed for its time goes back as the exception passes by.
void Schedule::require_outside(const std::string& what) const {
  SHARD_REQUIRE(phase() == Phase::outside || phase() == Phase::interrupted, "schedule",
                "{} inside a backward (rank {}); call it before", what, rank());
}

// What was started in common is awaited, the rest dropped.
void Schedule::abandon_backward() {
  forget_calls();
  comparison_.wait();
  hashes_.reset();
  if (delayed_) delayed_->drop();
  for (Bucket* bucket : reducing_) bucket->gradient.abandon_reduce();
  reducing_.clear();
  to_reduce_.clear();
  for (const auto& unit : units_) unit->end_backward();
  phase_ = Phase::outside;
  end_backward_within_units();
}

void Schedule::end_backward_within_units() {
  for (const auto& module : recomputed_) module->end_backward();
  take_calls_back();
  if (activations_) activations_->end_backward();
}

// A backward for chosen tensors, as that of autograd.grad, makes no gradient of a parameter, and is no microbatch.
bool Schedule::reaches_parameters() const {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (!chosen || chosen->empty()) return true;
  for (const Bucket* bucket : buckets_)
    for (const at::Tensor& view : bucket->views()) {
      const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(view);
      const auto found = chosen->find(accumulator.get());
      if (found != chosen->end() && found->second.needed_) return true;
    }
  return false;
}

void Schedule::begin_backward(uint64_t first) {
  if (phase_ != Phase::outside) return;
  backward_task = torch::autograd::get_current_graph_task_id();
  SHARD_REQUIRE(backward_task >= 0, "schedule",
                "rank {}: a node of this model's graph was called by hand, outside of a backward. Call backward()", rank());
  phase_ = Phase::backward;
  makes_graph = c10::GradMode::is_enabled();
  set_calls_aside(first, torch::autograd::get_current_graph_task_keep_graph());
  const bool is_microbatch = reaches_parameters();
  backward_ = !is_microbatch     ? Backward::of_inputs
              : !sync_           ? Backward::local
              : last_microbatch_ ? Backward::last
                                 : Backward::summed;
  if (is_microbatch) taken_by_ = nullptr;
  to_reduce_.clear();
  for (const auto& unit : units_)
    for (const auto& bucket : unit->buckets()) {
      if (!bucket->trainable() || !is_microbatch) continue;
      const bool reduces = sync_ && unit->settings.gradient_sync;
      bucket->gradient.begin_backward(reduces);
      if (reduces) to_reduce_.push_back({unit.get(), bucket.get()});
    }
  begin_comparison();
  if (watcher_) watcher_(true);
  torch::autograd::Engine::get_default_engine().queue_callback([this] { end_backward(); });
}

// Not when gradients have arrived, which ranks may see at other times where they use other parameters, but when the backward
// has left the unit: then what has not arrived never will.
void Schedule::start_ready_reduces() {
  while (!to_reduce_.empty() && (phase_ == Phase::ending || to_reduce_.back().unit->left())) {
    Bucket& bucket = *to_reduce_.back().bucket;
    if (!bucket.gradient.complete()) bucket.gradient.fill_missing();
    start_reduce(bucket);
    to_reduce_.pop_back();
  }
}

// Gathers and reductions start in an order that does not depend on whether this rank has put off anything.
void Schedule::before_wait() {
  if (!delayed_ || phase() != Phase::backward) return;
  delayed_->make_all();
  start_ready_reduces();
}

bool Schedule::fits(const Bucket& bucket) const {
  if (options_.bytes_in_flight_max > 0)
    return bytes_in_flight() + bucket.parameters.compute_bytes() <= options_.bytes_in_flight_max;
  int64_t sent = bucket.gradient.bytes_to_send();
  for (const Bucket* other : reducing_) sent += other->gradient.bytes_sent();
  return sent <= kLargestSumsInFlight * largest_sum_bytes_;
}

// Ranks that disagree would wait here for sums that never come.
void Schedule::advance_oldest() {
  end_comparison();
  Bucket* oldest = reducing_.front();
  reducing_.pop_front();
  if (oldest->gradient.advance_reduce()) reducing_.push_back(oldest);
}

// A further sum, as that over replicas, had the time of a unit's backward when it is the oldest.
void Schedule::start_reduce(Bucket& bucket) {
  while (!reducing_.empty() && (reducing_.front()->gradient.is_past_first_sum() || !fits(bucket))) advance_oldest();
  bucket.gradient.start_reduce(backward_ == Backward::last, fmt::format("rank {}, step {}", rank(), current_step()));
  if (bucket.gradient.reducing()) reducing_.push_back(&bucket);
}

void Schedule::end_backward() {
  if (delayed_) delayed_->make_all();
  if (backward_ == Backward::summed || backward_ == Backward::last) {
    phase_ = Phase::ending;
    start_ready_reduces();
    SHARD_CHECK(to_reduce_.empty(), "schedule", "{} buckets were not reduced", to_reduce_.size());
    while (!reducing_.empty()) advance_oldest();
  }
  for (const auto& unit : units_) unit->end_backward();
  phase_ = Phase::outside;
  end_backward_within_units();
  end_comparison();
  require_recomputed_entered();
  if (backward_ == Backward::last && finish_) finish_();
  if (watcher_) watcher_(false);
}

// Where the backend sees nothing but data, ranks in other steps, microbatches or states would add up what does not belong
// together. What this rank is in travels as a hash beside the backward's own work.
void Schedule::begin_comparison() {
  const auto communicates = [&](const Waiting& waiting) {
    return last_microbatch_ || !waiting.bucket->layout().reduce().empty();
  };
  if (!options_.compares || std::ranges::none_of(to_reduce_, communicates)) return;
  ++reductions_;
  if (options_.compares_seldom && (is_capturing() || !std::has_single_bit(++backwards_))) return;
  facts_ = {{"backward under way",
             fmt::format("step {}, reduction {}, {}{}", current_step(), reductions_,
                         last_microbatch_ ? "the last of this step" : "with others to follow", progress_->last)}};
  for (const Bucket* bucket : buckets_)
    for (size_t i = 0; i < bucket->views().size(); ++i)
      if (!bucket->views()[i].requires_grad()) facts_.emplace_back(bucket->layout().members()[i].name, "frozen");
  hashes_ = at::cat({hashes_of(facts_), hashes_of({{"gathers", gathered_.text()}})});
  comparison_ = options_.compares->all_reduce(hashes_, Reduce::max);
}

// A rank that runs a forward alone meets the gathers of other units, or of others' backwards.
void Schedule::gathers(const std::string& unit) {
  if (!options_.compares) return;
  gathered_ = {gathered_.count + 1, std::hash<std::string>{}(fmt::format("{:x} {}", gathered_.order, unit)), unit};
}

void Schedule::end_comparison() {
  if (!hashes_.defined()) return;
  comparison_.wait();
  const at::Tensor hashes = std::exchange(hashes_, at::Tensor());
  // Such ranks are not in the same place, and would wait for each other's texts for ever.
  SHARD_REQUIRE(!differ(hashes.slice(0, 2)), "schedule",
                "until this backward of step {} rank {} has gathered units {}, and another rank others or in another order. So "
                "wrong parameters may have moved. All ranks run the same units forward in the same order, also to evaluate, "
                "or where a batch is left out. This rank ends here, and others wait for it until it is gone",
                current_step(), rank(), gathered_.text());
  if (!differ(hashes)) return;
  throw_difference(*options_.compares, facts_, "schedule",
                   "All ranks take the same steps, each with as many microbatches, and freeze the same parameters");
}

void Schedule::require_recomputed_entered() const {
  const auto was_entered = [](const auto& module) { return module->was_entered(); };
  SHARD_REQUIRE(recomputed_.empty() || std::ranges::any_of(recomputed_, was_entered), "schedule",
                "recompute_modules chose {} modules, the first being '{}', and a backward has ended before any of them was "
                "entered (rank {}). Choose modules that the model enters through call(module, ..), which it writes instead of "
                "module->forward(..)",
                recomputed_.size(), recomputed_.front()->name(), rank());
}

int64_t Schedule::bytes_in_flight() const {
  int64_t bytes = 0;
  for (const Bucket* bucket : reducing_) bytes += bucket->gradient.bytes_in_flight();
  for (const auto& unit : units_)
    if (unit->residency() == Residency::gathering)
      for (const auto& bucket : unit->buckets())
        if (bucket->parameters.frees_compute()) bytes += bucket->parameters.compute_bytes();
  return bytes;
}

bool Schedule::fits(const Unit& unit) const {
  int64_t bytes = 0;
  for (const auto& bucket : unit.buckets()) {
    if (!bucket->parameters.frees_compute()) continue;
    bytes += bucket->parameters.compute_bytes();
    if (options_.buffers == Buffers::pooled && memory_->gathered_in_use(bucket->parameters.compute_bytes()) >= kPooledBuffers)
      return false;
  }
  return options_.bytes_in_flight_max == 0 || bytes_in_flight() + bytes <= options_.bytes_in_flight_max;
}

void Schedule::gather_ahead(const std::vector<Unit*>& units) {
  for (Unit* unit : units) {
    if (unit->residency() == Residency::gathering || unit->residency() == Residency::whole) continue;
    if (phase_ == Phase::backward && !unit->settings.unshard_in_backward) continue;
    if (!fits(*unit)) return;
    unit->start_unshard();
  }
}

void Schedule::require_no_backward(const char* what) const {
  SHARD_REQUIRE(!in_backward(), "schedule", "{} inside a backward (rank {}); call it after", what, rank());
}

std::string Schedule::why_not_final(const BucketGradient& gradient) const {
  if (gradient.state() == GradientState::empty && taken_by_)
    return fmt::format("{} has taken them. Call this before it, or after the next backward. A model has one optimizer, of all "
                       "parameters that train: give it groups", taken_by_);
  const char* so_far = gradient.state() == GradientState::empty ? "no backward has run" : "the last microbatch has not run";
  return fmt::format(
      "{}. Run a backward with set_last_microbatch(true) and set_gradient_sync(true) (in Python True), of the module "
      "and of its unit, first",
      so_far);
}

void Schedule::require_final(const char* what) const {
  require_no_backward(what);
  bool any = false;
  for (const Bucket* bucket : buckets()) {
    any |= bucket->trainable();
    SHARD_REQUIRE(!bucket->trainable() || bucket->gradient.final(), "schedule",
                  "{} needs the gradients of the last backward of step {} (rank {}), but {} has none: {}", what, current_step(),
                  rank(), bucket->layout().members().front().name, why_not_final(bucket->gradient));
  }
  SHARD_REQUIRE(any, "schedule", "{} in step {} (rank {}): every parameter is frozen", what, current_step(), rank());
}

void Schedule::zero_gradients() {
  take_gradients("zero_gradients");
}

void Schedule::take_gradients(const char* who) {
  if (phase() == Phase::interrupted) abandon_backward();
  require_no_backward(who);
  reductions_ = 0;
  noted_.clear();
  for (Bucket* bucket : buckets()) {
    if (bucket->gradient.state() != GradientState::empty) taken_by_ = who;
    bucket->gradient.zero_gradients();
  }
  if (activations_) activations_->abandon_forwards();
}

void Schedule::end_step(bool parameters_changed) {
  if (parameters_changed)
    for (const auto& unit : units_) unit->drop();
  const std::string done = noted_;
  take_gradients(parameters_changed ? "the optimizer's step" : "skip_step");
  noted_ = done;
  begin_next_step();
  last_microbatch_ = true;
}

void Schedule::begin_next_step() {
  reductions_ = 0;
  *progress_ = {step() + 1, std::exchange(noted_, "")};
}

}  // namespace shardproof
