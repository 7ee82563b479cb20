#include <ATen/ATen.h>

#include <cmath>

#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/gradient_place.h"

namespace shardproof {
namespace {

torch::nn::LinearOptions plain(int64_t in, int64_t out) { return torch::nn::LinearOptions(in, out).bias(false); }

// Angles [T, head / 2] of rotary embeddings: position / theta^(2i / head), in float32.
at::Tensor angles(const at::Tensor& positions, int64_t head_size, double theta, at::ScalarType dtype) {
  const at::Tensor exponents = at::arange(0, head_size, 2, at::kFloat) / static_cast<double>(head_size);
  const at::Tensor frequencies = at::pow(at::scalar_tensor(theta, at::kFloat), exponents).reciprocal();
  return at::outer(positions.to(at::kFloat), frequencies).to(dtype);
}

struct Turn {
  at::Tensor cosine, sine;  // [T, head / 2]
};

// In the dtype and on the device of `like`.
Turn turn_of(const at::Tensor& positions, int64_t head_size, double theta, const at::Tensor& like) {
  const at::Tensor turn = angles(positions, head_size, theta, like.scalar_type());
  return {turn.cos().to(like.device()), turn.sin().to(like.device())};
}

// Each by itself, in float64 and with the C library: LibTorch's vectors and their tails may differ.
Turn canonical_turn_of(const at::Tensor& positions, int64_t head_size, double theta) {
  const int64_t half = head_size / 2;
  Turn turn{at::empty({positions.numel(), half}, at::kDouble), at::empty({positions.numel(), half}, at::kDouble)};
  for (int64_t i = 0; i < positions.numel() * half; ++i) {
    const double exponent = static_cast<double>(2 * (i % half)) / static_cast<double>(head_size);
    const double angle = static_cast<double>(positions.const_data_ptr<int64_t>()[i / half]) / std::pow(theta, exponent);
    turn.cosine.mutable_data_ptr<double>()[i] = std::cos(angle);
    turn.sine.mutable_data_ptr<double>()[i] = std::sin(angle);
  }
  return turn;
}

// x [B, heads, T, head]: element i turns with element i + head / 2.
at::Tensor rotated(const at::Tensor& x, const Turn& turn) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  return at::cat({halves[0] * turn.cosine - halves[1] * turn.sine, halves[1] * turn.cosine + halves[0] * turn.sine}, -1);
}

void require_valid(const LlamaOptions& o) {
  SHARD_REQUIRE(o.layers >= 0 && o.hidden > 0 && o.heads > 0 && o.kv_heads > 0 && o.intermediate > 0 && o.vocab > 0, "llama",
                "sizes must be positive, got layers={} hidden={} heads={} kv_heads={} intermediate={} vocab={}", o.layers,
                o.hidden, o.heads, o.kv_heads, o.intermediate, o.vocab);
  SHARD_REQUIRE(o.hidden % o.heads == 0 && o.hidden / o.heads % 2 == 0 && o.heads % o.kv_heads == 0, "llama",
                "hidden={} must be a multiple of heads={} with an even quotient, and heads of kv_heads={}", o.hidden, o.heads,
                o.kv_heads);
}

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t size, double eps) : eps_(eps) { weight = register_parameter("weight", at::ones({size})); }

// Gradients of three uses of one tensor would be added in an order that depends on which modules are units; of two it does not
// matter. So what is used again goes through a view, which gathers its own two first.
at::Tensor RmsNormImpl::forward(at::Tensor x) {
  if (is_canonical()) return canonical_ops::rms_norm(x, weight, eps_, canonical_name());
  x = x.view_as(x);
  return x * at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + eps_) * weight;
}

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaOptions& options)
    : head_size_(options.hidden / options.heads), theta_(options.rope_theta) {
  q_proj_ = register_module("q_proj", Linear(plain(options.hidden, options.hidden)));
  k_proj_ = register_module("k_proj", Linear(plain(options.hidden, options.kv_heads * head_size_)));
  v_proj_ = register_module("v_proj", Linear(plain(options.hidden, options.kv_heads * head_size_)));
  positions_ = register_module("positions", Positions());
  attend_ = register_module("attend", Attention(/*causal=*/true, options.attention_dropout));
  o_proj_ = register_module("o_proj", Linear(plain(options.hidden, options.hidden)));
  if (options.qk_norm) {
    q_norm_ = register_module("q_norm", RmsNorm(head_size_, options.norm_eps));
    k_norm_ = register_module("k_norm", RmsNorm(head_size_, options.norm_eps));
  }
}

// Heads are counted from what the projections give, which may be some of them.
at::Tensor LlamaAttentionImpl::forward(at::Tensor x) {
  const at::Tensor both = x.view_as(x);
  const at::Tensor q = call(q_proj_, x), k = call(k_proj_, both), v = call(v_proj_, both);
  const int64_t batch = q.size(0), length = q.size(1);
  const auto heads = [&](const at::Tensor& part, const RmsNorm& norm) {
    const at::Tensor each = part.view({batch, length, part.size(-1) / head_size_, head_size_});
    return (norm.is_empty() ? each : call(norm, each)).transpose(1, 2);
  };
  const at::Tensor positions = positions_->forward(length);
  const Turn turn = is_canonical() ? canonical_turn_of(positions, head_size_, theta_)
                                   : turn_of(positions, head_size_, theta_, q);
  const at::Tensor queries = rotated(heads(q, q_norm_), turn), keys = rotated(heads(k, k_norm_), turn);
  const at::Tensor attended = call(attend_, queries, keys, heads(v, nullptr));
  return call(o_proj_, attended.transpose(1, 2).reshape({batch, length, q.size(-1)}));
}

