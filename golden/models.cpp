#include "golden/models.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "golden/attention.h"
#include "golden/experts.h"
#include "golden/validate.h"

namespace golden {
namespace {

constexpr double kLayerNormEps = 1e-5;
constexpr double kBatchNormEps = 1e-5, kMomentum = 0.1;

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::identity:
      return x;
    case Activation::relu:
      return at::relu(x);
    case Activation::tanh:
      return at::tanh(x);
    case Activation::gelu:
      return at::gelu(x);
  }
  throw std::logic_error("golden: unknown activation");
}

// The parameters below one prefix, e.g. "h.0.attn.".
class Scope {
 public:
  Scope(const Parameters& parameters, std::string prefix) : parameters_(parameters), prefix_(std::move(prefix)) {}

  const at::Tensor& operator()(const char* name) const { return parameters_.at(prefix_ + name); }

  at::Tensor layer_norm(const at::Tensor& x, const std::string& name) const {
    return at::layer_norm(x, {x.size(-1)}, parameters_.at(prefix_ + name + ".weight"), parameters_.at(prefix_ + name + ".bias"),
                          kLayerNormEps);
  }
  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    return at::linear(x, parameters_.at(prefix_ + name + ".weight"), parameters_.at(prefix_ + name + ".bias"));
  }

 private:
  const Parameters& parameters_;
  std::string prefix_;
};

at::Tensor attention(Forward& forward, const std::string& block, const at::Tensor& x, int64_t heads) {
  const int64_t batch = x.size(0), length = x.size(1), hidden = x.size(2);
  const std::vector<at::Tensor> qkv = forward.linear(x, block + "attn.c_attn").split(hidden, -1);
  const auto by_head = [&](const at::Tensor& t) { return t.view({batch, length, heads, hidden / heads}).transpose(1, 2); };
  const at::Tensor mixed = causal_attention(by_head(qkv[0]), by_head(qkv[1]), by_head(qkv[2]), forward.dropout);
  return forward.linear(mixed.transpose(1, 2).reshape({batch, length, hidden}), block + "attn.c_proj");
}

at::Tensor feed_forward(Forward& forward, const std::string& block, const at::Tensor& x, bool tanh_gelu) {
  const at::Tensor curved = at::gelu(forward.linear(x, block + "mlp.c_fc"), tanh_gelu ? "tanh" : "none");
  return forward.linear(curved, block + "mlp.c_proj");
}

}  // namespace

namespace {

Shapes mlp_shapes(const Mlp& mlp) {
  Shapes shapes;
  for (size_t i = 0; i + 1 < mlp.widths.size(); ++i) {
    shapes.push_back({fmt::format("layers.{}.weight", i), {mlp.widths[i + 1], mlp.widths[i]}});
    if (mlp.bias) shapes.push_back({fmt::format("layers.{}.bias", i), {mlp.widths[i + 1]}});
  }
  return shapes;
}

Shapes gpt_shapes(const Gpt& gpt) {
  Shapes shapes;
  const int64_t hidden = gpt.hidden;
  const auto layer_norm = [&](const std::string& name) {
    shapes.push_back({name + ".weight", {hidden}});
    shapes.push_back({name + ".bias", {hidden}});
  };
  const auto linear = [&](const std::string& name, int64_t out, int64_t in) {
    shapes.push_back({name + ".weight", {out, in}});
    shapes.push_back({name + ".bias", {out}});
  };
  shapes.push_back({"wte.weight", {gpt.vocab, hidden}});
  shapes.push_back({"wpe.weight", {gpt.positions, hidden}});
  for (int64_t i = 0; i < gpt.layers; ++i) {
    const std::string block = fmt::format("h.{}.", i);
    layer_norm(block + "ln_1");
    linear(block + "attn.c_attn", 3 * hidden, hidden);
    linear(block + "attn.c_proj", hidden, hidden);
    layer_norm(block + "ln_2");
    linear(block + "mlp.c_fc", 4 * hidden, hidden);
    linear(block + "mlp.c_proj", hidden, 4 * hidden);
  }
  layer_norm("ln_f");
  if (!gpt.tied) shapes.push_back({"lm_head.weight", {gpt.vocab, hidden}});
  return shapes;
}

Shapes conv_shapes(const Conv& conv) {
  Shapes shapes;
  for (size_t i = 0; i + 1 < conv.channels.size(); ++i) {
    const int64_t in = conv.channels[i], out = conv.channels[i + 1];
    shapes.push_back({fmt::format("conv.{}.weight", i), {out, in, conv.kernel, conv.kernel}});
    shapes.push_back({fmt::format("conv.{}.bias", i), {out}});
    if (!conv.norm) continue;
    shapes.push_back({fmt::format("norm.{}.weight", i), {out}});
    shapes.push_back({fmt::format("norm.{}.bias", i), {out}});
  }
  shapes.push_back({"head.weight", {conv.classes, conv.channels.back()}});
  shapes.push_back({"head.bias", {conv.classes}});
  return shapes;
}

Shapes odd_shapes(const Odd& odd) {
  const int64_t width = odd.width;
  Shapes shapes = {{"shared.weight", {width, width}}, {"shared.bias", {width}}};
  if (odd.gain) shapes.push_back({"gain", {}});
  if (odd.cube) shapes.push_back({"cube", {2, width, 1}});
  if (odd.empty) shapes.push_back({"empty", {0, width}});
  if (odd.side) shapes.push_back({"side.weight", {width, width}});
  if (odd.never) shapes.push_back({"never", {width}});
  return shapes;
}

Shapes bare_shapes(const Model& model) {
  switch (model.kind) {
    case Model::Kind::mlp:
      return mlp_shapes(model.mlp);
    case Model::Kind::gpt:
      return gpt_shapes(model.gpt);
    case Model::Kind::conv:
      return conv_shapes(model.conv);
    case Model::Kind::odd:
      return odd_shapes(model.odd);
    case Model::Kind::llama:
      return llama_shapes(model.llama);
  }
  throw std::logic_error("golden: unknown model");
}

}  // namespace

