// An optimizer that lives in Python, on the shards of a model, as checkpoints see it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "sharded.h"
#include "shardproof/optim/optimizer_state.h"

namespace shardproof::python {

// Made for one save or one load. For a save Python tells what this rank holds, and `share` the rest; after a load Python takes
// what is here.
class ForeignOptimizer final : public OptimizerState {
 public:
  struct State {
    std::map<std::string, at::Tensor> tensors;  // 1-D, in the storage order of the shard
    std::map<std::string, at::Tensor> scalars;  // without dims
  };

  // `plain`: parameters of the groups that are not sharded, by name.
  ForeignOptimizer(ShardedMirror& held, std::vector<Group> groups, const std::map<std::string, at::Tensor>& plain);

  // What this rank has of a parameter of which it holds elements. Nothing: the parameter has no state yet.
  void hold(const std::string& parameter, State state);
  // This rank cannot save, which `share` tells the others.
  void fail(std::string error) { error_ = std::move(error); }
  // Every rank learns which parameters have state, and their scalars. Throws Error on every rank when one failed, or when two
  // ranks that hold parts of a parameter differ. Collective over the mesh.
  void share();
  // Whether a load has set the state of the parameter. It has not where that of the checkpoint does not fit.
  bool is_restored(const std::string& parameter) const { return parameters_.at(parameter).is_restored; }
  // Nothing of a parameter without state.
  State state(const std::string& parameter) const { return parameters_.at(parameter).state; }
  const std::map<size_t, std::vector<Setting>>& loaded_settings() const { return loaded_settings_; }

  std::vector<Group> groups() const override { return groups_; }
  std::vector<std::string> state_names() const override;
  std::vector<Shard> state_shards(const std::string& state_name) const override;
  std::vector<Scalar> scalars() const override;
  int64_t updates(const std::string& parameter) const override;
  void restore(const std::string& parameter, int64_t updates, bool with_state) override;
  bool replace_state(const std::string& parameter, const std::string& state_name, at::Tensor values) override;
  void restore_scalar(const std::string& parameter, const std::string& name, const at::Tensor& value) override;
  bool takes_settings() const override { return true; }
  void restore_settings(size_t index, const std::vector<Setting>& settings) override { loaded_settings_[index] = settings; }

 private:
  struct Parameter {
    Shape shape;
    Placement at;
    at::TensorOptions options = {};
    int64_t numel = 0;  // of this rank
    size_t group = 0;
    State state = {};
    bool is_restored = false;
  };
  std::string told() const;

  Comm& world_;
  const int64_t rank_;
  const std::vector<Group> groups_;
  std::map<std::string, Parameter> parameters_;
  std::map<size_t, std::vector<Setting>> loaded_settings_;  // by group
  std::string error_;
};

}  // namespace shardproof::python
