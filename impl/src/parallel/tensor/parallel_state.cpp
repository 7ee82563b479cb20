#include "parallel/tensor/parallel_state.h"

#include <ATen/ATen.h>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

Comm& group_of(MeshComm& comms, const std::string& axis) {
  SHARD_REQUIRE(comms.mesh().has(axis), "tensor_parallel", "mesh '{}' has no axis {}; name it in ParallelPlan::axis",
                comms.mesh().str(), axis);
  return comms.along({axis});
}

at::Tensor flat(const at::Tensor& tensor) { return tensor.contiguous().view({-1}); }

}  // namespace

ParallelState::ParallelState(std::shared_ptr<MeshComm> comms, ParallelPlan plan)
    : comms_(std::move(comms)), plan_(std::move(plan)), group_(&group_of(*comms_, plan_.axis)) {}

void ParallelState::add(const at::Tensor& parameter, ParallelParameter description) {
  of_tensor_[parameter.unsafeGetTensorImpl()] = parameters_.size();
  parameters_.push_back(std::move(description));
}

const ParallelParameter* ParallelState::find(const at::Tensor& parameter) const {
  const auto found = of_tensor_.find(parameter.unsafeGetTensorImpl());
  return found == of_tensor_.end() ? nullptr : &parameters_[found->second];
}

at::Tensor ParallelState::cut(const TensorCut& cut, const at::Tensor& whole) const {
  std::vector<at::Tensor> pieces;
  for (const CutRows& rows : cut.rows(parts(), part()))
    pieces.push_back(whole.narrow(cut.dim, rows.whole.begin, rows.whole.size()));
  return at::cat(pieces, cut.dim).contiguous();
}

at::Tensor ParallelState::join(const ParallelParameter& parameter, const at::Tensor& local) const {
  at::NoGradGuard no_grad;
  if (!parameter.cut) return local.detach().clone();
  int64_t most = 0;
  for (int64_t p = 0; p < parts(); ++p) most = std::max(most, numel(parameter.cut->local_shape(parameter.shape, parts(), p)));
  at::Tensor mine = at::zeros({most}, local.options()), all = at::empty({most * parts()}, local.options());
  mine.narrow(0, 0, local.numel()).copy_(flat(local.detach()));
  group_->all_gather(all, mine).wait();
  at::Tensor whole = at::empty({numel(parameter.shape)}, local.options());
  for (int64_t p = 0; p < parts(); ++p) {
    const int64_t held = numel(parameter.cut->local_shape(parameter.shape, parts(), p));
    for (const CutRun& run : parameter.cut->runs(parameter.shape, parts(), p, {0, held}))
      whole.narrow(0, run.whole.begin, run.whole.size()).copy_(all.narrow(0, p * most + run.local, run.whole.size()));
  }
  return whole.view(parameter.shape);
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
