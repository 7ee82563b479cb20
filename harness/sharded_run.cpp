#include "harness/sharded_run.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/conv.h>

#include <cmath>
#include <optional>
#include <set>

#include "harness/case_checkpoints.h"
#include "harness/network.h"
#include "harness/parallel.h"
#include "harness/problem.h"
#include "harness/random.h"
#include "shardproof/shardproof.h"

namespace harness {
namespace {

using namespace shardproof;

at::ScalarType dtype_of(int64_t dtype) {
  return dtype == bf16 ? at::kBFloat16 : dtype == fp16 ? at::kHalf : at::kFloat;
}

void set_parameters(torch::nn::Module& module, const golden::Named& values, int64_t rank) {
  at::NoGradGuard no_grad;
  auto parameters = module.named_parameters();
  std::set<const c10::TensorImpl*> distinct;
  for (const auto& item : parameters) distinct.insert(item.value().unsafeGetTensorImpl());
  SHARD_REQUIRE(distinct.size() == values.size(), "harness", "the library's model has {} parameters, the golden one {}",
                distinct.size(), values.size());
  for (const auto& [name, value] : values) {
    if (rank == 0) parameters[name].copy_(value);
    else parameters[name].fill_(static_cast<double>(rank) + 0.5);
  }
}

// Chooses modules by the hashes of their names, the same on every rank.
bool chosen(const Case& c, const char* what, const std::string& name) {
  return Draws(c.seed, name + what).bits(0) % 2 == 0;
}

UnitSelector any_unit(const Case& c) {
  switch (c.options.units) {
    case units_block: return by_type<GptBlockImpl>();
    case units_leaf:
      return by_type<torch::nn::LinearImpl, torch::nn::LayerNormImpl, torch::nn::EmbeddingImpl, torch::nn::Conv2dImpl,
                     torch::nn::GroupNormImpl>();
    case units_some:
      // Name spaces ("h", "attn") are never called, so they cannot be units.
      return [c](const std::string& name, const torch::nn::Module& module) {
        const bool name_space = name == "out" || name == "lm_head";
        const bool callable = !module.parameters(/*recurse=*/false).empty() || by_type<GptBlockImpl>()(name, module);
        return callable && !name_space && chosen(c, "unit", name);
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

ShardOptions shard_options(const Case& c, const golden::Run& run) {
  const CaseOptions& o = c.options;
  ShardOptions options;
  options.strategy = strategy(c.strategy);
  options.units = selector(c);
  if (o.recompute > 0)
    options.recompute = [c](const std::string& name, const torch::nn::Module&) {
      return !name.empty() && (c.options.recompute == 1 || chosen(c, "recompute", name));
    };
  options.bucket_bytes_max = o.bucket_bytes;
  options.bucket_count = o.buckets;
  options.alignment_bytes = o.alignment_bytes;
  options.granularity = o.whole ? Granularity::tensor : Granularity::element;
  options.reshard_after_forward = o.reshard == 1   ? Reshard::always()
                                  : o.reshard == 0 ? Reshard::never()
                                                   : Reshard::within(o.reshard);
  options.reshard_after_backward = o.reshard_backward != 0;
  options.buffers = o.pooled ? Buffers::pooled : Buffers::freed;
  options.gather = o.side_by_side ? Gather::side_by_side : Gather::copied;
  options.prefetch_forward = options.prefetch_backward = o.prefetch;
  options.bytes_in_flight_max = o.in_flight_bytes;
  if (o.compute != fp32) {
    options.precision.compute = dtype_of(o.compute);
    options.precision.main = at::kFloat;
  }
  if (o.gradient != fp32) options.precision.gradient = dtype_of(o.gradient);
  if (o.reduce != o.gradient) options.precision.reduce = dtype_of(o.reduce);
  options.precision.float32_sums = o.float32_sums != 0;
  if (o.compute != fp32)
    options.unit_precision = [precision = options.precision](const std::string& unit) {
      Precision own = precision;
      if (unit.empty()) own.output = at::kFloat;
      return own;
    };
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
  options.divide = o.divide == divide_before ? Divide::before : o.divide == divide_split ? Divide::split : Divide::after;
  options.reduce_replicas_every_microbatch = o.replicas_each != 0;
  options.check_gradients = o.loss_scale == 0;
  if (o.meta) {
    options.initialize = initializer(run.parameters);
    options.broadcast_initial_values = false;
  }
  return options;
}

Sharded shard(const Case& c, const golden::Run& run, const Network& network, std::shared_ptr<MeshComm> comms) {
  const ShardOptions options = shard_options(c, run);
  if (c.options.units != units_listed) return fully_shard(network.module, std::move(comms), options);
  Sharding sharding(std::move(comms), options);
  const size_t parts = network.parts.size() - branches_differ(c);  // the last one is the one that differs
  for (size_t i = 0; i < parts; i += 2) {
    Sharding::Modules modules{network.parts[i]};
    if (i + 1 < parts) modules.push_back(network.parts[i + 1]);
    sharding.unit(modules);
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

// The case's groups in order, then one for all others; with muon each of them twice, for matrices and for the rest.
Optimizer make_optimizer(Sharded& sharded, const Case& c) {
  std::vector<golden::Optimizer::Group> groups = optimizer_groups(c.groups);
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

std::vector<Piece> copies(std::vector<Piece> pieces) {
  for (Piece& piece : pieces) piece.data = piece.data.to(at::kFloat).clone();
  return pieces;
}

// One rank through the history, or through what lies between two loads.
class RankRun {
 public:
  // `resumes`: begins with values of its own, which a load has to replace.
  RankRun(const Case& c, const golden::Run& run, const std::shared_ptr<Comm>& comm, CaseCheckpoints& checkpoints, bool resumes)
      : case_(c), run_(run), rank_(comm->rank()), resumes_(resumes), comms_(std::make_shared<MeshComm>(comm, c.mesh)),
        network_(build()), sharded_(shard(c, run, network_, comms_)), optimizer_(make_optimizer(sharded_, c)),
        checkpoints_(checkpoints) {
    if (!checkpoints.directory().empty()) manager_.emplace(checkpoints.directory(), checkpoints.options());
    if (c.options.loss_scale > 0)
      scaler_.emplace(LossScalerOptions{.initial = run.scaling.initial, .growth_interval = run.scaling.growth_interval});
  }

  // Before that step.
  void save(size_t index) {
    const StepPlan& plan = case_.steps[index];
    if (plan.save) {
      checkpoint::TrainerState trainer{.step = CaseCheckpoints::number(index)};
      if (scaler_) trainer.scaler = scaler_->state();
      manager_->save(sharded_, &optimizer_, trainer);
    }
    if (!plan.crash) return;
    manager_->wait();
    checkpoints_.crash(index, sharded_, optimizer_);
  }

  void load(size_t index) {
    const auto loaded = manager_->load_latest(sharded_, &optimizer_);
    const int64_t expected = CaseCheckpoints::number(static_cast<size_t>(case_.loaded_after(index) + 1));
    SHARD_REQUIRE(loaded && loaded->trainer.step == expected, "harness", "checkpoint {} was loaded instead of {}",
                  loaded ? loaded->trainer.step : -1, expected);
    if (scaler_) scaler_->set_state(loaded->trainer.scaler.value());
  }

  // What is being saved is there when this returns.
  void end() {
    if (manager_) manager_->wait();
  }

  RankStep step(size_t index) {
    const StepPlan& plan = case_.steps[index];
    const golden::Step& step = run_.steps[index];
    set_frozen(plan);
    optimizer_.set_lr_factor(static_cast<double>(plan.lr_percent) / 100);
    before(plan, step);
    RankStep result;
    for (size_t round = 0; round < step.microbatches.size(); ++round) backward(step, index, round, result);
    finish(step, result);
    return result;
  }

 private:
  Network build() {
    const bool parallel = case_.tensor_ranks() > 1;
    Comm* const tensor_group = parallel ? &comms_->along({"tp"}) : nullptr;
    Network network;
    if (case_.options.meta) {
      const MetaInit meta;
      network = make_network(case_.model, tensor_group);
    } else {
      network = make_network(case_.model, tensor_group);
      set_parameters(*network.module, run_.parameters, resumes_ ? rank_ + 1 : rank_);
    }
    if (parallel) parallel_ = parallelize(network.module, comms_, parallel_plan(case_));
    if (case_.context_ranks() > 1) context_ = context_parallel(network.module, comms_, context_options(case_));
    return network;
  }

  // With the rank's positions of its sequences.
  golden::Microbatch microbatch(const golden::Step& step, size_t round) {
    golden::Microbatch data = step.microbatches[round][static_cast<size_t>(rank_ / case_.microbatch_ranks())];
    if (context_) data.input = context_->cut(data.input), data.target = context_->cut(data.target);
    return data;
  }

  // Of the whole microbatch.
  double value_of(const at::Tensor& loss) {
    if (!context_) return static_cast<double>(loss.item<float>());
    at::Tensor sum = loss.detach().to(at::kDouble).reshape({1});
    comms_->along({"cp"}).all_reduce(sum).wait();
    return sum.item<double>();
  }

  void set_frozen(const StepPlan& plan) {
    const std::vector<std::string> frozen = frozen_parameters(case_, plan);
    auto parameters = network_.module->named_parameters();
    for (const auto& [name, value] : run_.parameters)
      parameters[name].set_requires_grad(std::find(frozen.begin(), frozen.end(), name) == frozen.end());
  }

  // What must leave no trace in the step.
  void before(const StepPlan& plan, const golden::Step& step) {
    if (plan.unshard) {
      for (UnitHandle unit : sharded_.units()) unit.start_unshard();
      for (UnitHandle unit : sharded_.units()) unit.unshard();
      for (UnitHandle unit : sharded_.units())
        if (chosen(case_, "free", unit.name())) unit.reshard();
    }
    if (plan.eval) {
      const at::NoGradGuard no_grad;
      network_.loss(microbatch(step, 0));
    }
    if (plan.discard) {
      sharded_.set_last_microbatch(case_.seed % 2 == 0);
      sharded_.set_gradient_sync(case_.seed % 3 != 0);
      network_.loss(microbatch(step, 0)).backward();
      sharded_.zero_gradients();
      sharded_.set_gradient_sync(true);
    }
  }

  void backward(const golden::Step& step, size_t index, size_t round, RankStep& result) {
    const bool last = round + 1 == step.microbatches.size();
    const int64_t every = case_.steps[index].sync_every;
    sharded_.set_last_microbatch(last);
    sharded_.set_gradient_sync(last || (static_cast<int64_t>(round) + 1) % every == 0);
    const golden::Microbatch data = microbatch(step, round);
    if (case_.options.loss == loss_tokens) sharded_.add_tokens(data.target.numel());
    const at::Tensor loss = network_.loss(data);
    result.losses.push_back(value_of(loss));
    if (!std::isfinite(result.losses.back()))
      throw NonFiniteError(fmt::format("rank {}, step {}, round {}: the loss is {}", rank_, index, round,
                                       result.losses.back()));
    (scaler_ ? scaler_->scale(loss) : loss).backward();
  }

  void finish(const golden::Step& step, RankStep& result) {
    if (scaler_) {
      result.loss_scale = scaler_->value();
      result.skipped = !scaler_->unscale(sharded_);
    }
    if (!result.skipped) {
      result.gradient_norm = step.clip_norm > 0 ? sharded_.clip_gradients(step.clip_norm, step.norm_order)
                                                : sharded_.gradient_norm(step.norm_order);
      result.gradients = copies(sharded_.gradients());
      optimizer_.step();
    }
    const bool has_main = case_.options.compute != fp32;
    result.parameters = copies(has_main ? sharded_.main_parameters() : sharded_.parameters());
    if (has_main) result.compute_parameters = copies(sharded_.parameters());
    for (const std::string& slot : optimizer_.slots()) result.state.emplace_back(slot, copies(optimizer_.state(slot)));
  }

  const Case& case_;
  const golden::Run& run_;
  int64_t rank_;
  bool resumes_;
  std::shared_ptr<MeshComm> comms_;
  std::optional<TensorParallel> parallel_;
  std::optional<ContextParallel> context_;
  Network network_;
  Sharded sharded_;
  Optimizer optimizer_;
  std::optional<LossScaler> scaler_;
  CaseCheckpoints& checkpoints_;
  std::optional<checkpoint::Manager> manager_;
};

using Steps = std::vector<std::vector<RankStep>>;

// Steps [first, last) in one world, and the saves before step `last`.
void run_stretch(const Case& c, const golden::Run& run, CaseCheckpoints& checkpoints, bool resumes, size_t first, size_t last,
                 Steps& steps) {
  for (size_t s = first; s < last; ++s) steps[s].resize(static_cast<size_t>(c.mesh.size()));
  run_threads(
      c.mesh.size(),
      [&](std::shared_ptr<Comm> comm) {
        RankRun rank_run(c, run, comm, checkpoints, resumes);
        if (resumes) rank_run.load(first);
        for (size_t s = first; s < last; ++s) {
          if (s != first || !resumes) rank_run.save(s);
          steps[s][static_cast<size_t>(comm->rank())] = rank_run.step(s);
        }
        if (last < c.steps.size()) rank_run.save(last);
        rank_run.end();
      },
      threads_options(c));
}

}  // namespace

std::vector<std::vector<RankStep>> run_sharded(const Case& c, const golden::Run& run) {
  CaseCheckpoints checkpoints(c);
  Steps steps(run.steps.size());
  bool resumes = false;
  for (size_t first = 0; first < steps.size() || !resumes;) {
    size_t last = resumes ? first + 1 : first;
    while (last < steps.size() && !c.steps[last].loads()) ++last;
    run_stretch(resumes ? c.at(first) : c, run, checkpoints, resumes, first, last, steps);
    first = last, resumes = true;
  }
  return steps;
}

}  // namespace harness
