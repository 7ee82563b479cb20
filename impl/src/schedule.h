// When things happen: gathers around a unit's forward and backward, reduces as gradients arrive, frees as soon as nobody
// reads. One Schedule a sharded module, one Unit a wrapped module.
//
// A backward has no owner in LibTorch, so it is recognised by what it touches: the first output hook or gradient hook that
// fires begins it and queues one callback for its end, which catches whatever never fired. A unit's parameters are freed
// once all its gradients have arrived and the backward has left it through every watched input: then no node is left that
// could read them. Reduces start in one fixed order, last bucket first, so that all ranks agree on it.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "bucket.h"
#include "shardproof/unit.h"

namespace shardproof {

class Schedule;

class Unit final : public UnitHooks {
 public:
  enum class Residency { sharded, gathering, unsharded };

  Unit(Schedule& schedule, std::string name, std::vector<std::unique_ptr<Bucket>> buckets, bool keeps_after_forward);
  ~Unit() override;

  const std::string& name() const { return name_; }
  const std::vector<std::unique_ptr<Bucket>>& buckets() const { return buckets_; }
  Residency residency() const { return residency_; }

  void before_forward() override;
  at::Tensor watch_input(const at::Tensor& input) override;
  void watch_output(const at::Tensor& output) override;
  void after_forward() override;

  // sharded -> gathering -> unsharded; nothing when already there.
  void start_unshard();
  void finish_unshard();
  // unsharded -> sharded; nothing when already there.
  void reshard();

  void on_gradient(Bucket& bucket, int64_t slot, const at::Tensor& gradient);
  void on_input_gradient();
  void end_backward();

 private:
  void before_backward();
  void reshard_when_done();

  Schedule& schedule_;
  std::string name_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  bool keeps_after_forward_;
  Residency residency_ = Residency::sharded;
  int64_t trainable_count_ = 0;  // parameters
  int64_t arrived_count_ = 0;    // of their gradients, in this backward
  int64_t inputs_watched_ = 0;   // backward has still to leave through so many
};

class Schedule {
 public:
  // `rank` is only named in messages.
  explicit Schedule(int64_t rank) : rank_(rank) {}
  Schedule(const Schedule&) = delete;

  void add(std::unique_ptr<Unit> unit) { units_.push_back(std::move(unit)); }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  // Every bucket, in unit order.
  std::vector<Bucket*> buckets() const;

  void set_last_microbatch(bool last) { last_microbatch_ = last; }
  // Throws Error, naming `what`, unless the last backward of this step is over.
  void require_final(const char* what) const;
  void zero_gradients();
  // The optimizer changed parameters: whatever is gathered is stale.
  void parameters_changed();
  int64_t step() const { return step_; }

  void begin_backward();
  void bucket_complete();

 private:
  void end_backward();
  void start_ready_reduces();
  void start_reduce(Bucket& bucket);

  int64_t rank_;
  int64_t step_ = 0;
  bool last_microbatch_ = true;
  std::vector<std::unique_ptr<Unit>> units_;

  bool in_backward_ = false;
  std::vector<Bucket*> to_reduce_;  // of this backward, the next one at the back
  std::deque<Bucket*> reducing_;
};

}  // namespace shardproof
