// What a failed case looks like from outside: which rank holds which elements of each parameter, and which collectives each
// rank calls in the failing step.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness/case/case.h"
#include "shardproof/comm/traced.h"
#include "shardproof/sharding/piece.h"

namespace harness {

// A call of one rank. Calls of one column are one collective, or stand side by side in groups that have nothing to do with each
// other. Columns are an order and no times.
struct PicturedCall {
  int64_t column = 0;
  shardproof::TraceRecord record;
  bool differs = false;  // others of its group make another call there, or in another order
};

struct Picture {
  int64_t step = 0;
  shardproof::Mesh mesh;
  std::map<std::string, shardproof::ParameterPlacement> placements;
  std::vector<std::vector<PicturedCall>> calls;  // of each rank
};

// Trains the case once more, on rank-threads of the CPU. `step` below 0: the last one that any rank has begun. A case that ends
// in an error gives what was there until then.
Picture picture_of(const Case& c, int64_t step);

// The calls of each rank in columns: the k-th calls that ranks make in groups of one name share a column, which lies behind the
// columns of all that these ranks called before.
std::vector<std::vector<PicturedCall>> in_columns(const std::vector<std::vector<shardproof::TraceRecord>>& calls);

// For the page of `verify --report`. Large pictures are cut, and say how much is left out.
nlohmann::json to_json(const Picture& picture);

}  // namespace harness
