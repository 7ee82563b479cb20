#include "golden/models.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <stdexcept>

#include "golden/validate.h"

namespace golden {
namespace {

constexpr double kLayerNormEps = 1e-5;

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
  Scope(const Parameters& parameters, std::string prefix)
      : parameters_(parameters), prefix_(std::move(prefix)) {}

  const at::Tensor& operator()(const char* name) const { return parameters_.at(prefix_ + name); }

  at::Tensor layer_norm(const at::Tensor& x, const std::string& name) const {
    return at::layer_norm(x, {x.size(-1)}, parameters_.at(prefix_ + name + ".weight"),
                          parameters_.at(prefix_ + name + ".bias"), kLayerNormEps);
  }
  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    return at::linear(x, parameters_.at(prefix_ + name + ".weight"),
                      parameters_.at(prefix_ + name + ".bias"));
  }

 private:
  const Parameters& parameters_;
  std::string prefix_;
};

at::Tensor attention(const Scope& block, const at::Tensor& x, int64_t heads) {
  const int64_t batch = x.size(0), length = x.size(1), hidden = x.size(2);
  const std::vector<at::Tensor> qkv = block.linear(x, "attn.c_attn").split(hidden, -1);
  const auto by_head = [&](const at::Tensor& t) {
    return t.view({batch, length, heads, hidden / heads}).transpose(1, 2);
  };
  const at::Tensor mixed =
      at::scaled_dot_product_attention(by_head(qkv[0]), by_head(qkv[1]), by_head(qkv[2]), {}, 0.0,
                                       /*is_causal=*/true);
  return block.linear(mixed.transpose(1, 2).reshape({batch, length, hidden}), "attn.c_proj");
}

at::Tensor feed_forward(const Scope& block, const at::Tensor& x) {
  return block.linear(at::gelu(block.linear(x, "mlp.c_fc")), "mlp.c_proj");
}

std::vector<std::pair<std::string, std::vector<int64_t>>> conv_shapes(const Conv& conv) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes;
  for (size_t i = 0; i + 1 < conv.channels.size(); ++i) {
    shapes.push_back({fmt::format("conv.{}.weight", i), {conv.channels[i + 1], conv.channels[i], conv.kernel, conv.kernel}});
    shapes.push_back({fmt::format("conv.{}.bias", i), {conv.channels[i + 1]}});
  }
  for (size_t i = 0; conv.norm && i + 1 < conv.channels.size(); ++i) {
    shapes.push_back({fmt::format("norm.{}.weight", i), {conv.channels[i + 1]}});
    shapes.push_back({fmt::format("norm.{}.bias", i), {conv.channels[i + 1]}});
  }
  shapes.push_back({"head.weight", {conv.classes, conv.channels.back()}});
  shapes.push_back({"head.bias", {conv.classes}});
  return shapes;
}

std::vector<std::pair<std::string, std::vector<int64_t>>> odd_shapes(const Odd& odd) {
  const int64_t width = odd.width;
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes;
  const auto add = [&](bool present, const char* name, std::vector<int64_t> shape) {
    if (present) shapes.emplace_back(name, std::move(shape));
  };
  add(odd.gain, "gain", {});
  add(odd.cube, "cube", {2, width, 1});
  add(odd.empty, "empty", {0, width});
  add(odd.never, "never", {width});
  add(true, "shared.weight", {width, width});
  add(true, "shared.bias", {width});
  add(odd.side, "side.weight", {width, width});
  return shapes;
}

}  // namespace

