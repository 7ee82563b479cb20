// A decorator over any backend that writes down every call: who, what, in which group, how many bytes.
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
  std::string group;  // the communicator's name
  std::string call;   // as `describe` prints it
  int64_t bytes = 0;  // of the larger of the call's tensors: the whole buffer of a gather or scatter
};

// Shared by the ranks of a world; safe to use from all of them.
class Trace {
 public:
  void add(int64_t rank, TraceRecord record);
  // The calls of one rank of the world that `traced` was given, in order.
  std::vector<TraceRecord> of_rank(int64_t rank) const;
  // Calls and bytes by group and op, of one rank.
  std::string summary(int64_t rank) const;
  // Where the ranks' calls in one group first differ, in words; "" when they agree.
  std::string first_disagreement(const std::string& group) const;

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<TraceRecord>> records_;
};

// Groups of one make no calls, so they leave no records. Groups split from it are traced under the same ranks.
std::shared_ptr<Comm> traced(std::shared_ptr<Comm> inner, std::shared_ptr<Trace> trace);

}  // namespace shardproof
