// What a campaign makes of its failures: each is counted with the one that explains it, or shrunk and told as a new one.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness/case/failures.h"
#include "harness/commands/judge.h"
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
  // `tell` writes a line of --json. All must outlive this.
  Findings(const VerifyOptions& options, const std::atomic<bool>& interrupted, Judge& judge,
           std::function<void(const nlohmann::json&)> tell);

  // Of a case that failed as the `cases`-th. Returns when it is sorted; shrinking takes its time. One at a time.
  void add(const Case& c, const Verdict& verdict, int64_t cases);

  // Whether as many failures are known as are asked for. Any thread may ask.
  bool enough() const { return enough_; }

  // At the end.
  std::vector<Failure> take() { return std::move(failures_); }

 private:
  Failure* known_cause(const Case& c, const std::string& kind);
  Verdict judge_unless_interrupted(const Case& c) const;
  Shrunk shrunk(const Case& c, const Verdict& verdict) const;
  void add_alike(const Case& c, const Verdict& verdict, Failure& known);
  void add_failure(const Case& c, const Shrunk& shrunk, int64_t cases);

  const VerifyOptions& options_;
  const std::atomic<bool>& interrupted_;
  Judge& judge_;
  std::function<void(const nlohmann::json&)> tell_;
  Failures database_;
  std::vector<Failure> failures_;
  std::atomic<bool> enough_{false};
};

}  // namespace harness
