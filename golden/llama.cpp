#include <ATen/ATen.h>
#include <fmt/format.h>

#include "golden/attention.h"
#include "golden/experts.h"
#include "golden/models.h"
#include "golden/rope.h"
#include "golden/sight.h"

namespace golden {
namespace {

class Layer {
 public:
  Layer(const Llama& llama, Forward& forward, const at::Tensor& tokens, int64_t index)
      : llama_(llama),
        forward_(forward),
        hidden_(hidden_keys(llama, tokens, index)),
        has_experts_(has_experts(llama, index)),
        prefix_(fmt::format("model.layers.{}.", index)) {}

  at::Tensor forward(at::Tensor x) const {
    const at::Tensor own = rms_norm(x, weight("input_layernorm"), llama_.eps);
    x = x + (llama_.kv_rank > 0 ? latent_attention(own) : attention(own));
    const at::Tensor normed = rms_norm(x, weight("post_attention_layernorm"), llama_.eps);
    const std::string mlp = prefix_ + "mlp.";
    return x + (has_experts_ ? mixture(llama_, forward_, mlp, normed) : gated_mlp(forward_, mlp, normed));
  }

  // Norms and angles are float32 numbers in a model of a smaller dtype, as in the package that these models come from.
  static at::Tensor in_wide(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }

  static at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& scale, double eps) {
    const at::Tensor own = in_wide(x.view_as(x));
    const at::Tensor mean_square = own.square().mean(-1, /*keepdim=*/true);
    return (own * at::rsqrt(mean_square + eps)).to(x.scalar_type()) * scale;
  }

 private:
  const at::Tensor& weight(const char* name) const { return forward_.parameters.at(prefix_ + name + ".weight"); }
  at::Tensor linear(const at::Tensor& x, const char* name) const { return forward_.linear(x, prefix_ + name); }

  at::Tensor attention(const at::Tensor& x) const {
    const int64_t batch = x.size(0), length = x.size(1), width = llama_.head();
    const auto heads = [&](const at::Tensor& input, const char* name, int64_t count, const char* norm = nullptr) {
      const at::Tensor each = linear(input, name).view({batch, length, count, width});
      return (norm && llama_.qk_norm ? rms_norm(each, weight(norm), llama_.eps) : each).transpose(1, 2);
    };
    const auto serving_all = [&](const at::Tensor& kv) {
      return llama_.kv_heads == llama_.heads ? kv : kv.repeat_interleave(llama_.heads / llama_.kv_heads, 1);
    };
    const at::Tensor angles = angles_of(length, x.scalar_type());
    const at::Tensor both = x.view_as(x);
    const at::Tensor q = first_turned(heads(x, "self_attn.q_proj", llama_.heads, "self_attn.q_norm"), angles);
    const at::Tensor k =
        serving_all(first_turned(heads(both, "self_attn.k_proj", llama_.kv_heads, "self_attn.k_norm"), angles));
    const at::Tensor v = serving_all(heads(both, "self_attn.v_proj", llama_.kv_heads));
    const at::Tensor mixed = causal_attention(q, k, v, forward_.dropout, hidden_);
    return linear(mixed.transpose(1, 2).reshape({batch, length, llama_.heads * width}), "self_attn.o_proj");
  }

