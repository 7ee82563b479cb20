// Mixtures of experts (Shazeer et al. 2017; Fedus et al. 2022): a router (router.h) chooses a few experts for each token, and
// their outputs are added with the router's weights.
//
// Experts may lie on several ranks: the style `ExpertParallel` (parallel_plan.h) gives each rank some of them. Rows then go to
// the ranks of their experts and back, and their gradients likewise. Laws:
//   1. An expert's gradient is the sum over all tokens of the world, divided as the gradients of all other parameters are.
//   2. Which experts a token gets, and what they give, does not depend on the mesh or, without a capacity (router.h), on other
//      tokens, but for the rounding of products of other numbers of rows.
//   3. `Experts` multiplies rows apart by the rank that they come from, and adds these products to a gradient in the order of
//      ranks, as all sums of the library are taken.
// They can be differentiated once: a backward with create_graph throws Error on every rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "shardproof/comm/comm.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/parallel/collective_ops.h"

namespace shardproof {

// How many of `choices` each expert gets where they are dealt out as evenly as integers allow; what is left over goes to the
// first experts.
std::vector<int64_t> even_counts(int64_t choices, int64_t experts);

// The way of tokens to the experts of a layer and back, for layers of your own. Experts are counted over all ranks of the
// group, of which each holds some neighbours, cut as torch.chunk cuts; where it is null, all are here. All ranks of the group
// make one, call its methods, and run their backwards, in the same order. A rank may have no tokens.
class Dispatch {
 public:
  // `chosen` [tokens, experts of one] int64: experts, or -1 for a choice that goes nowhere. Throws Error on every rank of the
  // group when one is not among the `count` experts. Collective. On the meta device, where choices have no values, they are
  // even (even_counts), none goes nowhere, and every rank has as many tokens as this one.
  // `slices`: the ranks that hold other slices of the same experts, and get the same tokens; null where experts are whole. What
  // they give, and the gradients of `rows`, are summed over these ranks as `sum` says.
  Dispatch(const at::Tensor& chosen, int64_t count, std::shared_ptr<Comm> group, std::shared_ptr<Comm> slices = nullptr,
           collective::Sum sum = {});
  // x [tokens, n] -> [rows, n]: a row for each choice of one of this rank's experts, by the rank that it comes from, then by
  // expert, then by token. Differentiable. Collective.
  at::Tensor rows(const at::Tensor& x) const;
  // How many rows there are of each of those ranks and of each of this rank's experts, in that order.
  const std::vector<int64_t>& blocks() const { return blocks_; }
  // The expert of each row, counted from this rank's first: [rows] int64.
  at::Tensor experts() const;
  // Rows [rows, n] of what the experts gave -> [tokens, experts of one, n], those of each token's choices, and zeros for what
  // went nowhere. Differentiable. Collective.
  at::Tensor outputs(const at::Tensor& rows) const;
  // The same, added with `weights` [tokens, experts of one] -> [tokens, n].
  at::Tensor sums(const at::Tensor& rows, const at::Tensor& weights) const;

 private:
  std::shared_ptr<Comm> group_, slices_;
  collective::Sum sum_;
  at::Tensor chosen_, order_;
  std::vector<int64_t> sent_, received_, blocks_;
  int64_t own_ = 0;
};

// The ranks that share the experts of a module with the style ExpertParallel; null where it has none.
std::shared_ptr<Comm> expert_group(const torch::nn::Module& module);
// The ranks that hold other slices of them; null where it has whole ones.
std::shared_ptr<Comm> slice_group(const torch::nn::Module& module);

// The experts of a layer, gated MLPs: down(silu(gate(x)) * up(x)). Parameters: "gate_up_proj" [experts, 2 * intermediate,
// hidden], whose first half of rows is the gate's, and "down_proj" [experts, hidden, intermediate].
class ExpertsImpl : public torch::nn::Module, public CanonicalPart {
 public:
  ExpertsImpl(int64_t experts, int64_t hidden, int64_t intermediate);
  // x [tokens, hidden] -> [tokens, hidden]: for each token the sum of its experts' outputs times their weights; an expert of -1
  // adds nothing. Collective over the ranks that share the experts.
  at::Tensor forward(at::Tensor x, at::Tensor experts, at::Tensor weights);

  at::Tensor gate_up_proj, down_proj;

 private:
  at::Tensor plainly(const Dispatch& dispatch, const at::Tensor& rows) const;
  at::Tensor canonically(const Dispatch& dispatch, const at::Tensor& rows) const;

  int64_t count_;  // of experts, on all ranks
};
TORCH_MODULE(Experts);

}  // namespace shardproof
