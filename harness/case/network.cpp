#include "harness/case/network.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>

#include "shardproof/hooks/unit.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/gradient_place.h"
#include "shardproof/nn/meta_init.h"
#include "shardproof/parallel/tensor/cross_entropy.h"

namespace harness {
namespace {

using namespace shardproof;

at::Tensor squared_error(const at::Tensor& output, const golden::Microbatch& data) {
  const at::Tensor difference = output - data.target;
  return (difference * difference).sum();
}

class BatchNormImpl final : public torch::nn::BatchNorm2dImpl, public HasBuffers {
 public:
  using BatchNorm2dImpl::BatchNorm2dImpl;
  void reset_buffers() override { reset_running_stats(); }
};

// A normalised convolution with a relu.
class ConvLayerImpl : public torch::nn::Module {
 public:
  ConvLayerImpl(torch::nn::Module& convs, torch::nn::Module* norms, bool batch, const std::string& name, int64_t in,
                int64_t out, int64_t kernel) {
    conv_ = convs.register_module(
        name, torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel).padding(kernel / 2)));
    if (norms && batch) batch_norm_ = norms->register_module(name, std::make_shared<BatchNormImpl>(out));
    if (norms && !batch) norm_ = norms->register_module(name, torch::nn::GroupNorm(torch::nn::GroupNormOptions(1, out)));
  }
  at::Tensor forward(at::Tensor x) {
    x = call(conv_, x);
    if (norm_) x = call(norm_, x);
    if (batch_norm_) x = call(batch_norm_, x);
    return at::relu(x);
  }
  std::vector<std::shared_ptr<torch::nn::Module>> parts() {
    std::vector<std::shared_ptr<torch::nn::Module>> list{conv_.ptr()};
    if (norm_) list.push_back(norm_.ptr());
    if (batch_norm_) list.push_back(batch_norm_);
    return list;
  }

 private:
  torch::nn::Conv2d conv_{nullptr};
  torch::nn::GroupNorm norm_{nullptr};
  std::shared_ptr<BatchNormImpl> batch_norm_;
};

class ConvNetImpl : public torch::nn::Module {
 public:
  explicit ConvNetImpl(const golden::Conv& options) {
    auto convs = register_module("conv", std::make_shared<torch::nn::Module>("conv"));
    std::shared_ptr<torch::nn::Module> norms;
    if (options.norm) norms = register_module("norm", std::make_shared<torch::nn::Module>("norm"));
    for (size_t i = 0; i + 1 < options.channels.size(); ++i)
      layers_.push_back(std::make_shared<ConvLayerImpl>(*convs, norms.get(), options.batch, std::to_string(i),
                                                        options.channels[i], options.channels[i + 1], options.kernel));
    head_ = register_module("head", Linear(options.channels.back(), options.classes));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers_) x = layer->forward(x);
    return call(head_, x.mean({2, 3}));
  }
  std::vector<std::shared_ptr<torch::nn::Module>> parts() {
    std::vector<std::shared_ptr<torch::nn::Module>> list;
    for (auto& layer : layers_)
      for (auto& part : layer->parts()) list.push_back(part);
    list.push_back(head_.ptr());
    return list;
  }

 private:
  std::vector<std::shared_ptr<ConvLayerImpl>> layers_;
  Linear head_{nullptr};
};

// See golden::Odd.
class OddNetImpl : public torch::nn::Module, public HasBuffers {
 public:
  explicit OddNetImpl(const golden::Odd& options) : options_(options) {
    const int64_t width = options.width;
    shared_ = register_module("shared", Linear(width, width));
    if (options.gain) gain_ = register_parameter("gain", at::ones({}));
    if (options.cube) cube_ = register_parameter("cube", at::zeros({2, width, 1}));
    if (options.empty) empty_ = register_parameter("empty", at::zeros({0, width}));
    if (options.side)
      side_ = register_module("side", Linear(torch::nn::LinearOptions(width, width).bias(false)));
    if (options.never) register_parameter("never", at::zeros({width}));
    if (options.tied)
      register_module("out", std::make_shared<torch::nn::Module>("out"))->register_parameter("weight", shared_->weight);
    scales_ = register_buffer("scales", at::empty({width}));
    if (!scales_.is_meta()) reset_buffers();
  }

