// When things happened on each rank: the forwards and backwards of units, the collectives, and how long the rank waited for
// them. A program makes one Timeline for its world and passes it to `traced`:
//
//   auto comms = std::make_shared<MeshComm>(traced(comm, trace, timeline), mesh);
//   Sharded sharded = fully_shard(model.ptr(), comms, options);       // its units write their spans too
//
// Without a Timeline nothing is measured, and a unit pays for one comparison with null. Times are the host's: on a GPU they say
// when work was queued, not when the device did it.
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

class Trace;

// One thing that a rank did. Computations and waits of a rank nest. A collective begins with its call and ends when the rank
// knows that it is complete, so collectives overlap with all other spans.
struct Span {
  enum class Kind { computation, wait, collective };

  Kind kind = Kind::computation;
  std::string name;        // "forward", "backward", ...; of a collective and of the wait for it, its op
  std::string unit = {};   // what it was for, e.g. "unit 'h.3'"; "" where that is not known
  std::string group = {};  // of collectives and waits
  int64_t bytes = 0;       // of collectives, as in TraceRecord
  int64_t begin_ns = 0, end_ns = 0;  // of the steady clock, which processes of one host share
};

// The spans of a world. Its ranks share one object, and may use it at the same time.
class Timeline {
 public:
  // Begins a span of this rank now, and returns the number to end it with. A span without a unit gets that of the innermost
  // computation of the rank that has not ended yet.
  int64_t begin(int64_t rank, Span span);
  void end(int64_t rank, int64_t number);

  // The spans of one rank in the order in which they began. One that has not ended ends now.
  std::vector<Span> of_rank(int64_t rank) const;

 private:
  struct Rank {
    std::vector<Span> spans;
    std::vector<int64_t> open;  // computations that have not ended, the innermost at the back
  };
  mutable std::mutex mutex_;
  std::map<int64_t, Rank> ranks_;
};

// Measures a computation of a rank from here to the end of the scope. Does nothing when `timeline` is null.
class TimedSpan {
 public:
  TimedSpan(Timeline* timeline, int64_t rank, std::string name)
      : timeline_(timeline), rank_(rank), number_(timeline ? timeline->begin(rank, {.name = std::move(name)}) : 0) {}
  ~TimedSpan() {
    if (timeline_) timeline_->end(rank_, number_);
  }
  TimedSpan(const TimedSpan&) = delete;
  TimedSpan& operator=(const TimedSpan&) = delete;

 private:
  Timeline* timeline_;
  int64_t rank_, number_;
};

// As `traced` (traced.h), and also measures every call. The result has to be the outermost decorator, or units do not find the
// timeline.
std::shared_ptr<Comm> traced(std::shared_ptr<Comm> inner, std::shared_ptr<Trace> trace, std::shared_ptr<Timeline> timeline);

// The timeline that measures this communicator's calls; null when it is not measured.
std::shared_ptr<Timeline> timeline_of(const Comm& comm);

}  // namespace shardproof
