// The GPT of the benchmark: no biases in its linear layers, learned positions, an untied head. Parameters "tok.weight",
// "pos.weight", "blocks.<i>.{ln1,wq,wk,wv,wo,ln2,fc1,fc2}.*", "lnf.*", "head.weight"; a model with experts has
// "router.weight" and "experts.{gate_up,down}_proj" in the place of fc1 and fc2. bench/peers/peer.py has the same model for
// PyTorch.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/models/models.h"
#include "shardproof/parallel/experts/experts.h"
#include "shardproof/parallel/experts/router.h"
#include "shardproof/parallel/tensor/parallel_plan.h"

namespace bench {

struct Size {
  std::string name;
  int64_t layers, hidden, heads, vocab, seq, batch;  // batch: sequences of a step over all ranks
  // Of a block, each as wide as the block, of which a token gets two; 0: it has one MLP.
  int64_t experts = 0;
};
// gpt33m (33.6 million parameters), gpt1b (1.04 billion, for GPUs) and tiny; and moe38m (37.8 million, of which a token meets
// 19.0) and moe_tiny, with experts. Throws shardproof::Error for another name.
Size size_of(const std::string& name);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Size& size);
  at::Tensor forward(at::Tensor x);

 private:
  at::Tensor mlp(const at::Tensor& x);

  int64_t head_size_;
  torch::nn::LayerNorm ln1_{nullptr}, ln2_{nullptr};
  shardproof::Linear wq_{nullptr}, wk_{nullptr}, wv_{nullptr}, wo_{nullptr}, fc1_{nullptr}, fc2_{nullptr};
  shardproof::RouterOptions routing_;
  shardproof::Linear router_{nullptr};
  shardproof::Experts experts_{nullptr};  // null where the block has fc1 and fc2
};
TORCH_MODULE(Block);

class ModelImpl : public torch::nn::Module {
 public:
  explicit ModelImpl(const Size& size);
  at::Tensor forward(at::Tensor tokens);

 private:
  shardproof::Embedding tok_{nullptr}, pos_{nullptr};
  std::vector<Block> blocks_;
  torch::nn::LayerNorm lnf_{nullptr};
  shardproof::Linear head_{nullptr};
};
TORCH_MODULE(Model);

// How tensor parallelism cuts a model without experts: heads, the hidden size of fc1, and the vocabulary.
shardproof::ParallelPlan parallel_plan(bool sequence_parallel, int64_t overlap_pieces = 1);

// Neighbours of so many ranks share the experts of each block.
shardproof::ParallelPlan expert_plan(int64_t ranks);

// The bytes of activations in float32 that a rank with so many tokens keeps from its forward to its backward, of a model
// without experts: how many rows those of a rank get is known only when tokens are there. They include two
// tensors as large as the logits: their logarithms and their gradient. `tp` ranks share what parallel_plan cuts.
int64_t activation_bytes(const Size& size, int64_t tokens, int64_t tp, bool sequence_parallel);

// Tokens [batch, seq + 1] of a step: a function of (step, index) alone. Half of them continue the one before, so that there is
// something to learn.
at::Tensor tokens_of(const Size& size, int64_t step);

}  // namespace bench
