// A check for real training that costs little: after each step all ranks compare fingerprints of what they hold in copies.
//
//   Optimizer optimizer = adamw(sharded, {.lr = 1e-3});
//   FingerprintCheck check(sharded, optimizer);
//   for (...) {
//     ...
//     optimizer.step();
//     check.step();   // throws on every rank, and names the step, the tensor and the ranks that disagree
//   }
//
// Wrong sums over some ranks, an update that one rank missed, random numbers that differ where they must not, a write by hand
// on one rank and faulty memory leave replicas different, and the loss falls all the same. What leaves all ranks wrong alike is
// found by `verify` and not here. Where ranks may call different collectives, wrap the communicator: checked(comm)
// (comm/checked.h).
#pragma once

#include <memory>

#include "shardproof/base/failed_check.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

// What the check found. It has the same message on every rank.
class FingerprintError : public FailedCheck {
 public:
  using FailedCheck::FailedCheck;
};

class FingerprintCheck {
 public:
  // Not collective. The optimizer must stay where it is as long as this object is used.
  FingerprintCheck(Sharded& sharded, Optimizer& optimizer);
  ~FingerprintCheck();
  FingerprintCheck(const FingerprintCheck&) = delete;

  // Call it between steps, on every rank. Throws FingerprintError when one of these does not hold:
  // - Ranks that hold the same elements of a parameter, of a main parameter or of an optimizer's state hold the same bits.
  //   Replicas along the tensor-parallel axis count, copies of key heads too. On a GPU that needs deterministic operators.
  // - The padding of buckets is zero.
  // - What the last update trained has moved, the parameter or its state, on every rank where a gradient was so large that the
  //   rule's learning rate had to move it. Rules that name no learning rate in their settings are left out.
  // One small all_gather over the mesh, and a second one when something is wrong. Every byte that is held in copies is read
  // once.
  void step();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shardproof
