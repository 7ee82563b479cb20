// What a model and its optimizer have, by the names that checkpoints use.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof::checkpoint {

struct ModelParameter {
  Dtype dtype = Dtype::Float;  // of the main parameter
  Shape sizes;
  bool trains = false;
  Placement at;                          // of the main parameter
  std::vector<std::string> other_names;  // of a tied one
};

// The same on every rank.
struct ModelNames {
  std::map<std::string, ModelParameter> parameters;  // sharded ones, by their first name
  std::map<std::string, at::Tensor> plain;  // buffers of state, and parameters that are not sharded: whole on every rank
  std::set<std::string> transient;          // buffers that are no state
  std::set<std::string> extra;              // what modules keep beside tensors
  std::vector<std::string> kept_along;  // the first parts of names of what has one tensor for each parameter, as averages
  Placement everywhere;                 // whole on every rank

  // Where the main parameter lies, its optimizer's state and what is kept along: `everywhere` where it is not sharded.
  // Throws Error where the model has none of that name.
  const Placement& state_placement(const std::string& parameter) const;
};
ModelNames names_of_model(Sharded& sharded);

std::string model_key(const std::string& name);
std::string state_key(const std::string& parameter, const std::string& state_name);
std::string kept_key(const std::string& first, const std::string& parameter);
Path model_path(const std::string& name);
Path state_path(const std::string& parameter, const std::string& state_name);
Path kept_path(const std::string& first, const std::string& parameter);

}  // namespace shardproof::checkpoint
