#include "golden/experts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace golden {
namespace {

constexpr bool kStable = true, kFalling = true;

// Places by falling score; of equal ones the first place comes first.
at::Tensor places_by_score(const at::Tensor& scores) {
  return std::get<1>(at::sort(scores, kStable, /*dim=*/-1, kFalling));
}

// Those in groups that take no part get a score below all others.
at::Tensor within_groups(const Llama& llama, const at::Tensor& scores) {
  if (llama.expert_groups == 1) return scores;
  const int64_t tokens = scores.size(0), each = llama.experts / llama.expert_groups;
  const at::Tensor grouped = scores.view({tokens, llama.expert_groups, each});
  const at::Tensor best =
      std::get<0>(at::sort(grouped, kStable, /*dim=*/-1, kFalling)).narrow(2, 0, std::min<int64_t>(each, 2));
  const at::Tensor chosen = places_by_score(best.sum(-1)).narrow(1, 0, llama.groups_per_token);
  const at::Tensor is_out =
      at::ones({tokens, llama.expert_groups}, scores.options().dtype(at::kBool)).scatter(1, chosen, false);
  return grouped.masked_fill(is_out.unsqueeze(2), -INFINITY).view({tokens, llama.experts});
}

// rows [n, hidden], all of one expert's
at::Tensor expert(const at::Tensor& rows, const at::Tensor& gate_up, const at::Tensor& down) {
  const std::vector<at::Tensor> parts = at::linear(rows, gate_up).chunk(2, -1);
  return at::linear(at::silu(parts[0]) * parts[1], down);
}

// The routes of sequences of `length` tokens, with -1 and no weight in the place of what is dropped.
Routes without_dropped(const Llama& llama, const Routes& routes, int64_t length) {
  const at::Tensor experts = routes.experts.to(at::kCPU).contiguous(),
                   weights = routes.weights.detach().to(at::kCPU, at::kDouble).contiguous();
  const auto* expert = experts.const_data_ptr<int64_t>();
  const auto* weight = weights.const_data_ptr<double>();
  const std::vector<bool> dropped =
      dropped_choices(llama, length, {expert, expert + experts.numel()}, {weight, weight + weights.numel()});
  at::Tensor is_out = at::zeros(experts.sizes(), at::kBool);
  std::ranges::copy(dropped, is_out.mutable_data_ptr<bool>());
  is_out = is_out.to(routes.experts.device());
  return {routes.experts.masked_fill(is_out, -1), routes.weights.masked_fill(is_out, 0)};
}

// x [N, hidden]
at::Tensor of_experts(const Forward& forward, const std::string& prefix, const at::Tensor& x, const Routes& routes) {
  const at::Tensor &gate_up = forward.parameters.at(prefix + "gate_up_proj"),
                   &down = forward.parameters.at(prefix + "down_proj");
  const int64_t tokens = x.size(0), each = routes.experts.size(1), hidden = x.size(1);
  const at::Tensor rows = x.unsqueeze(1).expand({tokens, each, hidden}).reshape({tokens * each, hidden});
  const at::Tensor owner = routes.experts.reshape({tokens * each});
  // The gradient of gate_up[e] would be a sum with the zeros of the other experts, which makes +0 of -0.
  const std::vector<at::Tensor> gates = gate_up.unbind(0), downs = down.unbind(0);
  at::Tensor outputs = at::zeros_like(rows);
  for (size_t e = 0; e < gates.size(); ++e) {
    const at::Tensor own = at::nonzero(owner == static_cast<int64_t>(e)).squeeze(1);
    if (own.numel() > 0) outputs = outputs.index_copy(0, own, expert(rows.index_select(0, own), gates[e], downs[e]));
  }
  return (outputs.view({tokens, each, hidden}) * routes.weights.unsqueeze(-1)).sum(1);
}

// Of logits [B, T, experts], float32 or float64. `of_step`: counts of the step, for a balance over it.
void add_losses(const Llama& llama, Forward& forward, const at::Tensor& logits, const at::Tensor& experts,
                const at::Tensor& of_step) {
  const int64_t batch = logits.size(0);
  const auto each = static_cast<double>(llama.experts_per_token);
  at::Tensor& sum = forward.auxiliary;
  const auto add = [&sum](const at::Tensor& loss) { sum = sum.defined() ? sum + loss : loss; };
  if (llama.expert_balance != 0) {
    at::Tensor p = llama.score == Llama::Score::sigmoid ? at::sigmoid(logits) : at::softmax(logits, -1);
    if (llama.score == Llama::Score::sigmoid) p = p / (p.sum(-1, /*keepdim=*/true) + 1e-20);
    const at::Tensor counts = of_step.defined()
                                  ? of_step.view({1, llama.experts})
                                  : at::one_hot(experts.reshape({batch, -1}), llama.experts).sum(1).to(at::kDouble);
    const at::Tensor tokens = counts.sum(1, /*keepdim=*/true) / each;
    const at::Tensor f = counts / tokens * (llama.expert_balance * static_cast<double>(llama.experts) / each);
    add((p * f.to(logits.scalar_type()).unsqueeze(1)).sum());
  }
  if (llama.expert_z != 0) add((at::logsumexp(logits, {-1}).square() * llama.expert_z).sum());
}

}  // namespace

