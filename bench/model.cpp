#include "bench/model.h"

#include <ATen/ATen.h>

#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"

namespace bench {
namespace {

using shardproof::call;
using shardproof::Linear;

torch::nn::LayerNorm layer_norm(int64_t size) { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})); }
Linear linear(int64_t in, int64_t out) { return Linear(torch::nn::LinearOptions(in, out).bias(false)); }

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64 (Steele, Lea, Flood 2014)
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Size size_of(const std::string& name) {
  if (name == "gpt33m") return {name, 8, 512, 8, 8192, 128, 8};
  if (name == "gpt1b") return {name, 24, 1792, 14, 32768, 1024, 8};
  if (name == "moe38m") return {name, 4, 512, 8, 8192, 128, 8, /*experts=*/8};
  if (name == "moe_tiny") return {name, 2, 64, 4, 256, 32, 8, /*experts=*/4};
  SHARD_REQUIRE(name == "tiny", "bench", "there is no model '{}': there are gpt33m, gpt1b, tiny, moe38m, moe_tiny", name);
  return {name, 2, 64, 4, 256, 32, 8};
}

BlockImpl::BlockImpl(const Size& size)
    : head_size_(size.hidden / size.heads), routing_{.experts = size.experts, .experts_per_token = 2} {
  const int64_t hidden = size.hidden;
  ln1_ = register_module("ln1", layer_norm(hidden));
  wq_ = register_module("wq", linear(hidden, hidden));
  wk_ = register_module("wk", linear(hidden, hidden));
  wv_ = register_module("wv", linear(hidden, hidden));
  wo_ = register_module("wo", linear(hidden, hidden));
  ln2_ = register_module("ln2", layer_norm(hidden));
  if (size.experts > 0) {
    router_ = register_module("router", linear(hidden, size.experts));
    experts_ = register_module("experts", shardproof::Experts(size.experts, hidden, hidden));
    return;
  }
  fc1_ = register_module("fc1", linear(hidden, 4 * hidden));
  fc2_ = register_module("fc2", linear(4 * hidden, hidden));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  const at::Tensor y = call(ln1_, x);
  const auto by_head = [&](Linear& w) { return call(w, y).unflatten(-1, {-1, head_size_}).transpose(1, 2); };
  const at::Tensor mixed =
      at::scaled_dot_product_attention(by_head(wq_), by_head(wk_), by_head(wv_), {}, 0.0, /*is_causal=*/true);
  x = x + call(wo_, mixed.transpose(1, 2).flatten(2));
  return x + mlp(call(ln2_, x));
}

at::Tensor BlockImpl::mlp(const at::Tensor& x) {
  if (!experts_) return call(fc2_, at::gelu(call(fc1_, x)));
  const at::Tensor rows = x.flatten(0, 1);
  const shardproof::Routes routes = shardproof::route(call(router_, rows), routing_);
  return call(experts_, rows, routes.experts, routes.weights).view(x.sizes());
}

ModelImpl::ModelImpl(const Size& size) {
  tok_ = register_module("tok", shardproof::Embedding(size.vocab, size.hidden));
  pos_ = register_module("pos", shardproof::Embedding(size.seq, size.hidden));
  auto blocks = register_module("blocks", std::make_shared<torch::nn::Module>("blocks"));
  for (int64_t i = 0; i < size.layers; ++i) blocks_.push_back(blocks->register_module(std::to_string(i), Block(size)));
  lnf_ = register_module("lnf", layer_norm(size.hidden));
  head_ = register_module("head", linear(size.hidden, size.vocab));
}

at::Tensor ModelImpl::forward(at::Tensor tokens) {
  at::Tensor x = call(tok_, tokens) + call(pos_, at::arange(tokens.size(1), tokens.options()));
  for (const Block& block : blocks_) x = call(block, x);
  return call(head_, call(lnf_, x));
}

shardproof::ParallelPlan parallel_plan(bool sequence_parallel, int64_t overlap_pieces) {
  using namespace shardproof;
  ParallelPlan plan{.styles = {{"tok", VocabParallel{}},
                               {"pos", ScatterOutput{0}},
                               {"blocks.*.ln*", SequenceParallel{}},
                               {"blocks.*.wo", RowParallel{}},
                               {"blocks.*.w*", ColumnParallel{}},
                               {"blocks.*.fc1", ColumnParallel{}},
                               {"blocks.*.fc2", RowParallel{}},
                               {"lnf", SequenceParallel{}},
                               {"head", ColumnParallel{}}}};
  if (sequence_parallel) plan.sequence_dim = 1;
  plan.overlap_pieces = overlap_pieces;
  return plan;
}

shardproof::ParallelPlan expert_plan(int64_t ranks) {
  return {.styles = {{"blocks.*.experts", shardproof::ExpertParallel{.ranks = ranks}}}};
}

int64_t activation_bytes(const Size& size, int64_t tokens, int64_t tp, bool sequence_parallel) {
  // Of a block. Between the cut layers: inputs and outputs of its two norms. Within them: queries, keys and values, what
  // attention returns (as it is, and in the order of tokens), and the outputs of fc1 and of gelu.
  const int64_t between = 4 * size.hidden, within = 13 * size.hidden;
  const int64_t cut = sequence_parallel ? tp : 1;
  const int64_t blocks = size.layers * (between / cut + within / tp);
  return 4 * tokens * (blocks + 2 * size.hidden / cut + 3 * size.vocab / tp);
}

at::Tensor tokens_of(const Size& size, int64_t step) {
  at::Tensor tokens = at::empty({size.batch, size.seq + 1}, at::kLong);
  int64_t* data = tokens.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    const uint64_t bits = mix(mix(static_cast<uint64_t>(step)) ^ static_cast<uint64_t>(i));
    const bool continues = i % (size.seq + 1) != 0 && bits >> 63;
    data[i] = continues ? (data[i - 1] + 1) % size.vocab : static_cast<int64_t>(bits % static_cast<uint64_t>(size.vocab));
  }
  return tokens;
}

}  // namespace bench
