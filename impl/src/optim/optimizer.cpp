#include "shardproof/optim/optimizer.h"

#include <ATen/ATen.h>
#include <c10/util/Type.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <typeinfo>

#include "parallel/tensor/parallel_state.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/base/nearest.h"
#include "shardproof/comm/agree.h"

namespace shardproof {
namespace {

int64_t group_of(const std::vector<ParameterGroup>& groups, const BucketParameter& member) {
  for (size_t i = 0; i < groups.size(); ++i)
    if (!groups[i].takes || groups[i].takes(member.name, member.whole)) return static_cast<int64_t>(i);
  throw Error(
      fmt::format("[optimizer] no group takes parameter {}; end the list with a group whose `takes` is empty", member.name));
}

bool is_cut(const BucketParameter& member) {
  return member.is_cut() && member.own.mesh.size() > 1;
}

Schedule::Place place_of(const Sharded::Impl& state, const std::string& parameter) {
  const Schedule::Place* found = state.schedule.find(parameter);
  if (!found) throw Error(fmt::format("[optimizer] there is no parameter '{}'", parameter));
  return *found;
}

// Refuses a member that no rank can update as a whole, on every rank alike.
void require_whole(const OwnPart& part) {
  const auto& [mesh, owned] = part.at;
  const BucketParameter& member = *part.parameter;
  const Layout cut{member.own.layout.dims, {}, {}};
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const int64_t held = owned_numel(member.whole, mesh, owned, rank), part = owned_numel(member.whole, mesh, cut, rank);
    SHARD_REQUIRE(held == 0 || held == part, "optimizer",
                  "the rule for parameter {} needs it whole, and rank {} holds {} of the {} elements that tensor parallelism "
                  "leaves it. Give fully_shard the granularity `tensor`",
                  member.name, rank, held, part);
    SHARD_REQUIRE(part > 0 || numel(member.whole) == 0, "optimizer",
                  "the rule for parameter {} needs it whole, and tensor parallelism leaves rank {} nothing of it to join. "
                  "Choose another rule for it, by `takes` of a group, or fewer ranks",
                  member.name, rank);
  }
}

// An update that needs what tensor parallelism has cut: every rank along the axis joins it, does the same, and keeps its cut.
void update_joined(const Sharded::Impl& state, const BucketParameter& member, const UpdateRule& rule, const Update& own) {
  const auto joined = [&](const at::Tensor& local) {  // by the device's communicators
    const at::Tensor whole = state.join(member, local.view(member.shape).to(state.device()));
    return whole.to(local.device()).contiguous().view({-1});
  };
  const at::Tensor parameter = joined(own.parameter);
  std::vector<at::Tensor> held;
  for (const at::Tensor& one : own.state) held.push_back(joined(one));
  rule.update({.name = own.name,
               .shape = member.whole,
               .parameter = parameter,
               .gradient = joined(own.gradient),
               .state = held,
               .step = own.step,
               .lr_factor = own.lr_factor,
               .decay_factor = own.decay_factor});
  const auto keep = [&](const at::Tensor& local, const at::Tensor& whole) {
    local.copy_(state.parallel->cut(member.own.layout, whole.view(member.whole)).view({-1}));
  };
  keep(own.parameter, parameter);
  for (size_t i = 0; i < held.size(); ++i) keep(own.state[i], held[i]);
}

// "SgdRule lr=0.1 momentum=0.9 times 0.5": rules, settings and factors of all groups, which other ranks have alike.
std::string described(const std::vector<ParameterGroup>& groups, double lr_factor) {
  std::string text;
  const auto add = [&](const std::string& name, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (!std::is_same_v<Value, std::monostate>)
      if (value != Value()) text += fmt::format(" {}={}", name, value);
  };
  for (const ParameterGroup& group : groups) {
    const UpdateRule& rule = *group.rule;
    const std::string kind = c10::demangle(typeid(rule).name());
    text += (text.empty() ? "" : " | ") + kind.substr(kind.rfind(':') + 1);
    for (const auto& [name, setting] : rule.settings())
      std::visit([&, of = name](const auto& value) { add(of, value); }, setting);
    add("lr_factor", lr_factor * group.lr_factor);
    add("decay_factor", group.decay_factor);
  }
  return text;
}

}  // namespace

