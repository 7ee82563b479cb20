#include "harness/plan/dry_run.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <unordered_set>
#include <utility>

#include "harness/case/network.h"
#include "harness/case/parallel.h"
#include "harness/plan/meta_device.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/comm/counted.h"
#include "shardproof/nn/meta_init.h"
#include "shardproof/shardproof.h"

namespace harness {
namespace {

using namespace shardproof;

at::ScalarType dtype_of(const std::string& name) {
  const std::map<std::string, at::ScalarType> known = {{"float32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};
  const auto found = known.find(name);
  SHARD_REQUIRE(found != known.end(), "plan", "the dtype must be float32, bf16 or fp16, got {}", name);
  return found->second;
}

class Stopwatch {
 public:
  // Seconds since the last lap.
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// LibTorch has no convolution without memory, and no copy between memory and none, as an optimizer on the host needs it.
c10::Device device_of(const DryRun& options) {
  const bool needs_memory =
      options.what.model.kind == golden::Model::Kind::conv || options.what.options.offload != offload_none;
  return needs_memory ? at::kCPU : at::kMeta;
}

golden::Microbatch zeros(const DryRun& options) {
  const golden::Model& model = options.what.model;
  const at::TensorOptions floats = at::TensorOptions(at::kFloat).device(device_of(options)), tokens = floats.dtype(at::kLong);
  const int64_t samples = options.samples;
  const auto floating = [&](std::vector<int64_t> sizes) {
    sizes.insert(sizes.begin(), samples);
    return at::zeros(sizes, floats);
  };
  switch (model.kind) {
    case golden::Model::Kind::gpt:
    case golden::Model::Kind::llama: {
      const int64_t length = options.length == 0 ? model.positions() : options.length;
      return {at::zeros({samples, length}, tokens), at::zeros({samples, length}, tokens)};
    }
    case golden::Model::Kind::conv:
      return {floating({model.conv.channels.front(), model.conv.size, model.conv.size}), floating({model.conv.classes})};
    case golden::Model::Kind::odd:
      return {floating({model.odd.width}), floating({model.odd.width})};
    case golden::Model::Kind::mlp:
      break;
  }
  return {floating({model.mlp.widths.front()}), floating({model.mlp.widths.back()})};
}

ShardOptions shard_options(const DryRun& options, const Network& network) {
  ShardOptions shard;
  shard.strategy = strategy(options.what.strategy);
  shard.offload = options.what.options.offload == offload_none ? Offload::none : Offload::pageable;
  std::unordered_set<const torch::nn::Module*> parts;
  for (const auto& part : network.parts) parts.insert(part.get());
  shard.units = [parts](const std::string&, const torch::nn::Module& module) { return parts.contains(&module); };
  const at::ScalarType dtype = dtype_of(options.dtype);
  shard.device = device_of(options);
  shard.prefetch_forward = shard.prefetch_backward = options.prefetch;
  shard.delayed_gradient_bytes_max = options.delayed_gradient_bytes;
  if (options.recompute)
    shard.recompute = [](const std::string&, const torch::nn::Module& module) {
      return module.as<GptBlockImpl>() || module.as<LlamaLayerImpl>();
    };
  if (options.offload_activations) shard.offload_activations = shard.units;
  if (dtype != at::kFloat) shard.precision = {.main = at::kFloat, .compute = dtype, .reduce = dtype};
  shard.initialize = [](const std::string&, const Shape&, Interval, at::Tensor) {};  // nobody reads them
  shard.broadcast_initial_values = false;
  shard.check_gradients = false;  // of what nobody gathered
  return shard;
}

std::vector<Traffic> traffic_of(const StepRecord& record) {
  std::map<std::pair<std::string, std::string>, Traffic> sums;
  for (const Collective& call : record.collectives) {
    const RankGroup& group = record.groups[call.group];
    Traffic& sum = sums[{group.name, to_string(call.op)}];
    sum.op = to_string(call.op), sum.group = group.name, sum.ranks = std::ssize(group.ranks);
    ++sum.calls;
    sum.bytes += call.bytes;
  }
  std::vector<Traffic> traffic;
  for (auto& [key, sum] : sums) traffic.push_back(std::move(sum));
  return traffic;
}

// A save that ends before it has written anything.
double seconds_of_save(Sharded& sharded, const Optimizer& optimizer, checkpoint::KeptPlan& plan) {
  const std::string parent =
      (std::filesystem::temp_directory_path() / fmt::format("shardproof_dry_run_{}", ::getpid())).string();
  std::filesystem::create_directory(parent);
  const std::shared_ptr<void> removed(nullptr, [&](void*) { std::filesystem::remove_all(parent); });
  Stopwatch watch;
  checkpoint::SaveJob(parent + "/step", sharded, &optimizer, {}, {.plan = &plan}, nullptr);
  return watch.lap();
}

}  // namespace

bool runs_without_memory(const DryRun& options) {
  return device_of(options) == at::kMeta;
}

DryRunResult dry_run(const DryRun& options) {
  const Case& c = options.what;
  SHARD_REQUIRE(options.rounds >= 1 && options.samples >= 1 && options.length >= 0, "plan",
                "expected at least one microbatch of one sample, got {} of {}", options.rounds, options.samples);
  SHARD_REQUIRE(!options.recompute || c.model.of_tokens(), "plan", "--recompute is about blocks, and a {} has none",
                to_string(c.model.kind));
  SHARD_REQUIRE(c.tensor_ranks() == 1 || c.model.of_tokens() || c.model.kind == golden::Model::Kind::mlp, "plan",
                "a {} has no plan for tp={}; a gpt, llama or mlp has", to_string(c.model.kind), c.tensor_ranks());
  const auto show = [&](double fraction, const char* what) {
    if (options.shown) options.shown(fraction, what);
  };
  show(0.05, "building the model");
  Stopwatch watch;
  StepRecorder recorder;
  MetaDevice device(recorder);
  auto comms = std::make_shared<MeshComm>(recorded(counted(c.mesh.size(), options.rank), recorder), c.mesh);
  Comm* const tensor_group = c.tensor_ranks() > 1 ? &comms->along({"tp"}) : nullptr;
  Network network;
  {
    const MetaInit meta;
    network = make_network(c.model, tensor_group);
  }
  std::optional<TensorParallel> parallel;
  if (tensor_group) {
    ParallelPlan plan = parallel_plan(c);
    plan.compare_replicas = false;  // one rank has no others to compare with, and few steps have this traffic
    parallel = parallelize(network.module, comms, std::move(plan));
  }
  std::optional<ContextParallel> context;
  if (c.context_ranks() > 1) context = context_parallel(network.module, comms, context_options(c));
  show(0.2, "sharding it");
  Sharded sharded = fully_shard(network.module, comms, shard_options(options, network));
  Optimizer optimizer = adamw(sharded, {});
  DryRunResult result;
  result.cost.shard = watch.lap();
  for (const auto& [name, shape] : golden::parameter_shapes(c.model)) result.parameters += numel(shape);
  for (const Piece& piece : sharded.parameters()) {
    result.own_parameters += piece.run.size();
    result.pieces.push_back({piece.name, piece.shape, piece.run, {}});
  }
  result.built = sharded.memory();
  golden::Microbatch data = zeros(options);
  if (context) data.input = context->cut(data.input), data.target = context->cut(data.target);
  // The ledger counts those activations that leave, too.
  const auto beside_ledger = [&] {
    const MemoryUse use = sharded.memory();
    return device.bytes() - use.now_total() + use.now(MemoryKind::activation);
  };
  // The first step makes groups and state that are there from then on.
  for (int64_t step = 0; step < 2; ++step) {
    show(step == 0 ? 0.4 : 0.7, step == 0 ? "the first step" : "the second step");
    watch.lap();
    recorder.clear();
    sharded.reset_peak_memory();
    device.reset_peak();
    for (int64_t round = 0; round < options.rounds; ++round) {
      sharded.set_last_microbatch(round + 1 == options.rounds);
      const int64_t before = beside_ledger();
      const at::Tensor loss = network.loss(data);
      result.activation_bytes = beside_ledger() - before;
      loss.backward();
    }
    optimizer.step();
  }
  result.cost.step = watch.lap();
  result.stepped = sharded.memory();
  result.peak_bytes = device.peak_bytes();
  result.record = recorder.record();
  result.traffic = traffic_of(result.record);
  watch.lap();
  result.placements = sharded.placements();
  result.cost.placements = watch.lap();
  if (options.saves) {
    checkpoint::KeptPlan plan;
    result.cost.save_plan = seconds_of_save(sharded, optimizer, plan);
    result.cost.next_save_plan = seconds_of_save(sharded, optimizer, plan);
  }
  return result;
}

}  // namespace harness