at::Tensor gated_mlp(Forward& forward, const std::string& prefix, const at::Tensor& x) {
  // One after the other: sites of dropout are counted.
  const at::Tensor gate = forward.linear(x, prefix + "gate_proj"), up = forward.linear(x, prefix + "up_proj");
  return forward.linear(at::silu(gate) * up, prefix + "down_proj");
}

bool has_experts(const Llama& llama, int64_t layer) {
  return llama.experts > 0 && layer >= llama.dense_layers;
}

at::Tensor initial_bias(const Llama& llama) {
  if (llama.expert_lean == 0) return at::zeros({llama.experts});  // and not -0
  return (llama.expert_lean * (at::arange(llama.experts, at::kDouble).remainder(3) - 1)).to(at::kFloat);
}

Routes routes_of(const Llama& llama, const at::Tensor& logits, const at::Tensor& bias) {
  using enum Llama::Score;
  const at::Tensor scores = llama.score == softmax   ? at::softmax(logits, -1)
                            : llama.score == sigmoid ? at::sigmoid(logits)
                                                     : logits;
  const at::Tensor judged = bias.defined() ? scores.detach() + bias : scores.detach();
  const at::Tensor order = places_by_score(within_groups(llama, judged));
  const at::Tensor experts = order.narrow(1, 0, llama.experts_per_token);
  at::Tensor weights = scores.gather(1, experts);
  if (llama.score == chosen_softmax) {
    weights = at::softmax(weights, -1);
  } else if (llama.normalized) {
    const at::Tensor sum = weights.sum(-1, /*keepdim=*/true);
    weights = weights / (llama.score == sigmoid ? sum + 1e-20 : sum);
  }
  return {experts, llama.expert_scale == 1 ? weights : weights * llama.expert_scale};
}

std::vector<bool> dropped_choices(const Llama& llama, int64_t length, const std::vector<int64_t>& experts,
                                  const std::vector<double>& weights) {
  std::vector<bool> dropped(experts.size(), false);
  if (llama.expert_capacity == 0 || experts.empty()) return dropped;
  const auto choices = static_cast<size_t>(length * llama.experts_per_token);
  const double even = llama.expert_capacity * (static_cast<double>(choices) / static_cast<double>(llama.experts));
  const double room = std::max(1.0, std::ceil(even));
  for (size_t begin = 0; begin < experts.size(); begin += choices)
    for (int64_t e = 0; e < llama.experts; ++e) {
      std::vector<size_t> own;
      for (size_t place = begin; place < begin + choices; ++place)
        if (experts[place] == e) own.push_back(place);
      std::ranges::stable_sort(own, [&](size_t a, size_t b) { return weights[a] > weights[b]; });
      for (size_t i = 0; i < own.size(); ++i)
        if (static_cast<double>(i) >= room) dropped[own[i]] = true;
    }
  return dropped;
}

at::Tensor mixture(const Llama& llama, Forward& forward, const std::string& prefix, const at::Tensor& x) {
  // Gradients are sums of two at a time: first of the router and the experts, then of these and the shared MLP.
  const at::Tensor routed = llama.shared_width > 0 ? x.view_as(x) : x;
  const auto wide = [](const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); };
  const std::string bias = prefix + "gate.e_score_correction_bias";
  const bool has_losses = forward.training && (llama.expert_balance != 0 || llama.expert_z != 0);
  const at::Tensor logits = forward.linear(routed, prefix + "gate", /*in_float32=*/llama.score == Llama::Score::sigmoid);
  const at::Tensor judged = has_losses ? logits.view_as(logits) : logits;
  Routes routes = routes_of(llama, wide(judged.reshape({-1, llama.experts})),
                            llama.has_bias() ? forward.parameters.at(bias) : at::Tensor());
  forward.counts[bias] = at::one_hot(routes.experts.reshape({-1}), llama.experts).sum(0).to(at::kDouble);
  if (has_losses)
    add_losses(llama, forward, wide(logits.view_as(logits)), routes.experts,
               forward.of_step ? forward.of_step->at(bias) : at::Tensor());
  if (llama.expert_capacity != 0) routes = without_dropped(llama, routes, x.size(1));
  routes.weights = routes.weights.to(x.scalar_type());
  const at::Tensor y = of_experts(forward, prefix + "experts.", routed.reshape({-1, x.size(-1)}), routes).view(x.sizes());
  return llama.shared_width > 0 ? y + gated_mlp(forward, prefix + "shared_experts.", x) : y;
}

Shapes mixture_shapes(const Llama& llama, const std::string& prefix) {
  const int64_t hidden = llama.hidden, width = llama.expert_width, shared = llama.shared_width;
  Shapes shapes = {{prefix + "gate.weight", {llama.experts, hidden}},
                   {prefix + "experts.gate_up_proj", {llama.experts, 2 * width, hidden}},
                   {prefix + "experts.down_proj", {llama.experts, hidden, width}}};
  if (shared == 0) return shapes;
  shapes.push_back({prefix + "shared_experts.gate_proj.weight", {shared, hidden}});
  shapes.push_back({prefix + "shared_experts.up_proj.weight", {shared, hidden}});
  shapes.push_back({prefix + "shared_experts.down_proj.weight", {hidden, shared}});
  return shapes;
}

}  // namespace golden
