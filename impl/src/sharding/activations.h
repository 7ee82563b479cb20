// Activations of units in the host's memory, between the units' forward and their backward.
//
// What autograd saves while such a unit runs is a group, which goes this way:
//
//   recording  --the unit's forward ends-->          leaving  the copy to the host has started, the device still has all
//   leaving    --the next group's forward ends-->    away     the device's memory is freed
//   leaving    --its backward begins-->              kept     nothing has to come back
//   away       --the next group's backward begins--> coming   the copy to the device has started
//   away, coming --its backward begins-->            here
//   kept, here, coming --the whole backward ends-->  away     where the graph is kept for another backward
//
// So the device holds two groups at most while one unit's forward or backward runs after the other's.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sharding/memory_ledger.h"
#include "sharding/saved_tensors.h"
#include "internal/device/host_transfers.h"

namespace shardproof {

class SavedGroup;

// Of one sharded module on one rank.
class ActivationStore final : public SavedTensorKeeper, public std::enable_shared_from_this<ActivationStore> {
 public:
  // `is_parameter`: whether a tensor looks into memory of parameters, which the units themselves free and restore.
  ActivationStore(std::shared_ptr<MemoryLedger> memory, std::shared_ptr<HostTransfers> transfers,
                  std::function<bool(const at::Tensor&)> is_parameter);
  ~ActivationStore() override;

  // The forward of a unit, which messages name, begins or is over. What the thread saves between belongs to it, but for what
  // belongs to such a unit within it.
  void begin_forward(const std::string& unit);
  void end_forward();
  // A backward is over, or an exception has ended it.
  void end_backward();
  // Forgets the forwards that an exception has ended.
  void abandon_forwards();

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override;

 private:
  friend class SavedGroup;
  struct Open {
    std::shared_ptr<SavedGroup> group;
    std::weak_ptr<SavedTensorKeeper> keeper_before;
  };
  // The backward of this group begins.
  void prefetch_before(const SavedGroup& group);
  // Of a group that is gone: they hold memory of the host until they are over.
  struct Transfers {
    HostTransfer down, up;
  };
  void retire(Transfers transfers);
  void await_retired(size_t left);

  const std::shared_ptr<MemoryLedger> memory_;
  const std::shared_ptr<HostTransfers> transfers_;
  const std::function<bool(const at::Tensor&)> is_parameter_;
  std::vector<Open> open_;                         // forwards under way, the innermost at the back
  std::vector<std::weak_ptr<SavedGroup>> groups_;  // of forwards that are over, in their order; their graphs own them
  std::mutex retired_mutex_;  // graphs may be dropped by any thread
  std::deque<Transfers> retired_;
};

}  // namespace shardproof