LlamaMlpImpl::LlamaMlpImpl(const LlamaOptions& options) {
  gate_proj_ = register_module("gate_proj", Linear(plain(options.hidden, options.intermediate)));
  up_proj_ = register_module("up_proj", Linear(plain(options.hidden, options.intermediate)));
  down_proj_ = register_module("down_proj", Linear(plain(options.intermediate, options.hidden)));
}

at::Tensor LlamaMlpImpl::forward(at::Tensor x) {
  const at::Tensor gate = call(gate_proj_, x);
  return call(down_proj_, (is_canonical() ? canonical_ops::silu(gate) : at::silu(gate)) * call(up_proj_, x));
}

LlamaLayerImpl::LlamaLayerImpl(const LlamaOptions& options) {
  attention_ = register_module("self_attn", LlamaAttention(options));
  mlp_ = register_module("mlp", LlamaMlp(options));
  input_norm_ = register_module("input_layernorm", RmsNorm(options.hidden, options.norm_eps));
  attention_norm_ = register_module("post_attention_layernorm", RmsNorm(options.hidden, options.norm_eps));
}

at::Tensor LlamaLayerImpl::forward(at::Tensor x) {
  x = x + call(attention_, call(input_norm_, x));
  return x + call(mlp_, call(attention_norm_, x));
}

LlamaImpl::LlamaImpl(LlamaOptions options) : options_(options) {
  require_valid(options);
  auto model = register_module("model", std::make_shared<torch::nn::Module>("model"));
  tokens_ = model->register_module("embed_tokens", Embedding(options.vocab, options.hidden));
  auto layers = model->register_module("layers", std::make_shared<torch::nn::Module>("layers"));
  for (int64_t i = 0; i < options.layers; ++i)
    layers_.push_back(layers->register_module(std::to_string(i), LlamaLayer(options)));
  norm_ = model->register_module("norm", RmsNorm(options.hidden, options.norm_eps));
  if (options.tied) {
    tied_head_ = register_module("lm_head", std::make_shared<torch::nn::Module>("lm_head"));
    tied_head_->register_parameter("weight", tokens_->weight);
  } else {
    head_ = register_module("lm_head", Linear(plain(options.hidden, options.vocab)));
  }
}

at::Tensor LlamaImpl::forward(at::Tensor tokens) {
  SHARD_REQUIRE(tokens.dim() == 2, "llama", "tokens must be [batch, length], got {}", fmt::join(tokens.sizes(), "x"));
  at::Tensor x = call(tokens_, tokens);
  for (const LlamaLayer& layer : layers_) x = call(layer, x);
  x = call(norm_, x);
  if (!options_.tied) return call(head_, x);
  const auto head = [this](at::Tensor hidden) {
    if (is_canonical()) return canonical_ops::linear(hidden, tokens_->weight, {}, "lm_head");
    return direct::linear(hidden, tokens_->weight, {});
  };
  return call_as(*tied_head_, head, x);
}

ParallelPlan llama_plan(const LlamaOptions& options, int64_t ranks, bool sequence_parallel) {
  SHARD_REQUIRE(ranks <= options.kv_heads || options.heads % ranks == 0, "llama",
                "{} heads over {} ranks, which share {} key-value heads: each rank must have as many", options.heads, ranks,
                options.kv_heads);
  const int64_t head = options.hidden / options.heads;
  // Query heads go where their key head is.
  const int64_t together = ranks <= options.kv_heads ? options.heads / options.kv_heads : 1;
  const std::vector<CutSegment> heads = {{options.hidden, together * head}};
  const std::vector<CutSegment> kv_heads = {{options.kv_heads * head, head, /*copied=*/true}};
  ParallelPlan plan{.styles = {{"model.embed_tokens", VocabParallel{}},
                               {"model.layers.*.*_layernorm", SequenceParallel{}},
                               {"model.layers.*.self_attn.q_proj", ColumnParallel{.segments = heads}},
                               {"model.layers.*.self_attn.k_proj", ColumnParallel{.segments = kv_heads}},
                               {"model.layers.*.self_attn.v_proj", ColumnParallel{.segments = kv_heads}},
                               {"model.layers.*.self_attn.attend", CutAttention{{{options.heads, together}},
                                                                                {{options.kv_heads, 1, /*copied=*/true}}}},
                               {"model.layers.*.self_attn.o_proj", RowParallel{.segments = heads}},
                               {"model.layers.*.mlp.gate_proj", ColumnParallel{}},
                               {"model.layers.*.mlp.up_proj", ColumnParallel{}},
                               {"model.layers.*.mlp.down_proj", RowParallel{}},
                               {"model.norm", SequenceParallel{}}}};
  if (options.qk_norm) plan.styles.emplace_back("model.layers.*.self_attn.*_norm", PartialGradients{});
  if (options.layers == 0)
    std::erase_if(plan.styles, [](const auto& style) { return style.first.starts_with("model.layers."); });
  if (options.tied) plan.styles.emplace_back("lm_head", ColumnInput{});
  else plan.styles.emplace_back("lm_head", ColumnParallel{});
  if (sequence_parallel) plan.sequence_dim = 1;
  return plan;
}

}  // namespace shardproof
