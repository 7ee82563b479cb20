#include "shardproof/parallel/experts/router.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

at::Tensor in_wide(const at::Tensor& logits, bool canonical) {
  if (canonical) return canonical_ops::round(logits);
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

// Of rows in float32 or wider.
at::Tensor softmax(const at::Tensor& x, bool canonical) {
  return canonical ? canonical_ops::softmax(x) : at::softmax(x, -1);
}

at::Tensor sigmoid(const at::Tensor& x, bool canonical) {
  return canonical ? canonical_ops::sigmoid(x) : at::sigmoid(x);
}

at::Tensor shares(const at::Tensor& x, double more, bool canonical) {
  if (canonical) return canonical_ops::shares(x, more);
  const at::Tensor sum = x.sum(-1, /*keepdim=*/true);
  return x / (more > 0 ? sum + more : sum);
}

constexpr double kMore = 1e-20;  // is added to a sum of sigmoids, which may all be 0

at::Tensor probabilities(const at::Tensor& wide, const RouterOptions& options, bool canonical) {
  if (options.score != RouterScore::sigmoid) return softmax(wide, canonical);
  return shares(sigmoid(wide, canonical), kMore, canonical);
}

// With weights in float32 or wider.
Routes wide_routes(const at::Tensor& logits, const RouterOptions& options, const at::Tensor& bias, bool canonical) {
  require_valid(options);
  SHARD_REQUIRE(logits.dim() == 2 && logits.size(1) == options.experts, "experts", "a router of {} experts got logits [{}]",
                options.experts, fmt::join(logits.sizes(), ", "));
  const at::Tensor wide = in_wide(logits, canonical);
  const at::Tensor scores = options.score == RouterScore::softmax   ? softmax(wide, canonical)
                            : options.score == RouterScore::sigmoid ? sigmoid(wide, canonical)
                                                                    : wide;
  const at::Tensor judged = bias.defined() ? scores.detach() + bias : scores.detach();
  const at::Tensor order = std::get<1>(of_chosen_groups(judged, options).sort(/*stable=*/true, -1, /*descending=*/true));
  const at::Tensor experts = order.narrow(1, 0, options.experts_per_token).contiguous();
  at::Tensor weights = scores.gather(1, experts);
  if (options.score == RouterScore::chosen_softmax) {
    weights = softmax(weights, canonical);
  } else if (options.normalized) {
    weights = shares(weights, options.score == RouterScore::sigmoid ? kMore : 0, canonical);
  }
  if (options.scale != 1) weights = weights * options.scale;
  return {experts, weights};
}

// Of all choices of a sequence, by falling weight, those of an expert keep their order and come to lie in a run of their own.
Routes without_dropped(const Routes& routes, const RouterOptions& o, int64_t sequences, int64_t tokens) {
  const int64_t room = room_for(o, tokens);
  if (room >= tokens) return routes;
  const at::Tensor experts = routes.experts.view({sequences, tokens * o.experts_per_token});
  const at::Tensor by_weight =
      std::get<1>(routes.weights.detach().view_as(experts).sort(/*stable=*/true, 1, /*descending=*/true));
  const auto [owner, in_runs] = experts.gather(1, by_weight).sort(/*stable=*/true, 1, /*descending=*/false);
  const at::Tensor counts =
      at::zeros({sequences, o.experts}, experts.options()).scatter_add_(1, experts, at::ones_like(experts));
  const at::Tensor begins = counts.cumsum(1) - counts;
  const at::Tensor places = at::arange(experts.size(1), experts.options()) - begins.gather(1, owner);
  const at::Tensor dropped = at::empty_like(experts, at::kBool).scatter_(1, by_weight.gather(1, in_runs), places >= room);
  const at::Tensor of_tokens = dropped.view_as(routes.experts);
  return {routes.experts.masked_fill(of_tokens, -1), routes.weights.masked_fill(of_tokens, 0)};
}

template <class Visit>
void each_router(torch::nn::Module& module, Visit visit) {
  if (auto* router = dynamic_cast<Router*>(&module)) visit(*router);
  for (const auto& item : module.modules(/*include_self=*/false))
    if (auto* router = dynamic_cast<Router*>(item.get())) visit(*router);
}

}  // namespace

int64_t room_for(const RouterOptions& o, int64_t tokens) {
  const double choices = o.capacity * (static_cast<double>(tokens * o.experts_per_token) / static_cast<double>(o.experts));
  return static_cast<int64_t>(std::clamp<double>(std::ceil(choices), 1, static_cast<double>(std::max<int64_t>(1, tokens))));
}

Routes route(const at::Tensor& logits, const RouterOptions& options, const at::Tensor& bias, bool canonical) {
  const Routes wide = wide_routes(logits, options, bias, canonical);
  return {wide.experts, wide.weights.to(logits.scalar_type())};
}

Router::Router(RouterOptions options, torch::nn::Module& gate) : options_(options) {
  require_valid(options);
  for (const double value : {options.balance_loss, options.z_loss, options.bias_rate, options.capacity})
    SHARD_REQUIRE(std::isfinite(value) && value >= 0, "experts",
                  "balance_loss {}, z_loss {}, bias_rate {} and capacity {} must be finite and not below 0",
                  options.balance_loss, options.z_loss, options.bias_rate, options.capacity);
  if (options.bias_rate == 0 && !options.bias) return;
  bias_ = gate.register_buffer("e_score_correction_bias", at::zeros({options.experts}, at::kFloat));
  counts_ = std::make_shared<std::vector<double>>(options.experts);
}

