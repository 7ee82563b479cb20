// The last calls of a rank, for when something went wrong: who called what, and how far it came. No Torch, no MPI.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof {

// A group of ranks, as records name it.
struct FlightGroup {
  uint64_t id = 0;  // the same on all of its ranks
  std::string name;
  std::vector<int64_t> ranks;  // in the world
};

struct FlightCall {
  enum class State { started, done, failed };

  std::shared_ptr<const FlightGroup> group;
  int64_t sequence = 0;
  const char* op = "";
  const char* reduce = "";  // of sums, maxima, minima
  std::string_view dtype = {};
  int64_t numel = 0;
  int64_t peer = -1;  // a broadcast's root, the other end of a send
  int64_t bytes = 0;  // given and taken by this rank
  std::string label = {};
  State state = State::started;
  double start_s = 0, end_s = 0;  // since the record began
};

class FlightRecord {
 public:
  FlightRecord(int64_t rank, int64_t world, int64_t calls_max);

  // Returns the number to mark its end with.
  int64_t add(FlightCall call);
  void mark(int64_t number, FlightCall::State state);

  // "all_reduce(sum, float32 x 8), call 3 on 'world', for unit 'h.3'": the last call; "" when there is none.
  std::string last() const;
  // Into DIRECTORY/rank_N.jsonl: a line about the rank with `why`, then one a call, the oldest first. Makes the directory.
  // Never throws: it reports what went wrong, or "".
  std::string write(const std::string& directory, const std::string& why) const;

 private:
  double now_s() const;

  const int64_t rank_, world_, calls_max_;
  const double begin_s_;
  mutable std::mutex mutex_;
  std::vector<FlightCall> calls_;  // call n at n % calls_max_
  int64_t next_ = 0;
};

}  // namespace shardproof
