// What a campaign asks about cases, each answered by a worker (workers.h).
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>

#include "harness/commands/verify_options.h"
#include "harness/commands/workers.h"
#include "harness/run/explain.h"

namespace harness {

// A case that was tried, and under how many schedules.
struct Judged {
  Case c;  // with the schedule under which it failed, where it fails under some only
  Verdict verdict;
  int64_t schedules = 0, schedules_distinct = 0;
  double seconds = 0;
};

// A failure seen from near.
struct CloseUp {
  Explanation looks_like;
  nlohmann::json picture;   // picture.h; null of engines
  nlohmann::json replicas;  // of the minimal case and of the original, from 1; null of engines and errors
};

class Judge {
 public:
  // Starts the workers. `options` must outlive this.
  explicit Judge(const VerifyOptions& options);

  // Any number of threads may call these. A case that ends its worker has the verdict that it crashes; a close-up that does is
  // empty. Throw Error where there are no ranks that could train a case.
  Verdict verdict_of(const Case& c);
  // With the schedules that the options ask for.
  Judged try_case(const Case& c);
  CloseUp look_at(const Case& minimal, const Verdict& verdict, const Case& original);

  // How many cases run at a time.
  int64_t size() const { return workers_.size(); }

 private:
  struct Reply;
  Reply ask(const nlohmann::json& request);
  nlohmann::json answer(const nlohmann::json& request);
  Ranks& ranks();

  const VerifyOptions& options_;
  std::unique_ptr<Ranks> own_ranks_;  // of a worker
  Workers workers_;
};

// Whether cases run in processes of their own.
bool has_workers(const VerifyOptions& options);

}  // namespace harness