// Gradients of no more than two uses of a tensor are added, so that their order does not matter.
Routes Router::choose(const at::Tensor& logits) {
  SHARD_REQUIRE(logits.dim() == 3, "experts", "a router got logits [{}]; expected [sequences, tokens, experts]",
                fmt::join(logits.sizes(), ", "));
  const bool has_losses = c10::GradMode::is_enabled() && (options_.balance_loss != 0 || options_.z_loss != 0);
  SHARD_REQUIRE(!bias_.defined() || bias_.scalar_type() == at::kFloat || bias_.scalar_type() == at::kDouble, "experts",
                "the bias of a router has the dtype {}, in which small moves are lost. Keep it in float32",
                c10::toString(bias_.scalar_type()));
  SHARD_REQUIRE(options_.capacity == 0 || !rule || rule->length(logits.size(1)) == logits.size(1), "experts",
                "a router with the capacity {} where context parallelism cuts sequences: which choices stay is known on a rank "
                "that has all of a sequence. Leave out the capacity, or the context parallelism",
                options_.capacity);
  const Routes wide =
      wide_routes((has_losses ? logits.view_as(logits) : logits).flatten(0, 1), options_, bias_, is_canonical());
  Routes routes = options_.capacity > 0 ? without_dropped(wide, options_, logits.size(0), logits.size(1)) : wide;
  routes.weights = routes.weights.to(logits.scalar_type());
  if (has_losses) routes.weights = with_losses(logits.view_as(logits), wide.experts, routes.weights);
  if (options_.bias_rate != 0 && c10::GradMode::is_enabled() && !logits.is_meta())
    when_collected([counts = counts_, chosen = wide.experts] {
      const at::Tensor sums = at::bincount(chosen.flatten(), {}, std::ssize(*counts)).cpu();
      for (size_t e = 0; e < counts->size(); ++e) (*counts)[e] += static_cast<double>(sums.const_data_ptr<int64_t>()[e]);
    });
  return routes;
}

// balance_loss * f_e in double, [sequences, experts], or [1, experts] over the step. Over ranks along tp, counts and tokens are
// all as often, and the part of the tokens is the same double. A forward that runs again takes what the first one has found.
at::Tensor Router::busyness(const at::Tensor& chosen, int64_t sequences) {
  const bool over_step = options_.balance_over == BalanceOver::step;
  const auto& [record, runs_again] = auxiliary_scope();
  const bool has_counts = step_record_ && (runs_again ? step_record_ == record : !is_dropped(*step_record_));
  SHARD_REQUIRE(!over_step || runs_again == has_counts, "experts",
                "a second training forward in a step with a balance loss over the step: its tokens would have counted in the "
                "first. Take one microbatch in a step, or BalanceOver::sequence; after a step call update_router_biases, and "
                "forget_router_counts where its gradients are dropped, and neither before its last backward");
  if (over_step && runs_again) return step_busyness_;
  SHARD_REQUIRE(!over_step || step_ranks_ || !rule, "experts",
                "a balance loss over the step on a rank that has parts of sequences, and of no mesh. Call parallelize or "
                "fully_shard, or share_router_counts");
  const int64_t rows = over_step ? 1 : sequences;
  const at::Tensor own = chosen.view({rows, rows == 0 ? 0 : chosen.numel() / rows});
  at::Tensor counts = at::zeros({rows, options_.experts}, chosen.options().dtype(at::kDouble));
  counts.scatter_add_(1, own, at::ones(own.sizes(), counts.options()));
  if (over_step && step_ranks_)
    step_ranks_->world().all_reduce(counts).wait();
  else if (!over_step && rule)
    rule->sum(counts);
  const auto experts = static_cast<double>(options_.experts), each = static_cast<double>(options_.experts_per_token);
  const at::Tensor tokens = counts.sum(1, /*keepdim=*/true).div_(each).clamp_min_(1);
  const at::Tensor busy = counts / tokens * (options_.balance_loss * experts / each);
  if (over_step) step_busyness_ = busy, step_record_ = record;
  return busy;
}

at::Tensor Router::with_losses(const at::Tensor& logits, const at::Tensor& chosen, at::Tensor weights) {
  const bool canonical = is_canonical();
  const auto sum = [&](const at::Tensor& x) { return canonical ? canonical_ops::sum(x, canonical_name()) : x.sum(); };
  const at::Tensor wide = in_wide(logits, canonical);
  if (options_.balance_loss != 0) {
    const at::Tensor busy = busyness(chosen, logits.size(0)).to(wide.scalar_type());
    weights = carry_loss(weights, sum(probabilities(wide, options_, canonical) * busy.unsqueeze(1)));
  }
  if (options_.z_loss != 0) {
    const at::Tensor log = canonical ? canonical_ops::log_sum_exp(wide) : at::logsumexp(wide, {-1});
    weights = carry_loss(weights, sum((log.square() * options_.z_loss).unsqueeze(-1)));
  }
  return weights;
}

void update_router_biases(torch::nn::Module& module, MeshComm& comms) {
  const at::NoGradGuard no_grad;
  each_router(module, [&](Router& router) {
    router.forget_step();
    if (router.options_.bias_rate == 0) return;
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
    router.forget_step();
    if (router.counts_) std::ranges::fill(*router.counts_, 0);
  });
}

void share_router_counts(torch::nn::Module& module, const std::shared_ptr<MeshComm>& comms) {
  each_router(module, [&](Router& router) {
    if (router.options_.balance_loss != 0 && router.options_.balance_over == BalanceOver::step) router.step_ranks_ = comms;
  });
}

}  // namespace shardproof