Optimizer::Optimizer(Sharded& sharded, std::shared_ptr<UpdateRule> rule)
    : Optimizer(sharded, std::vector<ParameterGroup>{{.rule = std::move(rule)}}) {}

Optimizer::Optimizer(Sharded& sharded, std::vector<ParameterGroup> groups)
    : sharded_(sharded.watch()), groups_(std::move(groups)) {
  SHARD_REQUIRE(!groups_.empty(), "optimizer", "needs at least one group, got none");
  for (const ParameterGroup& group : groups_)
    SHARD_REQUIRE(group.rule != nullptr, "optimizer", "a group's update rule is null");
  for (const Bucket* bucket : sharded.impl().schedule.buckets()) {
    std::vector<Held>& held = held_.emplace_back();
    for (const BucketParameter& member : bucket->layout().members()) held.push_back({.group = group_of(groups_, member)});
    for (const OwnPart& part : bucket->parts()) {
      const auto member = static_cast<size_t>(part.member);
      if (groups_[held[member].group].rule->needs_whole_parameters()) require_whole(part);
      if (bucket->trains(part.member)) allocate_state(held_.size() - 1, member);
    }
  }
}

std::shared_ptr<Sharded::Impl> Optimizer::sharded() const {
  std::shared_ptr<Sharded::Impl> state = sharded_.lock();
  SHARD_REQUIRE(state != nullptr, "optimizer",
                "the Sharded that this optimizer was made for is gone; keep it, or make another "
                "optimizer for the new one");
  return state;
}

void Optimizer::allocate_state(size_t index, size_t member) {
  const std::shared_ptr<Sharded::Impl> state = sharded();
  Bucket& bucket = *state->schedule.buckets()[index];
  Held& held = held_[index][member];
  const size_t wanted = groups_[held.group].rule->state_names().size();
  held.has_state = true;
  const int64_t own = bucket.part(static_cast<int64_t>(member)).local.size();
  while (own > 0 && held.state.size() < wanted) held.state.push_back(bucket.parameters.allocate_state(own).zero_());
}

void Optimizer::step() {
  at::NoGradGuard no_grad;
  const std::shared_ptr<Sharded::Impl> state = sharded();
  Schedule& schedule = state->schedule;
  state->require_own_values("Optimizer::step");
  schedule.require_final("Optimizer::step");
  state->checks->read(&state->comms->world());
  state->begin_update();
  for (const auto& begin : state->before_update) begin();
  const std::vector<Bucket*>& buckets = schedule.buckets();
  size_t placed = 0;  // which group has which parameter, as a number
  for (const std::vector<Held>& bucket : held_)
    for (const Held& held : bucket) placed = placed * 31 + static_cast<size_t>(held.group) + 1;
  schedule.note(fmt::format("{}{}", described(groups_, lr_factor_),
                            groups_.size() == 1 ? "" : fmt::format(" | parameters by group {:x}", placed)));
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (!buckets[b]->gradient.final()) continue;
    const bool rounded = update_bucket(b);
    buckets[b]->parameters.all_gather_updated(rounded);
  }
  // Gathers of earlier buckets ran while later ones were updated.
  for (Bucket* bucket : buckets) bucket->parameters.end_update();
  schedule.end_step(/*parameters_changed=*/true);
}