  void reset_buffers() override {
    scales_.copy_(at::arange(options_.width, at::kFloat) / 8 + 1);  // exact
  }

  at::Tensor forward(at::Tensor x, bool branch) {
    x = x * scales_.to(x.scalar_type());
    for (int64_t i = 0; i < options_.calls; ++i) x = at::tanh(call(shared_, x));
    if (gain_.defined()) x = x * gain_;
    if (cube_.defined()) x = x + x * (cube_.select(0, 0) + cube_.select(0, 1)).squeeze(-1);
    if (empty_.defined()) x = x + empty_.sum(0);
    if (side_ && branch) x = x + call(side_, x);
    if (options_.tied) x = direct::linear(at::tanh(x), shared_->weight, {});
    return x;
  }
  std::vector<std::shared_ptr<torch::nn::Module>> parts() {
    std::vector<std::shared_ptr<torch::nn::Module>> list{shared_.ptr()};
    if (side_) list.push_back(side_.ptr());
    return list;
  }

 private:
  golden::Odd options_;
  Linear shared_{nullptr}, side_{nullptr};
  at::Tensor gain_, cube_, empty_, scales_;
};

Network make_mlp(const golden::Mlp& m) {
  Mlp mlp(MlpOptions{.widths = m.widths, .activation = static_cast<Activation>(m.activation), .bias = m.bias});
  Network network{mlp.ptr(), [mlp](const golden::Microbatch& data) { return call(mlp, data.input); }, squared_error, {}};
  for (const auto& module : mlp->modules(/*include_self=*/false))
    if (module->as<LinearImpl>()) network.parts.push_back(module);
  return network;
}

// The sum over tokens of the cross entropy.
at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& target, int64_t vocab, Comm* tensor_group) {
  if (tensor_group) return vocab_parallel_cross_entropy(logits, target, vocab, *tensor_group, {.mean = false});
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), target.reshape({-1}), {}, at::Reduction::Sum);
}

Network make_gpt(const golden::Gpt& g, Comm* tensor_group) {
  Gpt gpt(gpt_options(g));
  Network network{gpt.ptr(), [gpt](const golden::Microbatch& data) { return call(gpt, data.input); },
                  [vocab = g.vocab, tensor_group](const at::Tensor& logits, const golden::Microbatch& data) {
                    return token_loss(logits, data.target, vocab, tensor_group);
                  },
                  {}};
  for (const auto& item : gpt->named_modules("", /*include_self=*/false)) {
    const bool is_block = item.value()->as<GptBlockImpl>() != nullptr;
    const bool is_inside = item.key().starts_with("h.") && item.key().find('.', 2) != std::string::npos;
    if (is_block || (!is_inside && item.value()->as<torch::nn::EmbeddingImpl>()) ||
        (!is_inside && item.value()->as<torch::nn::LayerNormImpl>()))
      network.parts.push_back(item.value());
  }
  return network;
}

Network make_llama(const golden::Llama& m, Comm* tensor_group) {
  Llama llama(llama_options(m));
  Network network{llama.ptr(),
                  [llama](const golden::Microbatch& data) { return call(llama, data.input); },
                  [vocab = m.vocab, tensor_group](const at::Tensor& logits, const golden::Microbatch& data) {
                    return token_loss(logits, data.target, vocab, tensor_group);
                  },
                  {}};
  for (const auto& item : llama->named_modules("", /*include_self=*/false))
    if (item.value()->as<LlamaLayerImpl>() || item.key() == "model.embed_tokens" || item.key() == "model.norm")
      network.parts.push_back(item.value());
  return network;
}

void make_canonical(Network& network, const golden::Model& model, Comm* tensor_group) {
  use_canonical_arithmetic(*network.module);
  network.loss_of = [of_tokens = model.of_tokens(), vocab = model.vocab(), tensor_group](const at::Tensor& output,
                                                                                         const golden::Microbatch& data) {
    return of_tokens ? canonical_ops::cross_entropy(output, data.target, vocab, tensor_group)
                     : canonical_ops::squared_error(output, data.target);
  };
}

