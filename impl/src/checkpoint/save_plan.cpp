#include "checkpoint/save_plan.h"

#include <algorithm>
#include <list>
#include <unordered_map>
#include <utility>

#include "checkpoint/format/row_walk.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {
namespace {

// A box, and the ranks that hold it.
struct HeldBox {
  Box box;
  std::vector<int64_t> holders;
};

// What one rank would take to hold the whole tensor, and who else along the replicated axes could give it. Of a run that is
// held in copies the plan names one.
std::vector<HeldBox> held_boxes(const SavedTensor& tensor) {
  std::vector<HeldBox> boxes;
  for (Transfer& transfer : plan(tensor.shape, tensor.at, {Mesh(), replicated()}))
    boxes.push_back({std::move(transfer.box), replicas(tensor.at.mesh, tensor.at.layout, transfer.source)});
  return boxes;
}

struct HashOfPlace {
  size_t operator()(const SavedTensor* tensor) const {
    size_t hash = tensor->shape.size();
    const auto add = [&](int64_t number) { hash = hash * 1099511628211U + static_cast<size_t>(number); };
    for (const int64_t size : tensor->shape) add(size);
    add(tensor->at.layout.bucket.offset);
    add(tensor->at.layout.bucket.length);
    return hash;
  }
};
struct SamePlace {
  bool operator()(const SavedTensor* a, const SavedTensor* b) const { return a->shape == b->shape && a->at == b->at; }
};
// What was found out about a tensor, for all that have its shape and placement: models repeat their layers, and an optimizer's
// state lies as its parameter does.
template <class Found>
using ByPlace = std::unordered_map<const SavedTensor*, Found, HashOfPlace, SamePlace>;

// A box of a tensor that somebody has to write.
struct Part {
  const std::pair<const std::string, SavedTensor>* tensor;
  const HeldBox* held;
  uint64_t bytes = 0;
};

bool before(const Part& a, const Part& b) {
  if (a.tensor != b.tensor) return a.tensor->first < b.tensor->first;
  return std::lexicographical_compare(a.held->box.begin(), a.held->box.end(), b.held->box.begin(), b.held->box.end(),
                                      [](Interval x, Interval y) { return x.begin < y.begin; });
}

}  // namespace

std::vector<std::vector<PlannedBox>> plan_save(const std::map<std::string, SavedTensor>& tensors, int64_t ranks) {
  ByPlace<std::vector<HeldBox>> known;
  std::vector<Part> parts;
  std::vector<std::vector<Part>> parts_of(static_cast<size_t>(ranks));
  std::list<HeldBox> empty;  // of tensors without elements
  for (const auto& named : tensors) {
    const SavedTensor& tensor = named.second;
    SHARD_CHECK(tensor.at.layout.partial.empty(), "checkpoint", "{} is at rest as terms of a sum: {}", named.first,
                tensor.at.layout.str());
    const auto [found, is_new] = known.try_emplace(&tensor);
    if (is_new) found->second = held_boxes(tensor);
    const auto item = static_cast<uint64_t>(dtype_info(tensor.dtype).bytes);
    for (const HeldBox& held : found->second) parts.push_back({&named, &held, static_cast<uint64_t>(numel(held.box)) * item});
    if (numel(tensor.shape) > 0) continue;
    empty.push_back({whole_box(tensor.shape), {}});
    parts_of[0].push_back({&named, &empty.back(), 0});
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.bytes > b.bytes; });
  std::vector<uint64_t> written(static_cast<size_t>(ranks), 0);
  for (const Part& part : parts) {
    const std::vector<int64_t>& holders = part.held->holders;
    const auto least = std::min_element(holders.begin(), holders.end(), [&](int64_t a, int64_t b) {
      return std::pair(written[static_cast<size_t>(a)], a) < std::pair(written[static_cast<size_t>(b)], b);
    });
    const int64_t rank = part.tensor->second.of_rank_0 ? 0 : *least;
    written[static_cast<size_t>(rank)] += part.bytes;
    parts_of[static_cast<size_t>(rank)].push_back(part);
  }
  std::vector<std::vector<PlannedBox>> boxes(static_cast<size_t>(ranks));
  for (size_t rank = 0; rank < boxes.size(); ++rank) {
    std::sort(parts_of[rank].begin(), parts_of[rank].end(), before);
    boxes[rank].reserve(parts_of[rank].size());
    for (const Part& part : parts_of[rank]) boxes[rank].push_back({part.tensor->first, part.held->box});
  }
  return boxes;
}

namespace {

// Both lists ascend: the rank's boxes, and what it holds of a tensor, box by box.
std::vector<int64_t> begins_of(const SavePlan& plan) {
  std::vector<int64_t> begins;
  ByPlace<std::vector<Box>> known;
  const std::vector<Box>* boxes = nullptr;
  const std::string* name = nullptr;
  auto tensor = plan.tensors.begin();
  size_t at = 0;
  int64_t begin = 0;
  for (const PlannedBox& planned : plan.boxes[static_cast<size_t>(plan.rank)]) {
    if (!name || *name != planned.name) {
      while (tensor->first != planned.name) ++tensor;
      const SavedTensor& saved = tensor->second;
      const auto [found, is_new] = known.try_emplace(&saved);
      if (is_new) found->second = owned(saved.shape, saved.at.mesh, saved.at.layout, plan.rank);
      boxes = &found->second;
      name = &planned.name;
      at = 0, begin = 0;
    }
    const int64_t count = numel(planned.box);
    for (; count > 0 && at < boxes->size() && (*boxes)[at] != planned.box; ++at) begin += numel((*boxes)[at]);
    SHARD_CHECK(count == 0 || at < boxes->size(), "checkpoint", "rank {} writes a box of {} that it does not hold", plan.rank,
                planned.name);
    begins.push_back(begin);
  }
  return begins;
}

std::vector<std::vector<uint64_t>> lengths_of(const SavePlan& plan) {
  std::map<std::pair<Dtype, Shape>, uint64_t> known;
  std::vector<std::vector<uint64_t>> lengths(plan.boxes.size());
  for (size_t rank = 0; rank < plan.boxes.size(); ++rank)
    for (const PlannedBox& planned : plan.boxes[rank]) {
      const Dtype dtype = plan.tensors.at(planned.name).dtype;
      const Shape sizes = sizes_of(planned.box);
      uint64_t& length = known[{dtype, sizes}];
      if (length == 0) length = lay_out_tensor_entry(dtype, sizes).length;
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
  plan->begins = begins_of(*plan);
  if (rank == 0) plan->lengths = lengths_of(*plan);
  return plan;
}

}  // namespace shardproof::checkpoint
