// One unit: its buckets, and what its forward and backward do to them. Its part of the state machine that schedule.h describes
// is its passage through a backward:
//
//   outside  --output's or parameter's gradient-->  inside   parameters are gathered again, gradients go to buckets
//   inside   --gradient of the last watched input-->  left   nothing in the unit runs any more: parameters are freed, and the
//                                                            schedule may reduce what has arrived
//   left     --an input that a recomputation watches-->  inside
//   any      --end of the backward-->  outside
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "sharding/activations.h"
#include "sharding/bucket.h"
#include "sharding/delayed_gradients.h"
#include "shardproof/comm/timeline.h"
#include "shardproof/hooks/unit.h"

namespace shardproof {

class Unit;

// What a unit tells the schedule of all units, and asks it.
class UnitEvents {
 public:
  virtual ~UnitEvents() = default;
  virtual bool in_backward() const = 0;
  // A backward has reached a unit; nothing when it is known already.
  virtual void begin_backward() = 0;
  // A backward has left a unit.
  virtual void unit_left() = 0;
  // A unit's gather has started, if it needs one, and the rank is about to wait for it.
  virtual void before_wait() = 0;
  // Starts gathering these units, in order, as far as the limits allow.
  virtual void gather_ahead(const std::vector<Unit*>& units) = 0;

  // Forwards under way without a graph whose backward will come: units behave as in training.
  int64_t recomputed_forwards = 0;
};

struct UnitSettings {
  Reshard reshard_after_forward = Reshard::always();
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  bool recompute = false;
  std::shared_ptr<ActivationStore> activations;  // where they go between forward and backward; null: they stay
  std::shared_ptr<DelayedGradients> delayed;     // null: gradients are made when the backward comes by
  std::optional<at::ScalarType> input_dtype, output_dtype;
  std::vector<Unit*> forward_prefetch, backward_prefetch;
  bool gradient_sync = true;  // backwards reduce its gradients, where the schedule has them reduced
  std::vector<Unit*> inside;  // units within this one; those of the root are not listed
  std::vector<Unit*> below;   // the same, of the root as well
  Unit* root = nullptr;       // null for the root itself
  // Of a module that is recomputed and is no unit: the unit other than the root that holds its parameters, if it has any.
  Unit* holder = nullptr;
  std::shared_ptr<Timeline> timeline;  // null: nothing is measured
  int64_t rank = 0;                    // in the timeline
};

class Unit final : public UnitHooks, public std::enable_shared_from_this<Unit> {
 public:
  // `modules`: how many modules make up the unit.
  Unit(UnitEvents& schedule, std::string name, std::vector<std::unique_ptr<Bucket>> buckets, size_t modules);
  ~Unit() override;

  // Once it is held by a shared pointer: asks autograd to hand over gradients.
  void hook_parameters();

  const std::string& name() const { return name_; }
  const std::vector<std::unique_ptr<Bucket>>& buckets() const { return buckets_; }
  // Of all its buckets; of a unit without any, sharded.
  Residency residency() const { return buckets_.empty() ? Residency::sharded : buckets_.front()->parameters.residency(); }
  UnitSettings settings;

  void before_forward(const torch::nn::Module& module) override;
  at::Tensor watch_input(const at::Tensor& input) override;
  at::Tensor watch_output(const at::Tensor& output) override;
  void after_forward(const torch::nn::Module& module) override;
  bool recomputes() const override { return settings.recompute; }
  std::vector<at::Tensor> run_without_graph(Body body, std::vector<at::Tensor> inputs) override;

  // Since it was made.
  bool was_entered() const { return was_entered_; }

  // All its buckets; see BucketParameters. Nothing when already there.
  void start_unshard();
  void finish_unshard();
  // Whole parameters are freed; nothing when they are not there.
  void reshard();
  // Whatever is gathered, or being gathered, goes.
  void drop();

  // Throws Error inside a backward. `recurse`: of all units below it as well.
  void set_gradient_sync(bool sync, bool recurse);

  void before_backward();
  // Where the gradient of a parameter may be made; see BucketGradient.
  at::Tensor place_of_gradient(Bucket& bucket, int64_t member);
  // Whether the gradient dy^T x is made later.
  bool delay_gradient(Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x);
  void on_gradient(Bucket& bucket, int64_t member, const at::Tensor& gradient);
  void on_input_gradient();
  void end_backward();

  // A recomputation is the forward and backward of its own of something that ran before, so the gradients of one backward come
  // in several parts: those of the unit, of units inside it, and of the root, whose parameters it may have used. Theirs are
  // complete when all recomputations are over; the root's, which the rest of the backward may use as well, at the end. Those
  // of a holder are complete when the backward has left it.
  void begin_recomputation();
  void end_recomputation();
  bool expects_more() const { return recomputations_ > 0 || until_left_ || until_the_end_; }
  void expect_no_more();
  // The backward of this unit is over, recomputations included. Only known when each of its calls had an input with a gradient.
  bool left() const { return passage_ == Passage::left && !leaves_unseen_ && !expects_more(); }

 private:
  // A forward or backward of this unit begins or ends.
  int64_t begin_span(const char* what);
  void end_span(int64_t number);
  void gather();
  void enter_backward();
  void make_delayed(const Bucket& bucket, int64_t member);
  void make_gradient(Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x);
  void reshard_after_forward();
  void reshard_when_done();
  bool complete() const;
  void add_parts();
  void expect_no_more_when_left();
  bool keeps_activations_away() const;
  std::string label() const { return name_.empty() ? "the root unit" : "unit '" + name_ + "'"; }

  UnitEvents& schedule_;
  std::string name_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  size_t modules_;
  bool was_entered_ = false;
  std::set<const torch::nn::Module*> ran_;  // in this forward
  int64_t inputs_watched_ = 0;   // backward has still to leave through so many
  int64_t recomputations_ = 0;   // of it, or around it, that the backward has still to run
  bool until_left_ = false, until_the_end_ = false;
  bool call_watched_ = false;   // the current call has an input whose gradient will come
  bool leaves_unseen_ = false;  // some call has none
  enum class Passage { outside, inside, left };
  Passage passage_ = Passage::outside;  // of a backward, through all inputs that were watched
  void pass(Passage next);
  std::vector<int64_t> forward_spans_;  // of calls under way
  int64_t backward_span_ = -1;
};

}  // namespace shardproof