golden::Gpt gpt_of(const GptOptions& o) {
  return {.layers = o.layers,
          .hidden = o.hidden,
          .heads = o.heads,
          .vocab = o.vocab,
          .positions = o.positions,
          .tied = o.tied,
          .tanh_gelu = o.tanh_gelu};
}

golden::Llama llama_of(const LlamaOptions& o, int64_t positions) {
  golden::Llama m = {.layers = o.layers,
                     .hidden = o.hidden,
                     .heads = o.heads,
                     .kv_heads = o.kv_heads,
                     .intermediate = o.intermediate,
                     .vocab = o.vocab,
                     .positions = positions,
                     .tied = o.tied,
                     .qk_norm = o.qk_norm,
                     .qkv_bias = o.qkv_bias,
                     .head_size = o.head_size,
                     .theta = o.rope_theta,
                     .eps = o.norm_eps,
                     .rope_factor = o.rope_scaling.factor,
                     .rope_low = o.rope_scaling.low_turns,
                     .rope_high = o.rope_scaling.high_turns,
                     .rope_positions = o.rope_scaling.positions,
                     .rope_yarn = o.rope_scaling.yarn,
                     .rope_mscale = o.rope_scaling.mscale,
                     .rotary_size = o.rotary_size,
                     .kv_rank = o.kv_rank,
                     .query_rank = o.query_rank,
                     .value_size = o.value_size,
                     .interleaved = o.rope_interleaved,
                     .window = o.window,
                     .full_layers = o.full_layers,
                     .document_end = o.document_end};
  const RouterOptions& router = o.router;
  if (router.experts == 0) return m;
  m.experts = router.experts;
  m.experts_per_token = router.experts_per_token;
  m.expert_width = o.expert_intermediate;
  m.shared_width = o.shared_intermediate;
  m.dense_layers = o.dense_layers;
  m.score = static_cast<golden::Llama::Score>(router.score);
  m.normalized = router.normalized;
  m.expert_scale = router.scale;
  m.expert_groups = router.groups;
  m.groups_per_token = router.groups_per_token;
  m.expert_balance = router.balance_loss;
  m.balance_over = static_cast<golden::Llama::BalanceOver>(router.balance_over);
  m.expert_z = router.z_loss;
  m.expert_bias = router.bias_rate;
  m.expert_lean = router.bias;  // there is one, and its values are those of the weights
  m.expert_capacity = router.capacity;
  return m;
}

Network make_bare(const golden::Model& model, Comm* tensor_group) {
  switch (model.kind) {
    case golden::Model::Kind::mlp:
      return make_mlp(model.mlp);
    case golden::Model::Kind::gpt:
      return make_gpt(model.gpt, tensor_group);
    case golden::Model::Kind::conv: {
      auto net = std::make_shared<ConvNetImpl>(model.conv);
      return {net, [net](const golden::Microbatch& data) { return call(net, data.input); }, squared_error, net->parts()};
    }
    case golden::Model::Kind::odd: {
      auto net = std::make_shared<OddNetImpl>(model.odd);
      return {net, [net](const golden::Microbatch& data) { return call(net, data.input, data.branch); }, squared_error,
              net->parts()};
    }
    case golden::Model::Kind::llama:
      return make_llama(model.llama, tensor_group);
  }
  return {};
}

}  // namespace

GptOptions gpt_options(const golden::Gpt& g) {
  return {.layers = g.layers,
          .hidden = g.hidden,
          .heads = g.heads,
          .vocab = g.vocab,
          .positions = g.positions,
          .tied = g.tied,
          .dropout = g.dropout,
          .tanh_gelu = g.tanh_gelu};
}

