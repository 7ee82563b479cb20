#include "harness/train/train_rank.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <set>

#include "harness/case/network.h"
#include "harness/case/parallel.h"
#include "harness/train/train_case.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/comm/checked.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/initialize.h"
#include "shardproof/optim/fingerprint_check.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/sharding/fully_shard.h"

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

TrainedModel make_model(const Case& c, const TrainOptions& options, const std::shared_ptr<MeshComm>& comms) {
  Comm* const tensor_group = c.tensor_ranks() > 1 ? &comms->along({"tp"}) : nullptr;
  TrainedModel model{.network = make_network(c.model, tensor_group), .tensor = {}, .context = {}};
  initialize_parameters(*model.network.module, options.seed);
  move_to(*model.network.module, options.device);
  if (tensor_group) model.tensor = parallelize(model.network.module, comms, parallel_plan(c));
  if (c.context_ranks() > 1) model.context = context_parallel(model.network.module, comms, context_options(c));
  return model;
}

ShardOptions shard_options(const TrainOptions& options) {
  // The weights of losses already divide by the tokens of the global batch.
  ShardOptions shard{.strategy = strategy(options.strategy),
                     .units = by_type<GptBlockImpl, LlamaLayerImpl>(),
                     .offload = options.offload ? Offload::pinned : Offload::none,
                     .numerics = options.canonical ? Numerics::canonical : Numerics::ordered,
                     .gradient_divide = 1};
  if (options.model.canonical) shard.precision = {.main = at::kFloat, .compute = at::kDouble};
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
  const at::Tensor sum = model.network.loss_of(model.network.output(data), data), part = sum * data.weight;
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

void resume(checkpoint::Manager& manager, Sharded& sharded, Optimizer& optimizer, const TrainHistory& history) {
  const auto loaded = manager.load_latest(sharded, &optimizer);
  SHARD_REQUIRE(loaded && loaded->trainer.step == history.first_step, "train",
                "the last checkpoint in {} changed while the run began; is another run saving there?", manager.directory());
}

}  // namespace

golden::Named initial_parameters(const TrainOptions& options) {
  const Network network = make_network(options.model);
  initialize_parameters(*network.module, options.seed);
  golden::Named parameters;
  std::set<const c10::TensorImpl*> seen;  // a tied parameter counts under its first name
  for (const auto& item : network.module->named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      parameters.emplace_back(item.key(), item.value().detach().clone());
  return parameters;
}

golden::Microbatch training_microbatch(const TrainingData& data, const BatchRule& rule, int64_t step,
                                       int64_t round, int64_t rank) {
  const int64_t length = data.sequence_length();
  at::Tensor tokens = at::empty({rule.microbatch(), length + 1}, at::kLong);
  int64_t* next = tokens.mutable_data_ptr<int64_t>();
  const SampleRange range = rule.positions(step, round, rank);
  for (int64_t i = range.begin; i < range.end; ++i)
    for (const uint32_t token : data.sequence(i)) *next++ = token;
  return {tokens.narrow(1, 0, length).contiguous(), tokens.narrow(1, 1, length).contiguous(),
          1.0 / static_cast<double>(rule.global_batch() * length)};
}

void train_rank(const TrainOptions& options, const TrainingData& data, const BatchRule& rule, const TrainHistory& history,
                const std::shared_ptr<Comm>& comm, const PutStep& put) {
  const Case c = train_case(options, history.stretches.back());
  const auto comms = std::make_shared<MeshComm>(options.fingerprint ? checked(comm) : comm, options.mesh);
  TrainedModel model = make_model(c, options, comms);
  Comm* const context_group = model.context ? &comms->along({"cp"}) : nullptr;
  Sharded sharded = fully_shard(model.network.module, comms, shard_options(options));
  Optimizer optimizer = make_optimizer(sharded, options.optimizer);
  std::optional<FingerprintCheck> fingerprints;
  if (options.fingerprint) fingerprints.emplace(sharded, optimizer);
  const int64_t rank = comm->rank() / c.microbatch_ranks();
  const TrainCheckpoints& asked = options.checkpoints;
  std::optional<checkpoint::Manager> manager;
  if (!asked.directory.empty())
    manager.emplace(asked.directory, checkpoint::ManagerOptions{.keep = asked.keep, .async = asked.async});
  if (history.first_step > 0) resume(*manager, sharded, optimizer, history);

  for (int64_t step = history.first_step; step < options.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    RankStep result;
    for (int64_t round = 0; round < rule.rounds(); ++round) {
      sharded.set_last_microbatch(round + 1 == rule.rounds());
      const PartialLoss loss =
          loss_of(model, training_microbatch(data, rule, step, round, rank), options, context_group);
      result.losses.push_back(loss.value);
      if (!std::isfinite(result.losses.back()))
        throw NonFiniteError(
            fmt::format("[train] step {}, round {}: the loss is {}. Lower --lr, or clip with --clip", step,
                        round, result.losses.back()));
      loss.part.backward();
    }
    result.gradient_norm =
        options.clip_norm > 0 ? sharded.clip_gradients(options.clip_norm) : sharded.gradient_norm();
    if (options.check) result.gradients = copies(sharded.gradients());
    optimizer.step();
    if (fingerprints) fingerprints->step();
    const int64_t done = step + 1;
    if (manager) manager->poll();
    if (manager && (done == options.steps || (asked.save_every > 0 && done % asked.save_every == 0)))
      manager->save(sharded, &optimizer, trainer_state(options, data, history, done));
    if (manager && done == options.steps) manager->wait();
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options.check) {
      result.parameters = copies(options.model.canonical ? sharded.main_parameters() : sharded.parameters());
      if (options.model.canonical) result.compute_parameters = copies(sharded.parameters());
      for (const std::string& state_name : optimizer.state_names())
        result.state.emplace_back(state_name, copies(optimizer.state(state_name)));
    }
    if (!put(std::move(result))) throw ReaderStopped();
  }
}

}  // namespace harness
