#include "harness/run/sharded_run.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "harness/case/axes.h"
#include "harness/case/network.h"
#include "harness/case/parallel.h"
#include "harness/case/problem.h"
#include "harness/run/case_checkpoints.h"
#include "harness/run/policies.h"
#include "harness/run/property.h"
#include "harness/run/running_cases.h"
#include "harness/run/sharded_options.h"
#include "harness/run/tracing.h"
#include "shardproof/checkpoint/adapters.h"
#include "shardproof/nn/state_buffers.h"

namespace harness {
namespace {

using namespace shardproof;

void set_parameters(torch::nn::Module& module, const golden::Named& values, int64_t rank) {
  at::NoGradGuard no_grad;
  auto parameters = module.named_parameters();
  std::set<const c10::TensorImpl*> distinct;
  for (const auto& item : parameters) distinct.insert(item.value().unsafeGetTensorImpl());
  SHARD_REQUIRE(distinct.size() == values.size(), "harness", "the library's model has {} parameters, the golden one {}",
                distinct.size(), values.size());
  for (const auto& [name, value] : values) {
    if (rank == 0) parameters[name].copy_(value);
    else
      parameters[name].fill_(beginning_of(rank));
  }
  if (rank == 0) return;
  for (const auto& [name, buffer] : buffers_of(module).state) buffer.fill_(beginning_of(rank));
}

std::vector<Piece> copies(std::vector<Piece> pieces) {
  for (Piece& piece : pieces) piece.data = piece.data.to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  return pieces;
}

// While it lives a device's work comes on a stream that the program chose, as a user's may: behind what was given before, and
// before what is given afterwards. The library has a say in none of it.
class UsersStream {
 public:
  explicit UsersStream(c10::Device device) : guard_(device.type()), before_(guard_.getStream(device)) {
    const c10::Stream own = guard_.getStreamFromGlobalPool(device);
    order(before_, own);
    guard_.exchangeStream(own);
  }
  ~UsersStream() { order(guard_.exchangeStream(before_), before_); }
  UsersStream(const UsersStream&) = delete;

 private:
  static void order(c10::Stream first, c10::Stream second) {
    c10::Event event(first.device_type());
    event.record(first);
    event.block(second);
  }
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream before_;
};

// One rank through the history, or through what lies between two loads.
class RankRun {
 public:
  // `resumes`: begins with values of its own, which a load has to replace.
  RankRun(const Trial& trial, const std::shared_ptr<Comm>& comm, CaseCheckpoints& checkpoints, bool resumes)
      : case_(trial.c),
        run_(trial.run),
        device_(trial.device),
        output_scale_(trial.output_scale),
        rank_(comm->rank()),
        data_rank_(static_cast<size_t>(case_.data_rank_of_each()[static_cast<size_t>(rank_)])),
        resumes_(resumes),
        tracing_(trial.tracing),
        comms_(std::make_shared<MeshComm>(tracing_.around(comm), case_.mesh)),
        network_(build()),
        sharded_(shard(case_, run_, network_, comms_, device_)),
        optimizer_(make_optimizer(sharded_, case_)),
        checkpoints_(checkpoints) {
    const Case& c = case_;
    const golden::Run& run = run_;
    if (!resumes) begin_router_biases(*network_.module, run.model.llama);
    if (tracing_.ranks) watch_.emplace(*network_.module, [this] { return tracing_.last_collective(rank_); });
    if (run.ema > 0) ema_.emplace(sharded_, EmaOptions{.decay = run.ema});
    if (c.options.fingerprint) fingerprints_.emplace(sharded_, optimizer_);
    if (!checkpoints.directory().empty()) manager_.emplace(checkpoints.directory(), checkpoints.options());
    if (c.options.loss_scale > 0)
      scaler_.emplace(LossScalerOptions{.initial = run.scaling.initial,
                                        .growth_interval = run.scaling.growth_interval,
                                        .scale_min = std::max(run.scaling.minimum, LossScalerOptions{}.scale_min)});
  }

