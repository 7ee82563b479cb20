// A group of ranks as NCCL sees it: for each kind of call a lane, which is a communicator, a stream, and the memory through
// which calls on that stream pass.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "comm/nccl/nccl_buffers.h"
#include "shardproof/comm/nccl/nccl_api.h"

namespace shardproof::nccl {

struct Operation;

// Memory of the backend itself. What lies in it is used in the order of one stream.
class LaneMemory {
 public:
  struct Block {
    std::byte* memory = nullptr;
    int64_t bytes = 0;
    NcclApi::Memory kind = NcclApi::Memory::plain;
  };

  // A copy of host memory, on the device (`plain`) or on its way there (`pinned`), until it is given back.
  Block take(NcclApi& api, int64_t bytes, NcclApi::Memory kind);
  void give_back(Block block);
  // What the call in hand needs besides; the next call on the lane gets the same memory. With one sequence of sizes on all
  // ranks it grows on all of them together, as symmetric windows must.
  std::byte* scratch(NcclApi& api, NcclApi::Communicator communicator, int64_t bytes, NcclApi::Memory kind,
                     const Finish& finish);
  // With nothing on its way; a null communicator was aborted, and knows of no registrations.
  void close(NcclApi& api, NcclApi::Communicator communicator);

 private:
  std::vector<Block> free_, all_;
  std::vector<RegisteredMemory> scratches_;  // the last is in use; calls on their way may still use the others
};

struct Lane {
  NcclApi::Communicator communicator = nullptr;  // null before it is there, and once it was aborted
  NcclApi::Stream stream = nullptr;
  LaneMemory memory = {};
  BufferPool buffers = {};  // of the tensors of calls, where that was asked for
};

enum class LaneKind : size_t { gathers, reductions, messages };
constexpr size_t kLanes = 3;
LaneKind lane_of(Op op);

struct Group {
  int64_t rank = 0;  // within the group
  std::vector<int64_t> world_ranks;
  uint64_t id = 0;  // the same on all of its ranks
  std::array<Lane, kLanes> lanes;
  int64_t collectives = 0, message_count = 0;        // so many were called
  std::vector<std::shared_ptr<Operation>> messages;  // sends and receives that are not launched yet
  std::set<int64_t> met;                             // peers that messages were exchanged with

  // Groups that were split from this one, by everybody's colors and keys; several where a body asked several times. All ranks
  // have the same, so that all of them find one again in the next body, or none.
  struct Splits {
    std::vector<std::shared_ptr<Group>> groups;  // null where this rank joined none
    size_t used = 0;                             // in this body
  };
  std::map<std::vector<int64_t>, Splits> splits;

  int64_t size() const { return static_cast<int64_t>(world_ranks.size()); }
  Lane& lane(LaneKind kind) { return lanes[static_cast<size_t>(kind)]; }
};

}  // namespace shardproof::nccl
