#include "harness/train_rank.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cmath>
#include <optional>

#include "shardproof/check.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/fully_shard.h"
#include "shardproof/initialize.h"
#include "shardproof/mesh_comm.h"
#include "shardproof/optimizer.h"

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

at::Tensor loss_of(const Gpt& model, const golden::Microbatch& microbatch) {
  const at::Tensor logits = call(model, microbatch.input);
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), microbatch.target.reshape({-1}), {},
                                at::Reduction::Sum) *
         microbatch.weight;
}

std::vector<Piece> copies(std::vector<Piece> pieces) {
  for (Piece& piece : pieces) piece.data = piece.data.clone();
  return pieces;
}

void resume(checkpoint::Manager& manager, Sharded& sharded, Optimizer& optimizer, const TrainHistory& history) {
  const auto loaded = manager.load_latest(sharded, &optimizer);
  SHARD_REQUIRE(loaded && loaded->trainer.step == history.first_step, "train",
                "the last checkpoint in {} changed while the run began; is another run saving there?", manager.directory());
}

}  // namespace

Gpt make_model(const TrainOptions& options) {
  const golden::Gpt& m = options.model;
  Gpt model(GptOptions{.layers = m.layers,
                       .hidden = m.hidden,
                       .heads = m.heads,
                       .vocab = m.vocab,
                       .positions = m.positions,
                       .tied = m.tied});
  initialize_parameters(*model, options.seed);
  return model;
}

void train_rank(const TrainOptions& options, const TextData& data, const BatchRule& rule, const TrainHistory& history,
                const std::shared_ptr<Comm>& comm, const PutStep& put) {
  const auto comms = std::make_shared<MeshComm>(comm, options.mesh);
  Gpt model = make_model(options);
  // The weights already divide by the tokens of the global batch.
  Sharded sharded = fully_shard(
      model.ptr(), comms,
      {.strategy = strategy(options.strategy), .units = by_type<GptBlockImpl>(),
       .numerics = options.canonical ? Numerics::canonical : Numerics::ordered, .gradient_divide = 1});
  Optimizer optimizer = make_optimizer(sharded, options.optimizer);
  const int64_t rank = comm->rank();
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
      const at::Tensor loss = loss_of(model, training_microbatch(data, rule, step, round, rank));
      result.losses.push_back(loss.item<double>());
      if (!std::isfinite(result.losses.back()))
        throw NonFiniteError(
            fmt::format("[train] step {}, round {}: the loss is {}. Lower --lr, or clip with --clip", step,
                        round, result.losses.back()));
      loss.backward();
    }
    result.gradient_norm =
        options.clip_norm > 0 ? sharded.clip_gradients(options.clip_norm) : sharded.gradient_norm();
    if (options.check) result.gradients = copies(sharded.gradients());
    optimizer.step();
    const int64_t done = step + 1;
    if (manager) manager->poll();
    if (manager && (done == options.steps || (asked.save_every > 0 && done % asked.save_every == 0)))
      manager->save(sharded, &optimizer, trainer_state(options, data, history, done));
    if (manager && done == options.steps) manager->wait();
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options.check) {
      result.parameters = copies(sharded.parameters());
      for (const std::string& slot : optimizer.slots())
        result.state.emplace_back(slot, copies(optimizer.state(slot)));
    }
    if (!put(std::move(result))) throw ReaderStopped();
  }
}

}  // namespace harness
