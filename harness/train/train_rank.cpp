#include "harness/train/train_rank.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "harness/case/axes.h"
#include "harness/case/network.h"
#include "harness/case/parallel.h"
#include "harness/train/stop_request.h"
#include "harness/train/timed_comm.h"
#include "harness/train/train_case.h"
#include "harness/train/train_measures.h"
#include "harness/train/train_weights.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/comm/checked.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/threads/threads.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/attention.h"
#include "shardproof/nn/initialize.h"
#include "shardproof/nn/meta_init.h"
#include "shardproof/nn/state_buffers.h"
#include "shardproof/optim/fingerprint_check.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/sharding/fully_shard.h"
#include "shardproof/sharding/named_options.h"

namespace harness {
namespace {

using namespace shardproof;

Optimizer make_optimizer(Sharded& sharded, const golden::Optimizer& o) {
  if (o.kind == golden::Optimizer::Kind::sgd)
    return sgd(sharded, {.lr = o.lr, .momentum = o.momentum, .weight_decay = o.weight_decay});
  return adamw(
      sharded,
      {.lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay});
}

// The model as this rank has it, cut over cp and tp.
struct TrainedModel {
  Network network;
  std::optional<TensorParallel> tensor;
  std::optional<ContextParallel> context;
};

void require_recomputed_exist(const torch::nn::Module& model, const std::string& pattern) {
  if (pattern.empty() || pattern == "blocks" || pattern == "attention") return;
  for (const auto& item : model.named_modules("", /*include_self=*/false))
    if (by_name(pattern)(item.key(), *item.value())) return;
  throw Error(fmt::format("[train] --recompute={} fits no module of the {}. Give blocks, attention, or a pattern of names "
                          "such as {}",
                          pattern, model.name(), "'*.mlp.*'"));
}

// Without memory, where what fills it is read into shards.
Network network_of(const Case& c, const TrainOptions& options, bool filled_later, Comm* tensor_group) {
  if (filled_later) {
    const MetaInit meta;
    return make_network(c.model, tensor_group);
  }
  Network network = make_network(c.model, tensor_group);
  initialize_parameters(*network.module, options.seed);
  begin_router_biases(*network.module, c.model.llama);
  move_to(*network.module, options.device);
  return network;
}

// Whether a run begins with values out of files: weights, or a checkpoint.
bool begins_with_files(const TrainOptions& options, const TrainHistory& history) {
  return history.first_step > 0 || !options.weights.empty();
}

TrainedModel make_model(const Case& c, const TrainOptions& options, bool filled_later, const std::shared_ptr<MeshComm>& comms) {
  Comm* const tensor_group = c.tensor_ranks() > 1 ? &comms->along({axes::tp}) : nullptr;
  TrainedModel model{.network = network_of(c, options, filled_later, tensor_group), .tensor = {}, .context = {}};
  if (tensor_group || expert_ranks(c) > 1) model.tensor = parallelize(model.network.module, comms, parallel_plan(c));
  if (c.context_ranks() > 1) model.context = context_parallel(model.network.module, comms, context_options(c));
  require_recomputed_exist(*model.network.module, options.recompute);
  return model;
}

ShardOptions shard_options(const TrainOptions& options, bool filled_later) {
  // The weights of losses already divide by the tokens of the global batch.
  ShardOptions shard{.strategy = strategy(options.strategy),
                     .units = by_type<GptBlockImpl, LlamaLayerImpl>(),
                     .numerics = options.canonical ? Numerics::canonical : Numerics::ordered,
                     .gradient_divide = 1};
  if (options.model.canonical) shard.precision = {.main = at::kFloat, .compute = at::kDouble};
  if (options.bf16) {
    shard.precision = {.main = at::kFloat, .compute = at::kBFloat16};
    shard.unit_options = [precision = shard.precision](const std::string& unit) {
      UnitOptions own;
      own.precision = precision;
      if (unit.empty()) own.precision->output = at::kFloat;  // of which the loss is taken
      return own;
    };
  }
  if (options.recompute == "blocks") shard.recompute = shard.units;
  else if (options.recompute == "attention") shard.recompute_modules = by_type<AttentionImpl>();
  else if (!options.recompute.empty())
    shard.recompute_modules = by_name(options.recompute);
  if (options.offload_activations) shard.offload_activations = shard.units;
  set_options(shard, options.sharding);
  if (filled_later) fill_shards_later(shard, options.device);
  return shard;
}

// Of the whole microbatch; ready to be differentiated where this rank has a part of it.
struct PartialLoss {
  at::Tensor part;
  double value = 0;
};

PartialLoss loss_of(TrainedModel& model, golden::Microbatch data, const TrainOptions& options, Comm* context_group) {
  const bool canonical = options.model.canonical;
  data.input = data.input.to(options.device), data.target = data.target.to(options.device);
  if (model.context) data.input = model.context->cut(data.input), data.target = model.context->cut(data.target);
  AuxiliaryLosses auxiliary;
  const at::Tensor sum = auxiliary.add_to(model.network.loss_of(model.network.output(data), data)), part = sum * data.weight;
  if (!context_group && !canonical) return {part, part.item<double>()};
  // A canonical sum is exact, and weighed once.
  at::Tensor whole = (canonical ? sum : part).detach().to(at::kDouble).reshape({1});
  if (context_group) context_group->all_reduce(whole).wait();
  return {part, canonical ? whole.item<double>() * data.weight : whole.item<double>()};
}

std::vector<Piece> copies(std::vector<Piece> pieces) {
  for (Piece& piece : pieces) piece.data = piece.data.to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  return pieces;
}

// Of parameters and of the optimizer's state, on the rank that holds most of them. A state that overflowed stays so, and its
// parameters move no more. Collective.
int64_t values_not_finite(const Sharded& sharded, const Optimizer& optimizer, Comm& world) {
  int64_t found = 0;
  const auto count = [&](const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces)
      found += piece.data.numel() - piece.data.isfinite().count_nonzero().item<int64_t>();
  };
  count(sharded.main_parameters());
  for (const std::string& state_name : optimizer.state_names()) count(optimizer.state(state_name));
  at::Tensor most = at::tensor({found}, at::kLong);
  world.all_reduce(most, Reduce::max).wait();
  return most.item<int64_t>();
}

void resume(checkpoint::Manager& manager, Sharded& sharded, Optimizer& optimizer, const TrainHistory& history, Comm& world) {
  const auto loaded = manager.load_latest(sharded, &optimizer);
  SHARD_REQUIRE(loaded && loaded->trainer.step == history.first_step, "train",
                "the last checkpoint in {} changed while the run began; is another run saving there?", manager.directory());
  const int64_t broken = values_not_finite(sharded, optimizer, world);
  SHARD_REQUIRE(broken == 0, "train",
                "{} has {} values of parameters or of the optimizer's state on a rank that are infinite or NaN, so there is no "
                "way on from it. Remove it, to go on from the one before, or begin another run",
                checkpoint::step_folder(manager.directory(), history.first_step), broken);
}

// Of the sequences of a range. Its weight makes losses of `all` sequences add up to their mean over tokens.
golden::Microbatch microbatch_of(int64_t length, SampleRange range,
                                 const std::function<std::vector<uint32_t>(int64_t)>& sequence, int64_t all) {
  at::Tensor tokens = at::empty({range.end - range.begin, length + 1}, at::kLong);
  int64_t* next = tokens.mutable_data_ptr<int64_t>();
  for (int64_t i = range.begin; i < range.end; ++i)
    for (const uint32_t token : sequence(i)) *next++ = token;
  return {tokens.narrow(1, 0, length).contiguous(), tokens.narrow(1, 1, length).contiguous(),
          1.0 / static_cast<double>(all * length)};
}

// Parameters, and buffers that are part of the state.
std::map<std::string, at::Tensor> whole_weights(const golden::Model& model, const std::string& folder) {
  SHARD_REQUIRE(
      std::filesystem::exists(folder), "train",
      "the run began with the weights in {}, and they are gone. The golden run begins there as well: bring them back, "
      "or leave out --check",
      folder);
  std::map<std::string, at::Tensor> values;
  run_threads(1, [&](const std::shared_ptr<Comm>& comm) {
    const Network network = make_network(model);
    Sharded whole = fully_shard(network.module, std::make_shared<MeshComm>(comm, Mesh({{axes::dp_shard, 1}})),
                                {.strategy = strategy("ddp")});
    load_weights_of(folder, whole);
    values = whole.gather_main_parameters();
    values.merge(buffers_of(*network.module).state);
  });
  return values;
}

double machine_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Clock clock_of(const TrainOptions& options, int64_t rank) {
  if (!options.clock) return machine_seconds;
  return [clock = options.clock, rank] { return clock(rank); };
}

// A rank's part of a run.
class RankTraining {
 public:
  RankTraining(const TrainOptions& options, const TrainingData& data, const BatchRule& rule, const TrainHistory& history,
               const std::shared_ptr<Comm>& comm)
      : options_(options),
        data_(data),
        rule_(rule),
        history_(history),
        case_(train_case(options, history.stretches.back())),
        call_time_(std::make_shared<CallTime>(clock_of(options, comm->rank()))),
        comms_(std::make_shared<MeshComm>(timed(options.fingerprint ? checked(comm) : comm, call_time_), options.mesh)),
        model_(make_model(case_, options, begins_with_files(options, history), comms_)),
        context_group_(model_.context ? &comms_->along({axes::cp}) : nullptr),
        sharded_(fully_shard(model_.network.module, comms_, shard_options(options, begins_with_files(options, history)))),
        optimizer_(make_optimizer(sharded_, options.optimizer)),
        measures_(sharded_),
        rank_(comms_->data_rank()) {
    if (options.fingerprint) fingerprints_.emplace(sharded_, optimizer_);
    const TrainCheckpoints& asked = options.checkpoints;
    if (!asked.directory.empty())
      manager_.emplace(asked.directory,
                       checkpoint::ManagerOptions{.keep = asked.keep, .async = asked.async, .copy_in_background = asked.async});
    // Whether it can be written to, and by nobody else, had better be known before the training.
    if (manager_ && history.first_step < options.steps) manager_->begin(comms_->world());
    if (history.first_step > 0)
      resume(*manager_, sharded_, optimizer_, history, comms_->world());
    else if (!options.weights.empty())
      load_weights_of(options.weights, sharded_);
  }

