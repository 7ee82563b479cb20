#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "shardproof/base/check.h"
#include "shardproof/device/device_graph.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/gradient_place.h"

namespace shardproof {
namespace {

torch::nn::LinearOptions plain(int64_t in, int64_t out, bool bias = false) {
  return torch::nn::LinearOptions(in, out).bias(bias);
}

struct Rope {
  int64_t size;  // so many features of a head turn
  double theta;
  RopeScaling scaling;
};

Rope rope_of(const LlamaOptions& o) { return {o.turning_features(), o.rope_theta, o.rope_scaling}; }

// Of yarn: how far the pair is on the way from those that stay to those that are divided, from 0 to 1.
double way_of(int64_t pair, const Rope& rope) {
  const auto place = [&](double turns) {
    const double length = static_cast<double>(rope.scaling.positions) / (turns * 2 * M_PI);
    return static_cast<double>(rope.size) * std::log(length) / (2 * std::log(rope.theta));
  };
  const double first = std::max(std::floor(place(rope.scaling.high_turns)), 0.0);
  const double last = std::min(std::ceil(place(rope.scaling.low_turns)), static_cast<double>(rope.size - 1));
  return std::clamp((static_cast<double>(pair) - first) / (first == last ? 0.001 : last - first), 0.0, 1.0);
}

// The frequency of a pair of features, in the arithmetic of its type.
template <class Real>
Real scaled(Real frequency, int64_t pair, const Rope& rope) {
  const RopeScaling& scaling = rope.scaling;
  if (scaling.factor == 1) return frequency;
  if (scaling.yarn) {
    const auto way = static_cast<Real>(way_of(pair, rope));
    return frequency / static_cast<Real>(scaling.factor) * way + frequency * (1 - way);
  }
  const Real length = static_cast<Real>(2 * M_PI) / frequency, factor = static_cast<Real>(scaling.factor);
  const auto positions = static_cast<Real>(scaling.positions);
  const auto low = static_cast<Real>(scaling.low_turns), high = static_cast<Real>(scaling.high_turns);
  if (length > positions / low) return frequency / factor;
  if (length < positions / high) return frequency;
  const Real smooth = (positions / length - low) / (high - low);
  return (1 - smooth) * frequency / factor + smooth * frequency;
}

// Angles [T, size / 2] of rotary embeddings: position / theta^(2i / size), in float32.
at::Tensor angles(const at::Tensor& positions, const Rope& rope) {
  const at::Tensor exponents = at::arange(0, rope.size, 2, at::kFloat) / static_cast<double>(rope.size);
  const at::Tensor frequencies = at::pow(at::scalar_tensor(rope.theta, at::kFloat), exponents).reciprocal();
  for (int64_t i = 0; rope.scaling.factor != 1 && i < frequencies.numel(); ++i) {
    float& frequency = frequencies.mutable_data_ptr<float>()[i];
    frequency = scaled(frequency, i, rope);
  }
  return at::outer(positions.to(at::kFloat), frequencies);
}

struct Turn {
  at::Tensor cosine, sine;  // [T, size / 2]
};

// In the dtype and on the device of `like`. An angle is a number of radians up to the position itself, so smaller dtypes would
// give neighbours one angle: sines and cosines alone are rounded to them.
Turn turn_of(const at::Tensor& positions, const Rope& rope, const at::Tensor& like) {
  SHARD_REQUIRE(!is_capturing(), "llama",
                "rotary angles inside of a captured step: the host computes them in each forward and copies them there. "
                "Train a Llama without a graph");
  const at::Tensor turn = angles(positions, rope).to(at::toOpMathType(like.scalar_type()));
  return {turn.cos().to(like.options()), turn.sin().to(like.options())};
}

// Each by itself, in float64 and with the host's C library: LibTorch's vectors and their tails may differ, and so may a
// device's.
Turn canonical_turn_of(const at::Tensor& positions, const Rope& rope, c10::Device device) {
  const int64_t half = rope.size / 2;
  Turn turn{at::empty({positions.numel(), half}, at::kDouble), at::empty({positions.numel(), half}, at::kDouble)};
  for (int64_t i = 0; i < positions.numel() * half; ++i) {
    const double exponent = static_cast<double>(2 * (i % half)) / static_cast<double>(rope.size);
    const auto position = static_cast<double>(positions.const_data_ptr<int64_t>()[i / half]);
    const double power = std::pow(rope.theta, exponent);
    const double angle = rope.scaling.factor == 1 ? position / power : position * scaled(1 / power, i % half, rope);
    turn.cosine.mutable_data_ptr<double>()[i] = std::cos(angle);
    turn.sine.mutable_data_ptr<double>()[i] = std::sin(angle);
  }
  return {turn.cosine.to(device), turn.sine.to(device)};
}

// x [B, heads, T, size]: element i turns with element i + size / 2, or interleaved 2i with 2i + 1.
at::Tensor rotated(const at::Tensor& x, const Turn& turn, bool interleaved = false) {
  const std::vector<at::Tensor> halves =
      interleaved ? std::vector{x.slice(-1, 0, {}, 2), x.slice(-1, 1, {}, 2)} : x.chunk(2, -1);
  return at::cat({halves[0] * turn.cosine - halves[1] * turn.sine, halves[1] * turn.cosine + halves[0] * turn.sine}, -1);
}

// Of each head the first features.
at::Tensor rotated_first(const at::Tensor& x, const Turn& turn) {
  const int64_t size = 2 * turn.cosine.size(-1), rest = x.size(-1) - size;
  return rest == 0 ? rotated(x, turn) : at::cat({rotated(x.narrow(-1, 0, size), turn), x.narrow(-1, size, rest)}, -1);
}

at::Tensor in_heads(const at::Tensor& part, int64_t features) {
  return part.view({part.size(0), part.size(1), part.size(-1) / features, features}).transpose(1, 2);
}

constexpr double kLatentEps = 1e-6;  // of the norms of latents, whatever norm_eps is

void require_valid_latent(const LlamaOptions& o) {
  const int64_t head = o.features_of_head();
  SHARD_REQUIRE(o.rotary_size >= 0 && o.rotary_size % 2 == 0 && o.rotary_size <= head, "llama",
                "rotary_size must be even, and at most the {} features of a head, got rotary_size={}", head, o.rotary_size);
  SHARD_REQUIRE(o.kv_rank > 0 || (o.kv_rank == 0 && o.query_rank == 0 && o.value_size == 0 && !o.rope_interleaved &&
                                  !o.rope_scaling.yarn),
                "llama",
                "without a kv_rank there is no LatentAttention, and no query_rank, value_size, rope_interleaved and yarn, got "
                "kv_rank={} query_rank={} value_size={} rope_interleaved={} yarn={}",
                o.kv_rank, o.query_rank, o.value_size, o.rope_interleaved, o.rope_scaling.yarn);
  SHARD_REQUIRE(o.kv_rank == 0 || (o.heads == o.kv_heads && !o.qk_norm && !o.qkv_bias && o.turning_features() < head &&
                                   o.query_rank >= 0 && o.value_size >= 0 && o.value_size <= head),
                "llama",
                "with kv_rank={} heads={} and kv_heads={} must be equal, qk_norm={} and qkv_bias={} off, rotary_size={} below "
                "the {} features of a head, and value_size={} at most as many; query_rank={} must not be below 0",
                o.kv_rank, o.heads, o.kv_heads, o.qk_norm, o.qkv_bias, o.turning_features(), head, o.value_size, o.query_rank);
  SHARD_REQUIRE(!o.rope_scaling.yarn || o.rope_theta > 1, "llama", "with yarn rope_theta must be above 1, got {}",
                o.rope_theta);
}

void require_valid(const LlamaOptions& o) {
  SHARD_REQUIRE(o.layers >= 0 && o.hidden > 0 && o.heads > 0 && o.kv_heads > 0 && o.intermediate > 0 && o.vocab > 0, "llama",
                "sizes must be positive, got layers={} hidden={} heads={} kv_heads={} intermediate={} vocab={}", o.layers,
                o.hidden, o.heads, o.kv_heads, o.intermediate, o.vocab);
  SHARD_REQUIRE(o.head_size >= 0 && o.head_size % 2 == 0, "llama", "head_size must be even and not below 0, got head_size={}",
                o.head_size);
  SHARD_REQUIRE(o.head_size > 0 || (o.hidden % o.heads == 0 && o.hidden / o.heads % 2 == 0), "llama",
                "without head_size hidden={} must be a multiple of heads={} with an even quotient", o.hidden, o.heads);
  const RopeScaling& rope = o.rope_scaling;
  SHARD_REQUIRE(rope.factor > 0 && rope.low_turns > 0 && rope.high_turns > rope.low_turns && rope.positions > 0, "llama",
                "rope_scaling must have a factor, turns and positions above 0, and low_turns below high_turns, got factor={} "
                "low_turns={} high_turns={} positions={}",
                rope.factor, rope.low_turns, rope.high_turns, rope.positions);
  SHARD_REQUIRE(o.router.experts == 0 || (o.expert_intermediate > 0 && o.shared_intermediate >= 0 && o.dense_layers >= 0),
                "llama",
                "with experts expert_intermediate={} must be above 0, shared_intermediate={} and dense_layers={} not below",
                o.expert_intermediate, o.shared_intermediate, o.dense_layers);
  SHARD_REQUIRE(o.window >= 0 && o.full_layers >= 0 && o.document_end >= -1 && o.document_end < o.vocab, "llama",
                "window={} and full_layers={} must not be below 0, and document_end={} must be one of the {} tokens, or -1",
                o.window, o.full_layers, o.document_end, o.vocab);
  SHARD_REQUIRE(o.heads % o.kv_heads == 0, "llama", "heads={} must be a multiple of kv_heads={}", o.heads, o.kv_heads);
  require_valid_latent(o);
}

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t size, double eps) : eps_(eps) { weight = register_parameter("weight", at::ones({size})); }

// Gradients of three uses of one tensor would be added in an order that depends on which modules are units; of two it does not
// matter. So what is used again goes through a view, which gathers its own two first. Squares of what float16 holds may be none
// that it holds, so smaller dtypes are divided in float32.
at::Tensor RmsNormImpl::forward(at::Tensor x) {
  if (is_canonical()) return canonical_ops::rms_norm(x, weight, eps_, canonical_name());
  const at::Tensor wide = x.view_as(x).to(at::toOpMathType(x.scalar_type()));
  return (wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps_)).to(x.scalar_type()) * weight;
}

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaOptions& options) : options_(options) {
  const int64_t head = options.features_of_head(), queries = options.heads * head, keys = options.kv_heads * head;
  q_proj_ = register_module("q_proj", Linear(plain(options.hidden, queries, options.qkv_bias)));
  k_proj_ = register_module("k_proj", Linear(plain(options.hidden, keys, options.qkv_bias)));
  v_proj_ = register_module("v_proj", Linear(plain(options.hidden, keys, options.qkv_bias)));
  positions_ = register_module("positions", Positions());
  attend_ = register_module("attend", Attention(AttentionSight(/*causal=*/true, options.window), options.attention_dropout));
  o_proj_ = register_module("o_proj", Linear(plain(queries, options.hidden)));
  if (options.qk_norm) {
    q_norm_ = register_module("q_norm", RmsNorm(head, options.norm_eps));
    k_norm_ = register_module("k_norm", RmsNorm(head, options.norm_eps));
  }
}

