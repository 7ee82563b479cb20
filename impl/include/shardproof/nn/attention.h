// The two things in a transformer that know of other positions of a sequence, as modules without parameters: what a model
// written with them needs for context parallelism, which puts itself in their place.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/dropout.h"

namespace shardproof {

// Dropout of attention's probabilities [B, heads, T, T].
struct AttentionDropout {
  DropoutSite site;
  DimRows samples, heads;
};

// What a rank has of a sequence, and how its tokens see the others'.
class SequenceRule {
 public:
  virtual ~SequenceRule() = default;
  // The positions in the whole sequence of the `length` tokens that this rank has, ascending.
  virtual std::vector<int64_t> positions(int64_t length) = 0;
  virtual at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                            const std::optional<AttentionDropout>& dropout) = 0;
  // With canonical arithmetic; `name` is for messages.
  virtual at::Tensor attend_canonically(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                                        const std::optional<AttentionDropout>& dropout, const std::string& name) = 0;
  // What whoever relies on the rule holds, so that it lives; null where nothing says how long it does.
  virtual std::shared_ptr<void> held() { return {}; }
};

class SequencePart : public Placed {
 public:
  std::shared_ptr<SequenceRule> rule;  // null: a rank has whole sequences

 protected:
  ~SequencePart() = default;
};

// Key heads that other ranks hold copies of, each for queries of its own. Given by `parallelize`.
class CopiedKeys {
 public:
  virtual ~CopiedKeys() = default;
  // k and v as they are. Their gradients are summed exactly over the copies; the first copy's rank gets the sum, the others
  // zeros: so what comes before is computed from the whole gradient once, whatever the number of copies. `name`: for messages.
  virtual std::pair<at::Tensor, at::Tensor> summing(const at::Tensor& k, const at::Tensor& v,
                                                    const std::string& name) const = 0;
};

// forward(length) -> int64 [length], ascending: for position embeddings, learned or rotary.
class PositionsImpl : public torch::nn::Module, public SequencePart {
 public:
  at::Tensor forward(int64_t length);
};
TORCH_MODULE(Positions);

// Scaled dot-product attention: q [B, heads, T, head], k and v [B, kv_heads, T, head], where heads are a multiple of kv_heads
// and a key head serves neighbouring query heads -> [B, heads, T, head]. Dropout is of the probabilities. Where tensor
// parallelism cuts the heads its style is CutAttention, or with as many key heads as query heads CutDropout{1, ..}, in heads;
// it is then to be entered by `forward`, not by `call`.
class AttentionImpl : public torch::nn::Module, public SequencePart, public CanonicalPart {
 public:
  explicit AttentionImpl(bool causal = true, double dropout = 0) : causal_(causal), dropout_(dropout) {}
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

  std::shared_ptr<const CopiedKeys> copied_keys;  // null: none, or arithmetic is not canonical

 private:
  at::Tensor canonically(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<AttentionDropout>& dropout);

  bool causal_;
  double dropout_;
};
TORCH_MODULE(Attention);

// The same on whole sequences, with dropout if there is any: position i is allowed to see j when allowed[i, j], or everything
// when that is undefined; rows of it are those of q, columns those of k, at these positions of the whole sequence.
at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& allowed,
                            const std::optional<AttentionDropout>& dropout, const DimRows& q_positions,
                            const DimRows& k_positions);

}  // namespace shardproof
