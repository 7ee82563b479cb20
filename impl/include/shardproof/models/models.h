// The models that come with the library, written with plain LibTorch modules and `call`, so that they run unsharded and
// sharded alike. Parameter names are those of the headers of each model.
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
#include "shardproof/parallel/tensor/tensor_parallel.h"

namespace shardproof {

// torch::nn::Linear whose forward is the fused operation that Python's nn.Linear runs. LibTorch's own adds the bias in a
// second pass for inputs of three dims, which rounds differently and costs time.
class LinearImpl : public torch::nn::LinearImpl, public CanonicalPart {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& input);
};
TORCH_MODULE(Linear);

// torch::nn::LayerNorm over the last dim, and torch::nn::Embedding, which know canonical arithmetic.
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
  std::vector<int64_t> widths;  // at least two; layer i maps widths[i] to widths[i + 1]
  Activation activation = Activation::tanh;  // between layers, none after the last
  bool bias = true;
};

// [B, widths.front()] -> [B, widths.back()]. Parameters "layers.<i>.weight", "layers.<i>.bias".
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
  int64_t positions = 128;  // the longest sequence
  bool tied = true;         // the head is the token embedding
  double dropout = 0;       // of embeddings, attention's probabilities and what the branches of a block give
};

// One pre-norm transformer block: [B, T, hidden] -> the same.
class GptBlockImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit GptBlockImpl(const GptOptions& options);
  at::Tensor forward(at::Tensor x);

 private:
  int64_t head_size_;
  LayerNorm ln_1_{nullptr}, ln_2_{nullptr};
  Linear c_attn_{nullptr}, attn_proj_{nullptr}, c_fc_{nullptr}, mlp_proj_{nullptr};
  Attention attend_{nullptr};
  Dropout attn_dropout_{nullptr}, mlp_dropout_{nullptr};
};
TORCH_MODULE(GptBlock);

// Tokens [B, T] int64 -> logits [B, T, vocab]. Learned positions, layer norm, exact GELU, causal attention. Parameters
// "wte.weight", "wpe.weight", "h.<i>.ln_1.*", "h.<i>.attn.c_attn.*", "h.<i>.attn.c_proj.*", "h.<i>.ln_2.*",
// "h.<i>.mlp.c_fc.*", "h.<i>.mlp.c_proj.*", "ln_f.*" and "lm_head.weight", which is "wte.weight" itself when tied.
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
  std::shared_ptr<torch::nn::Module> tied_head_;  // has the name and the tied weight
};
TORCH_MODULE(Gpt);

// For parallelize. Heads, the MLP's width and the vocabulary are cut over the axis; the logits that come out are this rank's
// entries of the vocabulary, for vocab_parallel_cross_entropy. Sequences [B, T, ..] are split along T between blocks when
// `sequence_parallel`.
ParallelPlan gpt_plan(const GptOptions& options, bool sequence_parallel = false);

struct LlamaOptions {
  int64_t layers = 2;
  int64_t hidden = 64;        // a multiple of heads, by an even number
  int64_t heads = 4;          // of queries; a multiple of kv_heads
  int64_t kv_heads = 2;       // of keys and values
  int64_t intermediate = 128;  // width of the gated MLP
  int64_t vocab = 256;
  double rope_theta = 10000;
  double norm_eps = 1e-5;
  bool tied = false;
  double attention_dropout = 0;  // of probabilities
  bool qk_norm = false;  // RMS norms over the features of each head's queries and keys before they turn, as in Qwen3
};

// [.., size] -> the same, divided by the root of its mean square, times "weight".
class RmsNormImpl : public torch::nn::Module, public CanonicalPart {
 public:
  RmsNormImpl(int64_t size, double eps);
  at::Tensor forward(at::Tensor x);
  at::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RmsNorm);

// Causal, with rotary positions and grouped queries: [B, T, hidden] -> the same.
class LlamaAttentionImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit LlamaAttentionImpl(const LlamaOptions& options);
  at::Tensor forward(at::Tensor x);

 private:
  int64_t head_size_;
  double theta_;
  Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr}, o_proj_{nullptr};
  RmsNorm q_norm_{nullptr}, k_norm_{nullptr};  // null without qk_norm
  Positions positions_{nullptr};
  Attention attend_{nullptr};
};
TORCH_MODULE(LlamaAttention);

// down(silu(gate(x)) * up(x)).
class LlamaMlpImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit LlamaMlpImpl(const LlamaOptions& options);
  at::Tensor forward(at::Tensor x);

 private:
  Linear gate_proj_{nullptr}, up_proj_{nullptr}, down_proj_{nullptr};
};
TORCH_MODULE(LlamaMlp);

class LlamaLayerImpl : public torch::nn::Module {
 public:
  explicit LlamaLayerImpl(const LlamaOptions& options);
  at::Tensor forward(at::Tensor x);

 private:
  LlamaAttention attention_{nullptr};
  LlamaMlp mlp_{nullptr};
  RmsNorm input_norm_{nullptr}, attention_norm_{nullptr};
};
TORCH_MODULE(LlamaLayer);

// Tokens [B, T] int64 -> logits [B, T, vocab]. Parameters have the names and layouts of LlamaForCausalLM in Hugging Face's
// transformers: "model.embed_tokens.weight", "model.layers.<i>.self_attn.{q,k,v,o}_proj.weight",
// "model.layers.<i>.mlp.{gate,up,down}_proj.weight", "model.layers.<i>.{input,post_attention}_layernorm.weight",
// "model.norm.weight" and "lm_head.weight", which is the embedding itself when tied. With qk_norm they are those of
// Qwen3ForCausalLM, which has "model.layers.<i>.self_attn.{q,k}_norm.weight" as well.
class LlamaImpl : public torch::nn::Module, public CanonicalPart {
 public:
  explicit LlamaImpl(LlamaOptions options);
  at::Tensor forward(at::Tensor tokens);

 private:
  LlamaOptions options_;
  Embedding tokens_{nullptr};
  std::vector<LlamaLayer> layers_;
  RmsNorm norm_{nullptr};
  Linear head_{nullptr};
  std::shared_ptr<torch::nn::Module> tied_head_;  // has the name and the tied weight
};
TORCH_MODULE(Llama);

// The same for `ranks` along the axis. Key and value heads that are fewer than the ranks are held in copies. Throws Error when
// the heads cannot be dealt out so that each rank has the key heads of its queries.
ParallelPlan llama_plan(const LlamaOptions& options, int64_t ranks, bool sequence_parallel = false);

}  // namespace shardproof
