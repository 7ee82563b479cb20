// What a checkpoint asks of an optimizer, and what it gives back to it. `Optimizer` is one. A program that updates the shards
// by an optimizer of its own derives another one, and then saves and loads it as any.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shardproof/sharding/piece.h"

namespace shardproof {

// A setting and its name. std::monostate stands for Python's None, and a vector for a tuple of floats.
using Setting = std::pair<std::string, std::variant<std::monostate, bool, int64_t, double, std::vector<double>, std::string>>;

// Everything here is the same on every rank, but for the elements of shards. Nothing communicates.
//
// A save calls, on rank 0 alone, groups, and updates for each of their parameters. Then it calls, on every rank, state_names,
// state_shards for each of them, and scalars.
//
// A load calls groups and takes_settings, and compares them with the checkpoint. If all fits, it calls restore for each
// parameter of the groups, and after each of them replace_state for the state that it has read already. Then come
// restore_scalar for each scalar, restore_settings for each group, state_names, and state_shards for each of them, in this
// order. It fills the shards that were not replaced. With LoadOptions::partial these are the parameters that fit. If the
// checkpoint does not fit, or is damaged, it calls none of these.
class OptimizerState {
 public:
  // Parameters, with their state and settings. A parameter is in one group at most.
  struct Group {
    std::vector<std::string> parameters;
    std::vector<std::string> state_names;
    std::vector<std::string> scalar_names;  // of the scalars that a load must find where a parameter has state
    std::vector<Setting> settings;
  };
  // One number of a parameter's state.
  struct Scalar {
    std::string parameter, name;
    at::Tensor value;  // without dims, on the CPU
  };

  virtual ~OptimizerState() = default;
  virtual std::vector<Group> groups() const = 0;
  // The names of all state tensors, each once.
  virtual std::vector<std::string> state_names() const = 0;
  // One shard of each parameter that has this state, whether this rank holds a part or not. They lie as main parameters do, or
  // whole on every rank where the parameter is not sharded; a save throws Error where they do not. Whoever keeps an address and
  // not the tensor loses it at a load.
  virtual std::vector<Shard> state_shards(const std::string& state_name) const = 0;
  virtual std::vector<Scalar> scalars() const = 0;
  // How often a parameter has been updated so far; below 0: unknown.
  virtual int64_t updates(const std::string& parameter) const = 0;

  // For loading, as all below. Makes the parameter one that was updated `updates` times. With `with_state` this rank's part of
  // the state that its group names is allocated, and the load fills it; else the parameter has no state.
  virtual void restore(const std::string& parameter, int64_t updates, bool with_state) = 0;
  // Offers a 1-D tensor on the CPU with all values of this rank's part, in the state's dtype. The optimizer may keep it as the
  // state, and returns whether it does; if not, the load copies the values. It has to decline where somebody else has a tensor
  // of the old state, who would not see the new values. A load offers nothing on a device, or with check_before = false.
  virtual bool replace_state(const std::string& parameter, const std::string& state_name, at::Tensor values) { return false; }
  // One of its group's scalars.
  virtual void restore_scalar(const std::string& parameter, const std::string& name, const at::Tensor& value) {}
  // Whether settings are loaded, too. If not, the optimizer keeps those that it has.
  virtual bool takes_settings() const { return false; }
  // Those that the checkpoint has for the parameters of group `index`.
  virtual void restore_settings(size_t index, const std::vector<Setting>& settings) {}
};

}  // namespace shardproof
