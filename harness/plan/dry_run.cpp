#include "harness/plan/dry_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <unordered_set>
#include <utility>

#include "harness/case/axes.h"
#include "harness/case/network.h"
#include "harness/case/parallel.h"
#include "harness/case/parallel_sizes.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/meta_init.h"
#include "shardproof/sharding/named_options.h"
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

ShardOptions named_in(const DryRun& options) {
  ShardOptions named;
  set_options(named, options.sharding);
  return named;
}

// LibTorch has no convolution without memory, and no copy between memory and none, as an optimizer on the host needs it.
c10::Device device_of(const DryRun& options) {
  const bool needs_memory = options.what.model.kind == golden::Model::Kind::conv || named_in(options).offload != Offload::none;
  return needs_memory ? at::kCPU : at::kMeta;
}

golden::Microbatch zeros(const DryRun& options, c10::Device device) {
  const golden::Model& model = options.what.model;
  const at::TensorOptions floats = at::TensorOptions(at::kFloat).device(device), tokens = floats.dtype(at::kLong);
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

ShardOptions shard_options(const DryRun& options, const Network& network, c10::Device device) {
  ShardOptions shard = named_in(options);
  shard.strategy = strategy(options.what.strategy);
  std::unordered_set<const torch::nn::Module*> parts;
  for (const auto& part : network.parts) parts.insert(part.get());
  shard.units = [parts](const std::string&, const torch::nn::Module& module) { return parts.contains(&module); };
  const at::ScalarType dtype = dtype_of(options.dtype);
  shard.device = device;
  if (options.recompute)
    shard.recompute = [](const std::string&, const torch::nn::Module& module) {
      return module.as<GptBlockImpl>() || module.as<LlamaLayerImpl>();
    };
  if (options.offload_activations) shard.offload_activations = shard.units;
  if (dtype != at::kFloat) shard.precision = {.main = at::kFloat, .compute = dtype, .reduce = dtype};
  shard.broadcast_initial_values = false;
  shard.check_gradients = false;  // of what nobody gathered
  return shard;
}

bool has_experts(const golden::Model& model) {
  return model.kind == golden::Model::Kind::llama && model.llama.experts > 0;
}

// Of a sequence.
int64_t tokens_on(const DryRun& options, int64_t rank) {
  const Case& c = options.what;
  const int64_t length = options.length == 0 ? c.model.positions() : options.length;
  if (c.context_ranks() == 1) return length;
  return context_cut(context_split(c), length, c.context_ranks()).count(c.mesh.coordinate(rank, axes::cp));
}

// How many of these experts a token may choose. They are different ones, and in few enough groups.
int64_t most_chosen(const RouterOptions& o, const Interval& experts) {
  const int64_t each = o.experts / o.groups;
  std::vector<int64_t> here;
  for (int64_t begin = 0; begin < o.experts; begin += each)
    here.push_back(std::max<int64_t>(0, std::min(experts.end, begin + each) - std::max(experts.begin, begin)));
  std::ranges::sort(here, std::greater());
  return std::min(o.experts_per_token, std::accumulate(here.begin(), here.begin() + o.groups_per_token, int64_t{0}));
}

// How many rows of a sequence of so many tokens can come to these experts.
int64_t most_rows(const RouterOptions& o, int64_t tokens, const Interval& experts) {
  const int64_t rows = tokens * most_chosen(o, experts);
  return o.capacity > 0 ? std::min(rows, experts.size() * room_for(o, tokens)) : rows;
}

// What depends on routing. The buffers of an exchange are the rows that the rank's own tokens make, and those that it gets.
void add_routing(const DryRun& options, DryRunResult& result) {
  const LlamaOptions llama = llama_options(options.what.model.llama);
  const std::vector<RankGroup>& groups = result.record.groups;
  const auto sharing = std::ranges::find(groups, axes::ep, &RankGroup::name);
  const int64_t ranks = std::ssize(sharing->ranks);
  const auto place = std::ranges::find(sharing->ranks, options.rank) - sharing->ranks.begin();
  const Interval experts = piece({}, llama.router.experts, ranks, place);
  const int64_t own = options.samples * tokens_on(options, options.rank) * llama.router.experts_per_token;
  const std::vector<int64_t> even = even_counts(own, llama.router.experts);
  ExpertRows& rows = result.expert_rows;
  rows.even = ranks * std::accumulate(even.begin() + experts.begin, even.begin() + experts.end, int64_t{0});
  for (const int64_t rank : sharing->ranks)
    rows.worst += options.samples * most_rows(llama.router, tokens_on(options, rank), experts);
  rows.worst = std::max(rows.worst, rows.even);  // even routing drops nothing, whatever the capacity
  const auto worst_bytes = [&](std::string_view axis, Op op) -> int64_t& {
    return std::ranges::find_if(result.traffic, [&](const Traffic& traffic) {
             return traffic.group == axis && traffic.op == to_string(op);
           })->worst_bytes;
  };
  for (const Collective& call : result.record.collectives) {
    if (groups[call.group].name != axes::ep || call.op != Op::all_to_all || !c10::isFloatingType(call.dtype)) continue;
    const auto size = static_cast<int64_t>(c10::elementSize(call.dtype));
    worst_bytes(axes::ep, Op::all_to_all) += std::max(own, rows.worst) * llama.hidden * size - call.bytes;
    // Rows come and go, and in between slices are summed once.
    if (options.what.options.etp != 0)
      worst_bytes(axes::tp, Op::all_reduce) += (rows.worst - rows.even) * llama.hidden * size / 2;
  }
}

struct Trained {
  Network network;
  std::optional<TensorParallel> parallel = {};
  std::optional<ContextParallel> context = {};
  std::optional<Sharded> sharded = {};
  std::optional<Optimizer> optimizer = {};
};

}  // namespace

