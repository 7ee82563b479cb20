#include "comm/nccl/nccl_group.h"

#include <algorithm>
#include <bit>

namespace shardproof::nccl {
namespace {

constexpr uint64_t kBlockBytesMin = 512;

}  // namespace

LaneMemory::Block LaneMemory::take(NcclApi& api, int64_t bytes, NcclApi::Memory kind) {
  const auto rounded = static_cast<int64_t>(std::bit_ceil(std::max(kBlockBytesMin, static_cast<uint64_t>(bytes))));
  const auto fits = std::find_if(free_.begin(), free_.end(),
                                 [&](const Block& block) { return block.bytes == rounded && block.kind == kind; });
  if (fits != free_.end()) {
    const Block block = *fits;
    free_.erase(fits);
    return block;
  }
  const Block block{static_cast<std::byte*>(api.allocate(rounded, kind)), rounded, kind};
  all_.push_back(block);
  return block;
}

void LaneMemory::give_back(Block block) {
  free_.push_back(block);
}

std::byte* LaneMemory::scratch(NcclApi& api, NcclApi::Communicator communicator, int64_t bytes, NcclApi::Memory kind,
                               const Finish& finish) {
  if (scratches_.empty() || scratches_.back().bytes < bytes) {
    const auto rounded = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
    allocate_registered(api, communicator, rounded, kind, scratches_.emplace_back(), finish);
  }
  return static_cast<std::byte*>(scratches_.back().memory);
}

void LaneMemory::close(NcclApi& api, NcclApi::Communicator communicator) {
  for (RegisteredMemory& scratch : scratches_) {
    deregister(api, communicator, scratch);
    if (scratch.memory) api.release(scratch.memory, scratch.kind);
  }
  for (const Block& block : all_) api.release(block.memory, block.kind);
  scratches_.clear(), free_.clear(), all_.clear();
}

LaneKind lane_of(Op op) {
  if (op == Op::send || op == Op::recv) return LaneKind::messages;
  return op == Op::reduce_scatter || op == Op::all_reduce ? LaneKind::reductions : LaneKind::gathers;
}

}  // namespace shardproof::nccl
