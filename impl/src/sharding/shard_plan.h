// Which modules make up which unit, and whose each parameter is.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  int64_t room = 0;                // elements of the largest part along the axis that cuts it
  int64_t grad_partial_ranks = 1;  // so many ranks along that axis hold terms of its gradient
  int64_t expert_ranks = 1;        // so many ranks along ep hold parts of it, and their tokens are in its gradient already
  int64_t cut_dim = 0;             // along which Granularity::row cuts it
  int64_t granule = 1;             // elements that no cut takes apart, which may be more than there are
  int64_t bytes() const { return room * static_cast<int64_t>(tensor.element_size()); }
};

// A unit before its buckets exist.
struct UnitPlan {
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> modules;  // the first one names the unit
  UnitOptions options;
  std::vector<NamedParameter> parameters;
  std::vector<std::string> names = {};  // every name under which its modules are registered
  const std::string& name() const { return modules.front().first; }
};

// A module that is recomputed and is no unit.
struct RecomputedPlan {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
};

struct UnitPlans {
  std::vector<UnitPlan> units;  // in order of registration, the root first
  std::vector<RecomputedPlan> recomputed = {};
  // Every name of a sharded parameter and, for the ones that share a tensor, the name under which it is sharded.
  std::vector<std::pair<std::string, std::string>> aliases;
};

// Whether the module or parameter of this name lies below the module called `prefix`.
bool is_within(const std::string& name, const std::string& prefix);

// The names that a module around the one called `name` can have, innermost first: "a.b", "a" and "" for "a.b.c".
std::vector<std::string> modules_around(const std::string& name);

// A tensor belongs to the innermost unit of its first name; one that other units use as well belongs to the root, which is
// whole as long as any of them runs. Throws Error, naming module or parameter, when an entry is not below the root, a module is
// in two units, or a parameter cannot be sharded.
UnitPlans plan_units(const std::shared_ptr<torch::nn::Module>& root, const std::vector<Sharding::Entry>& entries,
                     const ShardOptions& options);

// Whether ShardOptions::keep_whole_numel_max says so. The same on every rank.
bool stays_whole(const NamedParameter& parameter, const ShardOptions& options);

// Parameters of one unit, split by dtype, device, requires-grad, terms, whether they stay whole and whether they are experts',
// and by size. The same on every rank.
std::vector<std::vector<NamedParameter>> split_into_buckets(const UnitPlan& plan, const ShardOptions& options);

}  // namespace shardproof
