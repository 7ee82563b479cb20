#include "sharding/sharded_state.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "parallel/tensor/parallel_state.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/nn/attention.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/meta_init.h"

namespace shardproof {
namespace {

constexpr int64_t kParallelOrder = 100, kDivisionOrder = 1000;

void validate(const ShardOptions& options, const Mesh& mesh) {
  const int64_t alignment = options.alignment_bytes;
  SHARD_REQUIRE(alignment >= 64 && (alignment & (alignment - 1)) == 0, "fully_shard",
                "alignment_bytes must be a power of two and at least 64, got {}", alignment);
  SHARD_REQUIRE(options.bucket_bytes_max >= 0 && options.bucket_count >= 0, "fully_shard",
                "bucket_bytes_max and bucket_count must not be negative, got {} and {}", options.bucket_bytes_max,
                options.bucket_count);
  SHARD_REQUIRE(options.bucket_bytes_max == 0 || options.bucket_count == 0, "fully_shard",
                "give bucket_bytes_max or bucket_count, not both");
  SHARD_REQUIRE(options.gradient_divide >= 0, "fully_shard", "gradient_divide must not be negative, got {}",
                options.gradient_divide);
  SHARD_REQUIRE(!options.divide_by_tokens || (options.gradient_divide == 0 && options.divide == Divide::after), "fully_shard",
                "divide_by_tokens takes the place of gradient_divide and needs Divide::after");
  SHARD_REQUIRE(options.gradient_magnitude_max > 0, "fully_shard", "gradient_magnitude_max must be above 0, got {}",
                options.gradient_magnitude_max);
  SHARD_REQUIRE(options.prefetch_forward >= 0 && options.prefetch_backward >= 0 && options.bytes_in_flight_max >= 0,
                "fully_shard", "prefetch_forward, prefetch_backward and bytes_in_flight_max must not be negative");
  SHARD_REQUIRE(
      options.numerics != Numerics::canonical || options.gradient_divide != 0 || options.divide_by_tokens || mesh.size() == 1,
      "fully_shard",
      "canonical sums cannot divide by the number of ranks, which depends on the mesh. Weigh the losses by the global batch "
      "and set gradient_divide to 1, or divide by tokens");
}

void validate(const Reshard& reshard, const Mesh& mesh) {
  if (reshard.ranks() == 0) return;
  const int64_t size = mesh.has("dp_shard") ? mesh.size("dp_shard") : 1;
  SHARD_REQUIRE(size % reshard.ranks() == 0, "fully_shard",
                "reshard_after_forward within {} ranks: dp_shard has {}, which is not a multiple", reshard.ranks(), size);
}

// Values of a rank's slots, from an initializer of whole parameters.
Initializer of_slots(const Initializer& of_whole, const std::vector<Slot>& slots) {
  if (!of_whole) return {};
  return [of_whole, slots](const std::string& name, const Shape&, Interval run, at::Tensor values) {
    const Slot& slot = *std::find_if(slots.begin(), slots.end(), [&](const Slot& s) { return s.name == name; });
    for (const CutRun& part : slot.runs(run))
      of_whole(name, slot.whole, part.whole, values.narrow(0, part.local - run.begin, part.whole.size()));
  };
}

Slot slot_of(const NamedParameter& parameter, const ParallelState* parallel) {
  const Shape shape = parameter.tensor.sizes().vec();
  Slot slot{.name = parameter.name, .shape = shape, .numel = parameter.tensor.numel(), .whole = shape};
  if (!parallel) return slot;
  slot.parts = parallel->parts();
  slot.part = parallel->part();
  if (const ParallelParameter* cut = parallel->find(parameter.tensor)) {
    slot.whole = cut->shape;
    slot.cut = cut->cut;
  }
  return slot;
}

// Parameters that tensor parallelism was to cut would be taken for replicated ones.
void require_parallel(const Mesh& mesh, const ParallelState* parallel) {
  constexpr const char* kAxis = "tp";
  SHARD_REQUIRE(
      !mesh.has(kAxis) || mesh.size(kAxis) == 1 || (parallel && parallel->axis() == kAxis), "fully_shard",
      "mesh '{}' has {} ranks along {}, and no module was cut along it. Call parallelize before fully_shard, or leave the "
      "axis out",
      mesh.str(), mesh.size(kAxis), kAxis);
}

// Sums that tensor and context parallelism cut inside of a module depend on the cut, unless it computes them exactly.
void require_canonical(const torch::nn::Module& root, const Mesh& mesh, const ShardOptions& options) {
  if (options.numerics != Numerics::canonical || uses_canonical_arithmetic(root)) return;
  for (const char* axis : {"cp", "tp"})
    SHARD_REQUIRE(
        !mesh.has(axis) || mesh.size(axis) == 1, "fully_shard",
        "Numerics::canonical on mesh '{}' with {} ranks along {}: sums inside of the module would depend on the mesh. "
        "Call use_canonical_arithmetic on it first",
        mesh.str(), mesh.size(axis), axis);
}

// Ranks along cp that compute on their own positions sum gradients as those along dp_shard do.
std::shared_ptr<MeshComm> data_parallel_comms(const torch::nn::Module& root, const ShardOptions& options,
                                              std::shared_ptr<MeshComm> comms) {
  constexpr const char* kAxis = "cp";
  const Mesh& mesh = comms->mesh();
  require_canonical(root, mesh, options);
  if (!mesh.has(kAxis)) return comms;
  if (mesh.size(kAxis) > 1)
    for (const auto& item : root.named_modules("", /*include_self=*/true)) {
      const auto* part = dynamic_cast<const SequencePart*>(item.value().get());
      SHARD_REQUIRE(!part || part->rule, "fully_shard",
                    "mesh '{}' has {} ranks along {}, and module '{}' sees the positions of one rank. Call context_parallel "
                    "before fully_shard, or leave the axis out",
                    mesh.str(), mesh.size(kAxis), kAxis, item.key());
    }
  return comms->on(data_parallel_mesh(mesh));
}

// Where the parameters are, and those of the meta device will be: all in one place.
c10::Device device_of(const torch::nn::Module& root, const ShardOptions& options) {
  std::optional<c10::Device> found = options.device;
  for (const auto& item : root.named_parameters(/*recurse=*/true)) {
    if (item.value().is_meta() || (options.ignored && options.ignored(item.key(), item.value()))) continue;
    if (!found) found = item.value().device();
    SHARD_REQUIRE(item.value().device() == *found, "fully_shard",
                  "parameter {} is on {}, others or ShardOptions::device are on {}; move the module to one device", item.key(),
                  item.value().device().str(), found->str());
  }
  const c10::Device device = found.value_or(at::kCPU);
  SHARD_REQUIRE(has_device_math(device), "fully_shard",
                "parameters are on {}, and this process has no arithmetic for it. Call shardproof::use_cuda() first, or move "
                "the module to the CPU",
                device.str());
  SHARD_REQUIRE(device.is_cpu() || !uses_canonical_arithmetic(root), "fully_shard",
                "use_canonical_arithmetic computes on the CPU, and parameters are on {}; move the module to the CPU",
                device.str());
  return device;
}

std::shared_ptr<MemoryLedger> make_ledger(c10::Device device, const ShardOptions& options) {
  return std::make_shared<MemoryLedger>(device, /*pins_host=*/options.offload == Offload::pinned && device.is_cuda());
}

std::vector<std::shared_ptr<void>> sequence_rules(const torch::nn::Module& root) {
  std::vector<std::shared_ptr<void>> rules;
  for (const auto& module : root.modules(/*include_self=*/true))
    if (const auto* part = dynamic_cast<const SequencePart*>(module.get()); part && part->rule)
      rules.push_back(part->rule->held());
  return rules;
}

void broadcast_buffers(const torch::nn::Module& module, MeshComm& comms, const Strategy& strategy) {
  at::NoGradGuard no_grad;
  for (const at::Tensor& buffer : module.buffers()) {
    at::Tensor values = buffer.contiguous();
    for (const std::string& axis : strategy.produced.partial) comms.along({axis}).broadcast(values, 0).wait();
    if (values.data_ptr() != buffer.data_ptr()) buffer.copy_(values);
  }
}

}  // namespace

ShardedState::ShardedState(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options,
                           const std::vector<Sharding::Entry>& entries)
    : module_(std::move(module)),
      comms_(data_parallel_comms(*module_, options, std::move(comms))),
      options_(std::move(options)),
      strategy_(on_mesh(
          options_.reduce_replicas_every_microbatch ? reducing_replicas_every_time(options_.strategy) : options_.strategy,
          comms_->mesh())),
      memory_(make_ledger(device_of(*module_, options_), options_)),
      transfers_(std::make_shared<HostTransfers>(memory_->device())),
      schedule_({comms_->rank(), options_.bytes_in_flight_max, options_.buffers}, memory_) {
  validate(options_, comms_->mesh());
  parallel_ = parallel_state(*module_);
  require_parallel(comms_->mesh(), parallel_.get());
  rules_ = sequence_rules(*module_);
  UnitPlans plans = plan_units(module_, entries, options_);
  if (parallel_) {
    for (UnitPlan& plan : plans.units)
      for (NamedParameter& parameter : plan.parameters)
        if (const ParallelParameter* known = parallel_->find(parameter.tensor)) parameter.terms = known->terms;
    add_finishing_step({"parallel terms", kParallelOrder, [this](Sharded&) { sum_parallel_terms(); }});
  }
  SHARD_REQUIRE(!plans.aliases.empty(), "fully_shard", "module {} has no parameters to shard", module_->name());
  aliases_ = std::move(plans.aliases);
  for (const UnitPlan& plan : plans.units)
    for (const auto& [name, unit_module] : plan.modules)
      SHARD_REQUIRE(unit_hooks(*unit_module) == nullptr, "fully_shard",
                    "module '{}' is sharded already; destroy the Sharded that holds it first", name);
  for (const UnitPlan& plan : plans.units) build_unit(plan);
  relate_units(plans.units);
  choose_prefetch();
  sequential_ = std::make_unique<SequentialEntries>(*module_);
  reset_meta_buffers();
  if (options_.broadcast_initial_values) broadcast_buffers(*module_, *comms_, strategy_);
  memory_->reset_peak();
}

std::unique_ptr<Bucket> ShardedState::make_bucket(const UnitPlan& plan, const std::vector<NamedParameter>& parameters,
                                                  const Precision& precision) {
  std::vector<Slot> slots;
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : parameters) {
    slots.push_back(slot_of(parameter, parallel_.get()));
    tensors.push_back(parameter.tensor);
  }
  BucketRules rules = resolve(options_, precision, strategy_, comms_->mesh(), tensors.front().scalar_type());
  rules.parallel_terms = parameters.front().terms;
  const auto alignment = options_.alignment_bytes / static_cast<int64_t>(c10::elementSize(rules.compute));
  BucketLayout layout(std::move(slots), strategy_, comms_->mesh(), comms_->rank(), alignment, options_.granularity);
  const Initializer initialize = of_slots(options_.initialize, layout.slots());
  return std::make_unique<Bucket>(
      BucketContext{plan.name().empty() ? "the root unit" : "unit '" + plan.name() + "'", std::move(tensors), std::move(layout),
                    comms_, memory_, transfers_, std::move(rules)},
      initialize);
}