  // Before that step.
  void save(size_t index) {
    const StepPlan& plan = case_.steps[index];
    if (plan.save) {
      checkpoint::TrainerState trainer{.step = CaseCheckpoints::number(index)};
      if (scaler_) trainer.scaler = scaler_->state();
      manager_->save(sharded_, &optimizer_, trainer);
      if (network_.lora)
        checkpoint::save_adapters(checkpoints_.adapters(index), sharded_, *network_.lora,
                                  {.overwrite = true, .files = checkpoints_.options().files});
    }
    if (!plan.crash) return;
    manager_->wait();
    std::map<std::string, at::Tensor> own = buffers_of(*network_.module).state;
    for (auto& [name, buffer] : own) buffer = buffer.clone();
    checkpoints_.crash(index, sharded_, optimizer_, comms_->world());
    if (rank_ == 0) return;
    at::NoGradGuard no_grad;
    for (const auto& [name, buffer] : buffers_of(*network_.module).state) buffer.copy_(own.at(name));
  }

  void load(size_t index) {
    if (case_.steps[index].unshard)
      for (UnitHandle unit : sharded_.units())
        if (chosen(case_, "whole while loading", unit.name())) unit.unshard();
    const auto loaded = manager_->load_latest(
        sharded_, &optimizer_, {.check_before = case_.options.unchecked == 0, .files = checkpoints_.options().files});
    const int64_t expected = CaseCheckpoints::number(static_cast<size_t>(case_.loaded_after(index) + 1));
    SHARD_REQUIRE(loaded && loaded->trainer.step == expected, "harness", "checkpoint {} was loaded instead of {}",
                  loaded ? loaded->trainer.step : -1, expected);
    if (scaler_) scaler_->set_state(loaded->trainer.scaler.value());
    if (network_.lora) load_adapters(static_cast<size_t>(case_.loaded_after(index) + 1));
  }

  const Sharded& sharded() const { return sharded_; }

  // What is being saved is there when this returns.
  void end() {
    if (manager_) manager_->wait();
  }

  RankStep step(size_t index) {
    const StepPlan& plan = case_.steps[index];
    if (!std::exchange(begun_, true)) ask(index, Moment::begun);
    std::optional<UsersStream> users;
    if (!device_.is_cpu() && (case_.seed + index) % 2 == 0) users.emplace(device_);
    const golden::Step& step = run_.steps[index];
    set_frozen(plan);
    optimizer_.set_lr_factor(lr_factor(case_, index));
    RankStep result;
    before(plan, step, index, result);
    train(step, index, result);
    ask(index, Moment::backward);
    finish(step, result);
    compare_fingerprints();
    ask(index, Moment::stepped);
    result.complaints = std::exchange(complaints_, {});
    return result;
  }

 private:
  // Those that were saved by themselves before that step, in place of the checkpoint's.
  void load_adapters(size_t step) {
    std::map<std::string, at::Tensor> zeros;
    for (const auto& [name, value] : run_.parameters)
      if (name.find(".lora_") != std::string::npos) zeros[name] = at::zeros_like(value);
    sharded_.write_parameters(zeros);
    checkpoint::load_adapters(checkpoints_.adapters(step), sharded_, *network_.lora);
  }

  // All ranks throw the same, so all go on, and the values say what is wrong before the fingerprints do.
  void compare_fingerprints() {
    if (!fingerprints_) return;
    try {
      fingerprints_->step();
    } catch (const FingerprintError& error) {
      complaints_.push_back({"fingerprint", error.what()});
    }
  }

  void ask(size_t index, Moment moment) {
    if (!properties().empty())
      ask_properties({case_.at(index), index, moment, sharded_, optimizer_, *comms_}, complaints_);
  }

  Network build() {
    const golden::Model& model = run_.model;
    const bool parallel = case_.tensor_ranks() > 1;
    Comm* const tensor_group = parallel ? &comms_->along({axes::tp}) : nullptr;
    Network network;
    if (case_.options.meta) {
      const MetaInit meta;
      network = make_network(model, tensor_group);
    } else {
      network = make_network(model, tensor_group);
      set_parameters(*network.module, run_.parameters, resumes_ ? rank_ + 1 : rank_);
      move_to(*network.module, device_);
    }
    if (parallel || expert_ranks(case_) > 1) parallel_ = parallelize(network.module, comms_, parallel_plan(case_));
    if (case_.context_ranks() > 1) context_ = context_parallel(network.module, comms_, context_options(case_));
    return case_.options.strided ? network.strided() : network;
  }

