// Who decides, in a world of rank-threads that run one at a time, what happens next. The choices of a policy are the whole
// schedule: the same program under the same choices takes the same course.
#pragma once

#include <compare>
#include <cstdint>
#include <span>

namespace shardproof {

class SchedulePolicy {
 public:
  // What can go on. It has the same name under every schedule of a program.
  struct Actor {
    enum class Kind {
      rank,         // a rank-thread
      host_thread,  // a thread that the library has started for a rank
      collective,   // the effect of a call on the tensors of one rank, once all ranks have made the call
      copy          // a copy of a rank that is under way
    };
    Kind kind = Kind::rank;
    int64_t rank = 0;
    int64_t number = 0;  // of a rank's calls, copies or threads, in the order in which the rank starts them
    auto operator<=>(const Actor&) const = default;
  };
  // What can happen next: the actor, and whether a thread is waiting for it.
  struct Choice {
    Actor actor;
    bool awaited = false;
  };

  virtual ~SchedulePolicy() = default;

  // Returns the index of one of the choices, which are in ascending order of their actors and not empty. `running` is the index
  // of the thread that came here and could go on, or -1. Called by one thread at a time, when a thread starts a collective or
  // waits for it, starts or waits for other work, pauses or ends, and after each effect.
  virtual size_t choose(std::span<const Choice> choices, int64_t running) = 0;
};

}  // namespace shardproof