// Buckets of terms hold nothing else, so their offsets, and what each rank has of them, are the same all along the axis.
void ShardedState::sum_parallel_terms() {
  for (Bucket* bucket : schedule_.buckets())
    if (bucket->gradient.final() && bucket->rules().parallel_terms > 1)
      bucket->gradient.sum_terms(comms_->within(parallel_->axis(), bucket->rules().parallel_terms));
}

at::Tensor ShardedState::join(const Slot& slot, const at::Tensor& local) const {
  if (!slot.cut) return local.detach().clone();
  return parallel_->join({slot.name, slot.whole, slot.cut}, local);
}

void ShardedState::build_unit(const UnitPlan& plan) {
  Precision precision = options_.precision;
  if (options_.unit_precision)
    if (const auto own = options_.unit_precision(plan.name())) precision = *own;
  if (plan.options.precision) precision = *plan.options.precision;

  std::vector<std::unique_ptr<Bucket>> buckets;
  for (const auto& parameters : split_into_buckets(plan, options_))
    buckets.push_back(make_bucket(plan, parameters, precision));
  auto unit = std::make_shared<Unit>(schedule_, plan.name(), std::move(buckets), plan.modules.size());
  UnitSettings& settings = unit->settings;
  const bool is_root = plan.modules.front().second == module_;
  settings.reshard_after_forward =
      plan.options.reshard_after_forward.value_or(is_root ? Reshard::never() : options_.reshard_after_forward);
  validate(settings.reshard_after_forward, comms_->mesh());
  settings.reshard_after_backward = options_.reshard_after_backward;
  settings.recompute = plan.options.recompute;
  if (precision.cast_inputs) settings.input_dtype = precision.compute;
  settings.output_dtype = precision.output;
  unit->hook_parameters();
  for (const auto& [name, module] : plan.modules) attached_.attach(module, *unit);
  schedule_.add(std::move(unit));
}