  // Whether any rank was asked to stop. Once one was, it stays so. Collective.
  bool is_asked_to_stop() {
    at::Tensor asked = at::tensor({int64_t{stop_requested()}}, at::kLong);
    comms_->world().all_reduce(asked, Reduce::max).wait();
    asked_to_stop_ = asked.item<int64_t>() != 0;
    return asked_to_stop_;
  }

  RankStep step(int64_t step) {
    const double start = machine_seconds(), began = call_time_->now(), in_calls = call_time_->seconds();
    RankStep result;
    backward(step, result);
    result.gradient_norm =
        options_.clip_norm > 0 ? sharded_.clip_gradients(options_.clip_norm) : sharded_.gradient_norm();
    if (options_.check) result.gradients = copies(sharded_.gradients());
    measures_.count_gradients(sharded_);
    optimizer_.set_lr_factor(lr_factor(options_.schedule, step));
    optimizer_.step();
    update_router_biases(*model_.network.module, *comms_);
    if (fingerprints_) fingerprints_->step();
    measure(step, result);
    result.compute_seconds = call_time_->now() - began - (call_time_->seconds() - in_calls);
    save(step + 1);
    result.seconds = machine_seconds() - start;
    if (!asked_to_stop_ && validates_after(options_, data_, step)) validate(step, result);
    result.stopped = asked_to_stop_ && step + 1 < options_.steps;
    if (options_.check) copy_state(result);
    return result;
  }

