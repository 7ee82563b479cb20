// The models that come with the library. They are written with plain LibTorch modules and `call`, so they run unsharded and
// sharded alike. The comment on each model lists the names of its parameters.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "shardproof/nn/attention.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/dropout.h"
#include "shardproof/nn/meta_init.h"
#include "shardproof/parallel/experts/experts.h"
#include "shardproof/parallel/experts/router.h"
#include "shardproof/parallel/tensor/tensor_parallel.h"

namespace shardproof {

// A torch::nn::Linear whose forward is the fused operation that Python's nn.Linear runs. For inputs of three dims LibTorch's
// own forward adds the bias in a second pass, which rounds differently and costs time.
class LinearImpl : public torch::nn::LinearImpl, public CanonicalPart {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);
};
TORCH_MODULE(Linear);

// torch::nn::LayerNorm over the last dim, and torch::nn::Embedding, both with canonical arithmetic (nn/canonical/canonical.h).
class LayerNormImpl : public torch::nn::LayerNormImpl, public CanonicalPart {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;
  at::Tensor forward(const at::Tensor& input);
};
TORCH_MODULE(LayerNorm);

class EmbeddingImpl : public torch::nn::EmbeddingImpl, public CanonicalPart {
 public:
  using torch::nn::EmbeddingImpl::EmbeddingImpl;
  at::Tensor forward(const at::Tensor& tokens);
};
TORCH_MODULE(Embedding);

enum class Activation { identity, relu, tanh, gelu };

struct MlpOptions {
  std::vector<int64_t> widths;               // at least two; layer i maps widths[i] features to widths[i + 1]
  Activation activation = Activation::tanh;  // applied between layers, not after the last one
  bool bias = true;
};

// A multilayer perceptron: [B, widths.front()] -> [B, widths.back()]. Its parameters are "layers.<i>.weight" and, with `bias`,
// "layers.<i>.bias".
class MlpImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit MlpImpl(MlpOptions options);
  at::Tensor forward(at::Tensor input);

 private:
  MlpOptions options_;
  std::vector<Linear> layers_;
};
TORCH_MODULE(Mlp);

struct GptOptions {
  int64_t layers = 2;
  int64_t hidden = 64;  // a multiple of heads
  int64_t heads = 4;
  int64_t vocab = 256;
  int64_t positions = 128;  // the length of the longest sequence
  bool tied = true;         // whether the head uses the weight of the token embedding
  double dropout = 0;       // its probability, on embeddings, attention probabilities and both branches of a block
  bool tanh_gelu = false;   // GELU by its formula with tanh, as OpenAI's GPT-2 has it, instead of the exact one
};

// One pre-norm transformer block: [B, T, hidden] -> [B, T, hidden].
class GptBlockImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit GptBlockImpl(const GptOptions& options);
  at::Tensor forward(at::Tensor x);

 private:
  int64_t head_size_;
  bool tanh_gelu_;
  LayerNorm ln_1_{nullptr}, ln_2_{nullptr};
  Linear c_attn_{nullptr}, attn_proj_{nullptr}, c_fc_{nullptr}, mlp_proj_{nullptr};
  Attention attend_{nullptr};
  Dropout attn_dropout_{nullptr}, mlp_dropout_{nullptr};
};
TORCH_MODULE(GptBlock);

// GPT-2: tokens [B, T] int64 -> logits [B, T, vocab]. It has learned positions, layer norms, GELU and causal attention.
// Its parameters have the names of GPT2LMHeadModel in Hugging Face's transformers, without "transformer.": "wte.weight",
// "wpe.weight", "h.<i>.ln_1.*", "h.<i>.attn.c_attn.*", "h.<i>.attn.c_proj.*", "h.<i>.ln_2.*", "h.<i>.mlp.c_fc.*",
// "h.<i>.mlp.c_proj.*", "ln_f.*" and "lm_head.weight", which is "wte.weight" itself when tied.
class GptImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit GptImpl(GptOptions options);
  at::Tensor forward(at::Tensor tokens);

 private:
  GptOptions options_;
  Embedding wte_{nullptr}, wpe_{nullptr};
  Positions positions_{nullptr};
  Dropout drop_{nullptr};
  std::vector<GptBlock> blocks_;
  LayerNorm ln_f_{nullptr};
  Linear lm_head_{nullptr};
  std::shared_ptr<torch::nn::Module> tied_head_;  // the module "lm_head" with the tied weight
};
TORCH_MODULE(Gpt);

// The plan for `parallelize` (tensor_parallel.h). It cuts heads, the MLP's width and the vocabulary over the axis. The model
// then returns this rank's entries of the logits, for vocab_parallel_cross_entropy. With `sequence_parallel`, activations [B,
// T, ..] are split along T between blocks.
ParallelPlan gpt_plan(const GptOptions& options, bool sequence_parallel = false);

