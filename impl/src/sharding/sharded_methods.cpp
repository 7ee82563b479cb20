// The methods of a Sharded and of its units' handles, except those on whole values (whole_values.cpp).
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>

#include "internal/device/flat_math.h"
#include "sharding/gradient_norm.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/sharding/note.h"
#include "internal/base/call_label.h"

namespace shardproof {

const std::string& UnitHandle::name() const { return unit_->name(); }
bool UnitHandle::is_unsharded() const { return unit_->residency() == Residency::whole; }
void UnitHandle::start_unshard() { unit_->start_unshard(); }
void UnitHandle::unshard() { unit_->finish_unshard(); }
void UnitHandle::reshard() {
  if (unit_->residency() == Residency::gathering) unit_->finish_unshard();  // ahead, for a unit that then did not run
  unit_->reshard();
}
void UnitHandle::set_reshard_after_forward(Reshard reshard) { unit_->settings.reshard_after_forward = reshard; }
void UnitHandle::set_gradient_sync(bool sync, bool recurse) { unit_->set_gradient_sync(sync, recurse); }
bool UnitHandle::gradient_sync() const { return unit_->settings.gradient_sync; }
void UnitHandle::set_unshard_in_backward(bool unshard) { unit_->settings.unshard_in_backward = unshard; }
void UnitHandle::set_reshard_after_backward(bool reshard) { unit_->settings.reshard_after_backward = reshard; }

void UnitHandle::set_forward_prefetch(const std::vector<UnitHandle>& units) {
  unit_->settings.forward_prefetch.clear();
  for (const UnitHandle& unit : units) unit_->settings.forward_prefetch.push_back(unit.unit_);
}

void UnitHandle::set_backward_prefetch(const std::vector<UnitHandle>& units) {
  unit_->settings.backward_prefetch.clear();
  for (const UnitHandle& unit : units) unit_->settings.backward_prefetch.push_back(unit.unit_);
}

Sharded::Sharded(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Sharded::Sharded(Sharded&&) noexcept = default;
Sharded& Sharded::operator=(Sharded&&) noexcept = default;
Sharded::~Sharded() = default;

void Sharded::set_last_microbatch(bool last) { impl_->schedule.set_last_microbatch(last); }
void Sharded::set_gradient_sync(bool sync) { impl_->schedule.set_gradient_sync(sync); }
bool Sharded::gradient_sync() const { return impl_->schedule.gradient_sync(); }
int64_t Sharded::step() const { return impl_->schedule.step(); }
int64_t Sharded::rank() const { return impl_->schedule.rank(); }
void Sharded::skip_step() {
  impl_->schedule.end_step(/*parameters_changed=*/false);
  impl_->checks->forget();
  impl_->tokens = 0;
}
MemoryUse Sharded::memory() const { return impl_->memory->use(); }
void Sharded::reset_peak_memory() { impl_->memory->reset_peak(); }

void note(Sharded& sharded, const std::string& done) { sharded.impl().schedule.note(done); }

void Sharded::zero_gradients() {
  impl_->schedule.zero_gradients();
  impl_->checks->forget();
  impl_->tokens = 0;
}

void Sharded::add_tokens(int64_t tokens) {
  SHARD_REQUIRE(tokens >= 0, "add_tokens", "a number of tokens cannot be negative, got {}", tokens);
  impl_->tokens += tokens;
}

void Sharded::add_finishing_step(std::string name, int64_t order, std::function<void(Sharded&)> step) {
  SHARD_REQUIRE(step != nullptr && order > 0, "add_finishing_step",
                "step '{}' needs a function and an order above 0, got order {}", name, order);
  impl_->add_finishing_step({std::move(name), order, std::move(step)});
}

namespace {

// What other ranks compare with what they take the norm for.
double norm_for(Sharded::Impl& state, double order, const std::string& what) {
  state.schedule.require_final("the gradient norm");
  const std::string occasion = fmt::format("step {}, {}", state.schedule.current_step(), what);
  const CallLabel label("the norm of the gradient", occasion);
  state.await_gradients();
  return gradient_norm(state, order);
}

}  // namespace

double Sharded::gradient_norm(double order) {
  return norm_for(*impl_, order, fmt::format("gradient_norm of order {}", order));
}

double Sharded::clip_gradients(double norm_max, double order) {
  SHARD_REQUIRE(norm_max > 0, "clip_gradients", "norm_max must be above 0, got {}", norm_max);
  const std::string what = fmt::format("clip_gradients to {}, of order {}", norm_max, order);
  const double norm = norm_for(*impl_, order, what);
  impl_->schedule.note(what);
  const double factor = norm_max / (norm + 1e-6);
  if (factor < 1)
    for (Bucket* bucket : impl_->schedule.buckets())
      if (bucket->gradient.final()) scale_by(bucket->gradient.values(), factor);
  return norm;
}

void Sharded::divide_gradients(double divisor) {
  impl_->schedule.require_final("divide_gradients");
  impl_->schedule.note(fmt::format("divide_gradients by {}", divisor));
  for (Bucket* bucket : impl_->schedule.buckets())
    if (bucket->gradient.final()) bucket->gradient.divide_final(divisor);
}

bool Sharded::gradients_are_finite() {
  impl_->schedule.require_final("gradients_are_finite");
  Comm& world = impl_->comms->world();
  impl_->await_gradients();
  const at::Tensor bad = at::full({1}, LateChecks::kNone, at::TensorOptions(impl_->state_device()).dtype(at::kLong));
  for (const Bucket* bucket : impl_->schedule.buckets())
    if (bucket->gradient.final()) note_beyond(bucket->gradient.values(), INFINITY, 0, bad);
  {
    const CallLabel label("gradients_are_finite");
    world.all_reduce(bad, Reduce::min).wait();
  }
  return impl_->checks->read(&world, {bad}).front().item<int64_t>() == LateChecks::kNone;
}

void Sharded::Impl::await_gradients() const {
  for (Bucket* bucket : schedule.buckets()) bucket->gradient.await_values();
}

std::vector<Shard> Sharded::Impl::shards(Kind kind) const {
  if (kind == Kind::gradient) await_gradients();
  std::vector<Shard> all;
  for (Bucket* bucket : schedule.buckets()) {
    if (kind != Kind::gradient) bucket->parameters.require_own();
    if (kind == Kind::gradient && !bucket->gradient.final()) continue;
    if (kind == Kind::parameter) bucket->parameters.await_updated();
    if (kind == Kind::main) bucket->parameters.await_main();
    std::vector<Shard> own = kind == Kind::parameter ? bucket->parameters.shards()
                             : bucket->shards(kind == Kind::main ? bucket->parameters.main() : bucket->gradient.values());
    if (kind == Kind::gradient) std::erase_if(own, [&](const Shard& shard) { return !bucket->trains(shard.name); });
    std::move(own.begin(), own.end(), std::back_inserter(all));
  }
  return all;
}

ModuleBuffers Sharded::Impl::plain_tensors() const {
  ModuleBuffers plain = buffers_of(*module);
  std::set<std::string> sharded;
  for (const auto& [name, first] : aliases) sharded.insert(name);
  for (const auto& item : module->named_parameters())
    if (item.value().defined() && !sharded.contains(item.key())) plain.state[item.key()] = item.value();
  return plain;
}

std::vector<Piece> Sharded::Impl::pieces(Kind kind) const {
  std::vector<Piece> pieces;
  for (const Shard& shard : shards(kind)) append_pieces(shard, comms->rank(), pieces);
  return pieces;
}

std::vector<Piece> Sharded::parameters() const {
  return impl_->pieces(Impl::Kind::parameter);
}
std::vector<Piece> Sharded::main_parameters() const {
  return impl_->pieces(Impl::Kind::main);
}
std::vector<Piece> Sharded::gradients() const {
  impl_->checks->read(nullptr);
  return impl_->pieces(Impl::Kind::gradient);
}

std::map<std::string, ParameterPlacement> Sharded::placements() const {
  std::map<std::string, ParameterPlacement> placements;
  for (const Bucket* bucket : impl_->schedule.buckets()) {
    const BucketLayout& layout = bucket->layout();
    for (const OwnPart& part : bucket->parts())
      placements[part.parameter->name] = {.shape = part.parameter->whole,
                                          .compute = bucket->rules().compute,
                                          .main = bucket->rules().main,
                                          .parameter = layout.placement(*part.parameter, layout.parameter()),
                                          .state = part.at};
  }
  return placements;
}

UnitHandle Sharded::unit(const std::string& name) { return UnitHandle(impl_->unit(name)); }

std::vector<UnitHandle> Sharded::units() {
  std::vector<UnitHandle> handles;
  for (const auto& unit : impl_->schedule.units()) handles.emplace_back(*unit);
  return handles;
}

std::string Sharded::describe() const {
  std::string text;
  for (const auto& unit : impl_->schedule.units()) {
    int64_t parameters = 0, rest = 0, compute = 0;
    for (const auto& bucket : unit->buckets()) {
      for (const BucketParameter& member : bucket->layout().members()) parameters += member.numel;
      rest += bucket->parameters.resting_bytes();
      compute += bucket->parameters.compute_bytes();
    }
    text += fmt::format("{}: {} parameters in {} buckets, {} bytes at rest, {} in compute\n",
                        unit->name().empty() ? "(root)" : unit->name(), parameters, unit->buckets().size(), rest, compute);
  }
  return text;
}

}  // namespace shardproof
