// A decorator for any backend. It records every call: which rank made it, in which group, what it was and how many bytes it
// had.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

struct TraceRecord {
  std::string op;     // "all_gather", ...
  std::string group;  // the name of the communicator
  std::string call;   // as `describe` (comm.h) prints it
  int64_t bytes = 0;  // the size of the larger of the call's two tensors, e.g. the whole buffer of an all_gather
};

// The records of a world. Its ranks share one object, and may use it at the same time.
class Trace {
 public:
  void add(int64_t rank, TraceRecord record);
  // The calls of one rank in the order in which it made them. Ranks are those of the world that `traced` was given.
  std::vector<TraceRecord> of_rank(int64_t rank) const;
  // The numbers of calls and bytes of one rank, by group and kind of call, as text.
  std::string summary(int64_t rank) const;
  // Says where the ranks' calls in one group first differ; "" when they agree.
  std::string first_disagreement(const std::string& group) const;

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<TraceRecord>> records_;
};

// A group of one rank makes no calls, so it leaves no records. Groups that are split from the result write into the same trace,
// under the ranks of `inner`.
std::shared_ptr<Comm> traced(std::shared_ptr<Comm> inner, std::shared_ptr<Trace> trace);

}  // namespace shardproof
