// What is known of a module that was made parallel.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "internal/hooks/attachments.h"
#include "shardproof/algebra/axes.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/nn/sequence_lengths.h"
#include "shardproof/parallel/tensor/parallel_plan.h"

namespace shardproof {

class ParallelState {
 public:
  ParallelState(std::shared_ptr<MeshComm> comms, ParallelPlan plan);

  const std::string& axis() const { return plan_.axis; }
  const ParallelPlan& plan() const { return plan_; }
  MeshComm& comms() const { return *comms_; }
  Comm& group() const { return *group_; }
  int64_t parts() const { return group_->size(); }
  int64_t part() const { return group_->rank(); }
  // The axis alone, as a view of the mesh: its ranks are the parts. Of a layout: the axis that it is on.
  const Mesh& view() const { return view_->mesh(); }
  const Mesh& view(const Layout& layout) const { return on(layout).mesh(); }
  // The ranks that hold different experts, 1 where no style gives any away; and this rank's group of them. Collective over the
  // mesh at first. Throws Error when another style named another number.
  Comm& share_experts(const ExpertParallel& style);
  int64_t expert_ranks() const { return experts_ ? experts_->mesh().size(axes::ep) : 1; }

  // The split of rows in `segments` over the axis; even when there are none.
  Split split(const std::vector<CutSegment>& segments) const {
    return segments.empty() ? Split{axis()} : split_in_segments(axis(), segments);
  }
  // The cut of a dim of these segments.
  DimCut dim_cut(const std::vector<CutSegment>& segments) const;

  void add(const at::Tensor& parameter, ParallelParameter description);
  // Null when the parameter is whole on every rank and its gradient is, too.
  const ParallelParameter* find(const at::Tensor& parameter) const;
  const std::vector<ParallelParameter>& parameters() const { return parameters_; }

  // The rank's cut of a whole parameter, and back.
  at::Tensor cut(const Layout& layout, const at::Tensor& whole) const;
  at::Tensor join(const ParallelParameter& parameter, const at::Tensor& local) const;  // collective

  // The sizes of this rank's cut.
  Shape local_shape(const ParallelParameter& parameter) const {
    return shardproof::local_shape(parameter.shape, view(parameter.layout), parameter.layout, on(parameter.layout).rank());
  }

  // Whole length of the activations that are split along the sequence: what the last module that saw them whole saw.
  int64_t sequence_length(int64_t local) const;
  void saw_sequence(int64_t length) { sequence_lengths()[number_] = length; }

  bool canonical = false;  // the module computes with canonical arithmetic
  bool sums_copied_keys = false;  // an Attention sums the gradients of key heads that are held in copies
  std::vector<std::pair<std::string, at::Tensor>> named;  // every parameter of the module, by its first name
  ParallelAttachments attached;
  void enter_sequentials(torch::nn::Module& root) { sequential_ = std::make_unique<SequentialEntries>(root); }

 private:
  std::unique_ptr<SequentialEntries> sequential_;
  std::shared_ptr<MeshComm> comms_;
  ParallelPlan plan_;
  Comm* group_;
  MeshComm& on(const Layout& layout) const;
  std::unique_ptr<MeshComm> view_;
  std::unique_ptr<MeshComm> experts_;  // the axis ep, and that of the plan
  std::vector<ParallelParameter> parameters_;
  std::unordered_map<const c10::TensorImpl*, size_t> of_tensor_;
  const int64_t number_ = new_sequence_number();
};

// What a style attaches to a module; the styles themselves are in styles.cpp and placements.cpp.
class StyleHooks : public ParallelHooks {
 public:
  explicit StyleHooks(std::weak_ptr<ParallelState> state) : state_(std::move(state)) {}
  std::shared_ptr<ParallelState> state() const { return state_.lock(); }

 private:
  std::weak_ptr<ParallelState> state_;  // which owns this
};

// The tensor gets the values that it has on rank 0 of the group; one on the meta device stays there. Collective.
void take_values_of_rank_0(const at::Tensor& tensor, Comm& group);

// That of the modules below root; null where none is parallel. Throws Error when they belong to several.
std::shared_ptr<ParallelState> parallel_state(const torch::nn::Module& root);

}  // namespace shardproof