LlamaOptions llama_options(const golden::Llama& m) {
  LlamaOptions o = {.layers = m.layers,
                    .hidden = m.hidden,
                    .heads = m.heads,
                    .kv_heads = m.kv_heads,
                    .intermediate = m.intermediate,
                    .vocab = m.vocab,
                    .rope_theta = m.theta,
                    .norm_eps = m.eps,
                    .tied = m.tied,
                    .attention_dropout = m.dropout,
                    .qk_norm = m.qk_norm,
                    .qkv_bias = m.qkv_bias,
                    .head_size = m.head_size,
                    .window = m.window,
                    .full_layers = m.full_layers,
                    .document_end = m.document_end,
                    .rope_scaling = {m.rope_factor, m.rope_low, m.rope_high, m.rope_positions, m.rope_yarn, m.rope_mscale},
                    .rotary_size = m.rotary_size,
                    .kv_rank = m.kv_rank,
                    .query_rank = m.query_rank,
                    .value_size = m.value_size,
                    .rope_interleaved = m.interleaved};
  if (m.experts == 0) return o;
  o.router = {.experts = m.experts,
              .experts_per_token = m.experts_per_token,
              .score = static_cast<RouterScore>(m.score),
              .normalized = m.normalized,
              .scale = m.expert_scale,
              .groups = m.expert_groups,
              .groups_per_token = m.groups_per_token,
              .balance_loss = m.expert_balance,
              .balance_over = static_cast<BalanceOver>(m.balance_over),
              .z_loss = m.expert_z,
              .bias_rate = m.expert_bias,
              .bias = m.expert_lean != 0,
              .capacity = m.expert_capacity};
  o.expert_intermediate = m.expert_width;
  o.shared_intermediate = m.shared_width;
  o.dense_layers = m.dense_layers;
  return o;
}

void begin_router_biases(torch::nn::Module& module, const golden::Llama& llama) {
  if (llama.expert_lean == 0) return;
  const at::NoGradGuard no_grad;
  for (const auto& item : module.named_buffers())
    if (item.key().ends_with("e_score_correction_bias"))
      item.value().copy_(llama.expert_lean * (at::arange(llama.experts, at::kDouble).remainder(3) - 1));
}

// Module::to gives each a new impl's content by set_data, which LibTorch grants to some devices only.
void move_to(torch::nn::Module& module, c10::Device device) {
  const at::NoGradGuard no_grad;
  for (const auto& list : {module.parameters(), module.buffers()})
    for (const at::Tensor& tensor : list) {
      if (tensor.device() == device) continue;
      const at::Tensor moved = tensor.detach().to(device).contiguous();
      c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      impl->_change_backend_component_keys(device);
      impl->set_storage_keep_dtype(moved.storage());
      impl->set_sizes_contiguous(moved.sizes());
    }
}

Network Network::strided() const {
  const auto exchanged = [](const at::Tensor& values) {
    return values.dim() < 2 ? values : values.transpose(0, -1).contiguous().transpose(0, -1);
  };
  Network result = *this;
  result.output = [output = output, exchanged](golden::Microbatch data) {
    data.input = exchanged(data.input);
    return exchanged(output(data));
  };
  return result;
}

golden::Model described_model(const checkpoint::HuggingFaceModel& described) {
  golden::Model model;
  if (const auto* gpt = std::get_if<GptOptions>(&described.options)) {
    model.kind = golden::Model::Kind::gpt;
    model.gpt = gpt_of(*gpt);
  } else {
    model.kind = golden::Model::Kind::llama;
    model.llama = llama_of(std::get<LlamaOptions>(described.options), described.positions);
  }
  return model;
}

LoraOptions lora_options(const golden::Adapters& adapters) {
  return {.rank = adapters.rank, .alpha = adapters.alpha, .targets = adapters.layers, .dropout = adapters.dropout};
}

Network make_network(const golden::Model& model, Comm* tensor_group) {
  static_assert(static_cast<int>(Activation::gelu) == static_cast<int>(golden::Activation::gelu));
  static_assert(static_cast<int>(RouterScore::sigmoid) == static_cast<int>(golden::Llama::Score::sigmoid));
  Network network = make_bare(model, tensor_group);
  if (!model.adapters.layers.empty()) network.lora = add_lora(network.module, lora_options(model.adapters));
  if (model.canonical) make_canonical(network, model, tensor_group);
  return network;
}

}  // namespace harness
