// The loss of a language model: of logits that are cut over ranks, and of hidden states whose logits never exist as a whole.
// The semantics of the first are those of Megatron-LM's cross_entropy.py in core/tensor_parallel (Shoeybi et al. 2019), and the
// second makes its gradients in the forward as the Liger kernels do (Hsu et al. 2024).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "shardproof/comm/comm.h"

namespace shardproof {

struct CrossEntropyOptions {
  bool mean = true;  // the mean over the targets that are not ignored; else their sum
  double label_smoothing = 0;
  int64_t ignore_index = -100;
  int64_t vocab = 0;  // entries from this one on are padding and have no probability; 0: no entry is padding
};

// Both losses: targets are int64 and number the whole vocabulary. Label smoothing spreads over it without its padding. The mean
// of no targets is NaN with gradients of 0, as that of PyTorch. A target outside of the vocabulary throws Error on the CPU. On
// a device the host would have to wait to see it: there the loss is NaN, and so are gradients.

// Cross entropy of logits [.., own entries] and targets [..]. The vocabulary of `entries` entries is cut evenly over the group.
// The result is what at::cross_entropy_loss gives on the gathered logits, but the logits are never gathered. The result and its
// gradient are the same on every rank. Every rank of the group must call it, in the same order.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t entries, Comm& group,
                                        const CrossEntropyOptions& options = {});

// A vocabulary of `entries` entries that is cut evenly over a group. The group must outlive the call.
struct VocabSplit {
  int64_t entries = 0;
  Comm* group = nullptr;
};

// Cross entropy of the logits `hidden weight^T + bias` and targets: hidden [.., in], weight [entries, in], bias [entries] or
// undefined, targets [..] -> 0-dim. Logits are made for some tokens at a time, in memory of at most `logits_bytes_max` bytes or
// one token's, and their gradient takes their place. The forward also makes the gradients of those inputs that need one, and
// keeps them for the backward: that of the weight as float32 (of float64 inputs float64). So a loss that no backward
// follows belongs under NoGradGuard.
//
// The inputs have one floating dtype; under autocast they are cast as those of at::linear. The loss is float32, or float64
// where they are: softmax and sums over tokens are taken in it. Logits and their gradients are rounded to the inputs' dtype for
// products, as those of at::linear. So are products for the weight's gradient of bfloat16 inputs. Those of float16, whose range
// a sum over tokens may leave, are made in float32. Each gradient is rounded once more at its end.
//
// The weight may be a parameter of a unit, inside of the unit's forward; its gradient is made where it is summed over ranks
// (gradient_place.h). The backward does not read the weight. A unit that is recomputed makes the gradients twice. The result is
// differentiable once: a backward with create_graph throws Error.
//
// With `split`, weight and bias are this rank's entries, and hidden is whole and the same on every rank of the group. Then loss
// and hidden's gradient are too, `logits_bytes_max` must be, and every rank must call it in the same order. Its backward is
// not collective.
inline constexpr int64_t kLogitsBytesMax = int64_t{128} << 20;
at::Tensor fused_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                                      const at::Tensor& targets, const CrossEntropyOptions& options = {},
                                      int64_t logits_bytes_max = kLogitsBytesMax, std::optional<VocabSplit> split = {});

}  // namespace shardproof
