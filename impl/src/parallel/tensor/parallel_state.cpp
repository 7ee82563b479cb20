#include "parallel/tensor/parallel_state.h"

#include <ATen/ATen.h>

#include "shardproof/base/check.h"
#include "shardproof/comm/redistribute.h"

namespace shardproof {
namespace {

Comm& group_of(MeshComm& comms, const std::string& axis) {
  SHARD_REQUIRE(comms.mesh().has(axis), "tensor_parallel", "mesh '{}' has no axis {}; name it as the plan's axis",
                comms.mesh().str(), axis);
  return comms.along({axis});
}

}  // namespace

ParallelState::ParallelState(std::shared_ptr<MeshComm> comms, ParallelPlan plan)
    : comms_(std::move(comms)),
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

at::Tensor ParallelState::cut(const Layout& layout, const at::Tensor& whole) const {
  return redistribute(whole.contiguous(), whole.sizes().vec(), replicated(), layout, *view_);
}

at::Tensor ParallelState::join(const ParallelParameter& parameter, const at::Tensor& local) const {
  const at::NoGradGuard no_grad;
  at::Tensor own = local.detach().contiguous();
  const at::Tensor whole = redistribute(own, parameter.shape, parameter.layout, replicated(), *view_);
  return whole.is_alias_of(own) ? whole.clone() : whole;
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
