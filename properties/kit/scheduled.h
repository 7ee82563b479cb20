// Rank-threads under a policy.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "harness/run/policies.h"
#include "shardproof/comm/threads/threads.h"

namespace scheduled {

using Policy = std::shared_ptr<shardproof::SchedulePolicy>;
using Body = std::function<void(std::shared_ptr<shardproof::Comm>)>;

inline void run_under(const Policy& policy, int64_t world, const Body& body) {
  shardproof::ThreadsOptions options{.schedule = shardproof::ThreadsOptions::Schedule::serial};
  options.policy = policy;
  run_threads(world, body, options);
}

inline std::vector<harness::Interleaving> some_of_each() {
  using Kind = harness::Interleaving::Kind;
  return {{.kind = Kind::eager},
          {.kind = Kind::latest},
          {.kind = Kind::random, .seed = 5},
          {.kind = Kind::pct, .seed = 5, .depth = 2, .steps = 100},
          {.kind = Kind::pct, .seed = 5, .depth = 3, .steps = 100},
          {.kind = Kind::choices, .choices = {1, 0, 2, 1}}};
}

}  // namespace scheduled
