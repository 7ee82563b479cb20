#include "checkpoint/match_state.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

class Matcher {
 public:
  Matcher(const Checkpoint& checkpoint, const ModelNames& names) : checkpoint_(checkpoint), names_(names) {}

  Matched match(const std::vector<OptimizerState::Group>* groups,
                const std::function<int64_t(const std::string&)>& updates_of) {
    for (const auto& [name, parameter] : names_.parameters) match_parameter(name, parameter);
    for (const auto& [name, tensor] : names_.plain)
      if (fits(model_key(name), tensor.scalar_type(), tensor.sizes().vec())) result_.plain.push_back(name);
    for (const std::string& name : names_.extra)
      if (has_one_entry(model_key(name))) result_.extra.push_back(name);
    for (const std::string& first : names_.kept_along)
      for (const auto& [name, parameter] : names_.parameters)
        if (const std::string key = kept_key(first, name); fits(key, parameter.dtype, parameter.sizes))
          result_.kept_along.insert(key);
    if (groups)
      for (const OptimizerState::Group& group : *groups)
        for (const std::string& name : group.parameters) match_state(name, group, updates_of);
    for (const std::string& name : names_.transient) known_.insert(model_key(name));  // another program may have saved them
    find_extra(groups != nullptr);
    return std::move(result_);
  }

 private:
  bool fits(const std::string& key, Dtype dtype, const Shape& sizes) {
    known_.insert(key);
    const auto found = checkpoint_.tensors.find(key);
    if (found == checkpoint_.tensors.end()) {
      result_.misfits.push_back(message("{} is missing from the checkpoint", key));
      return false;
    }
    const StoredTensor& stored = found->second;
    if (stored.sizes != sizes)
      result_.misfits.push_back(message("{} has shape [{}] in the checkpoint and [{}] here", key, fmt::join(stored.sizes, ", "),
                                        fmt::join(sizes, ", ")));
    else if (stored.dtype != dtype)
      result_.misfits.push_back(
          message("{} is {} in the checkpoint and {} here", key, dtype_info(stored.dtype).name, dtype_info(dtype).name));
    return stored.sizes == sizes && stored.dtype == dtype;
  }

  // PyTorch saves a tensor of extra state as one, and all else as a value.
  bool has_one_entry(const std::string& key) {
    known_.insert(key);
    const auto found = checkpoint_.tensors.find(key);
    if (found == checkpoint_.tensors.end() ? checkpoint_.values.contains(key) : found->second.chunks.size() == 1) return true;
    result_.misfits.push_back(message("{} is missing from the checkpoint", key));
    return false;
  }

  // A tied parameter is there if it is under any of its names.
  void match_parameter(const std::string& name, const ModelParameter& parameter) {
    std::string chosen = name;
    for (const std::string& other : parameter.other_names) {
      known_.insert(model_key(other));
      if (!checkpoint_.tensors.contains(model_key(chosen)) && checkpoint_.tensors.contains(model_key(other))) chosen = other;
    }
    known_.insert(model_key(name));
    if (fits(model_key(chosen), parameter.dtype, parameter.sizes)) result_.parameters.emplace_back(name, model_key(chosen));
  }

  // Of a parameter that is not sharded, too: an optimizer may have taken it.
  ModelParameter parameter_of(const std::string& name) const {
    if (const auto found = names_.parameters.find(name); found != names_.parameters.end()) return found->second;
    const at::Tensor& plain = names_.plain.at(name);
    return {plain.scalar_type(), plain.sizes().vec(), plain.requires_grad(), {}};
  }

  void match_state(const std::string& name, const OptimizerState::Group& group,
                   const std::function<int64_t(const std::string&)>& updates_of) {
    const std::vector<std::string>& state_names = group.state_names;
    known_.insert(state_key(name, "step"));
    const ModelParameter parameter = parameter_of(name);
    const bool saved = std::any_of(state_names.begin(), state_names.end(), [&](const std::string& state_name) {
      return checkpoint_.tensors.contains(state_key(name, state_name));
    });
    // Before the first update state is zero, or is not there yet.
    if (!saved && (!parameter.trains || updates_of(name) == 0)) return result_.states.push_back({name, 0, {}});
    bool all = true;
    for (const std::string& state_name : state_names)
      all &= fits(state_key(name, state_name), parameter.dtype, parameter.sizes);
    for (const std::string& scalar : group.scalar_names) all &= is_number(state_key(name, scalar));
    if (all) result_.states.push_back({name, std::max<int64_t>(0, updates_of(name)), state_names, group.scalar_names});
  }

  // PyTorch saves what an optimizer holds as a tensor as one, and a number of Python as a value.
  bool is_number(const std::string& key) {
    known_.insert(key);
    const auto found = checkpoint_.tensors.find(key);
    if (found == checkpoint_.tensors.end() ? checkpoint_.values.contains(key) : numel(found->second.sizes) == 1) return true;
    result_.misfits.push_back(found == checkpoint_.tensors.end()
                                  ? message("{} is missing from the checkpoint", key)
                                  : message("{} has shape [{}] in the checkpoint, and here it is one number", key,
                                            fmt::join(found->second.sizes, ", ")));
    return false;
  }

  void find_extra(bool with_optimizer) {
    const auto check = [&](const std::string& key) {
      const bool ours = key.starts_with("model.") || (with_optimizer && key.starts_with("optim.state."));
      if (ours && !known_.contains(key))
        result_.misfits.push_back(message("{} is in the checkpoint and nothing here has that name", key));
    };
    for (const auto& [key, tensor] : checkpoint_.tensors) check(key);
    for (const auto& [key, extent] : checkpoint_.values) check(key);
  }

  const Checkpoint& checkpoint_;
  const ModelNames& names_;
  std::set<std::string> known_;
  Matched result_;
};

}  // namespace

Matched match_state(const Checkpoint& checkpoint, const ModelNames& names, const std::vector<OptimizerState::Group>* groups,
                    const std::function<int64_t(const std::string&)>& updates_of) {
  return Matcher(checkpoint, names).match(groups, updates_of);
}

}  // namespace shardproof::checkpoint
