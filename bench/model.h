// The GPT of the benchmark: no biases in its linear layers, learned positions, an untied head. Parameters "tok.weight",
// "pos.weight", "blocks.<i>.{ln1,wq,wk,wv,wo,ln2,fc1,fc2}.*", "lnf.*", "head.weight"; bench/peers/peer.py has the same model
// for PyTorch.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/models/models.h"
#include "shardproof/parallel/tensor/parallel_plan.h"

namespace bench {

struct Size {
  std::string name;
  int64_t layers, hidden, heads, vocab, seq, batch;  // batch: sequences of a step over all ranks
};
// gpt33m (33.6 million parameters), gpt1b (1.04 billion, for GPUs) and tiny. Throws shardproof::Error for another name.
Size size_of(const std::string& name);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Size& size);
  at::Tensor forward(at::Tensor x);

 private:
  int64_t head_size_;
  torch::nn::LayerNorm ln1_{nullptr}, ln2_{nullptr};
  shardproof::Linear wq_{nullptr}, wk_{nullptr}, wv_{nullptr}, wo_{nullptr}, fc1_{nullptr}, fc2_{nullptr};
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

// How tensor parallelism cuts the model: heads, the hidden size of fc1, and the vocabulary.
shardproof::ParallelPlan parallel_plan(bool sequence_parallel, int64_t overlap_pieces = 1);

// The bytes of activations in float32 that a rank with so many tokens keeps from its forward to its backward. They include two
// tensors as large as the logits: their logarithms and their gradient. `tp` ranks share what parallel_plan cuts.
int64_t activation_bytes(const Size& size, int64_t tokens, int64_t tp, bool sequence_parallel);

// Tokens [batch, seq + 1] of a step: a function of (step, index) alone. Half of them continue the one before, so that there is
// something to learn.
at::Tensor tokens_of(const Size& size, int64_t step);

}  // namespace bench
