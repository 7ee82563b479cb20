// The gradient of a bucket, on its way from the backward of each microbatch to the optimizer:
//
//   empty        --add-->     produced     local terms, added over microbatches until they are reduced. Sums that were reduced
//                                          before lie beside them where the strategy reduces early
//   produced     --start-->   reducing     sums over ranks are under way; where the strategy takes none yet, it stays produced
//   reducing     --finish-->  accumulated  reduced over ranks, added over reductions
//   accumulated  --add-->     produced     another microbatch
//   accumulated  --advance--> reducing     after the last microbatch: the sum that is left, over replicas, is under way
//   accumulated  --finish-->  final        after the last microbatch: in the state layout and the main dtype, divided; what the
//                                          optimizer reads. With Offload it is in the host's memory
//   empty        --adopt-->    final       a replayed graph made it (step_graph.h)
//   reducing     --error-->   accumulated  this rank's terms were not finite: there is no sum, and only zero may follow
//   any but reducing --zero-->  empty
//
// Every other step is an error that names the unit and a parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <string>
#include <vector>

#include "sharding/bucket_part.h"
#include "sharding/reduction.h"

namespace shardproof {

enum class GradientState { empty, produced, reducing, accumulated, final };
const char* to_string(GradientState state);

class BucketGradient : private BucketPart {
 public:
  explicit BucketGradient(const BucketContext& context);

  GradientState state() const { return state_; }
  bool reducing() const { return state_ == GradientState::reducing; }
  bool final() const { return state_ == GradientState::final; }

  // A backward begins: which gradients will come, and whether they are reduced at its end.
  void begin_backward(bool reduces);
  // Memory of a member's sizes in which its gradient of this backward may be made; add_gradient then has nothing to copy.
  // Undefined where the gradient is one term of several, or takes another dtype. Once for each member in a backward.
  at::Tensor place(int64_t member);
  // Takes over one parameter's gradient, or a further one of this backward, as a backward within it makes it.
  void add_gradient(int64_t member, const at::Tensor& gradient);
  // Something of this parameter's gradient has come in this backward.
  bool has_arrived(int64_t member) const { return coming_[member] == Coming::arrived; }
  // Every gradient of this backward is there.
  bool complete() const { return missing() == 0; }
  // Parameters that the backward did not reach have zero gradients.
  void fill_missing();

  // Reduces what was added; `last` brings the gradient to its final form. `where` is for messages.
  void start_reduce(bool last, const std::string& where);
  // Waits for the sum under way. Returns whether it started another one, along the next axes; otherwise the reduction is over.
  // Throws where the sum says that this rank's terms are not finite, unless `checks` is false.
  bool advance_reduce(bool checks = true);
  // Brings the reduction to its end after an error, whatever its terms are, because all ranks have started it.
  void abandon_reduce() {
    while (advance_reduce(/*checks=*/false)) {
    }
  }
  int64_t bytes_in_flight() const { return reduction_ ? reduction_->bytes_in_flight() : reducing() ? bytes_to_send() : 0; }
  // The sum under way is of what an earlier one left, along other axes.
  bool is_past_first_sum() const {
    return reduction_ && (!reduction_->is_first() || (aim_ == Aim::finish && !layout_.reduce().empty()));
  }
  // Of the bytes in flight, terms of the whole bucket.
  int64_t bytes_sent() const {
    return is_past_first_sum() ? 0 : reduction_ ? reduction_->bytes_sent() : bytes_in_flight();
  }
  int64_t bytes_to_send() const {
    return layout_.numel() * static_cast<int64_t>(c10::elementSize(rules_.reduction.reduce));
  }

  // Waits until the final gradient is in the host's memory, where it is offloaded; one whose terms are still to be added is on
  // the device.
  void await_values();
  // In the state layout and the main dtype, divided by everything but what `divide_final` still adds. Somebody has awaited it.
  const at::Tensor& values() const;
  void divide_final(double divisor);
  // Adds up what the ranks of the group have of the final gradient: terms along the tensor-parallel axis. Collective.
  void sum_terms(Comm& group);

  // Whether a backward on this rank has made a gradient of the parameter since gradients were zeroed.
  bool was_reached(size_t member) const { return reached_[member]; }

  // Takes what a replayed graph has made as the final gradient.
  void adopt(at::Tensor gradient);

  void zero_gradients();

 private:
  // What becomes of the gradients of a backward.
  enum class Ending {
    kept,     // the next microbatch's are added to them
    reduced,  // they are summed over ranks. Before that, this rank looks whether its terms are finite
    unread    // they are summed, and the first sum looks (Reduction::finds_bad_terms)
  };
  // What becomes of the reduction under way.
  enum class Aim {
    accumulate,  // it is added to earlier ones, and other microbatches follow
    complete,    // it is of the last microbatch: it is added to earlier ones, and what is left to sum is summed then
    finish       // it is the final gradient
  };
  // A member's gradient in the backward under way.
  enum class Coming {
    expected,
    placed,  // somebody was given the place to make it in
    arrived  // something of it is there, or the member is frozen
  };

  void enter(GradientState next);
  Ending ending_of_reduced() const;
  int64_t missing() const;
  at::ScalarType produced_dtype() const;
  void begin_producing();
  at::Tensor produced(int64_t member) const;  // its part of produced_
  void take(int64_t member, const at::Tensor& gradient, Coming before);
  void check_terms(const at::Tensor& terms, bool in_bucket) const;  // otherwise they lie as units compute
  void ask_about(const at::Tensor& terms) const;
  [[noreturn]] void throw_nonfinite(const LateChecks::Bad& bad) const;
  void end_sum(bool checks);
  void accumulate(at::Tensor sum);
  double divide_in_sum() const;
  void finalize(at::Tensor sum, bool is_divided);
  void start_offload();

  const size_t terms_;  // the slot of this rank's terms among the checks
  const Ending when_it_reduces_ = ending_of_reduced();
  GradientState state_ = GradientState::empty;
  Ending ending_ = when_it_reduces_;  // of this backward
  std::vector<Coming> coming_;        // by member
  std::vector<bool> holds_;           // by member: produced_ has a value, of this or an earlier backward
  std::vector<bool> reached_;         // by member: a backward has come to it since gradients were zeroed
  std::optional<int64_t> suspect_;    // the first member of produced_ that may hold something not finite, or too large
  Aim aim_ = Aim::finish;
  std::string where_;       // the reduction's rank and step, for messages
  std::string occasion_;    // what its sums are for, for other ranks
  int64_t reductions_ = 0;  // in this step
  at::Tensor produced_, accumulated_, gradient_;
  std::optional<c10::Stream> stream_;   // that the reduction under way works on, from its first term: terms come on any
  at::Tensor own_;                      // registered memory for produced_; undefined where there is none
  at::Tensor fixed_;                    // the final gradient in fixed point, while terms of it are to be added
  HostTransfer download_;               // of the gradient
  std::optional<Reduction> reduction_;  // reducing without one: the strategy sums over no rank
};

}  // namespace shardproof
