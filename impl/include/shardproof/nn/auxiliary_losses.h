// Losses of a model's own layers, such as those that keep the experts of a layer equally busy. They are computed inside of
// units, which may be recomputed or freed before the backward. So their gradients do not come by a way of their own: a tensor
// that the layer passes on carries them, as in Megatron-LM.
//
//   AuxiliaryLosses auxiliary;                            // before the forward
//   at::Tensor loss = auxiliary.add_to(token_loss(call(model, tokens), targets));
//   (loss * weight).backward();                           // their gradients have the weight, too
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace shardproof {

struct AuxiliaryRecord;

// Collects those of the calling thread's forwards, from when it is made to `add_to`, once each, also when a unit is recomputed.
// Make one for each forward; one made meanwhile collects in its place.
class [[nodiscard]] AuxiliaryLosses {
 public:
  AuxiliaryLosses();
  ~AuxiliaryLosses();
  AuxiliaryLosses(const AuxiliaryLosses&) = delete;
  AuxiliaryLosses& operator=(const AuxiliaryLosses&) = delete;

  // The loss, 0-dim, a sum over this rank's tokens, plus those of the layers; the loss itself where no layer has one. Throws
  // Error when it is called twice. A backward from its result gives the layers their gradients, once differentiable; from
  // another loss of the forward it throws Error.
  at::Tensor add_to(const at::Tensor& loss);

 private:
  std::shared_ptr<AuxiliaryRecord> record_, before_;
};

// For layers. Returns x, and adds `loss`, 0-dim, to the losses: the backward through x then goes through it, too. Throws Error
// when nobody collects, or `add_to` was called already.
at::Tensor carry_loss(const at::Tensor& x, const at::Tensor& loss);

// For layers that count what a step has seen: runs it in `add_to`, and not for a forward that runs again. Throws Error as
// carry_loss does.
void when_collected(std::function<void()> count);

// What collects on this thread, for a forward that runs again in a backward.
struct AuxiliaryScope {
  std::shared_ptr<AuxiliaryRecord> record;  // null: nobody collects
  bool runs_again = false;                  // then the first run has added everything
};
AuxiliaryScope& auxiliary_scope();
// Whether its AuxiliaryLosses ended without `add_to`, as where a forward threw.
bool is_dropped(const AuxiliaryRecord& record);

}  // namespace shardproof
