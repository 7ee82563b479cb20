// The time of a recorded step on a stated machine. Operators follow each other as the rank called them. A collective begins
// when the rank started it and the link is free, and goes on beside the operators; a wait lasts until it is over. So what
// prefetching and late reductions hide is what they hide in the step that the library ran. All ranks are taken to do the same
// at the same time.
#pragma once

#include <map>
#include <string>

#include "harness/plan/machine.h"
#include "harness/plan/step_record.h"

namespace harness {

// `ranks_on_host` is how many ranks share the cores of a host.
double operator_seconds(const Operator& what, const Machine& machine, int64_t ranks_on_host);

// How a group lies on hosts. Rank r of the world is on host r / ranks_per_host.
struct Spread {
  int64_t ranks = 1;
  int64_t hosts = 1;
  int64_t on_a_host = 1;  // at most
};
Spread spread_of(const RankGroup& group, const Machine& machine);

// Of a group of n ranks with B bytes in its larger tensor, each rank of a ring sends (n - 1) / n of B, and twice that in an
// all_reduce. Where ranks lie on several hosts, each host's ranks share what their adapters carry. A ring has a step for each
// further rank of a host; between hosts there are as many as the logarithm of their number, as in a tree.
double collective_seconds(const Collective& what, const Spread& spread, const Machine& machine);

struct StepTime {
  double seconds = 0;
  double computing = 0;      // the sum over operators
  double communicating = 0;  // the sum over collectives
  double waiting = 0;        // of the rank, for collectives; computing + waiting is all
  std::map<std::string, double> communicating_by_group;
};

StepTime walk(const StepRecord& record, const Machine& machine);

// The machine's efficiency of matrix products with which the step takes so many seconds: between 0.05 and 1.
double efficiency_of(const StepRecord& record, Machine machine, double seconds);

// 0.00123 as "1.23 ms".
std::string seconds_text(double seconds);

}  // namespace harness
