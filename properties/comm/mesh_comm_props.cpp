// Which samples a rank of a mesh reads.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/threads/threads.h"

using namespace shardproof;

namespace {

// Some of the axes of training, in any order.
Mesh drawn_mesh() {
  std::vector<Axis> axes;
  for (const char* name : {"dp_replicate", "dp_shard", "cp", "tp"})
    if (*rc::gen::arbitrary<bool>()) axes.push_back({name, *rc::gen::inRange<int64_t>(1, 4)});
  if (axes.empty()) axes.push_back({"tp", 2});
  for (size_t i = 0; i < axes.size(); ++i) std::swap(axes[i], axes[*rc::gen::inRange<size_t>(i, axes.size())]);
  return Mesh(axes);
}

}  // namespace

RC_GTEST_PROP(MeshComm, ranks_have_one_data_rank_if_and_only_if_they_differ_along_tp_and_cp_alone, ()) {
  const Mesh mesh = drawn_mesh();
  RC_PRE(mesh.size() <= 24);
  const auto world = static_cast<size_t>(mesh.size());
  std::vector<int64_t> data_ranks(world), data_sizes(world);
  run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
    const MeshComm comms(comm, mesh);
    data_ranks[comm->rank()] = comms.data_rank();
    data_sizes[comm->rank()] = comms.data_size();
  });
  const auto place = [&](size_t rank, const char* axis) {
    return mesh.has(axis) ? mesh.coordinate(static_cast<int64_t>(rank), axis) : 0;
  };
  const auto places = [&](size_t rank) { return std::pair(place(rank, "dp_replicate"), place(rank, "dp_shard")); };
  for (size_t a = 0; a < world; ++a)
    for (size_t b = 0; b < world; ++b) {
      RC_ASSERT((data_ranks[a] == data_ranks[b]) == (places(a) == places(b)));
      RC_ASSERT((data_ranks[a] < data_ranks[b]) == (places(a) < places(b)));
    }
  const std::set<int64_t> different(data_ranks.begin(), data_ranks.end());
  const auto count = static_cast<int64_t>(different.size());
  RC_ASSERT(*different.begin() == 0 && *different.rbegin() == count - 1);
  for (const int64_t size : data_sizes) RC_ASSERT(size == count);
}