// Heads are counted from what the projections give, which may be some of them.
at::Tensor LlamaAttentionImpl::forward(at::Tensor x, at::Tensor documents) {
  const at::Tensor both = x.view_as(x);
  const at::Tensor q = call(q_proj_, x), k = call(k_proj_, both), v = call(v_proj_, both);
  const int64_t batch = q.size(0), length = q.size(1), head = options_.features_of_head();
  const auto heads = [&](const at::Tensor& part, const RmsNorm& norm) {
    const at::Tensor each = part.view({batch, length, part.size(-1) / head, head});
    return (norm.is_empty() ? each : call(norm, each)).transpose(1, 2);
  };
  const at::Tensor positions = positions_->forward(length);
  const Rope rope = rope_of(options_);
  const Turn turn = is_canonical() ? canonical_turn_of(positions, rope, q.device()) : turn_of(positions, rope, q);
  const at::Tensor queries = rotated_first(heads(q, q_norm_), turn), keys = rotated_first(heads(k, k_norm_), turn);
  const at::Tensor attended = call(attend_, queries, keys, heads(v, nullptr), documents);
  return call(o_proj_, attended.transpose(1, 2).reshape({batch, length, q.size(-1)}));
}

LatentAttentionImpl::LatentAttentionImpl(const LlamaOptions& o) : options_(o) {
  const int64_t head = o.features_of_head(), turning = o.turning_features(), value = o.features_of_value();
  if (o.query_rank > 0) {
    q_a_proj_ = register_module("q_a_proj", Linear(plain(o.hidden, o.query_rank)));
    q_a_norm_ = register_module("q_a_layernorm", RmsNorm(o.query_rank, kLatentEps));
    q_b_proj_ = register_module("q_b_proj", Linear(plain(o.query_rank, o.heads * head)));
  } else {
    q_proj_ = register_module("q_proj", Linear(plain(o.hidden, o.heads * head)));
  }
  kv_a_proj_ = register_module("kv_a_proj_with_mqa", Linear(plain(o.hidden, o.kv_rank + turning)));
  kv_a_norm_ = register_module("kv_a_layernorm", RmsNorm(o.kv_rank, kLatentEps));
  kv_b_proj_ = register_module("kv_b_proj", Linear(plain(o.kv_rank, o.heads * (head - turning + value))));
  shared_key_ = register_module("shared_key", std::make_shared<torch::nn::Module>("shared_key"));
  positions_ = register_module("positions", Positions());
  attend_ = register_module("attend", Attention(AttentionSight(/*causal=*/true, o.window), o.attention_dropout));
  o_proj_ = register_module("o_proj", Linear(plain(o.heads * value, o.hidden)));
}

