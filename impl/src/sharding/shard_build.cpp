#include "sharding/shard_build.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "parallel/tensor/parallel_state.h"
#include "sharding/shard_plan.h"
#include "sharding/shard_validate.h"
#include "shardproof/algebra/axes.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/agree.h"
#include "shardproof/nn/meta_init.h"
#include "shardproof/nn/state_buffers.h"

namespace shardproof {
namespace {

void measure(NamedParameter& parameter, const ParallelState* parallel) {
  parameter.room = parameter.tensor.numel();
  const ParallelParameter* known = parallel ? parallel->find(parameter.tensor) : nullptr;
  if (!known) return;
  parameter.grad_partial_ranks = known->grad_partial_ranks;
  if (known->layout.splits(axes::ep)) parameter.expert_ranks = parallel->expert_ranks();
  const Mesh& view = parallel->view(known->layout);
  for (int64_t part = 0; part < view.size(); ++part)
    parameter.room = std::max(parameter.room, owned_numel(known->shape, view, known->layout, part));
}

BucketParameter member_of(const NamedParameter& parameter, const ParallelState* parallel) {
  const Shape shape = parameter.tensor.sizes().vec();
  BucketParameter member{
      .name = parameter.name, .shape = shape, .numel = parameter.tensor.numel(), .room = parameter.room, .whole = shape,
      .cut_dim = parameter.cut_dim, .granule = std::min(parameter.granule, std::max<int64_t>(1, parameter.room))};
  if (!parallel) return member;
  const ParallelParameter* known = parallel->find(parameter.tensor);
  const Layout layout = known ? known->layout : replicated();
  if (parallel->view(layout).size() == 1) return member;
  member.own = {parallel->view(layout), layout};
  if (known) member.whole = known->shape;
  return member;
}

void broadcast_buffers(const torch::nn::Module& module, MeshComm& comms, const Strategy& strategy) {
  at::NoGradGuard no_grad;
  const ModuleBuffers buffers = buffers_of(module);
  for (const auto* kind : {&buffers.state, &buffers.transient})
    for (const auto& [name, buffer] : *kind) {
      at::Tensor values = buffer.contiguous();
      for (const std::string& axis : strategy.produced.partial) comms.along({axis}).broadcast(values, 0).wait();
      if (values.data_ptr() != buffer.data_ptr()) at::Tensor(buffer).copy_(values);
    }
}

// How one unit is sharded: as all are, but for what its own options say.
struct UnitSharding {
  ShardOptions options;
  std::shared_ptr<MeshComm> comms;
  Strategy strategy;
};

// What the units share while they are built.
struct Shared {
  ShardOptions options;  // without functions: each unit copies the options, and a function may hold a list of all units
  std::map<std::string, std::shared_ptr<MeshComm>> views;  // of units with the same mesh of their own
};

Shared shared_by_units(ShardOptions options) {
  options.units = nullptr;
  options.unit_options = nullptr;
  options.recompute = nullptr;
  options.ignored = nullptr;
  options.shard_dim_of = nullptr;
  options.granule_of = nullptr;
  options.initialize = nullptr;
  return {std::move(options), {}};
}

UnitSharding sharding_of(const Sharded::Impl& sharded, const UnitPlan& plan, Shared& shared) {
  const UnitOptions& own = plan.options;
  UnitSharding result{shared.options, sharded.comms, sharded.strategy};
  if (own.precision) result.options.precision = *own.precision;
  if (!own.strategy && !own.mesh && !own.gradient_divide) return result;
  if (own.strategy) result.options.strategy = *own.strategy;
  if (own.gradient_divide) result.options.gradient_divide = *own.gradient_divide;
  if (own.mesh) {
    const Mesh mesh = data_parallel_mesh(*own.mesh);
    std::shared_ptr<MeshComm>& view = shared.views[mesh.str()];
    if (!view) view = mesh == sharded.comms->mesh() ? sharded.comms : sharded.comms->on(mesh);
    result.comms = view;
  }
  const Mesh& mesh = result.comms->mesh();
  validate(result.options, mesh);
  result.strategy = strategy_on(result.options, mesh);
  validate_view(plan.name(), sharded.comms->rank(), mesh, result.strategy, sharded.comms->mesh(), sharded.strategy,
                sharded.parallel.get());
  return result;
}

// That of the unit's experts, which fewer ranks share.
UnitSharding sharding_of_experts(const Sharded::Impl& sharded, const UnitPlan& plan, UnitSharding how, Shared& shared) {
  const int64_t ranks = sharded.parallel->expert_ranks(), rank = sharded.comms->rank();
  const auto seen = [&](const Mesh& mesh) { return expert_mesh(mesh, ranks).peers(rank, {axes::ep}); };
  SHARD_REQUIRE(seen(how.comms->mesh()) == seen(sharded.comms->mesh()), "fully_shard",
                "unit '{}' has mesh '{}', on which rank {} shares experts with ranks {}; they were given to ranks {} of '{}'",
                plan.name(), how.comms->mesh().str(), rank, fmt::join(seen(how.comms->mesh()), " "),
                fmt::join(seen(sharded.comms->mesh()), " "), sharded.comms->mesh().str());
  const Mesh mesh = expert_mesh(how.comms->mesh(), ranks);
  std::shared_ptr<MeshComm>& view = shared.views[mesh.str()];
  if (!view) view = sharded.comms->on(mesh);
  how.comms = view;
  how.strategy = strategy_on(how.options, mesh);
  return how;
}

// Of a unit whose options leave it to the strategy.
Reshard reshard_of(const Strategy& strategy) {
  if (!strategy.between || *strategy.between == strategy.parameter) return Reshard::always();
  return *strategy.between == strategy.compute ? Reshard::never() : Reshard::by_strategy();
}

// The strategy for parameters that stay whole between steps.
Strategy keeping_whole(Strategy strategy) {
  strategy.parameter = strategy.compute;
  strategy.between = {};
  return strategy;
}

std::unique_ptr<Bucket> make_bucket(Sharded::Impl& sharded, const UnitPlan& plan, const UnitSharding& how,
                                    const std::vector<NamedParameter>& parameters) {
  std::vector<BucketParameter> members;
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : parameters) {
    members.push_back(member_of(parameter, sharded.parallel.get()));
    tensors.push_back(parameter.tensor);
  }
  const Mesh& mesh = how.comms->mesh();
  const Strategy strategy = stays_whole(parameters.front(), how.options) ? keeping_whole(how.strategy) : how.strategy;
  BucketRules rules = resolve(how.options, strategy, mesh, parameters.front().expert_ranks, tensors.front().scalar_type());
  rules.grad_partial_ranks = parameters.front().grad_partial_ranks;
  const auto alignment = how.options.alignment_bytes / static_cast<int64_t>(c10::elementSize(rules.compute));
  BucketLayout layout(std::move(members), strategy, mesh, how.comms->rank(), alignment,
                      how.options.granularity == Granularity::row, how.options.bucket_multiple);
  return std::make_unique<Bucket>(
      BucketContext{plan.name().empty() ? "the root unit" : "unit '" + plan.name() + "'", std::move(tensors), strategy,
                    std::move(layout), how.comms, sharded.memory, sharded.transfers, std::move(rules),
                    sharded.schedule.progress(), sharded.checks},
      sharded.options.initialize);
}

bool is_parameter(const Schedule& schedule, const at::Tensor& tensor) {
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  for (const auto& unit : schedule.units())
    for (const auto& bucket : unit->buckets())
      if (bucket->views().front().storage().unsafeGetStorageImpl() == storage) return true;
  return false;
}

// Made for the first unit that needs it.
std::shared_ptr<ActivationStore> activations_of(Sharded::Impl& sharded) {
  if (!sharded.schedule.activations())
    sharded.schedule.set_activations(std::make_shared<ActivationStore>(
        sharded.memory, sharded.transfers,
        [&schedule = sharded.schedule](const at::Tensor& tensor) { return is_parameter(schedule, tensor); }));
  return sharded.schedule.activations();
}

void build_unit(Sharded::Impl& sharded, const UnitPlan& plan, Shared& shared) {
  const UnitSharding how = sharding_of(sharded, plan, shared);
  const Precision& precision = how.options.precision;
  std::vector<std::unique_ptr<Bucket>> buckets;
  for (const auto& parameters : split_into_buckets(plan, how.options)) {
    const bool are_experts = parameters.front().expert_ranks > 1;
    const UnitSharding own = are_experts ? sharding_of_experts(sharded, plan, how, shared) : how;
    buckets.push_back(make_bucket(sharded, plan, own, parameters));
  }
  auto unit = std::make_shared<Unit>(sharded.schedule, plan.name(), std::move(buckets), plan.modules.size());
  UnitSettings& settings = unit->settings;
  const bool is_root = plan.modules.front().second == sharded.module;
  settings.reshard_after_forward =
      plan.options.reshard_after_forward.value_or(is_root ? Reshard::never() : sharded.options.reshard_after_forward);
  if (settings.reshard_after_forward.asks_strategy()) settings.reshard_after_forward = reshard_of(how.strategy);
  validate(settings.reshard_after_forward, how.strategy, how.comms->mesh());
  settings.reshard_after_backward = sharded.options.reshard_after_backward;
  settings.recompute = plan.options.recompute;
  if (plan.options.offload_activations) settings.activations = activations_of(sharded);
  settings.delayed = sharded.schedule.delayed();
  if (precision.cast_inputs) settings.input_dtype = precision.compute;
  settings.output_dtype = precision.output;
  settings.timeline = timeline_of(sharded.comms->world());
  settings.rank = sharded.comms->rank();
  unit->hook_parameters();
  for (const auto& [name, module] : plan.modules) sharded.attached.attach(module, *unit);
  sharded.schedule.add(std::move(unit));
}

void relate_units(Sharded::Impl& sharded, const std::vector<UnitPlan>& plans) {
  const auto& units = sharded.schedule.units();
  std::unordered_map<std::string, Unit*> unit_called;
  for (size_t i = 1; i < units.size(); ++i)
    for (const auto& [name, module] : plans[i].modules) unit_called[name] = units[i].get();
  for (size_t i = 1; i < units.size(); ++i) {
    Unit* const inner = units[i].get();
    units[0]->settings.below.push_back(inner);
    for (const std::string& name : modules_around(plans[i].name()))
      if (const auto outer = unit_called.find(name); outer != unit_called.end() && outer->second != inner)
        outer->second->settings.below.push_back(inner);
  }
}

void build_recomputed(Sharded::Impl& sharded, const UnitPlans& plans) {
  for (const RecomputedPlan& plan : plans.recomputed) {
    auto part = std::make_shared<Unit>(sharded.schedule, plan.name, std::vector<std::unique_ptr<Bucket>>(), 1);
    part->settings.recompute = true;
    const auto& units = sharded.schedule.units();
    part->settings.around = units.front().get();
    for (const auto& unit : units)
      if (is_within(plan.name, unit->name()) && unit->name().size() > part->settings.around->name().size())
        part->settings.around = unit.get();
    part->settings.timeline = timeline_of(sharded.comms->world());
    part->settings.rank = sharded.comms->rank();
    sharded.attached.attach(plan.module, *part);
    sharded.schedule.add_recomputed(std::move(part));
  }
}

// The root runs around all others, so it is never ahead of them.
void choose_prefetch(Sharded::Impl& sharded) {
  const auto& units = sharded.schedule.units();
  const auto count = std::ssize(units);
  for (int64_t i = 1; i < count; ++i) {
    for (int64_t ahead = 1; ahead <= sharded.options.prefetch_forward && i + ahead < count; ++ahead)
      units[i]->settings.forward_prefetch.push_back(units[i + ahead].get());
    for (int64_t ahead = 1; ahead <= sharded.options.prefetch_backward && i - ahead >= 1; ++ahead)
      units[i]->settings.backward_prefetch.push_back(units[i - ahead].get());
  }
  for (int64_t ahead = 1; ahead <= sharded.options.prefetch_forward && ahead < count; ++ahead)
    units[0]->settings.forward_prefetch.push_back(units[ahead].get());
}

void reset_meta_buffers(Sharded::Impl& sharded) {
  for (const auto& item : sharded.module->named_modules("", /*include_self=*/true)) {
    bool any = false;
    for (const auto& buffer : item.value()->named_buffers(/*recurse=*/false)) any |= buffer.value().is_meta();
    if (!any) continue;
    auto* owner = dynamic_cast<HasBuffers*>(item.value().get());
    SHARD_REQUIRE(
        owner, "fully_shard",
        "module '{}' ({}) has a buffer on the meta device, which has no values, and does not say how to compute it. Derive it "
        "from HasBuffers, or build it outside MetaInit",
        item.key(), item.value()->name());
    for (const auto& buffer : item.value()->named_buffers(/*recurse=*/false))
      if (buffer.value().is_meta()) materialize(buffer.value(), sharded.device());
    owner->reset_buffers();
  }
}

}  // namespace

