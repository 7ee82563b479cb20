#include "harness/plan/metadata_cost.h"

#include "harness/plan/stopwatch.h"
#include "shardproof/algebra/plan.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"

namespace harness {
namespace {

using namespace shardproof;

struct Described {
  checkpoint::Checkpoint checkpoint;
  checkpoint::Checksums sums;
  int64_t boxes = 0;
};

// Each rank's entries lie end to end in its file. Their lengths and checksums are made up.
Described described(const std::map<std::string, ParameterPlacement>& placements) {
  constexpr uint64_t kAround = 1024;
  Described made;
  std::map<std::string, uint64_t> ends;  // of the files
  for (const auto& [name, placement] : placements) {
    std::vector<checkpoint::Chunk> chunks;
    for (const Transfer& transfer : plan(placement.shape, placement.state, {Mesh(), replicated()})) {
      checkpoint::Chunk& chunk = chunks.emplace_back();
      for (const Interval& interval : transfer.box) {
        chunk.offsets.push_back(interval.begin);
        chunk.sizes.push_back(interval.size());
      }
      chunk.extent.file = checkpoint::entry_file_name(transfer.source);
    }
    const std::string state = "optim.state." + name;
    for (const std::string& key : {"model." + name, state + ".exp_avg", state + ".exp_avg_sq"}) {
      checkpoint::StoredTensor& tensor = made.checkpoint.tensors[key];
      tensor = {placement.main, placement.shape, chunks};
      for (checkpoint::Chunk& chunk : tensor.chunks) {
        uint64_t& end = ends[chunk.extent.file];
        chunk.extent.offset = end;
        chunk.extent.length = kAround + static_cast<uint64_t>(numel(chunk.sizes)) * 4;
        end += chunk.extent.length;
        checkpoint::add(made.sums, {chunk.extent, static_cast<uint32_t>(++made.boxes * 2654435761)});
      }
    }
  }
  made.checkpoint.has_checksums = true;
  return made;
}

}  // namespace

MetadataCost metadata_cost(const std::map<std::string, ParameterPlacement>& placements) {
  const Described made = described(placements);
  MetadataCost cost{.boxes = made.boxes};
  Stopwatch watch;
  checkpoint::validate(made.checkpoint, "what is written");
  const std::string metadata = checkpoint::write_metadata(made.checkpoint), sidecar = checkpoint::write_checksums(made.sums);
  cost.write = watch.lap();
  cost.bytes = std::ssize(metadata) + std::ssize(sidecar);
  watch.lap();
  const checkpoint::Checkpoint read = checkpoint::read_metadata(metadata, "what was written");
  checkpoint::validate(read, "what was written");
  const checkpoint::Checksums sums = checkpoint::read_checksums(sidecar, "what was written");
  cost.read = watch.lap();
  SHARD_CHECK(read.tensors == made.checkpoint.tensors && sums == made.sums, "plan", "{} boxes are read as others", made.boxes);
  return cost;
}

}  // namespace harness
