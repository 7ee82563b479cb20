// One unit: its buckets, and what its forward and backward do to them. Its part of the state machine that schedule.h describes
// is its passage through a backward:
//
//   unused   --its first forward-->                 outside
//   outside  --output's or parameter's gradient-->  inside   parameters are gathered again, gradients go to buckets
//   inside   --a node from before its first call--> left     nothing in the unit runs any more: parameters are freed, and the
//                                                            schedule may reduce what has arrived
//   any      --end of the backward-->               outside
//
// Nothing is put on a unit's inputs, so that their sums and identities are those of the plain model. That a backward has left a
// call of a unit shows in the numbers of autograd's nodes: a backward runs the nodes that are ready in the falling order of
// their numbers, which rise with the forward. So when it comes to a node that is older than a call, that call is over.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sharding/activations.h"
#include "sharding/bucket.h"
#include "sharding/delayed_gradients.h"
#include "sharding/saved_tensors.h"
#include "shardproof/comm/timeline.h"
#include "shardproof/hooks/unit.h"

namespace shardproof {

class Unit;
class Recomputation;

// One forward of a unit, with a graph.
struct UnitCall {
  std::weak_ptr<Unit> unit;
  uint64_t first_node = 0;                       // numbers of its nodes begin here
  uint64_t watched = 0;                          // the youngest node before it whose turn in a backward is told
  // Nodes of its outputs, with their numbers. They tell of a backward through it, and hold this.
  std::vector<std::pair<torch::autograd::Node*, uint64_t>> outputs = {};
  std::shared_ptr<Recomputation> recomputation = nullptr;  // null: autograd keeps what it saves
  // Of the forward alone: casts of inputs, and inputs that must not change since the backward will need them again.
  std::vector<std::pair<at::Tensor, at::Tensor>> casts = {};
  std::vector<SavedTensor> inputs = {};
};

// What a unit tells the schedule of all units, and asks it.
class UnitEvents {
 public:
  virtual ~UnitEvents() = default;
  virtual bool in_backward() const = 0;
  // Throws Error, naming `what`, inside a backward.
  virtual void require_outside(const std::string& what) const = 0;
  // A backward has reached a unit, whose node of this number it runs first; nothing when it is known already.
  virtual void begin_backward(uint64_t first) = 0;
  // A backward has left a unit.
  virtual void unit_left() = 0;
  // A unit's gather has started, if it needs one, and the rank is about to wait for it.
  virtual void before_wait() = 0;
  // A unit's gather has started, in which all ranks of the mesh take part.
  virtual void gathers(const std::string& unit) = 0;
  // Starts gathering these units, in order, as far as the limits allow.
  virtual void gather_ahead(const std::vector<Unit*>& units) = 0;

  // Calls to which a backward may come, in the order of their forwards. Inside of a backward those are left out that it cannot
  // come to. Each holds its unit's `open_calls`.
  struct OpenCall {
    std::shared_ptr<UnitCall> call;
    std::shared_ptr<void> open_calls;
  };
  std::vector<OpenCall> calls;
  // A backward, or one within it, is about to run the node of this number: calls that are younger are over.
  void reached(uint64_t node);
  void add_call(OpenCall call);
  // A backward begins with the node of the number `first`. Younger calls of other graphs are left out until it ends. Older ones
  // stay, because a second order goes through a call without coming to its outputs. At its end calls that it has not come to
  // are there again, and with `keeps_graph` all.
  void set_calls_aside(uint64_t first, bool keeps_graph);
  void take_calls_back();
  void forget_calls();

  int64_t forgetting_forwards = 0;   // forwards under way of which nothing is kept
  int64_t recomputing_forwards = 0;  // those that a backward runs again, whose graph nobody uses
  // The autograd engine's number of the backward under way, and whether it makes a graph of itself, which needs parameters.
  // Any backward may, in any state of the schedule.
  int backward_task = -1;
  bool makes_graph = false;

 private:
  std::vector<std::shared_ptr<UnitCall>> waiting_;  // those that are there again behind the backward under way
  size_t calls_max_ = 64;
};

// Its switches are the user's, each independent of the others and of every state.
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
  Unit* around = nullptr;     // of a module that is recomputed and is no unit: the unit that holds its parameters
  std::vector<Unit*> below;   // units within this one
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
  bool backward_is_seen() const override;
  bool recomputes() const override { return settings.recompute; }
  std::shared_ptr<void> forget_saved(Again again, const std::vector<at::Tensor>& inputs,
                                     const std::vector<at::Tensor>& buffers) override;
  UnitEvents& schedule() const { return schedule_; }
  std::string label() const { return name_.empty() ? "the root unit" : "unit '" + name_ + "'"; }

  // Since it was made.
  bool was_entered() const { return passage_ != Passage::unused; }

  // All its buckets; see BucketParameters. Nothing when already there.
  void start_unshard();
  void finish_unshard();
  // Whole parameters are freed; nothing when they are not there.
  void reshard();
  // Whatever is gathered, or being gathered, goes.
  void drop();

  // Throws Error inside a backward. `recurse`: of all units below it as well.
  void set_gradient_sync(bool sync, bool recurse);

  // Of a call, the youngest node of which is about to run.
  void before_backward(UnitCall& call, uint64_t node);
  // Parameters are there for a backward.
  void prepare_backward();
  // Where the gradient of a parameter may be made; see BucketGradient.
  at::Tensor place_of_gradient(Bucket& bucket, int64_t member);
  // Whether the gradient dy^T x is made later.
  bool delay_gradient(Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x);
  void on_gradient(Bucket& bucket, int64_t member, const at::Tensor& gradient);
  // Whether the backward under way may still come to a call of it.
  bool has_calls() const { return open_calls_.use_count() > 1; }
  UnitEvents::OpenCall open(std::shared_ptr<UnitCall> call) const { return {std::move(call), open_calls_}; }
  // A backward has left them all.
  void leave();
  void end_backward();
  // The backward of this unit is over.
  bool left() const { return passage_ == Passage::left; }

 private:
  // A forward or backward of this unit begins or ends.
  int64_t begin_span(const char* what);
  void end_span(int64_t number);
  void gather();
  void enter_backward();
  void make_delayed(const Bucket& bucket, int64_t member);
  void make_gradient(Bucket& bucket, int64_t member, const at::Tensor& dy, const at::Tensor& x);
  void reshard_after_forward();
  bool has_graph() const;
  bool is_here(const at::Tensor& tensor) const;
  void watch_backward(const at::Tensor& output);
  void watch_node(UnitCall& call, torch::autograd::Node& node);
  void leave_when_it_ends(const UnitCall& call);
  static void make_again(Recomputation& recomputation);
  bool keeps_activations_away() const;

  UnitEvents& schedule_;
  std::string name_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  size_t modules_;
  std::set<const torch::nn::Module*> ran_;  // in this forward
  std::vector<std::shared_ptr<UnitCall>> calls_;  // under way
  std::shared_ptr<void> open_calls_ = std::make_shared<char>();  // held by each in UnitEvents::calls
  enum class Passage { unused, outside, inside, left };
  Passage passage_ = Passage::unused;  // through backwards
  void pass(Passage next);
  std::vector<int64_t> forward_spans_;  // of calls under way
  int64_t backward_span_ = -1;
};

}  // namespace shardproof