// Rotary frequencies for longer sequences, as Llama has them from 3.1 on ("rope_type": "llama3" in Hugging Face's package):
// those that turn fewer than `low_turns` times in `positions` tokens are divided by the factor, those that turn more than
// `high_turns` times stay, and those between go over smoothly. With `yarn` (Peng et al. 2023) they go over from one pair of
// features to the next in equal steps, as DeepSeek-V3 has it, and scores of attention are multiplied by
// (1 + mscale / 10 * log(factor))^2.
struct RopeScaling {
  double factor = 1;  // 1: frequencies are not scaled
  double low_turns = 1, high_turns = 4;
  int64_t positions = 8192;
  bool yarn = false;
  double mscale = 0;  // of yarn
};

struct LlamaOptions {
  int64_t layers = 2;
  int64_t hidden = 64;         // an even multiple of heads, unless head_size is given
  int64_t heads = 4;           // query heads; a multiple of kv_heads
  int64_t kv_heads = 2;        // key and value heads
  int64_t intermediate = 128;  // the width of the gated MLP
  int64_t vocab = 256;
  double rope_theta = 10000;
  double norm_eps = 1e-5;
  bool tied = false;
  double attention_dropout = 0;  // the probability of dropout on attention probabilities
  bool qk_norm = false;          // RMS norms over the features of each head's queries and keys before rotation, as in Qwen3
  bool qkv_bias = false;         // biases of the projections of queries, keys and values, as in Qwen2
  int64_t head_size = 0;         // how many features a head has, an even number; 0: hidden / heads
  int64_t window = 0;            // how many keys a query sees, up to its own, as Mistral's sliding_window; 0: all before it
  int64_t full_layers = 0;       // so many layers, the first ones, have no window all the same, as Qwen2's max_window_layers
  int64_t document_end = -1;     // the token that ends a document: queries see keys of their own document alone; -1: none does
  RopeScaling rope_scaling = {};
  int64_t rotary_size = 0;  // how many features of a head turn, an even number; 0: all
  // Above 0: layers have a LatentAttention. The rest is its own: a query_rank of 0 projects queries at once, value_size is how
  // many features a head's values have, at most head_size, or 0 for as many, and with rope_interleaved features 2i and 2i + 1
  // turn together, and not i and i + rotary_size / 2. heads and kv_heads are equal, and qk_norm and qkv_bias off.
  int64_t kv_rank = 0, query_rank = 0, value_size = 0;
  bool rope_interleaved = false;
  // With experts a layer has a MoeMlp in place of the gated MLP.
  RouterOptions router = {};
  int64_t expert_intermediate = 0;  // the width of each expert
  int64_t shared_intermediate = 0;  // that of a gated MLP beside the experts, which every token gets; 0: there is none
  int64_t dense_layers = 0;         // so many layers, the first ones, have the gated MLP all the same

  int64_t features_of_head() const { return head_size > 0 ? head_size : hidden / heads; }
  int64_t turning_features() const { return rotary_size > 0 ? rotary_size : features_of_head(); }
  int64_t features_of_value() const { return value_size > 0 ? value_size : features_of_head(); }
};

// Divides each row of [.., size] by the root of its mean square and multiplies it by "weight" [size] (Zhang and Sennrich 2019,
// "Root Mean Square Layer Normalization").
class RmsNormImpl : public torch::nn::Module, public CanonicalPart {
 public:
  RmsNormImpl(int64_t size, double eps);
  at::Tensor forward(at::Tensor x);
  at::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RmsNorm);

// Causal attention with rotary positions (Su et al. 2021) and grouped queries (Ainslie et al. 2023): [B, T, hidden] ->
// [B, T, hidden]. The first rotary_size features of a head turn. `documents` is that of AttentionSight.
class LlamaAttentionImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit LlamaAttentionImpl(const LlamaOptions& options);  // `options.window` is the layer's own
  at::Tensor forward(at::Tensor x, at::Tensor documents = {});

 private:
  LlamaOptions options_;
  Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr}, o_proj_{nullptr};
  RmsNorm q_norm_{nullptr}, k_norm_{nullptr};  // null without qk_norm
  Positions positions_{nullptr};
  Attention attend_{nullptr};
};
TORCH_MODULE(LlamaAttention);

// The multi-head latent attention of DeepSeek-V2 and V3, like LlamaAttention: keys and values of all heads come from one latent
// vector of kv_rank features, after an RMS norm with the eps 1e-6, and so do queries from one of query_rank. The last
// rotary_size features of a head turn, and those of the keys are the same in all heads.
class LatentAttentionImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit LatentAttentionImpl(const LlamaOptions& options);
  at::Tensor forward(at::Tensor x, at::Tensor documents = {});

 private:
  LlamaOptions options_;
  Linear q_proj_{nullptr};  // null with a query_rank, and then there are the next two
  Linear q_a_proj_{nullptr}, q_b_proj_{nullptr};
  Linear kv_a_proj_{nullptr}, kv_b_proj_{nullptr}, o_proj_{nullptr};
  RmsNorm q_a_norm_{nullptr}, kv_a_norm_{nullptr};
  std::shared_ptr<torch::nn::Module> shared_key_;  // entered where heads get the features that all keys share
  Positions positions_{nullptr};
  Attention attend_{nullptr};
};
TORCH_MODULE(LatentAttention);

