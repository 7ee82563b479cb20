#include "parallel/context/exact_ring.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "parallel/context/ring_pass.h"

namespace shardproof {

using canonical_blocks::Mixture;

ExactRing::ExactRing(const ContextCut& cut, bool causal, std::optional<AttentionDropout> dropout, std::string name, Comm& group)
    : cut_(cut),
      causal_(causal),
      dropout_(std::move(dropout)),
      name_(std::move(name)),
      kept_(group.shared()),
      group_(*kept_),
      own_(cut.positions(group.rank())) {}

ExactRing::Block ExactRing::block(int64_t source, bool with_mask) const {
  Block block{cut_.positions(source), {}};
  if (dropout_ && with_mask)
    block.mask = dropout_mask(
        dropout_->site, {dropout_->samples, dropout_->heads, {own_, cut_.length}, {block.keys, cut_.length}}, at::kDouble);
  return block;
}

template <class F>
void ExactRing::go_round(at::Tensor mine, const F& f) const {
  for (int64_t source = group_.rank(), step = 0; step < group_.size(); ++step, source = ring_before(source, group_)) {
    std::optional<RingPass> passing;
    if (step + 1 < group_.size()) passing.emplace(mine, mine.dim() - 2, cut_.count(ring_before(source, group_)), group_);
    f(mine, source);
    if (passing) mine = passing->wait();
  }
}

ExactRing::Kept ExactRing::forward(const at::Tensor& given_q, const at::Tensor& given_k, const at::Tensor& given_v) const {
  const at::Tensor q = fixed::require_double(given_q, name_), k = fixed::require_double(given_k, name_),
                   v = fixed::require_double(given_v, name_);
  fixed::require_terms(std::max(cut_.length, q.size(3)), name_);
  fixed::Terms terms;
  at::Tensor most;
  go_round(k, [&](const at::Tensor& keys, int64_t source) {
    const Block here = block(source, /*with_mask=*/false);
    const at::Tensor found = canonical_blocks::largest(canonical_blocks::scores(q, keys, places(here), terms));
    most = most.defined() ? at::maximum(most, found) : found;
  });
  Mixture mixture(q);
  go_round(at::stack({k, v}), [&](const at::Tensor& both, int64_t source) {
    const Block here = block(source, /*with_mask=*/true);
    const at::Tensor scores = canonical_blocks::scores(q, both[0], places(here), terms);
    mixture.add(canonical_blocks::powers(scores, most), here.mask, both[1], terms);
  });
  terms.require_fit(name_);
  return {q, k, v, mixture.output(), most, mixture.divisor()};
}

ExactRing::Gradients ExactRing::backward(const Kept& kept, const at::Tensor& output_gradient) const {
  const std::string what = name_ + ", gradients";
  fixed::require_terms(cut_.length * (kept.q.size(1) / kept.k.size(1)), what);
  canonical_blocks::Gradients gradients(kept.q, output_gradient.contiguous(), kept.output);
  at::Tensor of_both = at::zeros({2, kept.k.size(0), kept.k.size(1), kept.k.size(2), kept.k.size(3)}, at::kLong);
  fixed::Terms terms;
  go_round(at::stack({kept.k, kept.v}), [&](const at::Tensor& both, int64_t source) {
    const Block here = block(source, /*with_mask=*/true);
    const at::Tensor scores = canonical_blocks::scores(kept.q, both[0], places(here), terms);
    const at::Tensor shares = canonical_blocks::powers(scores, kept.most).div_(kept.divisor);
    gradients.add(both[0], both[1], shares, here.mask, places(here), of_both[0], of_both[1], terms);
    if (group_.size() > 1) of_both = RingPass(of_both, 3, cut_.count(ring_before(source, group_)), group_).wait();
  });
  terms.require_fit(what);
  return {fixed::from_units(gradients.of_queries()), fixed::from_units(of_both[0]), fixed::from_units(of_both[1])};
}

}  // namespace shardproof
