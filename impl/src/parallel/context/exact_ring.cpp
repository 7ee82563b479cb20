#include "parallel/context/exact_ring.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "shardproof/nn/dropout_mask.h"

namespace shardproof {

using canonical_blocks::Mixture;

ExactRing::ExactRing(const DimCut& cut, AttentionSight sight, std::optional<AttentionDropout> dropout, std::string name,
                     Comm& group)
    : ring_(cut, group),
      sight_(std::move(sight)),
      dropout_(std::move(dropout)),
      name_(std::move(name)),
      own_(cut.positions(group.rank())) {}

ExactRing::Block ExactRing::block(int64_t source, bool with_mask, c10::Device device) const {
  const DimCut& cut = ring_.cut();
  const std::vector<int64_t> keys = cut.positions(source);
  Block block{{own_, keys, sight_.causal, device, sight_.hidden_besides(own_, keys, cut.length, device)}, {}};
  if (dropout_ && with_mask)
    block.mask = dropout_mask(dropout_->site, {dropout_->samples, dropout_->heads, {own_, cut.length}, {keys, cut.length}},
                              at::kDouble, device);
  return block;
}

ExactRing::Kept ExactRing::forward(const at::Tensor& given_q, const at::Tensor& given_k, const at::Tensor& given_v) const {
  const at::Tensor q = fixed::require_double(given_q, name_), k = fixed::require_double(given_k, name_),
                   v = fixed::require_double(given_v, name_);
  fixed::require_terms(std::max(ring_.cut().length, q.size(3)), name_);
  fixed::Terms terms;
  at::Tensor most;
  ring_.go_round(k, [&](const at::Tensor& keys, int64_t source) {
    const Block here = block(source, /*with_mask=*/false, q.device());
    const at::Tensor found = canonical_blocks::largest(canonical_blocks::scores(q, keys, here.sight, terms));
    most = most.defined() ? at::maximum(most, found) : found;
  });
  Mixture mixture(q);
  ring_.go_round(at::stack({k, v}), [&](const at::Tensor& both, int64_t source) {
    const Block here = block(source, /*with_mask=*/true, q.device());
    const at::Tensor scores = canonical_blocks::scores(q, both[0], here.sight, terms);
    canonical_blocks::raise(scores, most, here.sight);
    mixture.add(scores, here.mask, both[1], here.sight, terms);
  });
  terms.require_fit(name_);
  return {q, k, v, mixture.output(), most, mixture.divisor()};
}

ExactRing::Gradients ExactRing::backward(const Kept& kept, const at::Tensor& output_gradient) const {
  const std::string what = name_ + ", gradients";
  fixed::require_terms(ring_.cut().length * (kept.q.size(1) / kept.k.size(1)), what);
  canonical_blocks::Gradients gradients(kept.q, output_gradient.contiguous(), kept.output);
  fixed::Terms terms;
  const at::Tensor own_keys = at::stack({kept.k, kept.v});
  const auto visit = [&](const at::Tensor& both, const at::Tensor& of_both, int64_t source) {
    const Block here = block(source, /*with_mask=*/true, kept.q.device());
    const at::Tensor shares = canonical_blocks::scores(kept.q, both[0], here.sight, terms);
    canonical_blocks::raise(shares, kept.most, here.sight, kept.divisor);
    gradients.add(both[0], both[1], shares, here.mask, here.sight, of_both[0], of_both[1], terms);
  };
  const at::Tensor of_both =
      ring_.go_round_adding(own_keys, at::zeros(own_keys.sizes(), own_keys.options().dtype(at::kLong)), visit);
  terms.require_fit(what);
  return {fixed::from_units(gradients.of_queries()), fixed::from_units(of_both[0]), fixed::from_units(of_both[1])};
}

}  // namespace shardproof
