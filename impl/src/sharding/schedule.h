// When things happen: gathers around a unit's forward and backward, reduces as gradients arrive, frees as soon as nobody
// reads. One Schedule a sharded module, one Unit a wrapped module or list of them.
//
// A backward has no owner in LibTorch, so it is recognised by what it touches: the first output hook or gradient hook that
// fires begins it and queues one callback for its end, which catches whatever never fired. A unit's parameters are freed
// once all its gradients have arrived and the backward has left it: then no node is left that could read them. Reduces start
// in one fixed order, last bucket first, so that all ranks agree on it.
//
// The state machine of training is made of four, each an enum where it lives:
//
//   Schedule::Phase   the backward of the whole module, below
//   Unit's passage    of one unit through it (unit.h)
//   Residency         where the parameters of a bucket live (bucket_parameters.h)
//   GradientState     how far a bucket's gradient is (bucket_gradient.h)
//
//   Phase        event                                      then
//   outside      first gradient or output hook              backward: every trainable bucket expects its gradients
//   backward     a unit is left                             backward: buckets whose turn it is are reduced; with delayed
//                                                           gradients this waits until the next unit's gather has started
//   backward     autograd's callback at its end             ending: what never fired is caught, everything is reduced
//   ending       all reductions have finished               outside: after the last microbatch, finishing steps run
//   backward     an exception ends it: no graph task runs   interrupted: only zero_gradients and the switches are no errors
//   interrupted  zero_gradients                             outside: what was started in common is awaited, the rest dropped
#pragma once

#include <fmt/format.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "sharding/unit.h"
#include "shardproof/comm/require_same.h"

namespace shardproof {

struct ScheduleOptions {
  int64_t rank = 0;  // only named in messages
  int64_t bytes_in_flight_max = 0;
  Buffers buffers = Buffers::freed;
  Comm* compares = nullptr;  // of all ranks, where its backend does not compare what calls are for; null: nobody has to
  // Only in the first backward, the second, the fourth, the eighth and so on: a host waits for its device to compare.
  bool compares_seldom = false;
};

class Schedule final : public UnitEvents {
 public:
  enum class Phase { outside, backward, ending, interrupted };

  Schedule(ScheduleOptions options, std::shared_ptr<MemoryLedger> memory);
  Schedule(const Schedule&) = delete;
  ~Schedule() override;

  void add(std::shared_ptr<Unit> unit);
  // A module that is recomputed and is no unit: it has no bucket, and no other unit knows of it.
  void add_recomputed(std::shared_ptr<Unit> module) { recomputed_.push_back(std::move(module)); }
  const std::shared_ptr<ActivationStore>& activations() const { return activations_; }
  void set_activations(std::shared_ptr<ActivationStore> activations) { activations_ = std::move(activations); }
  const std::shared_ptr<DelayedGradients>& delayed() const { return delayed_; }
  void set_delayed(std::shared_ptr<DelayedGradients> delayed) { delayed_ = std::move(delayed); }
  const std::vector<std::shared_ptr<Unit>>& units() const { return units_; }
  // Every bucket, in unit order.
  const std::vector<Bucket*>& buckets() const { return buckets_; }
  // Where a parameter lies, by its first name: which of the buckets, and which member of it. Null when there is none.
  struct Place {
    size_t bucket, member;
  };
  const Place* find(const std::string& parameter) const;

  void set_last_microbatch(bool last);
  void set_gradient_sync(bool sync);
  bool gradient_sync() const { return sync_; }
  // Runs at the end of every last backward.
  void set_finish(std::function<void()> finish) { finish_ = std::move(finish); }
  // See watch_backwards (hand_over.h).
  void set_watcher(std::function<void(bool begins)> watcher) { watcher_ = std::move(watcher); }
  // Who has the gradients of the last backward.
  void note_taken(const char* who) { taken_by_ = who; }

