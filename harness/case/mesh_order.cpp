#include "harness/case/mesh_order.h"

#include <algorithm>
#include <array>

#include "harness/case/axes.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Axis;
using shardproof::Mesh;

bool is_before(const Axis& a, const Axis& b) {
  return std::ranges::find(mesh_axes(), a.name) < std::ranges::find(mesh_axes(), b.name);
}

bool can_be_sharded(const Mesh& mesh) {
  try {
    shardproof::data_parallel_mesh(mesh);
    return true;
  } catch (const shardproof::Error&) {
    return false;
  }
}

bool sums_lead_to(const shardproof::Layout& to, const shardproof::Layout& from, const Mesh& mesh) {
  auto last = static_cast<int64_t>(mesh.axes().size());
  for (const shardproof::Split& split : to.flat) {
    const bool is_summed = std::ranges::count(from.partial, split.axis) > 0 && std::ranges::count(to.partial, split.axis) == 0;
    if (!is_summed) continue;
    if (mesh.index(split.axis) > last) return false;
    last = mesh.index(split.axis);
  }
  return true;
}

}  // namespace

const std::vector<std::string>& mesh_axes() {
  static const std::vector<std::string> all = {axes::dp_replicate, axes::dp_shard, axes::cp, axes::tp};
  return all;
}

bool is_in_usual_order(const Mesh& mesh) {
  std::vector<Axis> axes = mesh.axes();
  std::erase_if(axes, [](const Axis& axis) { return axis.size == 1; });
  return std::ranges::is_sorted(axes, is_before);
}

Mesh in_usual_order(const Mesh& mesh) {
  std::vector<Axis> axes = mesh.axes();
  std::ranges::sort(axes, is_before);
  return Mesh(std::move(axes));
}

std::vector<Mesh> in_other_orders(const Mesh& mesh) {
  std::vector<Mesh> orders;
  std::vector<Axis> axes = in_usual_order(mesh).axes();
  do {
    const Mesh order(axes);
    if (!is_in_usual_order(order) && can_be_sharded(order)) orders.push_back(order);
  } while (std::ranges::next_permutation(axes, is_before).found);
  return orders;
}

bool sums_replicas_first(const shardproof::Strategy& strategy, const Mesh& mesh) {
  const auto has = [&](const char* axis) { return mesh.has(axis) && mesh.size(axis) > 1; };
  if (!has(axes::dp_replicate) || !has(axes::dp_shard) || mesh.index(axes::dp_replicate) < mesh.index(axes::dp_shard))
    return false;
  const auto adds_both = [](const shardproof::Layout& from, const shardproof::Layout& to) {
    return std::ranges::all_of(std::array{axes::dp_replicate, axes::dp_shard}, [&](const char* axis) {
      return std::ranges::count(from.partial, axis) > 0 && std::ranges::count(to.partial, axis) == 0;
    });
  };
  return adds_both(strategy.produced, strategy.accumulated) || adds_both(strategy.accumulated, strategy.state);
}

bool can_sum_on(const shardproof::Strategy& strategy, const Mesh& mesh) {
  return sums_lead_to(strategy.accumulated, strategy.produced, mesh) &&
         sums_lead_to(strategy.state, strategy.accumulated, mesh);
}

}  // namespace harness
