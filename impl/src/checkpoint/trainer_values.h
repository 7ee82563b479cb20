// TrainerState and settings of the optimizer as values of a checkpoint.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "checkpoint/state_names.h"
#include "shardproof/checkpoint/saved_state.h"

namespace shardproof::checkpoint {

struct NamedValue {
  std::string name;
  Path path;
  Value value;
  std::string entry = {};  // the bytes of the entry; empty: they are made of the value
};

inline constexpr const char* kUpdates = "shardproof.updates";  // of each parameter, by name

inline constexpr const char* kMergedAdapters = "shardproof.merged_adapters";  // fingerprints, where there are any

// What this rank writes.
std::vector<NamedValue> trainer_values(const TrainerState& trainer, int64_t rank);
std::vector<NamedValue> optimizer_values(const OptimizerState& optimizer);
void add_merged_adapters(const std::vector<std::string>& fingerprints, std::vector<NamedValue>& values);
// The parameters and settings of the groups that `optimizer_values` wrote. Settings of kinds that `Setting` has not are left
// out.
std::vector<OptimizerState::Group> groups_of(const Checkpoint& checkpoint,
                                             const std::function<Value(const std::string&)>& read);

// `read` is called with names of values only. Names that are unknown are ignored.
TrainerState trainer_of(const Checkpoint& checkpoint, int64_t rank, const std::function<Value(const std::string&)>& read);

}  // namespace shardproof::checkpoint