// Heads are counted from what the projections give. Attention takes values as wide as keys, so they get zeros. Canonically the
// gradients of the features that all keys share are rounded head by head, before any sum of them.
at::Tensor LatentAttentionImpl::forward(at::Tensor x, at::Tensor documents) {
  const int64_t head = options_.features_of_head(), turning = options_.turning_features(), still = head - turning;
  const int64_t value = options_.features_of_value();
  const at::Tensor both = x.view_as(x);
  const at::Tensor q = q_proj_ ? call(q_proj_, x) : call(q_b_proj_, call(q_a_norm_, call(q_a_proj_, x)));
  const at::Tensor compressed = call(kv_a_proj_, both);
  const at::Tensor kv = call(kv_b_proj_, call(kv_a_norm_, compressed.narrow(-1, 0, options_.kv_rank)));
  const auto unchanged = [](at::Tensor own) { return own; };
  const at::Tensor shared = call_as(*shared_key_, unchanged, compressed.narrow(-1, options_.kv_rank, turning));
  const at::Tensor queries = in_heads(q, head), parts = in_heads(kv, still + value);
  const int64_t batch = q.size(0), length = q.size(1), heads = queries.size(1);
  at::Tensor of_heads = shared.unsqueeze(1).expand({batch, heads, length, turning});
  if (is_canonical()) of_heads = canonical_ops::round(of_heads);
  const at::Tensor positions = positions_->forward(length);
  const Rope rope = rope_of(options_);
  const Turn turn = is_canonical() ? canonical_turn_of(positions, rope, q.device()) : turn_of(positions, rope, q);
  const auto turned = [&](const at::Tensor& still_part, const at::Tensor& part) {
    return at::cat({still_part.narrow(-1, 0, still), rotated(part, turn, options_.rope_interleaved)}, -1);
  };
  at::Tensor turned_queries = turned(queries, queries.narrow(-1, still, turning));
  if (const RopeScaling& scaling = options_.rope_scaling; scaling.yarn) {
    const double more = 1 + scaling.mscale / 10 * std::log(scaling.factor);
    turned_queries = turned_queries * (more * more);
  }
  const at::Tensor values = at::constant_pad_nd(parts.narrow(-1, still, value), {0, head - value});
  const at::Tensor attended = call(attend_, turned_queries, turned(parts, of_heads), values, documents).narrow(-1, 0, value);
  // Contiguous: products of rows that lie apart may be rounded differently without a gradient.
  return call(o_proj_, attended.transpose(1, 2).reshape({batch, length, heads * value}).contiguous());
}

