#include <ATen/ATen.h>

#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/gradient_place.h"

namespace shardproof {
namespace {

std::shared_ptr<torch::nn::Module> name_space(torch::nn::Module& parent, const std::string& name) {
  return parent.register_module(name, std::make_shared<torch::nn::Module>(name));
}

LayerNorm layer_norm(int64_t size) {
  return LayerNorm(torch::nn::LayerNormOptions({size}));
}

// Of tokens in the whole sequence, ascending. Where a rank has all of it the device counts them itself.
at::Tensor positions_of(const at::Tensor& tokens, Positions& module, int64_t positions_max) {
  if (!module->rule) return at::arange(tokens.size(1), tokens.options().dtype(at::kLong));
  const at::Tensor positions = module->forward(tokens.size(1));
  SHARD_REQUIRE(positions.numel() == 0 || positions[-1].item<int64_t>() < positions_max, "gpt",
                "a sequence reaches position {}, and there are {}", positions[-1].item<int64_t>(), positions_max);
  return positions.to(tokens.device());
}

}  // namespace

GptBlockImpl::GptBlockImpl(const GptOptions& options)
    : head_size_(options.hidden / options.heads), tanh_gelu_(options.tanh_gelu) {
  const int64_t hidden = options.hidden;
  ln_1_ = register_module("ln_1", layer_norm(hidden));
  auto attention = name_space(*this, "attn");
  c_attn_ = attention->register_module("c_attn", Linear(hidden, 3 * hidden));
  attend_ = attention->register_module("attend", Attention(/*causal=*/true, options.dropout));
  attn_proj_ = attention->register_module("c_proj", Linear(hidden, hidden));
  attn_dropout_ = attention->register_module("resid_dropout", Dropout(options.dropout));
  ln_2_ = register_module("ln_2", layer_norm(hidden));
  auto mlp = name_space(*this, "mlp");
  c_fc_ = mlp->register_module("c_fc", Linear(hidden, 4 * hidden));
  mlp_proj_ = mlp->register_module("c_proj", Linear(4 * hidden, hidden));
  mlp_dropout_ = mlp->register_module("dropout", Dropout(options.dropout));
}

at::Tensor GptBlockImpl::forward(at::Tensor x) {
  // Sizes come from what the projection gives, so that it may give some heads and a piece of a sequence may have come in.
  const at::Tensor fused = call(c_attn_, call(ln_1_, x));
  const int64_t batch = fused.size(0), length = fused.size(1), width = fused.size(2) / 3;
  const auto heads = [&](const at::Tensor& part) {
    return part.view({batch, length, width / head_size_, head_size_}).transpose(1, 2);
  };
  const std::vector<at::Tensor> qkv = fused.split(width, -1);
  const at::Tensor attended = call(attend_, heads(qkv[0]), heads(qkv[1]), heads(qkv[2]));
  x = x + call(attn_dropout_, call(attn_proj_, attended.transpose(1, 2).reshape({batch, length, width})));
  const at::Tensor wide = call(c_fc_, call(ln_2_, x));
  SHARD_REQUIRE(!is_canonical() || !tanh_gelu_, "gpt", "canonical arithmetic has the exact GELU, and this model has tanh_gelu");
  const at::Tensor curved = is_canonical() ? canonical_ops::gelu(wide) : at::gelu(wide, tanh_gelu_ ? "tanh" : "none");
  return x + call(mlp_dropout_, call(mlp_proj_, curved));
}

GptImpl::GptImpl(GptOptions options) : options_(options) {
  SHARD_REQUIRE(options.layers >= 0 && options.hidden > 0 && options.heads > 0 && options.vocab > 0 && options.positions > 0,
                "gpt", "sizes must be positive, got layers={} hidden={} heads={} vocab={} positions={}", options.layers,
                options.hidden, options.heads, options.vocab, options.positions);
  SHARD_REQUIRE(options.hidden % options.heads == 0, "gpt", "hidden={} must be a multiple of heads={}", options.hidden,
                options.heads);
  wte_ = register_module("wte", Embedding(options.vocab, options.hidden));
  wpe_ = register_module("wpe", Embedding(options.positions, options.hidden));
  positions_ = register_module("positions", Positions());
  drop_ = register_module("drop", Dropout(options.dropout));
  auto blocks = name_space(*this, "h");
  for (int64_t i = 0; i < options.layers; ++i)
    blocks_.push_back(blocks->register_module(std::to_string(i), GptBlock(options)));
  ln_f_ = register_module("ln_f", layer_norm(options.hidden));
  if (options.tied) {
    // The same tensor under a second name, so that whoever shards the model sees that two places use it.
    tied_head_ = name_space(*this, "lm_head");
    tied_head_->register_parameter("weight", wte_->weight);
  } else {
    lm_head_ = register_module(
        "lm_head", Linear(torch::nn::LinearOptions(options.hidden, options.vocab).bias(false)));
  }
}

at::Tensor GptImpl::forward(at::Tensor tokens) {
  SHARD_REQUIRE(tokens.dim() == 2 && tokens.size(1) <= options_.positions, "gpt",
                "tokens must be [batch, at most {} positions], got {}", options_.positions, fmt::join(tokens.sizes(), "x"));
  const at::Tensor found = call(wte_, tokens), placed = call(wpe_, positions_of(tokens, positions_, options_.positions));
  at::Tensor x = call(drop_, is_canonical() ? canonical_ops::add_bias(found, placed, "wpe") : found + placed);
  for (const GptBlock& block : blocks_) x = call(block, x);
  x = call(ln_f_, x);
  if (!options_.tied) return call(lm_head_, x);
  const auto head = [this](at::Tensor hidden) {
    if (is_canonical()) return canonical_ops::linear(hidden, wte_->weight, {}, "lm_head");
    return direct::linear(hidden, wte_->weight, {});
  };
  return call_as(*tied_head_, head, x);
}

ParallelPlan gpt_plan(const GptOptions& options, bool sequence_parallel) {
  const int64_t head = options.hidden / options.heads;
  const CutSegment heads{options.hidden, head};
  ParallelPlan plan{.styles = {{"wte", VocabParallel{}},
                               {"wpe", ScatterOutput{0}},
                               {"drop", SequenceParallel{}},
                               {"h.*.ln_*", SequenceParallel{}},
                               {"h.*.attn.c_attn", ColumnParallel{.segments = {heads, heads, heads}}},
                               {"h.*.attn.attend", CutDropout{1, {{options.heads, 1}}}},
                               {"h.*.attn.c_proj", RowParallel{.segments = {heads}}},
                               {"h.*.attn.resid_dropout", SequenceParallel{}},
                               {"h.*.mlp.c_fc", ColumnParallel{}},
                               {"h.*.mlp.c_proj", RowParallel{}},
                               {"h.*.mlp.dropout", SequenceParallel{}},
                               {"ln_f", SequenceParallel{}}}};
  if (options.layers == 0) std::erase_if(plan.styles, [](const auto& style) { return style.first.starts_with("h."); });
  if (options.tied) plan.styles.emplace_back("lm_head", ColumnInput{});
  else plan.styles.emplace_back("lm_head", ColumnParallel{});
  if (sequence_parallel) plan.sequence_dim = 1;
  return plan;
}

}  // namespace shardproof
