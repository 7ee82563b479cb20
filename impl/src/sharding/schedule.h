// When things happen: gathers around a unit's forward and backward, reduces as gradients arrive, frees as soon as nobody
// reads. One Schedule a sharded module, one Unit a wrapped module or list of them.
//
// A backward has no owner in LibTorch, so it is recognised by what it touches: the first output hook or gradient hook that
// fires begins it and queues one callback for its end, which catches whatever never fired. A unit's parameters are freed
// once all its gradients have arrived and the backward has left it through every watched input: then no node is left that
// could read them. Reduces start in one fixed order, last bucket first, so that all ranks agree on it.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/bucket.h"
#include "shardproof/hooks/unit.h"

namespace shardproof {

class Unit;

struct ScheduleOptions {
  int64_t rank = 0;  // only named in messages
  int64_t bytes_in_flight_max = 0;
  Buffers buffers = Buffers::freed;
};

class Schedule {
 public:
  Schedule(ScheduleOptions options, std::shared_ptr<MemoryLedger> memory);
  Schedule(const Schedule&) = delete;
  ~Schedule();

  void add(std::shared_ptr<Unit> unit) { units_.push_back(std::move(unit)); }
  const std::vector<std::shared_ptr<Unit>>& units() const { return units_; }
  // Every bucket, in unit order.
  std::vector<Bucket*> buckets() const;

  void set_last_microbatch(bool last);
  void set_gradient_sync(bool sync);
  bool gradient_sync() const { return sync_; }
  // Runs at the end of every last backward.
  void set_finish(std::function<void()> finish) { finish_ = std::move(finish); }

  // Throws Error, naming `what`, unless the last backward of this step is over.
  void require_final(const char* what) const;
  void zero_gradients();
  // A step is over. The optimizer changed parameters: whatever is gathered is stale.
  void end_step(bool parameters_changed);
  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }  // of a run that is resumed
  int64_t rank() const { return options_.rank; }

  // Throws Error after a backward that ended in an exception, until zero_gradients.
  bool in_backward() const;
  void begin_backward();
  void unit_left() { start_ready_reduces(); }

  // Starts gathering these units, in order, as far as the limits allow.
  void gather_ahead(const std::vector<Unit*>& units);

  // A forward without a graph whose backward will come: units behave as in training.
  int64_t recomputed_forwards = 0;

 private:
  void end_backward();
  bool interrupted() const;
  void abandon_backward();
  void start_ready_reduces();
  void start_reduce(Bucket& bucket);
  int64_t bytes_in_flight() const;
  bool fits(const Unit& unit) const;

  ScheduleOptions options_;
  std::shared_ptr<MemoryLedger> memory_;
  int64_t step_ = 0;
  bool last_microbatch_ = true, sync_ = true;
  std::function<void()> finish_;
  std::vector<std::shared_ptr<Unit>> units_;

  bool in_backward_ = false, ending_ = false;
  struct Waiting {
    Unit* unit;
    Bucket* bucket;
  };
  std::vector<Waiting> to_reduce_;  // of this backward, the next one at the back
  std::deque<Bucket*> reducing_;
};

}  // namespace shardproof
