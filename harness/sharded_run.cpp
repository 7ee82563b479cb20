#include "harness/sharded_run.h"

#include <ATen/ATen.h>

#include <cmath>
#include <set>

#include "harness/random.h"
#include "shardproof/shardproof.h"

namespace harness {
namespace {

using namespace shardproof;

// The library's model, called as a user would.
struct Network {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const golden::Microbatch&)> loss;
};

Network make_mlp(const golden::Mlp& m) {
  Mlp mlp(MlpOptions{.widths = m.widths, .activation = static_cast<Activation>(m.activation), .bias = m.bias});
  return {mlp.ptr(), [mlp](const golden::Microbatch& data) {
            const at::Tensor difference = call(mlp, data.input) - data.target;
            return (difference * difference).sum() * data.weight;
          }};
}

Network make_gpt(const golden::Gpt& g) {
  Gpt gpt(GptOptions{.layers = g.layers, .hidden = g.hidden, .heads = g.heads, .vocab = g.vocab, .positions = g.positions,
                     .tied = g.tied});
  return {gpt.ptr(), [gpt](const golden::Microbatch& data) {
            const at::Tensor logits = call(gpt, data.input);
            return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), data.target.reshape({-1}), {},
                                          at::Reduction::Sum) *
                   data.weight;
          }};
}

Network make_network(const golden::Model& model) {
  static_assert(static_cast<int>(Activation::gelu) == static_cast<int>(golden::Activation::gelu));
  return model.kind == golden::Model::Kind::mlp ? make_mlp(model.mlp) : make_gpt(model.gpt);
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

UnitSelector selector(const Case& c) {
  switch (c.units) {
    case Units::root: return {};
    case Units::block: return by_type<GptBlockImpl>();
    case Units::leaf:
      return by_type<torch::nn::LinearImpl, torch::nn::LayerNormImpl, torch::nn::EmbeddingImpl>();
    case Units::some:
      // The same on every rank: by the names' hashes. Name spaces ("h", "attn") are never called, so they cannot be units.
      return [seed = c.seed](const std::string& name, const torch::nn::Module& module) {
        const bool callable = !module.parameters(/*recurse=*/false).empty() || by_type<GptBlockImpl>()(name, module);
        return callable && Draws(seed, name).bits(0) % 2 == 0;
      };
  }
  return {};
}

ShardOptions shard_options(const Case& c) {
  ShardOptions options;
  options.strategy = strategy(c.strategy);
  options.units = selector(c);
  options.bucket_bytes_max = c.bucket_bytes_max;
  options.alignment_bytes = c.alignment_bytes;
  options.reshard_after_forward = c.reshard_after_forward;
  options.numerics = c.mode == Mode::fast ? Numerics::fast : Numerics::ordered;
  options.gradient_divide = c.mean_over_ranks ? 0 : 1;
  return options;
}

ThreadsOptions threads_options(const Case& c) {
  using Completion = ThreadsOptions::Completion;
  const Draws draws(c.seed, "threads");
  ThreadsOptions options;
  options.schedule = ThreadsOptions::Schedule::serial;
  options.completion = std::vector{Completion::eager, Completion::late, Completion::random}[draws.bits(0) % 3];
  options.sum = c.mode == Mode::ordered ? ThreadsOptions::Sum::rank_order : ThreadsOptions::Sum::ring;
  options.seed = c.seed;
  return options;
}

Optimizer make_optimizer(Sharded& sharded, const golden::Optimizer& o) {
  if (o.kind == golden::Optimizer::Kind::sgd)
    return sgd(sharded, {.lr = o.lr, .momentum = o.momentum, .weight_decay = o.weight_decay});
  return adamw(sharded, {.lr = o.lr, .beta1 = o.beta1, .beta2 = o.beta2, .eps = o.eps, .weight_decay = o.weight_decay});
}

std::vector<Piece> copies(std::vector<Piece> pieces) {
  for (Piece& piece : pieces) piece.data = piece.data.clone();
  return pieces;
}

RankStep train_step(const golden::Step& step, int64_t rank, const Network& network, Sharded& sharded, Optimizer& optimizer) {
  RankStep result;
  for (size_t round = 0; round < step.microbatches.size(); ++round) {
    sharded.set_last_microbatch(round + 1 == step.microbatches.size());
    const at::Tensor loss = network.loss(step.microbatches[round][static_cast<size_t>(rank)]);
    result.losses.push_back(static_cast<double>(loss.item<float>()));
    if (!std::isfinite(result.losses.back()))
      throw NonFiniteError(fmt::format("rank {}, step {}, round {}: the loss is {}", rank, sharded.step(), round,
                                       result.losses.back()));
    loss.backward();
  }
  result.gradient_norm = step.clip_norm > 0 ? sharded.clip_gradients(step.clip_norm) : sharded.gradient_norm();
  result.gradients = copies(sharded.gradients());
  optimizer.step();
  result.parameters = copies(sharded.parameters());
  for (const std::string& slot : optimizer.slots()) result.state.emplace_back(slot, copies(optimizer.state(slot)));
  return result;
}

}  // namespace

std::vector<std::vector<RankStep>> run_sharded(const Case& c, const golden::Run& run) {
  std::vector<std::vector<RankStep>> steps(run.steps.size(), std::vector<RankStep>(static_cast<size_t>(c.mesh.size())));
  run_threads(
      c.mesh.size(),
      [&](std::shared_ptr<Comm> comm) {
        const int64_t rank = comm->rank();
        const Network network = make_network(c.model);
        set_parameters(*network.module, run.parameters, rank);
        Sharded sharded = fully_shard(network.module, std::make_shared<MeshComm>(comm, c.mesh), shard_options(c));
        Optimizer optimizer = make_optimizer(sharded, c.optimizer);
        for (size_t s = 0; s < run.steps.size(); ++s)
          steps[s][static_cast<size_t>(rank)] = train_step(run.steps[s], rank, network, sharded, optimizer);
      },
      threads_options(c));
  return steps;
}

}  // namespace harness