bool Optimizer::update_bucket(size_t index) {
  const std::shared_ptr<Sharded::Impl> state = sharded();
  Bucket& bucket = *state->schedule.buckets()[index];
  for (size_t member = 0; member < held_[index].size(); ++member) {
    if (!bucket.trains(static_cast<int64_t>(member))) continue;
    Held& held = held_[index][member];
    ++held.updates;
    if (held.state.empty()) allocate_state(index, member);  // frozen until now, elsewhere, or not needed
  }
  bucket.gradient.await_values();
  const at::Tensor own = bucket.parameters.rounded();
  bool rounded = own.defined();
  for (const OwnPart& part : bucket.parts()) {
    if (!bucket.trains(part.member) || part.local.size() == 0) continue;
    const Held& held = held_[index][static_cast<size_t>(part.member)];
    const ParameterGroup& group = groups_[held.group];
    const BucketParameter& member = *part.parameter;
    const auto of = [&](const at::Tensor& buffer) { return part_of(buffer, part.local.begin, {part.local.size()}); };
    const Update update{.name = member.name,
                        .shape = member.whole,
                        .parameter = of(bucket.parameters.main()),
                        .gradient = of(bucket.gradient.values()),
                        .state = held.state,
                        .step = held.updates,
                        .lr_factor = lr_factor_ * group.lr_factor,
                        .decay_factor = group.decay_factor};
    if (own.defined() && group.rule->update_and_round(update, of(own))) continue;
    rounded = false;
    if (group.rule->needs_whole_parameters() && is_cut(member))
      update_joined(*state, member, *group.rule, update);
    else
      group.rule->update(update);
  }
  return rounded;
}

void Optimizer::set_lr_factor(double factor) {
  SHARD_REQUIRE(factor >= 0, "optimizer", "the factor of the learning rate must not be negative, got {}", factor);
  lr_factor_ = factor;
}

std::vector<std::string> Optimizer::state_names() const {
  std::vector<std::string> names;
  for (const ParameterGroup& group : groups_)
    for (const std::string& name : group.rule->state_names())
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  return names;
}

std::vector<Shard> Optimizer::state_shards(const std::string& state_name) const {
  const std::vector<std::string> known = state_names();
  SHARD_REQUIRE(std::find(known.begin(), known.end(), state_name) != known.end(), "optimizer",
                "no state called '{}': there are {}.{}", state_name, fmt::join(known, ", "), did_you_mean(state_name, known));
  std::vector<Shard> shards;
  const std::vector<Bucket*> buckets = sharded()->schedule.buckets();
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (const OwnPart& part : buckets[b]->parts()) {
      const Held& held = held_[b][static_cast<size_t>(part.member)];
      const std::vector<std::string> own = groups_[held.group].rule->state_names();
      const auto found = std::find(own.begin(), own.end(), state_name) - own.begin();
      if (found == std::ssize(own) || !held.has_state) continue;
      shards.push_back({part.parameter->name, part.parameter->whole, part.at,
                        held.state.empty() ? at::empty({0}, buckets[b]->rules().main) : held.state[found]});
    }
  }
  return shards;
}

std::vector<Piece> Optimizer::state(const std::string& state_name) const {
  std::vector<Piece> pieces;
  const int64_t rank = sharded()->comms->rank();
  for (const Shard& shard : state_shards(state_name)) append_pieces(shard, rank, pieces);
  return pieces;
}

std::map<std::string, at::Tensor> Optimizer::gather_state(const std::string& state_name) const {
  const std::shared_ptr<Sharded::Impl> state = sharded();
  state->schedule.require_no_backward("gather_state");
  return state->gather(state_shards(state_name));
}

at::Tensor Optimizer::gather_state(const std::string& state_name, const std::string& parameter) const {
  const std::shared_ptr<Sharded::Impl> state = sharded();
  state->schedule.require_no_backward("gather_state");
  std::vector<Shard> shards;
  agree_on(state->comms->world(), [&] { shards = state_shards(state_name); });
  return state->gather_one("gather_state", shards, parameter);
}