 private:
  void backward(int64_t step, RankStep& result) {
    for (int64_t round = 0; round < rule_.rounds(); ++round) {
      sharded_.set_last_microbatch(round + 1 == rule_.rounds());
      const PartialLoss loss =
          loss_of(model_, training_microbatch(data_, rule_, step, round, rank_), options_, context_group_);
      require_finite(loss.value, step, fmt::format("round {}: the loss", round));
      result.losses.push_back(loss.value);
      loss.part.backward();
    }
  }

  static void require_finite(double loss, int64_t step, const std::string& what) {
    if (!std::isfinite(loss))
      throw NonFiniteError(fmt::format("[train] step {}, {} is {}. Lower --lr, or clip with --clip", step + 1, what, loss));
  }

  void measure(int64_t step, RankStep& result) {
    const TrainMeasures::Result measured = measures_.measure(sharded_, stop_requested(), comms_->world());
    require_finite(measured.parameter_norm, step, "the norm of the parameters");
    result.parameter_norm = measured.parameter_norm;
    result.zero_gradients = measured.zero_gradients;
    result.held_bytes = sharded_.memory().peak_total_bytes;
    asked_to_stop_ = measured.stop;
  }

  // What is due, once: a run that is asked to stop while it saves or validates calls this again.
  void save(int64_t done) {
    if (!manager_) return;
    const TrainCheckpoints& asked = options_.checkpoints;
    manager_->poll();
    const bool due = done == options_.steps || (asked.save_every > 0 && done % asked.save_every == 0);
    if ((due || asked_to_stop_) && saved_ != done) {
      if (const int64_t broken = values_not_finite(sharded_, optimizer_, comms_->world()); broken > 0)
        throw NonFiniteError(fmt::format(
            "[train] step {}, {} values of the optimizer's state on a rank are infinite or NaN, and are not saved. Lower --lr, "
            "or clip with --clip",
            done, broken));
      manager_->save(sharded_, &optimizer_, trainer_state(options_, data_, history_, done));
      saved_ = done;
      if (!asked_to_stop_) is_asked_to_stop();
    }
    if (asked_to_stop_ || done == options_.steps) manager_->wait();
  }

