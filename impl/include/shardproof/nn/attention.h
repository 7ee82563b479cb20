// The two parts of a transformer that know about other positions of a sequence: position numbers and attention. Here they are
// modules without parameters. A model that is written with them can be made context parallel, which replaces what they do.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/nn/attention_sight.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/dropout.h"

namespace shardproof {

// The dropout of attention probabilities [B, heads, T, T].
struct AttentionDropout {
  DropoutSite site;
  DimRows samples, heads;
};

// What a rank has of a sequence, and how its tokens attend to those of other ranks.
class SequenceRule {
 public:
  virtual ~SequenceRule() = default;
  // This rank has `length` tokens of a sequence. Returns their positions in the whole sequence, ascending.
  virtual std::vector<int64_t> positions(int64_t length) = 0;
  // How many tokens the whole sequence has of which this rank has `own`.
  virtual int64_t length(int64_t own) = 0;
  // The sum of what the ranks with the sequence's tokens hold, in place. Collective.
  virtual void sum(at::Tensor& own) = 0;
  // Whole sequences [B, T] of which this rank has `own`, without a gradient. Collective.
  virtual at::Tensor whole(const at::Tensor& own) = 0;
  // Attention of this rank's queries to all keys; shapes as in `Attention` below.
  virtual at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight,
                            const std::optional<AttentionDropout>& dropout) = 0;
  // The same with canonical arithmetic. `name` appears in messages.
  virtual at::Tensor attend_canonically(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const AttentionSight& sight, const std::optional<AttentionDropout>& dropout,
                                        const std::string& name) = 0;
  // A pointer that keeps the rule in effect as long as somebody holds it; null when the rule has no such owner.
  virtual std::shared_ptr<void> held() { return {}; }
};

class SequencePart : public PlacementAware {
 public:
  std::shared_ptr<SequenceRule> rule;  // null when each rank has whole sequences

 protected:
  ~SequencePart() = default;
};

// For key heads of which several ranks hold copies, each for its own query heads. `parallelize` sets it.
class CopiedKeys {
 public:
  virtual ~CopiedKeys() = default;
  // Returns k and v unchanged. In the backward it sums their gradients exactly over the ranks that hold copies. The rank of the
  // first copy gets the sum and the others get zeros, so that earlier layers see the whole gradient once, however many copies
  // there are. `name` appears in messages.
  virtual std::pair<at::Tensor, at::Tensor> summing(const at::Tensor& k, const at::Tensor& v,
                                                    const std::string& name) const = 0;
};

// forward(length) returns the positions of this rank's `length` tokens: int64 [length], ascending. Learned and rotary position
// embeddings use it.
class PositionsImpl : public torch::nn::Module, public SequencePart {
 public:
  at::Tensor forward(int64_t length);
};
TORCH_MODULE(Positions);

// The documents that lie behind one another in sequences, each of which ends with the token `end`: tokens [B, T] of this rank
// -> the number of the document of each position, int64 [B, T of the whole sequence]. `Attention` takes it. Collective where a
// rank has a part of a sequence.
class DocumentsImpl : public torch::nn::Module, public SequencePart {
 public:
  explicit DocumentsImpl(int64_t end) : end_(end) {}
  at::Tensor forward(const at::Tensor& tokens);

 private:
  int64_t end_;
};
TORCH_MODULE(Documents);

// Scaled dot-product attention: q [B, heads, T, head], k and v [B, kv_heads, T, head] -> [B, heads, T, head]. `heads` is a
// multiple of `kv_heads`, and a key head serves heads / kv_heads neighbouring query heads. `documents`, where it is defined, is
// as in AttentionSight. `dropout` is the probability of dropout on attention probabilities. Where tensor parallelism cuts the
// heads, the module needs the style CutAttention; with as many key heads as query heads CutDropout{1, ..}, counted in heads, is
// enough. A model that enters it through `call` can have it recomputed (ShardOptions::recompute_modules).
class AttentionImpl : public torch::nn::Module, public SequencePart, public CanonicalPart {
 public:
  explicit AttentionImpl(AttentionSight sight = true, double dropout = 0) : sight_(std::move(sight)), dropout_(dropout) {}
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& documents = {});

  std::shared_ptr<const CopiedKeys> copied_keys;  // null when no key head is copied, or arithmetic is not canonical

 private:
  at::Tensor canonically(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight,
                         const std::optional<AttentionDropout>& dropout);

  AttentionSight sight_;
  double dropout_;
};
TORCH_MODULE(Attention);

// The attention of the module on whole sequences, for whoever has them: q [B, heads, T, head], k and v [B, kv_heads, T, head].
at::Tensor whole_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight,
                           const std::optional<AttentionDropout>& dropout);
at::Tensor canonical_whole_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight,
                                     const std::optional<AttentionDropout>& dropout, const std::string& name);

// The same attention with an explicit mask: query i does not attend to key j when hidden[.., i, j]. When `hidden` is undefined,
// every query attends to every key. `q_positions` and `k_positions` say where the rows of q and k lie in the whole sequence,
// which determines the dropout mask.
at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& hidden,
                            const std::optional<AttentionDropout>& dropout, const DimRows& q_positions,
                            const DimRows& k_positions);

}  // namespace shardproof