void ShardedState::relate_units(const std::vector<UnitPlan>& plans) {
  const auto& units = schedule_.units();
  for (size_t outer = 1; outer < units.size(); ++outer) {
    units[outer]->settings.root = units[0].get();
    for (size_t inner = 1; inner < units.size(); ++inner)
      for (const auto& [name, module] : plans[outer].modules)
        if (inner != outer && is_within(plans[inner].name(), name)) units[outer]->settings.inside.push_back(units[inner].get());
  }
}

// The root runs around all others, so it is never ahead of them.
void ShardedState::choose_prefetch() {
  const auto& units = schedule_.units();
  const auto count = std::ssize(units);
  for (int64_t i = 1; i < count; ++i) {
    for (int64_t ahead = 1; ahead <= options_.prefetch_forward && i + ahead < count; ++ahead)
      units[i]->settings.forward_prefetch.push_back(units[i + ahead].get());
    for (int64_t ahead = 1; ahead <= options_.prefetch_backward && i - ahead >= 1; ++ahead)
      units[i]->settings.backward_prefetch.push_back(units[i - ahead].get());
  }
  for (int64_t ahead = 1; ahead <= options_.prefetch_forward && ahead < count; ++ahead)
    units[0]->settings.forward_prefetch.push_back(units[ahead].get());
}