std::shared_ptr<Sharded::Impl> build_sharded(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms,
                                             ShardOptions options, const std::vector<Sharding::Entry>& entries) {
  UnitPlans plans;
  const std::string failure = error_of([&] { plans = plan_units(module, entries, options); });
  require_same(comms->world(), facts_of(*module, plans, options, comms->mesh(), failure), "fully_shard",
               "Give all ranks the same model and the same options");
  if (!failure.empty()) throw Error(failure);
  auto built = std::make_shared<Sharded::Impl>(std::move(module), std::move(comms), std::move(options));
  Sharded::Impl& sharded = *built;
  for (UnitPlan& plan : plans.units)
    for (NamedParameter& parameter : plan.parameters) measure(parameter, sharded.parallel.get());
  SHARD_REQUIRE(!plans.aliases.empty(), "fully_shard", "module {} has no parameters to shard", sharded.module->name());
  sharded.aliases = std::move(plans.aliases);
  for (const UnitPlan& plan : plans.units)
    for (const auto& [name, unit_module] : plan.modules)
      SHARD_REQUIRE(unit_hooks(*unit_module) == nullptr, "fully_shard",
                    "module '{}' is sharded already; destroy the Sharded that holds it first", name);
  for (const RecomputedPlan& plan : plans.recomputed)
    SHARD_REQUIRE(unit_hooks(*plan.module) == nullptr, "fully_shard",
                  "module '{}' is sharded already; destroy the Sharded that holds it first", plan.name);
  Shared shared = shared_by_units(sharded.options);
  if (sharded.options.delayed_gradient_bytes_max > 0)
    sharded.schedule.set_delayed(
        std::make_shared<DelayedGradients>(sharded.options.delayed_gradient_bytes_max, sharded.memory));
  for (const UnitPlan& plan : plans.units) build_unit(sharded, plan, shared);
  relate_units(sharded, plans.units);
  build_recomputed(sharded, plans);
  choose_prefetch(sharded);
  sharded.checks->begin();
  sharded.sequential = std::make_unique<SequentialEntries>(*sharded.module);
  reset_meta_buffers(sharded);
  if (sharded.options.broadcast_initial_values) broadcast_buffers(*sharded.module, *sharded.comms, sharded.strategy);
  sharded.memory->reset_peak();
  return built;
}

}  // namespace shardproof
