// What a campaign makes of its failures: each is counted with the one that explains it, or shrunk and told as a new one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "harness/case/failures.h"
#include "harness/commands/shrink.h"
#include "harness/commands/verify_options.h"
#include "harness/run/explain.h"

namespace harness {

struct Failure {
  Case original, minimal;
  std::string what;
  std::string kind;        // of failure (causes.h)
  Explanation looks_like;  // of the minimal case
  int64_t cases = 0;       // how many had run when it was found, itself included
  int64_t alike = 0;               // other cases that failed, and that the minimal one explains
  std::vector<Case> some_alike = {};  // the first of these
};

class Findings {
 public:
  // `judge` gives the verdict of a case, and `tell` writes a line of --json; several threads call both. `idle` counts threads
  // that have nothing to do, whose processors a shrink may use. All must outlive this.
  Findings(const VerifyOptions& options, const std::atomic<bool>& interrupted, std::atomic<int64_t>& idle,
           std::function<Verdict(const Case&)> judge, std::function<void(const nlohmann::json&)> tell);

  // Of a case that failed as the `cases`-th. Returns when it is sorted; shrinking takes its time.
  void add(const Case& c, const Verdict& verdict, int64_t cases);

  // Waits while the failures that are known or being shrunk are as many as are asked for: no other would be of interest, unless
  // one of them turns out to have a cause that is known.
  void wait_for_turn();

  // Whether as many failures are known as are asked for.
  bool enough() const;

  // At the end.
  std::vector<Failure> take() { return std::move(failures_); }

 private:
  void wait_for_turn(std::unique_lock<std::mutex>& lock);
  bool is_full() const;
  void end_turn();
  void sort(const Case& c, const Verdict& verdict, int64_t cases);
  std::optional<size_t> known_cause(const Case& c, const std::string& kind);
  Verdict judge_unless_interrupted(const Case& c) const;
  Shrunk shrunk(const Case& c, const Verdict& verdict) const;
  void add_alike(const Case& c, const Verdict& verdict, size_t cause);
  void add_failure(const Case& c, const Shrunk& shrunk, int64_t cases);
  nlohmann::json replicas_json(const Case& c) const;

  const VerifyOptions& options_;
  const std::atomic<bool>& interrupted_;
  std::atomic<int64_t>& idle_;
  std::function<Verdict(const Case&)> judge_;
  std::function<void(const nlohmann::json&)> tell_;
  Failures database_;

  std::mutex telling_;        // one at a time, and before the other
  mutable std::mutex mutex_;  // what follows
  std::condition_variable turn_;
  std::vector<Failure> failures_;  // grows at its end only
  int64_t shrinking_ = 0;
};

}  // namespace harness