LlamaMlpImpl::LlamaMlpImpl(int64_t hidden, int64_t intermediate) {
  gate_proj_ = register_module("gate_proj", Linear(plain(hidden, intermediate)));
  up_proj_ = register_module("up_proj", Linear(plain(hidden, intermediate)));
  down_proj_ = register_module("down_proj", Linear(plain(intermediate, hidden)));
}

at::Tensor LlamaMlpImpl::forward(at::Tensor x) {
  const at::Tensor gate = call(gate_proj_, x);
  return call(down_proj_, (is_canonical() ? canonical_ops::silu(gate) : at::silu(gate)) * call(up_proj_, x));
}

RouterGateImpl::RouterGateImpl(const LlamaOptions& options)
    : LinearImpl(plain(options.hidden, options.router.experts)), in_float32_(options.router.score == RouterScore::sigmoid) {}

at::Tensor RouterGateImpl::forward(const at::Tensor& x) {
  const bool is_narrow = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  if (!in_float32_ || !is_narrow) return LinearImpl::forward(x);
  return at::linear(x.to(at::kFloat), weight.to(at::kFloat));
}

void RouterGateImpl::reset_buffers() {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& bias : buffers(/*recurse=*/false)) bias.zero_();
}

MoeMlpImpl::MoeMlpImpl(const LlamaOptions& options) : MoeMlpImpl(options, RouterGate(options)) {}

