#include "checkpoint/save_plan.h"

#include <algorithm>
#include <utility>

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

// A box, and the ranks that hold it.
struct Part {
  PlannedBox planned;
  uint64_t bytes = 0;
  std::vector<int64_t> holders;
};

// What one rank would take to hold the whole tensor, and who else along the replicated axes could give it. Of a run that is
// held in copies the plan names one.
void append_parts(const std::string& name, const SavedTensor& tensor, std::vector<Part>& parts) {
  const Mesh& mesh = tensor.at.mesh;
  SHARD_CHECK(tensor.at.layout.partial.empty(), "checkpoint", "{} is at rest as terms of a sum: {}", name,
              tensor.at.layout.str());
  std::vector<std::string> replicated_along;
  for (const Axis& axis : mesh.axes())
    if (!tensor.at.layout.splits(axis.name)) replicated_along.push_back(axis.name);
  const auto item = static_cast<uint64_t>(dtype_info(tensor.dtype).bytes);
  for (Transfer& transfer : plan(tensor.shape, tensor.at, {Mesh(), replicated()})) {
    const uint64_t bytes = static_cast<uint64_t>(numel(transfer.box)) * item;
    parts.push_back({{name, std::move(transfer.box)}, bytes, mesh.peers(transfer.source, replicated_along)});
  }
}

bool before(const PlannedBox& a, const PlannedBox& b) {
  if (a.name != b.name) return a.name < b.name;
  return std::lexicographical_compare(a.box.begin(), a.box.end(), b.box.begin(), b.box.end(),
                                      [](Interval x, Interval y) { return x.begin < y.begin; });
}

}  // namespace

std::vector<std::vector<PlannedBox>> plan_save(const std::map<std::string, SavedTensor>& tensors, int64_t ranks) {
  std::vector<Part> parts;
  std::vector<std::vector<PlannedBox>> boxes(static_cast<size_t>(ranks));
  for (const auto& [name, tensor] : tensors) {
    append_parts(name, tensor, parts);
    if (numel(tensor.shape) > 0) continue;
    boxes[0].push_back({name, {}});
    for (const int64_t size : tensor.shape) boxes[0].back().box.push_back({0, size});
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.bytes > b.bytes; });
  std::vector<uint64_t> written(static_cast<size_t>(ranks), 0);
  for (Part& part : parts) {
    const int64_t rank = *std::min_element(part.holders.begin(), part.holders.end(), [&](int64_t a, int64_t b) {
      return std::pair(written[static_cast<size_t>(a)], a) < std::pair(written[static_cast<size_t>(b)], b);
    });
    written[static_cast<size_t>(rank)] += part.bytes;
    boxes[static_cast<size_t>(rank)].push_back(std::move(part.planned));
  }
  for (auto& own : boxes) std::sort(own.begin(), own.end(), before);
  return boxes;
}

}  // namespace shardproof::checkpoint