  // With the rank's positions of its sequences. Its forward is next.
  golden::Microbatch microbatch(const golden::Step& step, size_t round) {
    golden::Microbatch data = step.microbatches[round][data_rank_];
    data.input = data.input.to(device_), data.target = data.target.to(device_);
    if (context_) data.input = context_->cut(data.input), data.target = context_->cut(data.target);
    random_stream() = {.seed = data.dropout_seed};
    return data;
  }

  // Of the whole microbatch. A sum with canonical arithmetic is exact, and weighed once.
  double value_of(const at::Tensor& sum_of_losses, double weight) {
    const bool canonical = case_.options.arithmetic != 0;
    if (!context_ && !canonical) return static_cast<double>((sum_of_losses.detach() * weight).item<float>());
    at::Tensor sum = sum_of_losses.detach().to(at::kDouble).reshape({1});
    if (!canonical) sum *= weight;
    if (context_) comms_->along({axes::cp}).all_reduce(sum).wait();
    return canonical ? sum.item<double>() * weight : sum.item<double>();
  }

  void set_frozen(const StepPlan& plan) {
    const std::vector<std::string> frozen = frozen_parameters(case_, plan);
    auto parameters = network_.module->named_parameters();
    for (const auto& [name, value] : run_.parameters)
      parameters[name].set_requires_grad(std::find(frozen.begin(), frozen.end(), name) == frozen.end());
  }

  // What must leave no trace in the step, but for statistics.
  void before(const StepPlan& plan, const golden::Step& step, size_t index, RankStep& result) {
    if (plan.unshard) {
      for (UnitHandle unit : sharded_.units()) unit.start_unshard();
      for (UnitHandle unit : sharded_.units()) unit.unshard();
      for (UnitHandle unit : sharded_.units())
        if (chosen(case_, "free", unit.name())) unit.reshard();
    }
    if (plan.eval) result.evaluated.push_back(evaluate(step, index));
    if (plan.discard) {
      sharded_.set_last_microbatch(case_.seed % 2 == 0);
      sharded_.set_gradient_sync(case_.seed % 3 != 0);
      network_.loss(microbatch(step, 0)).backward();
      sharded_.zero_gradients();
      forget_router_counts(*network_.module);
      sharded_.set_gradient_sync(true);
    }
  }

  // With the averages, if there are any. Half of these evaluations end by an exception of every rank; not where ranks still
  // read the memory of one that puts its parameters back.
  double evaluate(const golden::Step& step, size_t index) {
    const at::NoGradGuard no_grad;
    const golden::Microbatch data = microbatch(step, 0);
    double loss = 0;
    const auto run = [&] { loss = value_of(network_.loss_of(network_.output(data), data), data.weight); };
    network_.module->eval();
    struct Ended {};
    try {
      if (!ema_) run();
      else
        ema_->with_averages([&] {
          run();
          if (case_.seed % 2 == 0 && case_.options.has("gather", "copied")) throw Ended();
        });
    } catch (const Ended&) {
    }
    network_.module->train();
    if (!std::isfinite(loss))
      throw NonFiniteError(fmt::format("rank {}, step {}: the loss of an evaluation is {}", rank_, index + 1, loss));
    return loss;
  }

  // Every forward and every backward of the step.
  void train(const golden::Step& step, size_t index, RankStep& result) {
    const size_t rounds = step.microbatches.size();
    const size_t open_max = passes() == passes_apart ? 1 : passes() == passes_alternating ? 2 : rounds;
    std::vector<at::Tensor> losses;
    size_t done = 0;
    const auto go_back = [&] {
      if (passes() != passes_apart) say_which_is_next(index, done, rounds);
      const size_t round = passes() == passes_reversed ? rounds - 1 - done : done;
      backward(step, index, round, std::move(losses[round]));
      ++done;
    };
    for (size_t round = 0; round < rounds; ++round) {
      if (passes() == passes_apart) say_which_is_next(index, round, rounds);
      losses.push_back(forward(step, index, round, result));
      if (losses.size() - done == open_max) go_back();
    }
    while (done < rounds) go_back();
  }

  // What is watched is one microbatch at a time.
  int64_t passes() const { return watch_ ? passes_apart : case_.options.passes; }

  void say_which_is_next(size_t index, size_t done, size_t rounds) {
    const bool last = done + 1 == rounds;
    sharded_.set_last_microbatch(last);
    sharded_.set_gradient_sync(last || (static_cast<int64_t>(done) + 1) % case_.steps[index].sync_every == 0);
  }