std::vector<std::pair<std::string, std::vector<int64_t>>> parameter_shapes(const Model& model) {
  require_valid(model);
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes;
  if (model.kind == Model::Kind::mlp) {
    const Mlp& mlp = model.mlp;
    for (size_t i = 0; i + 1 < mlp.widths.size(); ++i) {
      shapes.push_back({fmt::format("layers.{}.weight", i), {mlp.widths[i + 1], mlp.widths[i]}});
      if (mlp.bias) shapes.push_back({fmt::format("layers.{}.bias", i), {mlp.widths[i + 1]}});
    }
    return shapes;
  }
  if (model.kind == Model::Kind::conv) return conv_shapes(model.conv);
  if (model.kind == Model::Kind::odd) return odd_shapes(model.odd);
  const Gpt& gpt = model.gpt;
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

at::Tensor mlp_forward(const Mlp& mlp, const Parameters& parameters, const at::Tensor& input) {
  at::Tensor x = input;
  const size_t layers = mlp.widths.size() - 1;
  for (size_t i = 0; i < layers; ++i) {
    const Scope layer(parameters, fmt::format("layers.{}.", i));
    x = mlp.bias ? at::linear(x, layer("weight"), layer("bias")) : at::linear(x, layer("weight"));
    if (i + 1 < layers) x = activate(mlp.activation, x);
  }
  return x;
}

at::Tensor gpt_forward(const Gpt& gpt, const Parameters& parameters, const at::Tensor& tokens) {
  const Scope model(parameters, "");
  const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = at::embedding(model("wte.weight"), tokens) + at::embedding(model("wpe.weight"), positions);
  for (int64_t i = 0; i < gpt.layers; ++i) {
    const Scope block(parameters, fmt::format("h.{}.", i));
    x = x + attention(block, block.layer_norm(x, "ln_1"), gpt.heads);
    x = x + feed_forward(block, block.layer_norm(x, "ln_2"));
  }
  return at::linear(model.layer_norm(x, "ln_f"), model(gpt.tied ? "wte.weight" : "lm_head.weight"));
}

at::Tensor conv_forward(const Conv& conv, const Parameters& parameters, const at::Tensor& images) {
  at::Tensor x = images;
  for (size_t i = 0; i + 1 < conv.channels.size(); ++i) {
    const Scope layer(parameters, fmt::format("conv.{}.", i));
    x = at::conv2d(x, layer("weight"), layer("bias"), /*stride=*/1, /*padding=*/conv.kernel / 2);
    if (conv.norm) {
      const Scope norm(parameters, fmt::format("norm.{}.", i));
      x = at::group_norm(x, 1, norm("weight"), norm("bias"), kLayerNormEps);
    }
    x = at::relu(x);
  }
  const Scope head(parameters, "head.");
  return at::linear(x.mean({2, 3}), head("weight"), head("bias"));
}

at::Tensor odd_forward(const Odd& odd, const Parameters& parameters, const at::Tensor& input, bool branch) {
  const at::Tensor& weight = parameters.at("shared.weight");
  const at::Tensor scales = at::arange(odd.width, at::kFloat) / 8 + 1;
  at::Tensor x = input * scales.to(input.scalar_type());
  for (int64_t i = 0; i < odd.calls; ++i) x = at::tanh(at::linear(x, weight, parameters.at("shared.bias")));
  if (odd.gain) x = x * parameters.at("gain");
  if (odd.cube) {
    const at::Tensor& cube = parameters.at("cube");
    x = x + x * (cube.select(0, 0) + cube.select(0, 1)).squeeze(-1);
  }
  if (odd.empty) x = x + parameters.at("empty").sum(0);
  if (odd.side && branch) x = x + at::linear(x, parameters.at("side.weight"));
  if (odd.tied) x = at::linear(at::tanh(x), weight);
  return x;
}

at::Tensor loss(const Model& model, const Parameters& parameters, const Microbatch& microbatch) {
  const at::Tensor& input = microbatch.input;
  at::Tensor output;
  switch (model.kind) {
    case Model::Kind::mlp: output = mlp_forward(model.mlp, parameters, input); break;
    case Model::Kind::gpt: output = gpt_forward(model.gpt, parameters, input); break;
    case Model::Kind::conv: output = conv_forward(model.conv, parameters, input); break;
    case Model::Kind::odd: output = odd_forward(model.odd, parameters, input, microbatch.branch); break;
  }
  // Low precision ends here.
  if (output.scalar_type() != at::kDouble) output = output.to(at::kFloat);
  if (model.kind == Model::Kind::gpt)
    return at::cross_entropy_loss(output.reshape({-1, model.gpt.vocab}), microbatch.target.reshape({-1}), {},
                                  at::Reduction::Sum) *
           microbatch.weight;
  const at::Tensor error = output - microbatch.target;
  return (error * error).sum() * microbatch.weight;
}

}  // namespace golden
