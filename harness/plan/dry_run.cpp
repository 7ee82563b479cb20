#include "harness/plan/dry_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>

#include "harness/case/network.h"
#include "harness/case/parallel.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/counted.h"
#include "shardproof/comm/traced.h"
#include "shardproof/nn/meta_init.h"
#include "shardproof/shardproof.h"

namespace harness {
namespace {

using namespace shardproof;

at::ScalarType dtype_of(const std::string& name) {
  const std::map<std::string, at::ScalarType> known = {
      {"float32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};
  const auto found = known.find(name);
  SHARD_REQUIRE(found != known.end(), "plan", "the dtype must be float32, bf16 or fp16, got {}", name);
  return found->second;
}

golden::Microbatch zeros(const DryRun& options) {
  const golden::Model& model = options.what.model;
  const int64_t samples = options.samples;
  const auto floating = [&](std::vector<int64_t> sizes) {
    sizes.insert(sizes.begin(), samples);
    return at::zeros(sizes);
  };
  switch (model.kind) {
    case golden::Model::Kind::gpt:
    case golden::Model::Kind::llama: {
      const int64_t length = options.length == 0 ? model.positions() : options.length;
      return {at::zeros({samples, length}, at::kLong), at::zeros({samples, length}, at::kLong)};
    }
    case golden::Model::Kind::conv:
      return {floating({model.conv.channels.front(), model.conv.size, model.conv.size}), floating({model.conv.classes})};
    case golden::Model::Kind::odd: return {floating({model.odd.width}), floating({model.odd.width})};
    case golden::Model::Kind::mlp: break;
  }
  return {floating({model.mlp.widths.front()}), floating({model.mlp.widths.back()})};
}

ShardOptions shard_options(const DryRun& options, const Network& network) {
  ShardOptions shard;
  shard.strategy = strategy(options.what.strategy);
  shard.offload = options.what.options.offload == offload_none ? Offload::none : Offload::pageable;
  shard.units = [parts = network.parts](const std::string&, const torch::nn::Module& module) {
    return std::any_of(parts.begin(), parts.end(), [&](const auto& part) { return part.get() == &module; });
  };
  const at::ScalarType dtype = dtype_of(options.dtype);
  if (dtype != at::kFloat) shard.precision = {.main = at::kFloat, .compute = dtype, .reduce = dtype};
  shard.initialize = [](const std::string&, const Shape&, Interval, at::Tensor values) { values.zero_(); };
  shard.broadcast_initial_values = false;
  shard.check_gradients = false;  // of what nobody gathered
  return shard;
}

std::vector<Traffic> traffic_of(const std::vector<TraceRecord>& records, size_t first, const MeshComm& comms) {
  std::map<std::pair<std::string, std::string>, Traffic> sums;
  for (size_t i = first; i < records.size(); ++i) {
    const TraceRecord& record = records[i];
    if (record.op == "split") continue;
    Traffic& sum = sums[{record.group, record.op}];
    sum.op = record.op, sum.group = record.group;
    ++sum.calls;
    sum.bytes += record.bytes;
  }
  std::vector<Traffic> traffic;
  for (auto& [key, sum] : sums) {
    sum.ranks = comms.mesh().has(sum.group) ? comms.mesh().size(sum.group) : 0;
    traffic.push_back(std::move(sum));
  }
  return traffic;
}

}  // namespace

DryRunResult dry_run(const DryRun& options) {
  const Case& c = options.what;
  SHARD_REQUIRE(options.rounds >= 1 && options.samples >= 1 && options.length >= 0, "plan",
                "expected at least one microbatch of one sample, got {} of {}", options.rounds, options.samples);
  SHARD_REQUIRE(c.tensor_ranks() == 1 || c.model.of_tokens() || c.model.kind == golden::Model::Kind::mlp, "plan",
                "a {} has no plan for tp={}; a gpt, llama or mlp has", to_string(c.model.kind), c.tensor_ranks());
  auto trace = std::make_shared<Trace>();
  auto comms = std::make_shared<MeshComm>(traced(counted(c.mesh.size(), options.rank), trace), c.mesh);
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
  Sharded sharded = fully_shard(network.module, comms, shard_options(options, network));
  Optimizer optimizer = adamw(sharded, {});
  DryRunResult result;
  for (const auto& [name, shape] : golden::parameter_shapes(c.model)) result.parameters += numel(shape);
  for (const Piece& piece : sharded.parameters()) {
    result.own_parameters += piece.run.size();
    result.pieces.push_back({piece.name, piece.shape, piece.run, {}});
  }
  result.built = sharded.memory();
  golden::Microbatch data = zeros(options);
  if (context) data.input = context->cut(data.input), data.target = context->cut(data.target);
  size_t first = 0;
  // The first step makes groups and state that are there from then on.
  for (int64_t step = 0; step < 2; ++step) {
    first = trace->of_rank(options.rank).size();
    sharded.reset_peak_memory();
    for (int64_t round = 0; round < options.rounds; ++round) {
      sharded.set_last_microbatch(round + 1 == options.rounds);
      network.loss(data).backward();
    }
    optimizer.step();
  }
  result.stepped = sharded.memory();
  result.traffic = traffic_of(trace->of_rank(options.rank), first, *comms);
  return result;
}

}  // namespace harness
