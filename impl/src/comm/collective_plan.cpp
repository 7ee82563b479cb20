#include "internal/comm/collective_plan.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

std::vector<ElementRange> side_by_side(const std::vector<int64_t>& sizes) {
  std::vector<ElementRange> ranges;
  ranges.reserve(sizes.size());
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    ranges.push_back({begin, size});
    begin += size;
  }
  return ranges;
}

}  // namespace

ElementRange equal_range(int64_t numel, int64_t part, int64_t parts) {
  const int64_t share = (numel + parts - 1) / parts;
  const int64_t begin = std::min(numel, part * share);
  return {begin, std::min(numel, begin + share) - begin};
}

std::vector<int64_t> order_of_terms(int64_t ranks, int64_t first) {
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(ranks));
  for (int64_t k = 0; k < ranks; ++k) order.push_back((first + k) % ranks);
  return order;
}

CollectivePlan::CollectivePlan(const Call& call, int64_t rank, int64_t size, AllReduceBy all_reduce)
    : op_(call.op), rank_(rank), size_(size), all_reduce_(all_reduce) {
  SHARD_CHECK(op_ != Op::send && op_ != Op::recv, "comm", "{} is no collective", describe(call));
  if (call.input.defined()) input_numel_ = call.input.numel();
  if (call.output.defined()) output_numel_ = call.output.numel();
  if (op_ == Op::broadcast) root_ = call.peer;
  if (op_ == Op::all_to_all) input_ranges_ = side_by_side(call.input_sizes), output_ranges_ = side_by_side(call.output_sizes);
}

ElementRange CollectivePlan::send_range(int64_t peer) const {
  switch (op_) {
    case Op::all_gather:
    case Op::split:
      return {0, input_numel_};
    case Op::all_to_all:
      return input_ranges_[static_cast<size_t>(peer)];
    case Op::broadcast:
      return rank_ == root_ && peer != root_ ? ElementRange{0, input_numel_} : ElementRange{};
    case Op::reduce_scatter:
      return {peer * output_numel_, output_numel_};
    case Op::all_reduce:
      return in_slices() ? equal_range(input_numel_, peer, size_) : ElementRange{0, input_numel_};
    case Op::barrier:
    case Op::send:
    case Op::recv:
      break;
  }
  return {};
}

ElementRange CollectivePlan::recv_range(int64_t peer) const {
  switch (op_) {
    case Op::all_gather:
    case Op::split:
      return {peer * input_numel_, input_numel_};
    case Op::all_to_all:
      return output_ranges_[static_cast<size_t>(peer)];
    case Op::broadcast:
      return rank_ != root_ && peer == root_ ? ElementRange{0, output_numel_} : ElementRange{};
    case Op::reduce_scatter:
    case Op::all_reduce:
      return summed();
    case Op::barrier:
    case Op::send:
    case Op::recv:
      break;
  }
  return {};
}

// Everybody's terms for this rank are what this rank would give to itself.
ElementRange CollectivePlan::summed() const {
  return sums() ? send_range(rank_) : ElementRange{};
}

ElementRange CollectivePlan::result() const {
  return op_ == Op::reduce_scatter ? ElementRange{0, output_numel_} : summed();
}

ElementRange CollectivePlan::recv_sum_range(int64_t peer) const {
  return in_slices() ? equal_range(output_numel_, peer, size_) : ElementRange{};
}

}  // namespace shardproof