  at::Tensor latent_attention(const at::Tensor& x) const {
    const int64_t batch = x.size(0), length = x.size(1), heads = llama_.heads, rank = llama_.kv_rank;
    const int64_t turning = llama_.turning(), still = llama_.head() - turning, value = llama_.values();
    const auto normed = [&](const at::Tensor& latent, const char* name) { return rms_norm(latent, weight(name), kLatentEps); };
    const auto in_heads = [&](const at::Tensor& columns) {
      return columns.view({batch, length, heads, columns.size(2) / heads}).transpose(1, 2);
    };
    const at::Tensor both = x.view_as(x), angles = angles_of(length, x.scalar_type());
    const at::Tensor q = in_heads(
        llama_.query_rank > 0 ? linear(normed(linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm"), "self_attn.q_b_proj")
                              : linear(x, "self_attn.q_proj"));
    const at::Tensor compressed = linear(both, "self_attn.kv_a_proj_with_mqa");
    const at::Tensor latent = normed(compressed.narrow(2, 0, rank), "self_attn.kv_a_layernorm");
    const at::Tensor kv = in_heads(linear(latent, "self_attn.kv_b_proj"));
    const at::Tensor shared = compressed.narrow(2, rank, turning).unsqueeze(1).expand({batch, heads, length, turning});
    const auto last_turned = [&](const at::Tensor& first, const at::Tensor& last) {
      return at::cat({first.narrow(3, 0, still), turned(last, angles, llama_.interleaved)}, 3);
    };
    at::Tensor queries = last_turned(q, q.narrow(3, still, turning));
    if (llama_.rope_yarn) queries = queries * score_factor(llama_);
    // As wide as keys, for the engines of attention.
    const at::Tensor v = at::constant_pad_nd(kv.narrow(3, still, value), {0, llama_.head() - value});
    const at::Tensor mixed = causal_attention(queries, last_turned(kv, shared), v, forward_.dropout, hidden_);
    const at::Tensor rows = mixed.narrow(3, 0, value).transpose(1, 2).reshape({batch, length, heads * value});
    return linear(rows.contiguous(), "self_attn.o_proj");
  }

  // [length, width / 2], not rounded to a smaller dtype
  at::Tensor angles_of(int64_t length, at::ScalarType dtype) const {
    const int64_t width = llama_.turning();
    const at::Tensor powers =
        at::pow(at::full({}, llama_.theta, at::kFloat), at::arange(0, width, 2, at::kFloat) / double(width));
    const at::Tensor rates = powers.reciprocal();
    float* rate = rates.mutable_data_ptr<float>();
    for (int64_t i = 0; i < rates.numel(); ++i) rate[i] = slowed(rate[i], i, llama_);
    const at::Tensor angles = at::arange(length, at::kFloat).unsqueeze(1) * rates;
    return dtype == at::kDouble ? angles.to(dtype) : angles;
  }

  static at::Tensor first_turned(const at::Tensor& x, const at::Tensor& angles) {
    const int64_t width = 2 * angles.size(1), rest = x.size(3) - width;
    if (rest == 0) return turned(x, angles);
    return at::cat({turned(x.narrow(3, 0, width), angles), x.narrow(3, width, rest)}, 3);
  }

  static at::Tensor turned(const at::Tensor& x, const at::Tensor& angles, bool interleaved = false) {
    const int64_t half = x.size(3) / 2;
    const at::Tensor first = interleaved ? x.slice(3, 0, {}, 2) : x.narrow(3, 0, half);
    const at::Tensor second = interleaved ? x.slice(3, 1, {}, 2) : x.narrow(3, half, half);
    const at::Tensor cos = angles.cos().to(x.options()), sin = angles.sin().to(x.options());
    return at::cat({first * cos - second * sin, second * cos + first * sin}, 3);
  }

  // Of whole sequences, bool [B, 1, T, T]; undefined where a query sees all keys before it.
  static at::Tensor hidden_keys(const Llama& llama, const at::Tensor& tokens, int64_t layer) {
    const int64_t samples = tokens.size(0), length = tokens.size(1);
    if (sees_all_before(llama, layer, length)) return {};
    const at::Tensor own = tokens.cpu().contiguous(), hidden = at::empty({samples, 1, length, length}, at::kBool);
    bool* each = hidden.mutable_data_ptr<bool>();
    for (int64_t b = 0; b < samples; ++b)
      for (int64_t i = 0; i < length; ++i)
        for (int64_t j = 0; j < length; ++j) *each++ = !sees(llama, layer, own.const_data_ptr<int64_t>() + b * length, i, j);
    return hidden.to(tokens.device());
  }

  const Llama& llama_;
  Forward& forward_;
  at::Tensor hidden_;
  bool has_experts_;
  std::string prefix_;
};

// Of one layer, in the order of golden.h.
Shapes latent_shapes(const Llama& llama) {
  const int64_t hidden = llama.hidden, queries = llama.heads * llama.head(), rank = llama.query_rank;
  const int64_t parts = llama.heads * (llama.head() - llama.turning() + llama.values());
  Shapes shapes;
  if (rank == 0) shapes.push_back({"q_proj", {queries, hidden}});
  if (rank > 0) shapes = {{"q_a_proj", {rank, hidden}}, {"q_a_layernorm", {rank}}, {"q_b_proj", {queries, rank}}};
  shapes.push_back({"kv_a_proj_with_mqa", {llama.kv_rank + llama.turning(), hidden}});
  shapes.push_back({"kv_a_layernorm", {llama.kv_rank}});
  shapes.push_back({"kv_b_proj", {parts, llama.kv_rank}});
  shapes.push_back({"o_proj", {hidden, llama.heads * llama.values()}});
  return shapes;
}

}  // namespace

Shapes llama_shapes(const Llama& llama) {
  const int64_t hidden = llama.hidden, wide = llama.intermediate;
  const int64_t queries = llama.heads * llama.head(), keys = llama.kv_heads * llama.head();
  Shapes shapes = {{"model.embed_tokens.weight", {llama.vocab, hidden}}};
  for (int64_t i = 0; i < llama.layers; ++i) {
    const auto add = [&](const char* name, std::vector<int64_t> shape) {
      shapes.push_back({fmt::format("model.layers.{}.{}.weight", i, name), std::move(shape)});
    };
    const auto add_projection = [&](const char* name, int64_t outputs) {
      add(name, {outputs, hidden});
      if (llama.qkv_bias) shapes.push_back({fmt::format("model.layers.{}.{}.bias", i, name), {outputs}});
    };
    if (llama.kv_rank > 0) {
      for (auto& [name, shape] : latent_shapes(llama)) add(("self_attn." + name).c_str(), std::move(shape));
    } else {
      add_projection("self_attn.q_proj", queries);
      add_projection("self_attn.k_proj", keys);
      add_projection("self_attn.v_proj", keys);
      add("self_attn.o_proj", {hidden, queries});
    }
    if (llama.qk_norm) add("self_attn.q_norm", {llama.head()});
    if (llama.qk_norm) add("self_attn.k_norm", {llama.head()});
    if (has_experts(llama, i)) {
      for (auto& shape : mixture_shapes(llama, fmt::format("model.layers.{}.mlp.", i))) shapes.push_back(std::move(shape));
    } else {
      add("mlp.gate_proj", {wide, hidden});
      add("mlp.up_proj", {wide, hidden});
      add("mlp.down_proj", {hidden, wide});
    }
    add("input_layernorm", {hidden});
    add("post_attention_layernorm", {hidden});
  }
  shapes.push_back({"model.norm.weight", {hidden}});
  if (!llama.tied) shapes.push_back({"lm_head.weight", {llama.vocab, hidden}});
  return shapes;
}

at::Tensor llama_forward(const Llama& llama, Forward& forward, const at::Tensor& tokens) {
  const at::Tensor& embedding = forward.parameters.at("model.embed_tokens.weight");
  at::Tensor x = at::embedding(embedding, tokens);
  for (int64_t i = 0; i < llama.layers; ++i) x = Layer(llama, forward, tokens, i).forward(x);
  x = Layer::rms_norm(x, forward.parameters.at("model.norm.weight"), llama.eps);
  return llama.tied ? at::linear(x, embedding) : forward.linear(x, "lm_head");
}

}  // namespace golden
