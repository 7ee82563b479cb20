// One call on its way, and how calls become calls of NCCL.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/nccl/nccl_group.h"
#include "comm/process/engine.h"
#include "shardproof/comm/nccl/nccl.h"
#include "internal/comm/collective_plan.h"

namespace shardproof::nccl {

struct Operation : process::Operation {
  // Of a tensor in host memory: where on the device its values will be, and where copies of them are put first.
  struct Landing {
    void* host;
    LaneMemory::Block device, staged;
    int64_t bytes;
  };

  Operation(std::shared_ptr<NcclApi> api, std::shared_ptr<Group> group, std::shared_ptr<const FlightGroup> flight, Call call);

  Lane& lane() const { return group->lane(lane_of(call.op)); }
  bool is_message() const { return call.op == Op::send || call.op == Op::recv; }

  std::shared_ptr<Group> group;

  Event done;  // recorded when launched
  std::chrono::steady_clock::time_point begun;
  bool launched = false, complete = false;
  bool is_captured = false;  // by a graph, whose events nobody may wait for once it has ended
  // Whether who waits blocks until it is complete: tensors in host memory, and barriers.
  bool blocks = false;
  std::vector<Landing> landings;
  std::vector<LaneMemory::Block> blocks_taken;
};

// Enqueues calls on their lane's stream.
class Issue {
 public:
  // `finish` with a null communicator: within a group, whose progress begins at its end.
  Issue(NcclApi& api, const NcclOptions& options, Finish finish) : api_(api), options_(options), finish_(std::move(finish)) {}

  void collective(Operation& operation);
  // Of one group, all at once. Between two ranks they meet by tag, and by order where tags are equal.
  void messages(std::vector<std::shared_ptr<Operation>> operations);

 private:
  struct Part {
    std::byte* data;
    int64_t bytes;
  };
  static Part part_of(std::byte* tensor, ElementRange range, int64_t element_bytes);
  LaneMemory::Block take(Operation& operation, int64_t bytes, NcclApi::Memory kind);
  std::byte* device_input(Operation& operation, const at::Tensor& tensor);
  std::byte* device_output(Operation& operation, const at::Tensor& tensor);
  // By peer; a part of no bytes is not sent. What a rank has for itself is copied.
  void exchange(Operation& operation, const std::vector<Part>& sends, const std::vector<Part>& recvs);
  void all_to_all(Operation& operation);
  // Connects this rank with peers that it has had no messages with.
  void meet(Lane& lane, const std::set<int64_t>& peers);
  std::byte* scratch(Lane& lane, int64_t bytes);
  bool wants_window(const Call& call, const Lane& lane, const std::byte* input, const std::byte* output) const;
  void reduce_natively(Operation& operation);
  void reduce_in_order(Operation& operation);
  void sum_in_order(Operation& operation, const CollectivePlan& plan, std::byte* input, std::byte* output);
  void share_sums(Operation& operation, const CollectivePlan& plan, std::byte* output);
  void barrier(Operation& operation);

  NcclApi& api_;
  const NcclOptions& options_;
  Finish finish_;
};

}  // namespace shardproof::nccl