  // Returns the loss, to run backwards from.
  at::Tensor forward(const golden::Step& step, size_t index, size_t round, RankStep& result) {
    golden::Microbatch data = microbatch(step, round);
    const bool is_split = passes() == passes_split;
    if (is_split && data.input.is_floating_point()) data.input = data.input.detach().requires_grad_();
    if (watch_) watch_->begin();
    if (case_.options.loss == loss_tokens) sharded_.add_tokens(data.target.numel());
    AuxiliaryLosses auxiliary;
    at::Tensor output = network_.output(data);
    if (output_scale_ != 1) output = output * output_scale_;
    const at::Tensor sum = auxiliary.add_to(network_.loss_of(output, data)), loss = sum * data.weight;
    result.losses.push_back(value_of(sum, data.weight));
    if (!std::isfinite(result.losses.back()))
      throw NonFiniteError(
          fmt::format("rank {}, step {}, round {}: the loss is {}", rank_, index + 1, round, result.losses.back()));
    const at::Tensor scaled = scaler_ ? scaler_->scale(loss) : loss;
    if (is_split) go_back_to(data.input, scaled);
    return scaled;
  }

  // A backward that makes no gradient of a parameter. Tokens have no gradient, and the first parameter that trains lies as far
  // down. A whole backward behind it makes the input's gradient once more.
  void go_back_to(const at::Tensor& input, const at::Tensor& loss) {
    const at::Tensor chosen = input.requires_grad() ? input : trained().at(0);
    const at::Tensor alone =
        torch::autograd::grad({loss}, {chosen}, {}, /*retain_graph=*/true, /*create_graph=*/false, /*allow_unused=*/true)[0];
    if (!input.requires_grad() || case_.mode == Mode::fast) return;
    input.register_hook([alone](const at::Tensor& again) {
      if (!alone.defined() || !at::allclose(alone, again, 0, 0, /*equal_nan=*/true))
        throw Error("[harness] a backward to the input alone makes another gradient of it");
    });
  }

  std::vector<at::Tensor> trained() const {
    std::vector<at::Tensor> parameters = network_.module->parameters();
    std::erase_if(parameters, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
    return parameters;
  }

  void backward(const golden::Step& step, size_t index, size_t round, at::Tensor loss) {
    if (watch_) watch_->begin_backward();
    if (passes() == passes_split && case_.seed % 2 == 0)
      torch::autograd::backward({loss}, {}, {}, /*create_graph=*/false, trained());  // for the weights alone
    else
      loss.backward();
    if (watch_ && index == tracing_.step) write_down(step.microbatches[round][data_rank_].input);
  }

  // Of a microbatch with as many positions as `like`.
  void write_down(const at::Tensor& like) {
    MicrobatchTrace seen{.calls = calls_of(*watch_, *network_.module), .scale = scaler_ ? scaler_->value() : 1};
    if (context_) seen.positions = context_->cut(at::arange(like.size(1)), /*dim=*/0);
    (*tracing_.ranks)[static_cast<size_t>(rank_)].push_back(std::move(seen));
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
      if (ema_) ema_->update();
      update_router_biases(*network_.module, *comms_);
    } else {
      forget_router_counts(*network_.module);
    }
    const bool low_precision = case_.options.compute != fp32, canonical = case_.options.arithmetic != 0;
    result.parameters = copies(low_precision || canonical ? sharded_.main_parameters() : sharded_.parameters());
    if (low_precision || canonical) result.compute_parameters = copies(sharded_.parameters());
    for (const std::string& state_name : optimizer_.state_names())
      result.state.emplace_back(state_name, copies(optimizer_.state(state_name)));
    if (ema_) result.state.emplace_back("ema", copies(ema_->pieces()));
    result.buffers = state_buffers(*network_.module);
  }

