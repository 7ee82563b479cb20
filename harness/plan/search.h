// Every mesh and strategy for a number of ranks, each with the memory and the time that it takes.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/plan/dry_run.h"
#include "harness/plan/machine.h"
#include "harness/plan/timeline.h"

namespace harness {

struct Choice {
  shardproof::Mesh mesh;
  std::string strategy;
};

// Powers of two along tp, up to a host's ranks; zero1, zero2 and zero3 over all the rest; hsdp and hfsdp with every power of
// two of replicas. Where the ranks are no power of two, what is left of them lies along dp_shard.
std::vector<Choice> choices_for(int64_t ranks, const Machine& machine);

struct SearchLimits {
  int64_t ranks = 8;
  double memory_max = 0;
};

struct Found {
  Choice choice;
  int64_t peak_bytes = 0;
  StepTime time;
  double tokens_per_second = 0;  // or samples, of all ranks together
  bool fits = false;
};

struct SearchResult {
  std::vector<Found> found;          // those that fit, fastest first; then those that do not, smallest first
  std::vector<std::string> refused;  // why the library takes a choice not, once for each reason
};

// `shown` hears how many choices were looked at, and of how many.
SearchResult search(const DryRun& what, const SearchLimits& limits, const Machine& machine,
                    const std::function<void(size_t, size_t, const Choice&)>& shown);

// Tokens of a step, or samples where the model has no tokens.
int64_t tokens_of_step(const DryRun& what);

}  // namespace harness