// The gated MLP: down(silu(gate(x)) * up(x)).
class LlamaMlpImpl : public torch::nn::Module, public CanonicalPart {
 public:
  LlamaMlpImpl(int64_t hidden, int64_t intermediate);
  at::Tensor forward(at::Tensor x);

 private:
  Linear gate_proj_{nullptr}, up_proj_{nullptr}, down_proj_{nullptr};
};
TORCH_MODULE(LlamaMlp);

// The layer that gives a router its logits; it holds the router's bias of the choice as a buffer, where there is one. With
// sigmoid scores it multiplies in float32 whatever the dtype of the layer is, as DeepSeek-V3 in transformers does: in bfloat16
// many logits would be equal.
class RouterGateImpl final : public LinearImpl, public HasBuffers {
 public:
  explicit RouterGateImpl(const LlamaOptions& options);
  at::Tensor forward(const at::Tensor& x);
  void reset_buffers() override;

 private:
  bool in_float32_;
};
TORCH_MODULE(RouterGate);

// A router, "gate.weight" [experts, hidden], with its "experts" and, where there is one, the gated MLP "shared_experts":
// [B, T, hidden] -> [B, T, hidden].
class MoeMlpImpl : public torch::nn::Module, public Router {
 public:
  explicit MoeMlpImpl(const LlamaOptions& options);
  at::Tensor forward(at::Tensor x);

 private:
  MoeMlpImpl(const LlamaOptions& options, RouterGate gate);

  RouterGate gate_;
  Experts experts_{nullptr};
  LlamaMlp shared_{nullptr};
};
TORCH_MODULE(MoeMlp);

class LlamaLayerImpl : public torch::nn::Module {
 public:
  LlamaLayerImpl(const LlamaOptions& options, bool has_experts);
  at::Tensor forward(at::Tensor x, at::Tensor documents = {});

 private:
  LlamaAttention attention_{nullptr};
  LatentAttention latent_{nullptr};  // in its place with a kv_rank
  LlamaMlp mlp_{nullptr};            // null where the layer has experts
  MoeMlp moe_{nullptr};
  RmsNorm input_norm_{nullptr}, attention_norm_{nullptr};
};
TORCH_MODULE(LlamaLayer);

// Llama: tokens [B, T] int64 -> logits [B, T, vocab]. Parameters have the names and shapes of LlamaForCausalLM in Hugging
// Face's transformers: "model.embed_tokens.weight", "model.layers.<i>.self_attn.{q,k,v,o}_proj.weight",
// "model.layers.<i>.mlp.{gate,up,down}_proj.weight", "model.layers.<i>.{input,post_attention}_layernorm.weight",
// "model.norm.weight" and "lm_head.weight", which is the embedding's weight itself when tied. With qkv_bias they are those of
// Qwen2ForCausalLM, which also has "model.layers.<i>.self_attn.{q,k,v}_proj.bias". With qk_norm they are those of
// Qwen3ForCausalLM, which also has "model.layers.<i>.self_attn.{q,k}_norm.weight". A layer with experts has
// "model.layers.<i>.mlp.gate.weight", "model.layers.<i>.mlp.experts.{gate_up,down}_proj" and, of a shared MLP,
// "model.layers.<i>.mlp.shared_experts.{gate,up,down}_proj.weight" in place of the MLP's, as MixtralForCausalLM,
// Qwen3MoeForCausalLM, Dots1ForCausalLM and Glm4MoeForCausalLM have in memory. With a kv_rank they are those of
// DeepseekV3ForCausalLM, which has "self_attn.q_proj" or "self_attn.{q_a_proj,q_a_layernorm,q_b_proj}", and
// "self_attn.{kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj,o_proj}".
class LlamaImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit LlamaImpl(LlamaOptions options);
  at::Tensor forward(at::Tensor tokens);

 private:
  LlamaOptions options_;
  Embedding tokens_{nullptr};
  Documents documents_{nullptr};  // null where no token ends one
  std::vector<LlamaLayer> layers_;
  RmsNorm norm_{nullptr};
  Linear head_{nullptr};
  std::shared_ptr<torch::nn::Module> tied_head_;  // the module "lm_head" with the tied weight
};
TORCH_MODULE(Llama);

// The plan of a Llama for `ranks` ranks along the axis; see gpt_plan. When there are fewer key heads than ranks, several ranks
// hold copies of a key head. A LatentAttention is cut by heads, and its latents are whole. Layers of experts are whole along
// the axis; ExpertParallel for their experts may be added, which with `cut_inside` cuts them, too. Throws Error when the heads
// cannot be cut so that each rank has the key heads of its query heads.
ParallelPlan llama_plan(const LlamaOptions& options, int64_t ranks, bool sequence_parallel = false);

}  // namespace shardproof