Shapes parameter_shapes(const Model& model) {
  require_valid(model);
  Shapes shapes = bare_shapes(model);
  for (const std::string& layer : model.adapters.layers) {
    const auto named = [&](const char* part) {
      return std::find_if(shapes.begin(), shapes.end(), [&](const auto& shape) { return shape.first == layer + part; });
    };
    const auto weight = named(".weight");
    if (weight == shapes.end() || weight->second.size() != 2 || layer.ends_with("wte") || layer.ends_with("wpe") ||
        layer.ends_with("embed_tokens"))
      throw std::invalid_argument("golden: adapters: " + layer + " is no linear layer of the model");
    const int64_t outputs = weight->second[0], inputs = weight->second[1], rank = model.adapters.rank;
    const auto behind = (named(".bias") == shapes.end() ? weight : named(".bias")) + 1;
    shapes.insert(behind, {{layer + ".lora_A.weight", {rank, inputs}}, {layer + ".lora_B.weight", {outputs, rank}}});
  }
  return shapes;
}

at::Tensor Forward::linear(const at::Tensor& x, const std::string& name, bool in_float32) {
  const auto bias = parameters.find(name + ".bias");
  const at::ScalarType dtype = in_float32 ? at::promote_types(x.scalar_type(), at::kFloat) : x.scalar_type();
  const auto plain = [&](const at::Tensor& input) {
    const at::Tensor wide = input.to(dtype), weight = parameters.at(name + ".weight").to(dtype);
    return bias == parameters.end() ? at::linear(wide, weight) : at::linear(wide, weight, bias->second.to(dtype));
  };
  const auto down = parameters.find(name + ".lora_A.weight");
  if (down == parameters.end()) return plain(x);
  const at::Tensor own = x.view_as(x), output = plain(own);
  const at::Tensor kept = dropout.dropped(own, adapters.dropout);
  return output + at::linear(at::linear(kept, down->second), parameters.at(name + ".lora_B.weight")) * adapters.scale();
}

at::Tensor mlp_forward(const Mlp& mlp, Forward& forward, const at::Tensor& input) {
  at::Tensor x = input;
  const size_t layers = mlp.widths.size() - 1;
  for (size_t i = 0; i < layers; ++i) {
    x = forward.linear(x, fmt::format("layers.{}", i));
    if (i + 1 < layers) x = activate(mlp.activation, x);
  }
  return x;
}

at::Tensor gpt_forward(const Gpt& gpt, Forward& forward, const at::Tensor& tokens) {
  const Scope model(forward.parameters, "");
  Dropout& dropout = forward.dropout;
  const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = dropout(at::embedding(model("wte.weight"), tokens) + at::embedding(model("wpe.weight"), positions));
  for (int64_t i = 0; i < gpt.layers; ++i) {
    const std::string block = fmt::format("h.{}.", i);
    x = x + dropout(attention(forward, block, model.layer_norm(x, block + "ln_1"), gpt.heads));
    x = x + dropout(feed_forward(forward, block, model.layer_norm(x, block + "ln_2"), gpt.tanh_gelu));
  }
  x = model.layer_norm(x, "ln_f");
  return gpt.tied ? at::linear(x, model("wte.weight")) : forward.linear(x, "lm_head");
}

