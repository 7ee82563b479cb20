#include "shardproof/parallel/experts/router.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "shardproof/base/check.h"
#include "shardproof/nn/auxiliary_losses.h"

namespace shardproof {
namespace {

at::Tensor in_wide(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
}

// Scores of experts in groups that take no part become -inf.
at::Tensor of_chosen_groups(const at::Tensor& scores, const RouterOptions& o) {
  if (o.groups_per_token == o.groups) return scores;
  const int64_t tokens = scores.size(0), each = o.experts / o.groups;
  const at::Tensor grouped = scores.view({tokens, o.groups, each});
  const at::Tensor best = std::get<0>(grouped.sort(/*stable=*/true, -1, /*descending=*/true));
  const at::Tensor strength = best.narrow(-1, 0, std::min<int64_t>(2, each)).sum(-1);
  const at::Tensor chosen =
      std::get<1>(strength.sort(/*stable=*/true, -1, /*descending=*/true)).narrow(1, 0, o.groups_per_token);
  const at::Tensor out = at::ones_like(strength, at::kBool).scatter_(1, chosen, false);
  return grouped.masked_fill(out.unsqueeze(-1), -std::numeric_limits<double>::infinity()).view_as(scores);
}

void require_valid(const RouterOptions& o) {
  SHARD_REQUIRE(o.experts > 0 && o.groups > 0 && o.experts % o.groups == 0 && o.groups_per_token > 0 &&
                    o.groups_per_token <= o.groups && o.experts_per_token > 0 &&
                    o.experts_per_token <= o.experts / o.groups * o.groups_per_token,
                "experts", "a token cannot get {} experts out of {}, which are in {} equal groups, of which it may use {}",
                o.experts_per_token, o.experts, o.groups, o.groups_per_token);
}

at::Tensor probabilities(const at::Tensor& wide, const RouterOptions& options) {
  if (options.score != RouterScore::sigmoid) return at::softmax(wide, -1);
  const at::Tensor scores = at::sigmoid(wide);
  return scores / (scores.sum(-1, /*keepdim=*/true) + 1e-20);
}

template <class Visit>
void each_router(torch::nn::Module& module, Visit visit) {
  if (auto* router = dynamic_cast<Router*>(&module)) visit(*router);
  for (const auto& item : module.modules(/*include_self=*/false))
    if (auto* router = dynamic_cast<Router*>(item.get())) visit(*router);
}

}  // namespace

Routes route(const at::Tensor& logits, const RouterOptions& options, const at::Tensor& bias, bool canonical) {
  require_valid(options);
  SHARD_REQUIRE(logits.dim() == 2 && logits.size(1) == options.experts, "experts", "a router of {} experts got logits [{}]",
                options.experts, fmt::join(logits.sizes(), ", "));
  const auto softmax = [canonical](const at::Tensor& x) { return canonical ? canonical_ops::softmax(x) : at::softmax(x, -1); };
  const auto sigmoid = [canonical](const at::Tensor& x) { return canonical ? canonical_ops::sigmoid(x) : at::sigmoid(x); };
  const at::Tensor wide = canonical ? canonical_ops::round(logits) : in_wide(logits);
  const at::Tensor scores = options.score == RouterScore::softmax   ? softmax(wide)
                            : options.score == RouterScore::sigmoid ? sigmoid(wide)
                                                                    : wide;
  const at::Tensor judged = bias.defined() ? scores.detach() + bias : scores.detach();
  const at::Tensor order = std::get<1>(of_chosen_groups(judged, options).sort(/*stable=*/true, -1, /*descending=*/true));
  const at::Tensor experts = order.narrow(1, 0, options.experts_per_token).contiguous();
  at::Tensor weights = scores.gather(1, experts);
  if (options.score == RouterScore::chosen_softmax) {
    weights = softmax(weights);
  } else if (options.normalized) {
    const double more = options.score == RouterScore::sigmoid ? 1e-20 : 0;
    const auto sum = [&weights, more] {
      const at::Tensor own = weights.sum(-1, /*keepdim=*/true);
      return more > 0 ? own + more : own;
    };
    weights = canonical ? canonical_ops::shares(weights, more) : weights / sum();
  }
  if (options.scale != 1) weights = weights * options.scale;
  return {experts, weights.to(logits.scalar_type())};
}

Router::Router(RouterOptions options, torch::nn::Module& gate) : options_(options) {
  for (const double value : {options.balance_loss, options.z_loss, options.bias_rate})
    SHARD_REQUIRE(std::isfinite(value) && value >= 0, "experts",
                  "balance_loss {}, z_loss {} and bias_rate {} must be finite and not below 0", options.balance_loss,
                  options.z_loss, options.bias_rate);
  if (options.bias_rate == 0) return;
  bias_ = gate.register_buffer("e_score_correction_bias", at::zeros({options.experts}, at::kFloat));
  counts_ = std::make_shared<std::vector<double>>(options.experts);
}

// Gradients of no more than two uses of a tensor are added, so that their order does not matter.
Routes Router::choose(const at::Tensor& logits) {
  SHARD_REQUIRE(logits.dim() == 3, "experts", "a router got logits [{}]; expected [sequences, tokens, experts]",
                fmt::join(logits.sizes(), ", "));
  const bool has_losses = c10::GradMode::is_enabled() && (options_.balance_loss != 0 || options_.z_loss != 0);
  SHARD_REQUIRE(!is_canonical() || (options_.balance_loss == 0 && options_.z_loss == 0 && options_.bias_rate == 0), "canonical",
                "{}: a router with balance_loss {}, z_loss {} and bias_rate {}, for which there is no canonical arithmetic; "
                "leave them out",
                canonical_name(), options_.balance_loss, options_.z_loss, options_.bias_rate);
  SHARD_REQUIRE(!bias_.defined() || bias_.scalar_type() == at::kFloat || bias_.scalar_type() == at::kDouble, "experts",
                "the bias of a router has the dtype {}, in which small moves are lost. Keep it in float32",
                c10::toString(bias_.scalar_type()));
  Routes routes = route((has_losses ? logits.view_as(logits) : logits).flatten(0, 1), options_, bias_, is_canonical());
  if (has_losses) routes.weights = with_losses(logits.view_as(logits), routes);
  if (bias_.defined() && c10::GradMode::is_enabled() && !logits.is_meta())
    when_collected([counts = counts_, experts = routes.experts] {
      const at::Tensor chosen = at::bincount(experts.flatten(), {}, std::ssize(*counts)).cpu();
      for (size_t e = 0; e < counts->size(); ++e) (*counts)[e] += static_cast<double>(chosen.const_data_ptr<int64_t>()[e]);
    });
  return routes;
}

at::Tensor Router::with_losses(const at::Tensor& logits, const Routes& routes) const {
  const at::Tensor wide = in_wide(logits);
  at::Tensor weights = routes.weights;
  if (options_.balance_loss != 0) {
    const int64_t sequences = logits.size(0);
    const at::Tensor chosen = routes.experts.view({sequences, logits.size(1) * options_.experts_per_token});
    at::Tensor counts = at::zeros({sequences, options_.experts}, wide.options());
    counts.scatter_add_(1, chosen, at::ones(chosen.sizes(), wide.options()));
    const int64_t tokens = std::max<int64_t>(1, rule ? rule->length(logits.size(1)) : logits.size(1));
    if (rule) rule->sum(counts);
    const double factor = options_.balance_loss * static_cast<double>(options_.experts) /
                          static_cast<double>(options_.experts_per_token * tokens);
    weights = carry_loss(weights, (probabilities(wide, options_) * (counts * factor).unsqueeze(1)).sum());
  }
  if (options_.z_loss != 0) weights = carry_loss(weights, at::logsumexp(wide, {-1}).square().sum() * options_.z_loss);
  return weights;
}

void update_router_biases(torch::nn::Module& module, MeshComm& comms) {
  const at::NoGradGuard no_grad;
  each_router(module, [&](Router& router) {
    if (!router.bias_.defined()) return;
    at::Tensor counts = at::tensor(*router.counts_, router.bias_.options().dtype(at::kDouble));
    comms.world().all_reduce(counts).wait();
    // Whole numbers: their sum is exact.
    const at::Tensor missing = at::sign(counts.sum() - counts * static_cast<double>(counts.numel()));
    router.bias_.add_(missing.to(router.bias_.options()) * router.options_.bias_rate);
    std::ranges::fill(*router.counts_, 0);
  });
}

void forget_router_counts(torch::nn::Module& module) {
  each_router(module, [](Router& router) {
    if (router.counts_) std::ranges::fill(*router.counts_, 0);
  });
}

}  // namespace shardproof
