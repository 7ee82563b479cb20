// Schedules of rank-threads: who runs next, and when work in the background happens.
//
// Probabilistic concurrency testing (Burckhardt, Kothari, Musuvathi, Nagarakatte: "A Randomized Scheduler with Probabilistic
// Guarantees of Finding Bugs", ASPLOS 2010) gives each thread a random priority and runs the one with the highest. At d - 1
// random steps the thread that would run gets a priority below all others. A bug that needs d orderings among n threads and k
// steps is met with a probability of at least 1 / (n * k^(d-1)). Here work in the background counts as a thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/case/interleaving.h"
#include "shardproof/comm/threads/schedule_policy.h"

namespace harness {

std::shared_ptr<shardproof::SchedulePolicy> make_policy(const Interleaving& interleaving);
// Null where there is none.
inline std::shared_ptr<shardproof::SchedulePolicy> policy_of(const std::optional<Interleaving>& interleaving) {
  return interleaving ? make_policy(*interleaving) : nullptr;
}

// Follows a policy and keeps what it chose.
class RecordedPolicy final : public shardproof::SchedulePolicy {
 public:
  // `of_choices`: also the text of the trace, which takes memory.
  explicit RecordedPolicy(std::shared_ptr<SchedulePolicy> policy, bool with_text = false)
      : policy_(std::move(policy)), with_text_(with_text) {}

  size_t choose(std::span<const Choice> choices, int64_t running) override;

  // A place where something was chosen, in the numbers of Interleaving::choices.
  struct Point {
    int64_t chosen = 0, width = 0;  // 0 is the thread that came here, if it could go on, and else the first choice
  };
  const std::vector<Point>& points() const { return points_; }
  // Of all choices: schedules with the same digest are the same.
  uint64_t digest() const { return digest_; }
  // One line a choice: "rank 1", "rank 1 call 4", "rank 0 thread 1", "rank 2 copy 1".
  const std::string& text() const { return text_; }

 private:
  std::shared_ptr<SchedulePolicy> policy_;
  const bool with_text_;
  std::vector<Point> points_;
  uint64_t digest_ = 0;
  std::string text_;
};

}  // namespace harness