MoeMlpImpl::MoeMlpImpl(const LlamaOptions& options, RouterGate gate) : Router(options.router, *gate), gate_(std::move(gate)) {
  register_module("gate", gate_);
  experts_ = register_module("experts", Experts(options.router.experts, options.hidden, options.expert_intermediate));
  if (options.shared_intermediate > 0)
    shared_ = register_module("shared_experts", LlamaMlp(options.hidden, options.shared_intermediate));
}

// Gradients of no more than two uses of a tensor are added, as in RmsNormImpl.
at::Tensor MoeMlpImpl::forward(at::Tensor x) {
  const at::Tensor routed = shared_ ? x.view_as(x) : x;
  const Routes routes = choose(call(gate_, routed));
  const at::Tensor weights = routes.weights.to(x.scalar_type());
  const at::Tensor y = call(experts_, routed.flatten(0, 1), routes.experts, weights).view(x.sizes());
  return shared_ ? y + call(shared_, x) : y;
}

LlamaLayerImpl::LlamaLayerImpl(const LlamaOptions& options, bool has_experts) {
  if (options.kv_rank > 0)
    latent_ = register_module("self_attn", LatentAttention(options));
  else
    attention_ = register_module("self_attn", LlamaAttention(options));
  if (has_experts)
    moe_ = register_module("mlp", MoeMlp(options));
  else
    mlp_ = register_module("mlp", LlamaMlp(options.hidden, options.intermediate));
  input_norm_ = register_module("input_layernorm", RmsNorm(options.hidden, options.norm_eps));
  attention_norm_ = register_module("post_attention_layernorm", RmsNorm(options.hidden, options.norm_eps));
}

at::Tensor LlamaLayerImpl::forward(at::Tensor x, at::Tensor documents) {
  const at::Tensor normed_x = call(input_norm_, x);
  const auto attended = [&](auto& attention) {
    return documents.defined() ? call(attention, normed_x, documents) : call(attention, normed_x);
  };
  x = x + (latent_ ? attended(latent_) : attended(attention_));
  const at::Tensor normed = call(attention_norm_, x);
  return x + (moe_ ? call(moe_, normed) : call(mlp_, normed));
}