void Optimizer::write_state(const std::string& state_name, const std::map<std::string, at::Tensor>& values) {
  const std::shared_ptr<Sharded::Impl> state = sharded();
  state->schedule.require_no_backward("write_state");
  std::vector<Shard> shards;
  agree_on(state->comms->world(), [&] { shards = state_shards(state_name); });
  state->write("write_state", shards, values);
}

int64_t Optimizer::updates(const std::string& parameter) const {
  const std::shared_ptr<Sharded::Impl> state = sharded();
  const Schedule::Place place = place_of(*state, parameter);
  return held_[place.bucket][place.member].updates;
}

std::vector<Optimizer::Group> Optimizer::groups() const {
  std::vector<Group> result(groups_.size());
  const std::vector<Bucket*> buckets = sharded()->schedule.buckets();
  for (size_t b = 0; b < buckets.size(); ++b)
    for (size_t i = 0; i < held_[b].size(); ++i)
      result[held_[b][i].group].parameters.push_back(buckets[b]->layout().members()[i].name);
  for (size_t g = 0; g < groups_.size(); ++g) {
    result[g].state_names = groups_[g].rule->state_names();
    result[g].settings = groups_[g].rule->settings();
    for (auto& [name, value] : result[g].settings)
      if (auto* number = std::get_if<double>(&value))
        *number *= name == "lr" ? lr_factor_ * groups_[g].lr_factor : name == "weight_decay" ? groups_[g].decay_factor : 1;
  }
  std::erase_if(result, [](const Group& group) { return group.parameters.empty(); });
  return result;
}

std::vector<Optimizer::Scalar> Optimizer::scalars() const {
  std::vector<Scalar> scalars;
  const std::vector<std::string> known = state_names();
  if (std::find(known.begin(), known.end(), "exp_avg") == known.end()) return scalars;
  for (const Shard& shard : state_shards("exp_avg"))
    scalars.push_back({shard.name, "step", at::scalar_tensor(static_cast<float>(updates(shard.name)), at::kFloat)});
  return scalars;
}
void Optimizer::restore(const std::string& parameter, int64_t updates, bool with_state) {
  const std::shared_ptr<Sharded::Impl> state = sharded();
  const Schedule::Place place = place_of(*state, parameter);
  Held& held = held_[place.bucket][place.member];
  held.updates = updates;
  if (with_state)
    allocate_state(place.bucket, place.member);
  else
    held.has_state = false, held.state.clear();
}

bool Optimizer::replace_state(const std::string& parameter, const std::string& state_name, at::Tensor values) {
  const std::shared_ptr<Sharded::Impl> state = sharded();
  const Schedule::Place place = place_of(*state, parameter);
  Held& held = held_[place.bucket][place.member];
  const std::vector<std::string> names = groups_[held.group].rule->state_names();
  const auto found = static_cast<size_t>(std::ranges::find(names, state_name) - names.begin());
  SHARD_CHECK(found < held.state.size(), "optimizer", "{} has no {} to replace", parameter, state_name);
  at::Tensor& old = held.state[found];
  if (!state->device().is_cpu() || old.use_count() > 1 || old.storage().use_count() > 1) return false;
  SHARD_CHECK(values.device().is_cpu() && values.is_contiguous() && values.sizes() == old.sizes() &&
                  values.scalar_type() == old.scalar_type(),
              "optimizer", "{} of {} has {} elements, and is to be replaced by {}", state_name, parameter, old.numel(),
              values.numel());
  old = state->schedule.buckets()[place.bucket]->parameters.adopt_state(values);
  return true;
}

std::vector<ParameterGroup> without_decay_of_norms_and_biases(std::shared_ptr<UpdateRule> rule) {
  const auto is_spared = [](const std::string& name, const Shape& shape) {
    return shape.size() < 2 || name.find("norm") != std::string::npos || name.find("ln_") != std::string::npos;
  };
  return {{.takes = is_spared, .rule = rule, .decay_factor = 0}, {.rule = rule}};
}

}  // namespace shardproof