  // Throws Error, naming `what`, inside a backward.
  void require_no_backward(const char* what) const;
  // Throws Error, naming `what`, unless the last backward of this step is over.
  void require_final(const char* what) const;
  void zero_gradients();
  // A step is over. The optimizer changed parameters: whatever is gathered is stale.
  void end_step(bool parameters_changed);
  // The same, but what has accumulated stays.
  void begin_next_step();
  int64_t step() const { return progress_->steps; }  // how many are over
  // The step under way, as messages count: the first one is step 1.
  int64_t current_step() const { return step() + 1; }
  void set_step(int64_t step) { *progress_ = {step, ""}; }  // of a run that is resumed
  std::shared_ptr<const Progress> progress() const { return progress_; }
  // What every rank does in this step besides what it exchanges. The next exchange shows whether all did.
  void note(const std::string& done) { noted_ += (noted_.empty() ? " after " : "; ") + done; }
  int64_t rank() const { return options_.rank; }

  Phase phase() const;
  void require_outside(const std::string& what) const override;
  // Throws Error after a backward that ended in an exception, until zero_gradients.
  bool in_backward() const override;
  void begin_backward(uint64_t first) override;
  void unit_left() override {
    if (!delayed_) start_ready_reduces();
  }
  void before_wait() override;
  void gathers(const std::string& unit) override;
  void gather_ahead(const std::vector<Unit*>& units) override;

 private:
  std::string why_not_final(const BucketGradient& gradient) const;
  void take_gradients(const char* who);
  void end_backward();
  void end_backward_within_units();
  void begin_comparison();
  void end_comparison();
  void require_recomputed_entered() const;
  bool reaches_parameters() const;
  void abandon_backward();
  void start_ready_reduces();
  void start_reduce(Bucket& bucket);
  bool fits(const Bucket& bucket) const;
  // Waits for the oldest sum under way, and starts the next one of its bucket.
  void advance_oldest();
  int64_t bytes_in_flight() const;
  bool fits(const Unit& unit) const;

  ScheduleOptions options_;
  std::shared_ptr<MemoryLedger> memory_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::string noted_;
  const char* taken_by_ = nullptr;  // what took or discarded the gradients of the last backward
  bool last_microbatch_ = true, sync_ = true;  // switches of the user's, which know nothing of each other; see Backward
  std::function<void()> finish_;
  std::function<void(bool begins)> watcher_;  // empty: nobody watches
  std::vector<std::shared_ptr<Unit>> units_, recomputed_;
  std::shared_ptr<ActivationStore> activations_;  // null: no unit has its activations elsewhere
  std::shared_ptr<DelayedGradients> delayed_;     // null: no gradient is made later
  std::vector<Bucket*> buckets_;                  // of the units
  std::unordered_map<std::string, Place> places_;

  // What the backward under way makes.
  enum class Backward {
    of_inputs,  // no gradient of a parameter, as that of autograd.grad: it is no microbatch
    local,      // gradients stay on this rank, and others are added to them
    summed,     // they are summed over ranks, and other microbatches follow
    last        // they are final at its end, and finishing steps run
  };
  Backward backward_ = Backward::of_inputs;
  int64_t reductions_ = 0;     // backwards of this step that reduced
  uint64_t backwards_ = 0;     // that reduced, outside of captures
  Facts facts_;                // of this rank's backward, while they are compared
  struct Gathered {
    int64_t count = 0;
    uint64_t order = 0;  // a hash of the units' names in their order
    std::string last = "";
    std::string text() const { return fmt::format("{} times, the last '{}', in the order {:016x}", count, last, order); }
  };
  Gathered gathered_;  // in which other ranks took part
  at::Tensor hashes_;
  Work comparison_;
  Phase phase_ = Phase::outside;  // never `interrupted`, which `phase` finds out
  struct Waiting {
    Unit* unit;
    Bucket* bucket;
  };
  std::vector<Waiting> to_reduce_;  // of this backward, the next one at the back
  std::deque<Bucket*> reducing_;     // the one whose sum was started first at the front
  int64_t largest_sum_bytes_ = 0;    // of any bucket's first sum
};

}  // namespace shardproof
