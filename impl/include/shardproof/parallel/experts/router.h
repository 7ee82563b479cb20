// Routers of mixtures of experts: which experts a token gets, and how much they weigh. The semantics are those of Mixtral,
// Qwen3-MoE, dots.llm1, GLM-4.5 and DeepSeek-V3 in Hugging Face's transformers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "shardproof/comm/mesh_comm.h"
#include "shardproof/nn/attention.h"
#include "shardproof/nn/auxiliary_losses.h"
#include "shardproof/nn/canonical/canonical.h"

namespace shardproof {

// What a token's scores are, in float32 or wider.
enum class RouterScore {
  softmax,         // of the logits of all experts
  chosen_softmax,  // of the logits of the chosen ones; they are chosen by logits
  sigmoid          // of each logit
};

// Of which tokens f_e of a balance loss is taken.
enum class BalanceOver {
  sequence,  // those of the token's own sequence
  step       // those of all sequences of all ranks (Qiu et al. 2025, "Demons in the Detail"; Qwen3's global-batch balance)
};

struct RouterOptions {
  int64_t experts = 0;
  int64_t experts_per_token = 2;  // those with the highest scores; of equal ones the first
  RouterScore score = RouterScore::softmax;
  bool normalized = true;  // a token's weights are divided by their sum; chosen_softmax has that by itself
  double scale = 1;        // and multiplied by this
  // Experts are in so many groups of neighbours, and a token's experts come from those `groups_per_token` groups whose two best
  // scores have the highest sum; of equal ones the first.
  int64_t groups = 1, groups_per_token = 1;

  // What keeps experts equally busy. A Router has it, and `route` alone has not; 0: nothing. Losses and biases count what was
  // chosen, whether it is dropped or not. The losses are sums over tokens, as a language model's own.
  //
  // The loss of DeepSeek-V3, sequence by sequence: for each token  balance_loss * sum over experts e of f_e * p_e.  p_e is the
  // token's probability of e (its softmax, or its sigmoid divided by the sum of all), and f_e is experts / experts_per_token *
  // the part of the sequence's tokens that chose e; with a bias and groups, where the paper's f_e is of the scores alone. The
  // gradient goes through p_e. That of Mixtral in transformers is experts_per_token times as large, mixes the sequences and
  // layers of a microbatch, and can leave out padding. Here all tokens count, also those whose target is ignored.
  //
  // Over the step it is that of Megatron's global_aux_loss, and a step has one training forward: f_e of tokens that are not
  // there yet is not known. A second one before update_router_biases or forget_router_counts throws Error, unless the first one
  // never came to add_to, as where it threw. There is no balance over each microbatch: such a loss would change with the cut
  // into microbatches, and with the number of ranks.
  double balance_loss = 0;
  BalanceOver balance_over = BalanceOver::sequence;
  double z_loss = 0;  // for each token z_loss * log(sum of exp(logits))^2 (Zoph et al. 2022, "ST-MoE")
  // Each update of `update_router_biases` moves a bias of each expert by this: up where it was chosen less often than the mean,
  // down where more often (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts").
  double bias_rate = 0;
  // Whether there is such a bias also where bias_rate is 0: then it stays as it is, such as that of a trained model.
  bool bias = false;
  // Of each sequence an expert takes no more choices than  capacity * tokens * experts_per_token / experts,  rounded up, and at
  // least one. Of more those with the highest weights stay, before these are rounded to the dtype of the layer, and of equal
  // ones the earlier tokens'. The others are dropped: a token's other weights stay what they are, and a token of which nothing
  // stays gets zeros. Megatron-LM's policy "probs" without padding does the same to the tokens of a microbatch, whatever
  // sequences they are of. A sequence that context parallelism cuts is refused.
  double capacity = 0;
};

// How many tokens of a sequence of so many an expert takes, with a capacity.
int64_t room_for(const RouterOptions& options, int64_t tokens);

struct Routes {
  at::Tensor experts;  // [tokens, experts_per_token] int64, by falling score; -1 where a Router has dropped the choice
  at::Tensor weights;  // alike; differentiable, in the dtype of the logits; 0 and without a gradient where it was dropped
};

// The routes of logits [tokens, experts]. `bias` [experts], where defined, is added to the scores of which experts and groups
// are chosen, and not to those that become weights. `canonical`: with canonical arithmetic. Throws Error when the options do
// not fit each other or the logits.
Routes route(const at::Tensor& logits, const RouterOptions& options, const at::Tensor& bias = {}, bool canonical = false);

// A part of modules that route: they derive from it. With losses or a bias_rate, a training forward needs an AuxiliaryLosses
// (nn/auxiliary_losses.h). Law: but for rounding, losses, counts, biases and what is dropped do not depend on the mesh or on
// microbatches, as long as a sequence is in one microbatch. Without a capacity it may be cut by context parallelism.
class Router : public SequencePart, public CanonicalPart {
 public:
  // logits [sequences, tokens of each, experts] -> the routes of [sequences * tokens] tokens. Collective over the ranks that
  // share sequences, where there is a balance loss; over the mesh, where a training forward has one over the step.
  Routes choose(const at::Tensor& logits);

 protected:
  // With a bias or a bias_rate, `gate` gets the buffer "e_score_correction_bias" [experts] of float32, which begins as zero.
  // For MetaInit it has to be a HasBuffers.
  Router(RouterOptions options, torch::nn::Module& gate);
  ~Router() = default;

 private:
  friend void update_router_biases(torch::nn::Module& module, MeshComm& comms);
  friend void forget_router_counts(torch::nn::Module& module);
  friend void share_router_counts(torch::nn::Module& module, const std::shared_ptr<MeshComm>& comms);

  at::Tensor busyness(const at::Tensor& chosen, int64_t sequences);
  at::Tensor with_losses(const at::Tensor& logits, const at::Tensor& chosen, at::Tensor weights);
  void forget_step() { step_busyness_ = at::Tensor(), step_record_ = nullptr; }

  RouterOptions options_;
  at::Tensor bias_;                              // [experts]; undefined where there is none
  std::shared_ptr<std::vector<double>> counts_;  // since the last update; passes may outlive this
  // For a balance over the step: who has its tokens, null where that is this rank alone, and f_e of the training forward since
  // the last update, undefined before it, with what collects the losses of that forward.
  std::shared_ptr<MeshComm> step_ranks_;
  at::Tensor step_busyness_;
  std::shared_ptr<AuxiliaryRecord> step_record_;
};

// Moves the biases of every Router below the module by what this step's training forwards have chosen, on all ranks. Ranks
// along tp count the same tokens, all as often, so they change no sign. Call it on every rank after each step of the optimizer,
// also for a balance over the step, which then begins anew. Collective over the mesh.
void update_router_biases(torch::nn::Module& module, MeshComm& comms);
// For a step that is skipped, forwards whose gradients are dropped, and before a load.
void forget_router_counts(torch::nn::Module& module);
// Tells every Router below the module that the ranks of the mesh have a step's tokens. `parallelize` and `fully_shard` do it.
void share_router_counts(torch::nn::Module& module, const std::shared_ptr<MeshComm>& comms);

}  // namespace shardproof
