#include "shardproof/parallel/tensor/parallel_layers.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "internal/device/matrix.h"
#include "shardproof/algebra/layout.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/gradient_place.h"
#include "shardproof/parallel/collective_ops.h"

namespace shardproof {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Of one rank's entries, with what all ranks know after two reductions. Logits of smaller dtypes are taken as float32: float16
// does not hold the sum of a vocabulary.
struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static Variable forward(AutogradContext* ctx, const Variable& given, const Variable& targets, int64_t first, int64_t real,
                          int64_t vocab, bool mean, double smoothing, int64_t ignore, Comm* group) {
    const at::Tensor logits = rows_of(given).narrow(1, 0, real).to(at::toOpMathType(given.scalar_type()));
    const at::Tensor target = targets.reshape({-1});
    at::Tensor most =
        real > 0 ? logits.amax({1}) : at::full({target.numel()}, -std::numeric_limits<double>::infinity(), logits.options());
    group->all_reduce(most, Reduce::max).wait();
    const at::Tensor shifted = logits - most.unsqueeze(1), powers = shifted.exp();
    const at::Tensor counts = target != ignore, local = target - first;
    const at::Tensor here = counts.logical_and(local >= 0).logical_and(local < real);
    const at::Tensor index = at::where(here, local, 0).unsqueeze(1);
    const at::Tensor picked =
        real > 0 ? at::where(here, shifted.gather(1, index).squeeze(1), 0) : at::zeros_like(most);
    at::Tensor sums = at::stack({powers.sum(1), picked, shifted.sum(1)});  // each a term of the sum over the vocabulary
    group->all_reduce(sums).wait();
    at::Tensor losses = sums[0].log() - sums[1];
    if (smoothing > 0)
      losses = losses * (1 - smoothing) + (sums[0].log() - sums[2] / static_cast<double>(vocab)) * smoothing;
    losses = at::where(counts, losses, 0);
    const double divisor = mean ? counts.sum().item<double>() : 1;

    at::Tensor gradient = powers / sums[0].unsqueeze(1);
    if (smoothing > 0) gradient = gradient - smoothing / static_cast<double>(vocab);
    if (real > 0) gradient.scatter_add_(1, index, here.to(gradient.scalar_type()).mul(smoothing - 1).unsqueeze(1));
    gradient = gradient * counts.unsqueeze(1) / divisor;
    const int64_t padding = given.size(-1) - real;
    if (padding > 0) gradient = at::cat({gradient, at::zeros({gradient.size(0), padding}, gradient.options())}, 1);
    ctx->save_for_backward({gradient.to(given.scalar_type()).view(given.sizes())});
    return (losses.sum() / divisor).to(given.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {ctx->get_saved_variables()[0] * dy[0], {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor vocab_parallel_embedding(const at::Tensor& tokens, const at::Tensor& weight, int64_t first_row, Comm& group,
                                    std::optional<int64_t> sequence_dim, int64_t padding_index) {
  const int64_t rows = weight.size(0);
  const int64_t padding = padding_index >= first_row && padding_index < first_row + rows ? padding_index - first_row : -1;
  if (group.size() == 1) return direct::embedding(weight, tokens, padding);
  const at::Tensor local = tokens - first_row, here = (local >= 0).logical_and(local < rows);
  at::Tensor found;
  if (rows == 0) {
    std::vector<int64_t> sizes = tokens.sizes().vec();
    sizes.push_back(weight.size(1));
    found = at::zeros(sizes, weight.options()) + weight.sum();  // so that a backward passes here as on other ranks
  } else {
    found = at::where(here.unsqueeze(-1), direct::embedding(weight, at::where(here, local, 0), padding), 0);
  }
  return sequence_dim ? collective::reduce_scatter(found, *sequence_dim, group) : collective::reduce(found, group);
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t entries, Comm& group,
                                        const CrossEntropyOptions& options) {
  const Interval own = piece({}, entries, group.size(), group.rank());
  const int64_t vocab = options.vocab > 0 ? options.vocab : entries;
  SHARD_REQUIRE(
      logits.dim() >= 1 && logits.size(-1) == own.size() && logits.sizes().slice(0, logits.dim() - 1) == targets.sizes(),
      "vocab_parallel_cross_entropy",
      "rank {} of {} in '{}': expected logits [.., {}] of {} entries beside targets [..], got {} and {}. Whole logits on "
      "each rank would add log({}) to the loss",
      group.rank(), group.size(), group.name(), own.size(), entries, fmt::join(logits.sizes(), "x"),
      fmt::join(targets.sizes(), "x"), group.size());
  SHARD_REQUIRE(vocab <= entries && options.label_smoothing >= 0 && options.label_smoothing <= 1,
                "vocab_parallel_cross_entropy", "vocab {} of {} entries, label_smoothing {}: out of range", vocab, entries,
                options.label_smoothing);
  const at::Tensor wrong = (targets != options.ignore_index).logical_and((targets < 0).logical_or(targets >= vocab));
  SHARD_REQUIRE(
      !wrong.any().item<bool>(), "vocab_parallel_cross_entropy",
      "a target is outside the vocabulary of {} and not the ignored {}; targets are in the whole vocabulary's numbering", vocab,
      options.ignore_index);
  const int64_t real = std::clamp<int64_t>(vocab - own.begin, 0, own.size());
  return CrossEntropy::apply(logits, targets, own.begin, real, vocab, options.mean, options.label_smoothing,
                             options.ignore_index, &group);
}

}  // namespace shardproof
