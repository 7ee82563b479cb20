#include "parallel/tensor/parallel_state.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "shardproof/algebra/axes.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/redistribute.h"

namespace shardproof {
namespace {

// A plan that only gives experts away needs no axis of its own.
std::shared_ptr<MeshComm> with_axis(std::shared_ptr<MeshComm> comms, const ParallelPlan& plan) {
  const bool has_others = std::ranges::any_of(plan.styles, [](const auto& style) {
    const auto* experts = std::get_if<ExpertParallel>(&style.second);
    return !experts || experts->cut_inside;
  });
  if (comms->mesh().has(plan.axis) || has_others || plan.styles.empty()) return comms;
  std::vector<Axis> axes = comms->mesh().axes();
  axes.push_back({plan.axis, 1});
  return comms->on(Mesh(axes));
}

Comm& group_of(MeshComm& comms, const std::string& axis) {
  SHARD_REQUIRE(comms.mesh().has(axis), "tensor_parallel", "mesh '{}' has no axis {}; name it as the plan's axis",
                comms.mesh().str(), axis);
  return comms.along({axis});
}

}  // namespace

ParallelState::ParallelState(std::shared_ptr<MeshComm> comms, ParallelPlan plan)
    : comms_(with_axis(std::move(comms), plan)),
      plan_(std::move(plan)),
      group_(&group_of(*comms_, plan_.axis)),
      view_(std::make_unique<MeshComm>(group_->shared(), Mesh(std::vector<Axis>{{plan_.axis, group_->size()}}))) {}

DimCut ParallelState::dim_cut(const std::vector<CutSegment>& segments) const {
  DimCut cut{split(segments), 0, parts()};
  for (const CutSegment& segment : segments) cut.length += segment.length;
  return cut;
}

void ParallelState::add(const at::Tensor& parameter, ParallelParameter description) {
  of_tensor_[parameter.unsafeGetTensorImpl()] = parameters_.size();
  parameters_.push_back(std::move(description));
}

const ParallelParameter* ParallelState::find(const at::Tensor& parameter) const {
  const auto found = of_tensor_.find(parameter.unsafeGetTensorImpl());
  return found == of_tensor_.end() ? nullptr : &parameters_[found->second];
}

int64_t ParallelState::sequence_length(int64_t local) const {
  const auto seen = sequence_lengths().find(number_);
  return seen == sequence_lengths().end() ? local * parts() : seen->second;
}

Comm& ParallelState::share_experts(const ExpertParallel& style) {
  if (!experts_) {
    const auto view = comms_->on(expert_mesh(data_parallel_mesh(comms_->mesh()), style.ranks));
    std::vector<Axis> own;  // as the view orders them
    std::vector<std::string> names;
    for (const Axis& one : view->mesh().axes())
      if (one.name == axes::ep || one.name == axis()) own.push_back(one), names.push_back(one.name);
    experts_ = std::make_unique<MeshComm>(view->along(names).shared(), Mesh(own));
  }
  SHARD_REQUIRE(expert_ranks() == style.ranks, "tensor_parallel", "experts over {} ranks and others over {}; give all the same",
                expert_ranks(), style.ranks);
  return experts_->along({axes::ep});
}

MeshComm& ParallelState::on(const Layout& layout) const {
  return layout.splits(axes::ep) ? *experts_ : *view_;
}

at::Tensor ParallelState::cut(const Layout& layout, const at::Tensor& whole) const {
  return redistribute(whole.contiguous(), whole.sizes().vec(), replicated(), layout, on(layout));
}

at::Tensor ParallelState::join(const ParallelParameter& parameter, const at::Tensor& local) const {
  const at::NoGradGuard no_grad;
  at::Tensor own = local.detach().contiguous();
  const at::Tensor whole = redistribute(own, parameter.shape, parameter.layout, replicated(), on(parameter.layout));
  return whole.is_alias_of(own) ? whole.clone() : whole;
}

void take_values_of_rank_0(const at::Tensor& tensor, Comm& group) {
  if (tensor.is_meta()) return;
  const at::NoGradGuard no_grad;
  at::Tensor values = tensor.detach().contiguous();
  group.broadcast(values, 0).wait();
  if (values.const_data_ptr() != tensor.const_data_ptr()) tensor.detach().copy_(values);
}

std::shared_ptr<ParallelState> parallel_state(const torch::nn::Module& root) {
  std::shared_ptr<ParallelState> found;
  for (const auto& module : root.modules(/*include_self=*/true)) {
    auto* style = dynamic_cast<StyleHooks*>(parallel_hooks(*module));
    if (!style) continue;
    const std::shared_ptr<ParallelState> state = style->state();
    SHARD_REQUIRE(!found || found == state, "fully_shard",
                  "module {} and another one below {} were made parallel by two calls; give parallelize their common root",
                  module->name(), root.name());
    found = state;
  }
  return found;
}

}  // namespace shardproof
