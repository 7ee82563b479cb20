#include "sharding/sharded_impl.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "parallel/tensor/parallel_state.h"
#include "sharding/replicas.h"
#include "sharding/shard_validate.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/capturable.h"
#include "shardproof/comm/comparing.h"
#include "shardproof/nn/attention.h"
#include "shardproof/parallel/experts/router.h"
#include "internal/base/call_label.h"

namespace shardproof {
namespace {

constexpr int64_t kParallelOrder = 100, kDivisionOrder = 1000;
constexpr int64_t kReplicasOrder = std::numeric_limits<int64_t>::max();  // after whatever the caller sums

std::shared_ptr<MemoryLedger> make_ledger(c10::Device device, const ShardOptions& options) {
  const bool uses_host = options.offload != Offload::none || options.offload_activations || options.unit_options;
  return std::make_shared<MemoryLedger>(device,
                                        /*pins_host=*/uses_host && options.offload != Offload::pageable && device.is_cuda());
}

// Where the host waits for a device to compare, only few backwards do, and none whose gradients nobody checks.
ScheduleOptions schedule_options(MeshComm& comms, const ShardOptions& options) {
  Comm& world = comms.world();
  const bool waits = can_be_captured(world);
  return {.rank = comms.rank(),
          .bytes_in_flight_max = options.bytes_in_flight_max,
          .buffers = options.buffers,
          .compares = compares_purposes(world) || (waits && !options.check_gradients) ? nullptr : &world,
          .compares_seldom = waits};
}

std::vector<std::shared_ptr<void>> rules_of(const torch::nn::Module& root) {
  std::vector<std::shared_ptr<void>> rules;
  for (const auto& module : root.modules(/*include_self=*/true)) {
    if (const auto* part = dynamic_cast<const SequencePart*>(module.get()); part && part->rule)
      rules.push_back(part->rule->held());
    if (const AdapterHooks* adapter = adapter_hooks(*module)) rules.push_back(adapter->held());
  }
  return rules;
}

// Buckets of terms hold nothing else, so their offsets, and what each rank has of them, are the same all along the axis.
void sum_parallel_terms(Sharded::Impl& sharded) {
  for (Bucket* bucket : sharded.schedule.buckets())
    if (bucket->gradient.final() && bucket->rules().grad_partial_ranks > 1)
      bucket->gradient.sum_terms(sharded.comms->within(sharded.parallel->axis(), bucket->rules().grad_partial_ranks));
}

// After the first backward, the second, the fourth, the eighth and so on.
Sharded::Impl::FinishingStep comparison_of_replicas() {
  return {"equal replicas", kReplicasOrder, [backwards = uint64_t{0}](Sharded& sharded) mutable {
            const Sharded::Impl& state = sharded.impl();
            if (!std::has_single_bit(++backwards)) return;
            state.await_gradients();
            require_equal_replicas(state.schedule, *state.comms, *state.parallel);
          }};
}

}  // namespace

Sharded::Impl::Impl(std::shared_ptr<torch::nn::Module> given, std::shared_ptr<MeshComm> whole_mesh, ShardOptions chosen)
    : module(std::move(given)),
      comms(data_parallel_comms(*module, chosen, std::move(whole_mesh))),
      options(std::move(chosen)),
      strategy(strategy_on(options, comms->mesh())),
      parallel(parallel_state(*module)),
      rules(rules_of(*module)),
      memory(make_ledger(device_of(*module, options), options)),
      transfers(std::make_shared<HostTransfers>(memory->device())),
      checks(std::make_shared<LateChecks>(memory->device(), comms->rank(), transfers)),
      schedule(schedule_options(*comms, options), memory) {
  validate(options, comms->mesh());
  require_shared(comms->mesh(), options.strategy, parallel.get());
  require_parallel(comms->mesh(), parallel.get());
  SHARD_REQUIRE(options.numerics != Numerics::canonical || !parallel || parallel->expert_ranks() == 1 || parallel->canonical,
                "fully_shard",
                "Numerics::canonical with experts that {} ranks share: their gradients are added in floating point first, so "
                "bits would depend on the mesh. Give ExpertParallel one rank, or use_canonical_arithmetic",
                parallel->expert_ranks());
  share_router_counts(*module, comms);
  if (parallel) {
    add_finishing_step({"parallel terms", kParallelOrder, [](Sharded& sharded) { sum_parallel_terms(sharded.impl()); }});
    if (parallel->plan().compare_replicas && parallel->parts() > 1) add_finishing_step(comparison_of_replicas());
  }
}

Sharded::Impl::~Impl() = default;

at::Tensor Sharded::Impl::join(const BucketParameter& member, const at::Tensor& local) const {
  if (!member.is_cut()) return local.detach().clone();
  return parallel->join({member.name, member.whole, member.own.layout}, local);
}

Unit& Sharded::Impl::unit(const std::string& name) const {
  std::vector<std::string> names;
  for (const auto& unit : schedule.units()) {
    if (unit->name() == name) return *unit;
    names.push_back("'" + unit->name() + "'");
  }
  throw Error(fmt::format("[fully_shard] there is no unit '{}': there are {}", name, fmt::join(names, ", ")));
}

void Sharded::Impl::add_finishing_step(FinishingStep step) {
  const auto later =
      std::find_if(finishing.begin(), finishing.end(), [&](const FinishingStep& s) { return s.order > step.order; });
  finishing.insert(later, std::move(step));
}

void Sharded::Impl::finish_reads() {
  for (const auto& finish_read : std::exchange(reads, {})) finish_read();
}

void Sharded::Impl::begin_update() {
  finish_reads();
  bool neighbours_read = false;
  for (Bucket* bucket : schedule.buckets()) {
    bucket->parameters.await_main();  // the device may still be fetching them
    neighbours_read |= bucket->parameters.side_by_side();
  }
  if (!neighbours_read) return;
  const std::string occasion = fmt::format("step {}", schedule.current_step());
  const CallLabel label("the update of what lies side by side", occasion);
  comms->world().barrier().wait();
}

// What has its final gradients is updated next, by whichever optimizer.
void Sharded::Impl::finish(const std::shared_ptr<Sharded::Impl>& self) {
  finish_reads();
  Sharded sharded(self);
  const auto run = [&](bool before_division) {
    for (const FinishingStep& step : finishing)
      if ((step.order < kDivisionOrder) == before_division) step.run(sharded);
  };
  run(true);
  if (options.divide_by_tokens) {
    at::Tensor total = at::full({1}, tokens, at::kLong);
    for (const std::string& axis : strategy.produced.partial) comms->along({axis}).all_reduce(total, Reduce::sum).wait();
    const auto divisor = static_cast<double>(std::max<int64_t>(1, total.item<int64_t>()));
    for (Bucket* bucket : schedule.buckets())
      if (bucket->gradient.final()) bucket->gradient.divide_final(divisor);
  }
  tokens = 0;
  run(false);
}

}  // namespace shardproof
