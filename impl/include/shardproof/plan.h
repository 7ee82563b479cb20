// What must move to turn one placement of a tensor into another, on the same mesh or on two different ones.
// Pure integers, no Torch. `plan` is the general answer and the oracle; `lower` names the one collective that does the
// same on one mesh, where there is one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/layout.h"

namespace shardproof {

struct Placement {
  Mesh mesh;
  Layout layout;
  bool operator==(const Placement&) const = default;
};

// `box` of the tensor goes from rank `source` of one mesh to rank `target` of the other. When several transfers reach
// the same element of a target, their values are summed in list order (terms of a partial sum, ascending by source).
struct Transfer {
  int64_t source = 0;
  int64_t target = 0;
  Box box;
  bool operator==(const Transfer&) const = default;
};

// Every transfer, ordered by target, then source. A rank that already has what it wants "sends" to itself.
// Laws: (1) executing it gives each target exactly owned(to); (2) without partial axes in `from`, each wanted element
// arrives once; (3) on one mesh, a replica takes from itself or from the source that shares its coordinates along the
// replicated axes; (4) a target axis that is partial while the source is not receives the value at coordinate 0 and
// nothing elsewhere.
std::vector<Transfer> plan(const Shape& shape, const Placement& from, const Placement& to);

// The rows of `plan` with this target or source, computed without enumerating the others.
std::vector<Transfer> plan_for_target(const Shape& shape, const Placement& from, const Placement& to, int64_t target);
std::vector<Transfer> plan_for_source(const Shape& shape, const Placement& from, const Placement& to, int64_t source);

enum class Step { none, slice, all_gather, all_reduce, reduce_scatter, all_to_all, general };
const char* to_string(Step step);

constexpr int64_t kFlat = -1;  // "the flat run" where a dim is asked for

// One step on one mesh.
struct Lowered {
  Step step = Step::none;
  std::vector<std::string> axes;  // along which ranks take part; empty for none
  int64_t dim = kFlat;            // the dim (or kFlat) that is split in `from`, or in `to` if it is not in `from`
  int64_t dim_to = kFlat;         // all_to_all: the dim that is split afterwards
  bool operator==(const Lowered&) const = default;
};

// A step is one collective when a single innermost split or partial axis changes. Equal layouts (after `canonical`) give
// none. Law: executing any lowered step with a loop over ranks equals executing the plan.
Lowered lower(const Shape& shape, const Mesh& mesh, const Layout& from, const Layout& to);

}  // namespace shardproof