LlamaImpl::LlamaImpl(LlamaOptions options) : options_(options) {
  require_valid(options);
  auto model = register_module("model", std::make_shared<torch::nn::Module>("model"));
  tokens_ = model->register_module("embed_tokens", Embedding(options.vocab, options.hidden));
  if (options.document_end >= 0) documents_ = model->register_module("documents", Documents(options.document_end));
  auto layers = model->register_module("layers", std::make_shared<torch::nn::Module>("layers"));
  for (int64_t i = 0; i < options.layers; ++i) {
    LlamaOptions own = options;
    if (i < options.full_layers) own.window = 0;
    const bool has_experts = options.router.experts > 0 && i >= options.dense_layers;
    layers_.push_back(layers->register_module(std::to_string(i), LlamaLayer(own, has_experts)));
  }
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
  const at::Tensor documents = documents_ ? documents_->forward(tokens) : at::Tensor();
  // A style of tensor parallelism around a layer takes one tensor.
  for (const LlamaLayer& layer : layers_) x = documents.defined() ? call(layer, x, documents) : call(layer, x);
  x = call(norm_, x);
  if (!options_.tied) return call(head_, x);
  const auto head = [this](at::Tensor hidden) {
    if (is_canonical()) return canonical_ops::linear(hidden, tokens_->weight, {}, "lm_head");
    return direct::linear(hidden, tokens_->weight, {});
  };
  return call_as(*tied_head_, head, x);
}

namespace {

// Latents are whole, and their gradients too: the layers of heads sum them.
auto latent_styles(const LlamaOptions& o) {
  const std::string at = "model.layers.*.self_attn.";
  const int64_t head = o.features_of_head(), value = o.features_of_value();
  const auto cut = [&](int64_t features) { return std::vector<CutSegment>{{o.heads * features, features}}; };
  decltype(ParallelPlan::styles) styles = {
      {at + (o.query_rank > 0 ? "q_b_proj" : "q_proj"), ColumnParallel{.segments = cut(head)}},
      {at + "kv_b_proj", ColumnParallel{.segments = cut(head - o.turning_features() + value)}},
      {at + "kv_a_proj_with_mqa", SequenceParallel{}},
      {at + "*_layernorm", SequenceParallel{}},
      {at + "shared_key", ColumnInput{}},
      {at + "attend", CutAttention{cut(1), cut(1)}},
      {at + "o_proj", RowParallel{.segments = cut(value)}}};
  if (o.query_rank > 0) styles.emplace_back(at + "q_a_proj", SequenceParallel{});
  return styles;
}

}  // namespace

ParallelPlan llama_plan(const LlamaOptions& options, int64_t ranks, bool sequence_parallel) {
  SHARD_REQUIRE(ranks <= options.kv_heads || options.heads % ranks == 0, "llama",
                "{} heads over {} ranks, which share {} key-value heads: each rank must have as many", options.heads, ranks,
                options.kv_heads);
  const int64_t head = options.features_of_head();
  // Query heads go where their key head is.
  const int64_t together = ranks <= options.kv_heads ? options.heads / options.kv_heads : 1;
  const std::vector<CutSegment> heads = {{options.heads * head, together * head}};
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
  const auto erase = [&plan](const char* prefix) {
    std::erase_if(plan.styles, [prefix](const auto& style) { return style.first.starts_with(prefix); });
  };
  if (options.kv_rank > 0) {
    erase("model.layers.*.self_attn.");
    std::ranges::move(latent_styles(options), std::back_inserter(plan.styles));
  }
  if (options.layers == 0) erase("model.layers.");
  if (options.router.experts > 0) {
    if (options.dense_layers == 0) erase("model.layers.*.mlp.");
    for (int64_t i = options.dense_layers; i < options.layers; ++i)
      plan.styles.emplace_back(fmt::format("model.layers.{}.mlp", i), WholeSequence{});
  }
  if (options.tied) plan.styles.emplace_back("lm_head", ColumnInput{});
  else plan.styles.emplace_back("lm_head", ColumnParallel{});
  if (sequence_parallel) plan.sequence_dim = 1;
  return plan;
}

}  // namespace shardproof