at::Tensor conv_forward(const Conv& conv, const Parameters& parameters, const at::Tensor& input, bool training) {
  at::Tensor x = input;
  for (size_t i = 0; i + 1 < conv.channels.size(); ++i) {
    const Scope layer(parameters, fmt::format("conv.{}.", i)), norm(parameters, fmt::format("norm.{}.", i));
    const int64_t padding = conv.kernel / 2;
    x = at::conv2d(x, layer("weight"), layer("bias"), /*stride=*/{1, 1}, {padding, padding});
    if (conv.norm && conv.batch)
      x = at::batch_norm(x, norm("weight"), norm("bias"), norm("running_mean"), norm("running_var"), training, kMomentum,
                         kBatchNormEps, at::globalContext().userEnabledCuDNN());
    else if (conv.norm)
      x = at::group_norm(x, 1, norm("weight"), norm("bias"), kLayerNormEps);
    x = at::relu(x);
  }
  return Scope(parameters, "").linear(x.mean({2, 3}), "head");
}

at::Tensor odd_forward(const Odd& odd, const Parameters& parameters, const at::Tensor& input, bool branch) {
  const Scope model(parameters, "");
  const at::Tensor scales = (at::arange(odd.width, at::kFloat) / 8 + 1).to(input.scalar_type()).to(input.device());
  at::Tensor x = input * scales;
  for (int64_t call = 0; call < odd.calls; ++call) x = at::tanh(model.linear(x, "shared"));
  if (odd.gain) x = x * model("gain");
  if (odd.cube) x = x + x * (model("cube")[0] + model("cube")[1]).squeeze(-1);
  if (odd.empty) x = x + model("empty").sum(0);
  if (odd.side && branch) x = x + at::linear(x, model("side.weight"));
  if (odd.tied) x = at::linear(at::tanh(x), model("shared.weight"));
  return x;
}

namespace {

at::Tensor output_of(const Model& model, Forward& forward, const Microbatch& microbatch) {
  switch (model.kind) {
    case Model::Kind::mlp:
      return mlp_forward(model.mlp, forward, microbatch.input);
    case Model::Kind::gpt:
      return gpt_forward(model.gpt, forward, microbatch.input);
    case Model::Kind::conv:
      return conv_forward(model.conv, forward.parameters, microbatch.input, forward.training);
    case Model::Kind::odd:
      return odd_forward(model.odd, forward.parameters, microbatch.input, microbatch.branch);
    case Model::Kind::llama:
      return llama_forward(model.llama, forward, microbatch.input);
  }
  throw std::logic_error("golden: unknown model");
}

}  // namespace

Named initial_buffers(const Model& model, at::ScalarType dtype) {
  Named buffers;
  for (int64_t i = 0; model.kind == Model::Kind::llama && model.llama.has_bias() && i < model.llama.layers; ++i)
    if (has_experts(model.llama, i))
      buffers.emplace_back(fmt::format("model.layers.{}.mlp.gate.e_score_correction_bias", i),
                           initial_bias(model.llama).to(dtype));
  if (model.kind != Model::Kind::conv || !model.conv.norm || !model.conv.batch) return buffers;
  for (size_t i = 0; i + 1 < model.conv.channels.size(); ++i) {
    const int64_t channels = model.conv.channels[i + 1];
    buffers.emplace_back(fmt::format("norm.{}.running_mean", i), at::zeros({channels}, dtype));
    buffers.emplace_back(fmt::format("norm.{}.running_var", i), at::ones({channels}, dtype));
  }
  return buffers;
}

at::Tensor loss(const Model& model, const Parameters& parameters, const Microbatch& microbatch, bool training, Counts* counts,
                const Counts* of_step) {
  Forward forward{parameters, model.adapters, {microbatch.dropout_seed, model.dropout()}, training, of_step};
  at::Tensor output = output_of(model, forward, microbatch);
  if (output.scalar_type() != at::kDouble) output = output.to(at::kFloat);
  for (const auto& [name, own] : forward.counts)
    if (counts) (*counts)[name] = counts->contains(name) ? counts->at(name) + own : own;
  if (model.of_tokens()) {
    const at::Tensor sum =
        at::cross_entropy_loss(output.reshape({-1, model.vocab()}), microbatch.target.reshape({-1}), {}, at::Reduction::Sum);
    return (forward.auxiliary.defined() ? sum + forward.auxiliary : sum) * microbatch.weight;
  }
  const at::Tensor error = output - microbatch.target;
  return (error * error).sum() * microbatch.weight;
}

}  // namespace golden