void ShardedState::reset_meta_buffers() {
  for (const auto& item : module_->named_modules("", /*include_self=*/true)) {
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
      if (buffer.value().is_meta()) materialize(buffer.value(), device());
    owner->reset_buffers();
  }
}

Unit& ShardedState::unit(const std::string& name) const {
  std::vector<std::string> names;
  for (const auto& unit : schedule_.units()) {
    if (unit->name() == name) return *unit;
    names.push_back("'" + unit->name() + "'");
  }
  throw Error(fmt::format("[fully_shard] there is no unit '{}': there are {}", name, fmt::join(names, ", ")));
}

void ShardedState::add_finishing_step(FinishingStep step) {
  const auto later =
      std::find_if(finishing_.begin(), finishing_.end(), [&](const FinishingStep& s) { return s.order > step.order; });
  finishing_.insert(later, std::move(step));
}

void ShardedState::finish(const std::shared_ptr<ShardedState>& self) {
  Sharded sharded(self);
  const auto run = [&](bool before_division) {
    for (const FinishingStep& step : finishing_)
      if ((step.order < kDivisionOrder) == before_division) step.run(sharded);
  };
  run(true);
  if (options_.divide_by_tokens) {
    at::Tensor total = at::full({1}, tokens, at::kLong);
    for (const std::string& axis : strategy_.produced.partial) comms_->along({axis}).all_reduce(total, Reduce::sum).wait();
    const auto divisor = static_cast<double>(std::max<int64_t>(1, total.item<int64_t>()));
    for (Bucket* bucket : schedule_.buckets())
      if (bucket->gradient.final()) bucket->gradient.divide_final(divisor);
  }
  tokens = 0;
  run(false);
}

ShardedState::~ShardedState() = default;

}  // namespace shardproof