  // Ranks gather parameters together, so one without a microbatch of its own computes the first one along. It takes long where
  // much is held out; a run that is asked to stop meanwhile gives no loss of a part.
  void validate(int64_t step, RankStep& result) {
    const at::NoGradGuard no_grad;
    const ValidationRule rule = validation_rule(options_, data_, rule_.ranks());
    for (int64_t round = 0; round < rule.rounds(); ++round) {
      if (is_asked_to_stop()) {
        result.validation_losses.clear();
        return save(step + 1);
      }
      const SampleRange own = rule.samples(round, rank_);
      const SampleRange taken = own.begin < own.end ? own : rule.samples(0, 0);
      const double loss = loss_of(model_, validation_microbatch(data_, rule, taken), options_, context_group_).value;
      require_finite(loss, step, "the validation loss");
      if (own.begin < own.end) result.validation_losses.push_back(loss);
    }
  }

  void copy_state(RankStep& result) {
    const bool has_main = options_.model.canonical || options_.bf16;
    result.parameters = copies(has_main ? sharded_.main_parameters() : sharded_.parameters());
    if (has_main) result.compute_parameters = copies(sharded_.parameters());
    for (const std::string& state_name : optimizer_.state_names())
      result.state.emplace_back(state_name, copies(optimizer_.state(state_name)));
    result.buffers = state_buffers(*model_.network.module);
  }

  const TrainOptions& options_;
  const TrainingData& data_;
  const BatchRule& rule_;
  const TrainHistory& history_;
  const Case case_;
  const std::shared_ptr<CallTime> call_time_;
  const std::shared_ptr<MeshComm> comms_;
  TrainedModel model_;
  Comm* const context_group_;
  Sharded sharded_;
  Optimizer optimizer_;
  TrainMeasures measures_;
  const int64_t rank_;  // among those with microbatches of their own
  std::optional<FingerprintCheck> fingerprints_;
  std::optional<checkpoint::Manager> manager_;
  int64_t saved_ = 0;  // after how many steps the last save was
  bool asked_to_stop_ = false;
};

}  // namespace

InitialValues initial_values(const TrainOptions& options, const TrainHistory& history) {
  const Network network = make_network(options.model);
  initialize_parameters(*network.module, options.seed);
  InitialValues values;
  if (!history.weights.empty()) {
    const at::NoGradGuard no_grad;
    auto own = network.module->named_parameters();
    for (const auto& [name, value] : whole_weights(options.model, history.weights))
      if (at::Tensor* parameter = own.find(name)) parameter->copy_(value);
      else
        values.buffers.emplace_back(name, value);
  }
  std::set<const c10::TensorImpl*> seen;  // a tied parameter counts under its first name
  for (const auto& item : network.module->named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      values.parameters.emplace_back(item.key(), item.value().detach().clone());
  return values;
}

golden::Microbatch training_microbatch(const TrainingData& data, const BatchRule& rule, int64_t step,
                                       int64_t round, int64_t rank) {
  const SampleRange range = rule.positions(step, round, rank);
  return microbatch_of(data.sequence_length(), range, [&](int64_t i) { return data.sequence(i); }, rule.global_batch());
}

golden::Microbatch validation_microbatch(const TrainingData& data, const ValidationRule& rule, SampleRange samples) {
  return microbatch_of(data.sequence_length(), samples, [&](int64_t i) { return data.validation_sequence(i); }, rule.samples());
}

ValidationRule validation_rule(const TrainOptions& options, const TrainingData& data, int64_t ranks) {
  const int64_t all = data.validation_sequences(), most = options.validation_sequences_max;
  return {most > 0 ? std::min(most, all) : all, options.microbatch, ranks};
}

bool validates_after(const TrainOptions& options, const TrainingData& data, int64_t step) {
  const int64_t done = step + 1;
  return data.validation_sequences() > 0 &&
         (done == options.steps || (options.validate_every > 0 && done % options.validate_every == 0));
}

void train_rank(const TrainOptions& options, const TrainingData& data, const BatchRule& rule, const TrainHistory& history,
                const std::shared_ptr<Comm>& comm, const PutStep& put) {
  RankTraining training(options, data, rule, history, comm);
  bool stopped = training.is_asked_to_stop();  // a load takes long, too
  for (int64_t step = history.first_step; step < options.steps && !stopped; ++step) {
    RankStep result = training.step(step);
    stopped = result.stopped;
    if (!put(std::move(result))) throw ReaderStopped();
  }
}

}  // namespace harness