DryTraining training_of(const DryRun& options, const std::shared_ptr<MeshComm>& comms, c10::Device device, bool computes) {
  const Case& c = options.what;
  Comm* const tensor_group = c.tensor_ranks() > 1 ? &comms->along({axes::tp}) : nullptr;
  auto made = std::make_shared<Trained>();
  {
    const MetaInit meta;
    made->network = make_network(c.model, tensor_group);
  }
  if (tensor_group || expert_ranks(c) > 1) {
    ParallelPlan plan = parallel_plan(c);
    plan.compare_replicas = false;  // one rank has no others to compare with, and few steps have this traffic
    made->parallel = parallelize(made->network.module, comms, std::move(plan));
  }
  if (c.context_ranks() > 1) made->context = context_parallel(made->network.module, comms, context_options(c));
  ShardOptions shard = shard_options(options, made->network, device);
  // Of a dry run nobody reads the values.
  shard.initialize = computes ? normal_initializer(/*seed=*/0) : [](const auto&, const auto&, Interval, const at::Tensor&) {};
  made->sharded = fully_shard(made->network.module, comms, shard);
  made->optimizer = adamw(*made->sharded, {});
  golden::Microbatch data = zeros(options, device);
  if (made->context) data.input = made->context->cut(data.input), data.target = made->context->cut(data.target);
  return {made, *made->sharded, *made->optimizer, [made, data] { return made->network.loss(data); },
          [made, comms] { update_router_biases(*made->network.module, *comms); }};
}

bool offloads(const DryRun& options) {
  return named_in(options).offload != Offload::none;
}

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
  SHARD_REQUIRE(named_in(options).gather == Gather::copied || runs_without_memory(options), "plan",
                "gather=side_by_side needs a step without memory, which there is not for {}",
                c.model.kind == golden::Model::Kind::conv ? "a conv" : "offload");
  const DryStep step{
      .mesh = c.mesh, .rank = options.rank, .rounds = options.rounds, .saves = options.saves, .shown = options.shown};
  SHARD_REQUIRE(!has_experts(c.model) || runs_without_memory(options), "plan",
                "offload takes a step with memory, in which tokens choose experts by values that nobody has set; leave offload "
                "out for a model with experts");
  require_expert_ranks(c, "plan");
  DryRunResult result =
      dry_step(step, [&](const auto& comms) { return training_of(options, comms, device_of(options), false); });
  if (expert_ranks(c) > 1) add_routing(options, result);
  for (const auto& [name, shape] : golden::parameter_shapes(c.model)) result.parameters += numel(shape);
  return result;
}

}  // namespace harness
