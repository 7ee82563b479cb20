#include "shardproof/parallel/tensor/tensor_parallel.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>

#include "parallel/tensor/parallel_state.h"
#include "parallel/tensor/styles.h"
#include "shardproof/base/check.h"
#include "shardproof/base/name_pattern.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/state_buffers.h"
#include "shardproof/parallel/experts/router.h"

namespace shardproof {
namespace {

std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) named.emplace_back(item.key(), item.value());
  return named;
}

// Without a style a module computes on its piece of the sequence, and its gradients would be terms that nobody sums.
void require_styles_everywhere(const torch::nn::Module& root, const std::set<std::string>& styled) {
  for (const auto& item : root.named_modules("", /*include_self=*/true)) {
    if (item.value()->parameters(/*recurse=*/false).empty()) continue;
    bool covered = styled.contains(item.key());
    for (const std::string& name : styled) covered |= item.key().starts_with(name + ".");
    SHARD_REQUIRE(
        covered, "tensor_parallel",
        "module '{}' ({}) has parameters and no style. With a sequence_dim it may see a piece of the sequence: give it "
        "SequenceParallel, or ScatterOutput if it sees all of it",
        item.key(), item.value()->name());
  }
}

// Ranks along the axis hold the same experts, and have to send them the same tokens.
void require_whole_sequences(const ParallelPlan& plan, const std::map<std::string, ParallelStyle>& styles) {
  for (const auto& [name, style] : styles) {
    if (!std::holds_alternative<ExpertParallel>(style)) continue;
    const bool has_whole = std::ranges::any_of(styles, [&name = name](const auto& other) {
      return std::holds_alternative<WholeSequence>(other.second) &&
             (other.first.empty() || name.starts_with(other.first + "."));
    });
    SHARD_REQUIRE(
        has_whole, "tensor_parallel",
        "module '{}' has the style ExpertParallel, and no module around it has WholeSequence. With a sequence_dim ranks "
        "along {} would send pieces of a sequence to experts of which each of them has a copy. Give WholeSequence to "
        "the layer with the router",
        name, plan.axis);
  }
}

// The rows of a head that is held in copies get gradients from the queries of every copy. Rounded by each copy for itself, they
// would depend on how many there are.
void require_sums_of_copies(const ParallelState& state) {
  if (!state.canonical || state.sums_copied_keys) return;
  for (const ParallelParameter& parameter : state.parameters())
    SHARD_REQUIRE(parameter.layout == replicated() || parameter.grad_partial_ranks == 1, "canonical",
                  "{}: there are fewer key-value heads than the {} ranks along {}, and no Attention knows: each copy would "
                  "round gradients of its own queries. Give the Attention the style CutAttention, or use fewer ranks",
                  parameter.name, state.parts(), state.axis());
}

// Of parameters that no style cuts, too, and of buffers: they are whole on every rank, and must be the same.
void take_values_of_rank_0(const ParallelState& state, const torch::nn::Module& module) {
  for (const auto& [name, parameter] : state.named) take_values_of_rank_0(parameter, state.group());
  const ModuleBuffers buffers = buffers_of(module);
  for (const auto* kind : {&buffers.state, &buffers.transient})
    for (const auto& [name, buffer] : *kind) take_values_of_rank_0(buffer, state.group());
}

}  // namespace

TensorParallel::TensorParallel(TensorParallel&&) noexcept = default;
TensorParallel& TensorParallel::operator=(TensorParallel&&) noexcept = default;
TensorParallel::~TensorParallel() = default;

const std::vector<ParallelParameter>& TensorParallel::parameters() const {
  return state_->parameters();
}

std::vector<std::pair<std::string, at::Tensor>> TensorParallel::gather_parameters() const {
  std::vector<std::pair<std::string, at::Tensor>> whole;
  for (const auto& [name, tensor] : state_->named) {
    const ParallelParameter* parallel = state_->find(tensor);
    whole.emplace_back(name, parallel ? state_->join(*parallel, tensor) : tensor.detach().clone());
  }
  return whole;
}

TensorParallel parallelize(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ParallelPlan plan) {
  SHARD_REQUIRE(plan.overlap_pieces >= 1, "tensor_parallel",
                "the plan has overlap_pieces={}; it must be at least 1, with which products stay whole", plan.overlap_pieces);
  share_router_counts(*module, comms);
  auto state = std::make_shared<ParallelState>(std::move(comms), plan);
  state->named = distinct_parameters(*module);
  state->canonical = uses_canonical_arithmetic(*module);
  take_values_of_rank_0(*state, *module);
  std::set<std::string> styled;
  std::map<std::string, ParallelStyle> styles;
  std::vector<bool> used(plan.styles.size(), false);
  for (const auto& item : module->named_modules("", /*include_self=*/true)) {
    SHARD_REQUIRE(!parallel_hooks(*item.value()) && !unit_hooks(*item.value()), "tensor_parallel",
                  "module '{}' is parallel or sharded already; call parallelize once, on the root, before fully_shard",
                  item.key());
    for (size_t i = 0; i < plan.styles.size(); ++i) {
      const auto& [pattern, style] = plan.styles[i];
      if (!name_matches(pattern, item.key())) continue;
      used[i] = true;
      styles.emplace(item.key(), style);
      if (styled.insert(item.key()).second)
        state->attached.attach(item.value(), make_style(state, item.key(), *item.value(), style));
      break;
    }
  }
  for (size_t i = 0; i < used.size(); ++i)
    SHARD_REQUIRE(used[i], "tensor_parallel", "pattern '{}' fits no module of {}", plan.styles[i].first, module->name());
  if (plan.sequence_dim && state->parts() > 1) {
    require_styles_everywhere(*module, styled);
    require_whole_sequences(plan, styles);
  }
  require_sums_of_copies(*state);
  state->enter_sequentials(*module);
  return TensorParallel(std::move(state));
}

}  // namespace shardproof