  const Case& case_;
  const golden::Run& run_;
  c10::Device device_;
  double output_scale_;
  int64_t rank_;
  size_t data_rank_;  // whose microbatches it trains on
  bool resumes_;
  const Tracing& tracing_;
  std::shared_ptr<MeshComm> comms_;
  std::optional<TensorParallel> parallel_;
  std::optional<ContextParallel> context_;
  Network network_;
  Sharded sharded_;
  Optimizer optimizer_;
  std::optional<Ema> ema_;
  std::optional<LossScaler> scaler_;
  CaseCheckpoints& checkpoints_;
  std::optional<checkpoint::Manager> manager_;
  std::optional<FingerprintCheck> fingerprints_;
  std::optional<ModuleWatch> watch_;
  bool begun_ = false;
  std::vector<PropertyComplaint> complaints_;  // of the step that goes on
};

// Steps [first, last) in one world, and the saves before step `last`.
void run_stretch(const Trial& trial, CaseCheckpoints& checkpoints, bool resumes, size_t first, size_t last, Steps& steps) {
  const Case& c = trial.c;
  const StepWatch& watch = trial.watch;
  for (size_t s = first; s < last; ++s) steps[s].resize(static_cast<size_t>(c.mesh.size()));
  trial.run_world(c, [&](std::shared_ptr<Comm> comm) {
    RankRun rank_run(trial, comm, checkpoints, resumes);
    if (resumes) rank_run.load(first);
    for (size_t s = first; s < last; ++s) {
      if (s != first || !resumes) rank_run.save(s);
      if (watch) watch(comm->rank(), s, /*ended=*/false, rank_run.sharded());
      steps[s][static_cast<size_t>(comm->rank())] = rank_run.step(s);
      if (watch) watch(comm->rank(), s, /*ended=*/true, rank_run.sharded());
    }
    if (last < c.steps.size()) rank_run.save(last);
    rank_run.end();
  });
}

}  // namespace

RunWorld on_threads(std::shared_ptr<SchedulePolicy> policy, AroundComm around) {
  return [policy = std::move(policy), around = std::move(around)](const Case& now, const RankBody& body) {
    ThreadsOptions options = threads_options(now);
    options.policy = policy;
    const auto wrapped = [&](std::shared_ptr<Comm> comm) { body(around(std::move(comm))); };
    run_threads(now.mesh.size(), around ? RankBody(wrapped) : body, options);
  };
}

// All steps, from one load to the next.
Steps run_sharded(const Trial& trial, CaseCheckpoints& checkpoints) {
  const Case& c = trial.c;
  Steps steps(trial.run.steps.size());
  Trial stretch = trial;
  stretch.run_world = [&trial, text = c.str()](const Case& now, const RankBody& body) {
    trial.run_world(now, [&](std::shared_ptr<Comm> comm) {
      const RunningCase running(text);
      body(std::move(comm));
    });
  };
  bool resumes = false;
  for (size_t first = 0; first < steps.size() || !resumes;) {
    size_t last = resumes ? first + 1 : first;
    while (last < steps.size() && !c.steps[last].loads()) ++last;
    if (resumes) stretch.c = c.at(first);
    run_stretch(stretch, checkpoints, resumes, first, last, steps);
    first = last, resumes = true;
  }
  return steps;
}

Steps run_sharded(const Trial& trial) {
  CaseCheckpoints checkpoints(trial.c);
  return run_sharded(trial, checkpoints);
}

ModuleTraces trace_modules(const Case& c, const golden::Run& run, size_t step) {
  ModuleTraces traces(static_cast<size_t>(c.at(step).mesh.size()));
  run_sharded({.c = c,
               .run = run,
               .run_world = on_threads(policy_of(c.interleaving)),
               .tracing = {.step = step, .ranks = &traces}});
  return traces;
}

MicrobatchTrace trace_unsharded(const golden::Model& model, const golden::Named& parameters, golden::Microbatch data) {
  const Network network = make_network(model);
  set_parameters(*network.module, parameters, 0);
  begin_router_biases(*network.module, model.llama);
  if (model.canonical) {
    network.module->to(at::kDouble);
    if (data.input.is_floating_point()) data.input = data.input.to(at::kDouble);
  }
  ModuleWatch watch(*network.module);
  watch.begin();
  random_stream() = {.seed = data.dropout_seed};
  const at::Tensor loss = network.loss(data);
  watch.begin_backward();
  loss.backward();
  MicrobatchTrace seen{.calls = calls_of(watch, *network.module)};
  const auto trained = network.module->named_parameters();
  for (const auto& [name, value] : parameters)
    if (const at::Tensor& gradient = trained[name].grad(); gradient.defined()) seen.gradients.emplace_back(name, gradient);
  return seen;
}

}  // namespace harness
