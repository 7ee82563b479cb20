#include "harness/run/sharded_options.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/conv.h>

#include "harness/case/problem.h"
#include "harness/case/random.h"

namespace harness {
namespace {

using namespace shardproof;

at::ScalarType dtype_of(int64_t dtype) {
  return dtype == bf16 ? at::kBFloat16 : dtype == fp16 ? at::kHalf : at::kFloat;
}

// Name spaces ("h", "attn") are never called, so they can be neither units nor recomputed.
bool is_called(const std::string& name, const torch::nn::Module& module) {
  const bool name_space = name == "out" || name == "lm_head";
  return !name_space && (!module.parameters(/*recurse=*/false).empty() ||
                         by_type<GptBlockImpl, LlamaLayerImpl, LlamaAttentionImpl, LlamaMlpImpl, MoeMlpImpl>()(name, module));
}

UnitSelector recomputed_within(const Case& c) {
  if (c.options.within == 0) return {};
  return [c](const std::string& name, const torch::nn::Module& module) {
    const bool is_attention = by_type<AttentionImpl>()(name, module);
    if (c.options.within == 1) return is_attention;
    return (is_attention || is_called(name, module)) && chosen(c, "within", name);
  };
}

UnitSelector any_unit(const Case& c) {
  switch (c.options.units) {
    case units_block:
      return by_type<GptBlockImpl, LlamaLayerImpl>();
    case units_leaf:
      return by_type<torch::nn::LinearImpl, torch::nn::LayerNormImpl, torch::nn::EmbeddingImpl, torch::nn::Conv2dImpl,
                     torch::nn::GroupNormImpl, RmsNormImpl, ExpertsImpl>();
    case units_some:
      return [c](const std::string& name, const torch::nn::Module& module) {
        return is_called(name, module) && chosen(c, "unit", name);
      };
    default: return {};
  }
}

UnitSelector selector(const Case& c) {
  UnitSelector any = any_unit(c);
  if (!any || !branches_differ(c)) return any;
  return [any](const std::string& name, const torch::nn::Module& module) { return name != "side" && any(name, module); };
}

Initializer initializer(const golden::Named& parameters) {
  return [&parameters](const std::string& name, const Shape&, Interval run, at::Tensor values) {
    for (const auto& [known, value] : parameters)
      if (known == name) values.copy_(value.contiguous().view({-1}).narrow(0, run.begin, run.size()));
  };
}

int64_t granule_of(const Case& c, const std::string& name, const at::Tensor& part) {
  const int64_t row = part.dim() == 0 ? 1 : part.numel() / part.size(0);
  if (c.options.granules == 1) return row;
  if (c.options.granules == 2) return part.numel();
  const std::vector<int64_t> all = {1, 3, row, 2 * row, 7 * row + 1, part.numel()};
  return all[Draws(c.seed, name + "granule").bits(0) % all.size()];
}

ShardOptions shard_options(const Case& c, const golden::Run& run, c10::Device device) {
  const CaseOptions& o = c.options;
  ShardOptions options;
  options.strategy = strategy(c.strategy);
  options.units = selector(c);
  if (o.recompute > 0)
    options.recompute = [c](const std::string& name, const torch::nn::Module&) {
      return !name.empty() && (c.options.recompute == 1 || chosen(c, "recompute", name));
    };
  options.recompute_modules = recomputed_within(c);
  if (o.activations > 0)
    options.offload_activations = [c](const std::string& name, const torch::nn::Module&) {
      return c.options.activations == 1 || chosen(c, "activations", name);
    };
  apply(o, options);
  if (o.dims != 0)
    options.shard_dim_of = [c](const std::string& name, const at::Tensor& parameter) {
      return static_cast<int64_t>(Draws(c.seed, name + "dim").bits(0) % static_cast<uint64_t>(parameter.dim()));
    };
  if (o.granules != 0)
    options.granule_of = [c](const std::string& name, const at::Tensor& part) { return granule_of(c, name, part); };
  // cuBLAS chooses kernels by alignment; the golden run's tensors have that of LibTorch's allocator.
  if (device.is_cuda()) options.alignment_bytes = 512;
  if (!device.is_cpu()) options.gather = Gather::copied;
  options.reshard_after_forward = o.reshard == 1   ? Reshard::by_strategy()
                                  : o.reshard == 0 ? Reshard::never()
                                                   : Reshard::within(o.reshard);
  if (o.compute != fp32) {
    options.precision.compute = dtype_of(o.compute);
    options.precision.main = at::kFloat;
  }
  if (o.gradient != fp32) options.precision.gradient = dtype_of(o.gradient);
  if (o.reduce != o.gradient) options.precision.reduce = dtype_of(o.reduce);
  options.precision.float32_sums = o.float32_sums != 0;
  options.unit_options = [c, precision = options.precision](const std::string& unit) {
    UnitOptions own;
    if (c.options.compute != fp32) own.precision = precision;
    if (c.options.compute != fp32 && unit.empty()) own.precision->output = at::kFloat;
    if (!has_unit_sharding(c) || !chosen(c, "sharding", unit)) return own;
    own.strategy = unit_strategy(c);
    own.mesh = unit_mesh(c);
    return own;
  };
  if (o.arithmetic != 0) options.precision = {.main = at::kFloat, .compute = at::kDouble};
  if (c.mode == Mode::canonical) options.precision.gradient = options.precision.reduce = {};
  options.numerics = c.mode == Mode::fast        ? Numerics::fast
                     : c.mode == Mode::canonical ? Numerics::canonical
                                                 : Numerics::ordered;
  // By default gradients are a mean over all ranks whose sum they are, but those along cp make one mean between them.
  if (o.loss == loss_sum)
    options.gradient_divide = 1;
  else if (o.loss == loss_mean && c.context_ranks() > 1)
    options.gradient_divide = static_cast<double>(c.data_ranks());
  options.divide_by_tokens = o.loss == loss_tokens;
  options.divide = o.divide == divide_before       ? Divide::before
                   : o.divide == divide_split      ? Divide::split
                   : o.divide == divide_collective ? Divide::in_collective
                                                   : Divide::after;
  options.check_gradients = o.loss_scale == 0;
  if (o.meta) {
    options.device = device;
    options.initialize = initializer(run.parameters);
    options.broadcast_initial_values = false;
  }
  return options;
}

std::shared_ptr<UpdateRule> adamw_rule(const golden::Optimizer& o) {
  return make_rule(AdamWOptions{.lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay});
}

std::shared_ptr<UpdateRule> make_rule_of(const golden::Optimizer& o) {
  using enum golden::Optimizer::Kind;
  switch (o.kind) {
    case sgd:
      return make_rule(SgdOptions{.lr = o.lr, .momentum = o.momentum, .nesterov = o.nesterov, .weight_decay = o.weight_decay});
    case adam:
      return make_rule(
          AdamOptions{.lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay});
    case adamw: return adamw_rule(o);
    case lion: return make_rule(LionOptions{.lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .weight_decay = o.weight_decay});
    case muon: return make_rule(MuonOptions{.lr = o.lr, .momentum = o.momentum, .weight_decay = o.weight_decay});
  }
  return nullptr;
}

bool is_matrix(const Shape& shape) { return shape.size() == 2 && shape[0] > 0 && shape[1] > 0; }

}  // namespace

bool chosen(const Case& c, const char* what, const std::string& name) {
  return Draws(c.seed, name + what).bits(0) % 2 == 0;
}

Sharded shard(const Case& c, const golden::Run& run, const Network& network, std::shared_ptr<MeshComm> comms,
              c10::Device device) {
  const ShardOptions options = shard_options(c, run, device);
  if (c.options.units != units_listed) return fully_shard(network.module, std::move(comms), options);
  Sharding sharding(std::move(comms), options);
  const size_t parts = network.parts.size() - branches_differ(c);  // the last one is the one that differs
  for (size_t i = 0; i < parts; i += 2) {
    const auto first = network.parts.begin() + static_cast<int64_t>(i);
    sharding.unit(Sharding::Modules(first, first + static_cast<int64_t>(std::min<size_t>(2, parts - i))));
  }
  return sharding.shard(network.module);
}

ThreadsOptions threads_options(const Case& c) {
  using Completion = ThreadsOptions::Completion;
  const Draws draws(c.seed, "threads");
  ThreadsOptions options;
  options.schedule = ThreadsOptions::Schedule::serial;
  options.completion = std::vector{Completion::eager, Completion::late, Completion::random}[draws.bits(0) % 3];
  options.sum = c.mode == Mode::ordered ? ThreadsOptions::Sum::rank_order : ThreadsOptions::Sum::ring;  // canonical: any order
  options.seed = c.seed;
  return options;
}

double lr_factor(const Case& c, size_t step) {
  const double plan = static_cast<double>(c.steps[step].lr_percent) / 100;
  if (c.options.schedule == schedule_constant) return plan;
  const auto schedule = c.options.schedule == schedule_cosine ? warmup_cosine : warmup_linear;
  return plan * schedule(static_cast<int64_t>(step), kWarmup, kScheduleSteps, kScheduleLast);
}

Optimizer make_optimizer(Sharded& sharded, const Case& c) {
  if (c.groups == kUndecayedGroups) return {sharded, without_decay_of_norms_and_biases(make_rule_of(c.optimizer))};
  std::vector<golden::Optimizer::Group> groups = optimizer_groups(c);
  groups.push_back({});  // every name has the empty pattern
  const bool muon = c.optimizer.kind == golden::Optimizer::Kind::muon;
  const auto rule = make_rule_of(c.optimizer), others = adamw_rule(c.optimizer);
  std::vector<ParameterGroup> result;
  for (const golden::Optimizer::Group& group : groups) {
    const auto named = [pattern = group.pattern](const std::string& name) { return name.find(pattern) != std::string::npos; };
    const auto add = [&](auto takes, const std::shared_ptr<UpdateRule>& its_rule) {
      result.push_back({.takes = takes, .rule = its_rule, .lr_factor = group.lr_factor, .decay_factor = group.decay_factor});
    };
    if (muon) add([named](const std::string& name, const Shape& shape) { return named(name) && is_matrix(shape); }, rule);
    add([named](const std::string& name, const Shape&) { return named(name); }, muon ? others : rule);
  }
  return {sharded, std::move(result)};
}

}  // namespace harness
