#include "checkpoint/save_plan.h"

#include <algorithm>
#include <utility>

#include "checkpoint/format/row_walk.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

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

namespace {

// Both lists ascend: the rank's boxes, and what it holds of a tensor, box by box.
std::vector<SavePlan::Part> parts_of(const SavePlan& plan) {
  std::vector<SavePlan::Part> parts;
  const std::string* name = nullptr;
  std::vector<Box> boxes;
  size_t at = 0;
  int64_t begin = 0;
  for (const PlannedBox& planned : plan.boxes[static_cast<size_t>(plan.rank)]) {
    if (!name || *name != planned.name) {
      const SavedTensor& tensor = plan.tensors.at(planned.name);
      boxes = owned(tensor.shape, tensor.at.mesh, tensor.at.layout, plan.rank);
      name = &planned.name;
      at = 0, begin = 0;
    }
    const int64_t count = numel(planned.box);
    for (; count > 0 && at < boxes.size() && boxes[at] != planned.box; ++at) begin += numel(boxes[at]);
    SHARD_CHECK(count == 0 || at < boxes.size(), "checkpoint", "rank {} writes a box of {} that it does not hold", plan.rank,
                planned.name);
    parts.push_back({begin, count});
  }
  return parts;
}

std::vector<std::vector<uint64_t>> lengths_of(const SavePlan& plan) {
  std::map<std::pair<Dtype, Shape>, uint64_t> known;
  std::vector<std::vector<uint64_t>> lengths(plan.boxes.size());
  for (size_t rank = 0; rank < plan.boxes.size(); ++rank)
    for (const PlannedBox& planned : plan.boxes[rank]) {
      const Dtype dtype = plan.tensors.at(planned.name).dtype;
      uint64_t& length = known[{dtype, sizes_of(planned.box)}];
      if (length == 0) length = lay_out_tensor_entry(dtype, sizes_of(planned.box)).length;
      lengths[rank].push_back(length);
    }
  return lengths;
}

}  // namespace

std::shared_ptr<const SavePlan> make_save_plan(std::map<std::string, SavedTensor> tensors, int64_t ranks, int64_t rank) {
  auto plan = std::make_shared<SavePlan>();
  plan->tensors = std::move(tensors);
  plan->ranks = ranks;
  plan->rank = rank;
  plan->boxes = plan_save(plan->tensors, ranks);
  plan->own = parts_of(*plan);
  if (rank == 0) plan->lengths = lengths_of(*plan);
  return plan;
}

}  // namespace shardproof::checkpoint
