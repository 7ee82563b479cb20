// Meshes whose axes stand in another order than the usual one.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <set>

#include "harness/case/generate.h"
#include "harness/case/mesh_order.h"
#include "properties/kit/expect_error.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/threads/threads.h"
#include "shardproof/sharding/fully_shard.h"

using namespace harness;
using shardproof::Axis;
using shardproof::expect_error;
using shardproof::Mesh;

namespace {

Case on(const std::string& mesh) {
  Case c = Case::parse("mlp(widths=5-7-3) mesh(dp_shard=2) zero3 sgd(lr=0.1) fast seed=3 : step");
  c.mesh = Mesh::parse(mesh);
  return c;
}

// Some of the axes, in some order.
Mesh any_mesh() {
  std::vector<Axis> axes;
  for (const std::string& name : mesh_axes())
    if (const auto size = *rc::gen::inRange<int64_t>(0, 4); size > 0) axes.push_back({name, size});
  for (size_t i = axes.size(); i > 1; --i) std::swap(axes[i - 1], axes[*rc::gen::inRange<size_t>(0, i)]);
  return Mesh(axes);
}

// Whether the library shards a layer by that row.
bool is_taken_by_the_library(const shardproof::Strategy& row, const Mesh& mesh) {
  try {
    shardproof::run_threads(mesh.size(), [&](std::shared_ptr<shardproof::Comm> comm) {
      torch::nn::Linear layer(5, 7);
      shardproof::fully_shard(layer.ptr(), std::make_shared<shardproof::MeshComm>(comm, mesh), {.strategy = row});
    });
    return true;
  } catch (const shardproof::Error&) {
    return false;
  }
}

}  // namespace

RC_GTEST_PROP(MeshOrder, ranks_of_one_microbatch_are_peers_along_cp_and_tp_wherever_these_axes_stand, ()) {
  Case c = on("dp_shard=2");
  c.mesh = any_mesh();
  const std::vector<int64_t> data_ranks = c.data_rank_of_each();
  std::vector<std::string> inner;
  for (const char* axis : {"cp", "tp"})
    if (c.mesh.has(axis)) inner.emplace_back(axis);
  for (int64_t rank = 0; rank < c.mesh.size(); ++rank) {
    const std::vector<int64_t> peers = c.mesh.peers(rank, inner);
    for (int64_t other = 0; other < c.mesh.size(); ++other)
      RC_ASSERT((data_ranks[static_cast<size_t>(rank)] == data_ranks[static_cast<size_t>(other)]) ==
                (std::ranges::count(peers, other) == 1));
  }
  RC_ASSERT(*std::ranges::max_element(data_ranks) == c.data_ranks() - 1);
}

RC_GTEST_PROP(MeshOrder, other_orders_have_the_same_axes_and_none_is_the_usual_one, ()) {
  const Mesh mesh = any_mesh();
  for (const Mesh& other : in_other_orders(mesh)) {
    RC_ASSERT(!is_in_usual_order(other));
    RC_ASSERT(in_usual_order(other) == in_usual_order(mesh));
    shardproof::data_parallel_mesh(other);  // takes it
  }
  RC_ASSERT(is_in_usual_order(in_usual_order(mesh)));
}

TEST(MeshOrder, axes_of_one_rank_have_no_order) {
  EXPECT_TRUE(is_in_usual_order(Mesh::parse("tp=1,dp_shard=2,dp_replicate=1")));
  EXPECT_FALSE(is_in_usual_order(Mesh::parse("tp=2,dp_shard=2")));
  EXPECT_TRUE(in_other_orders(Mesh::parse("dp_replicate=1,dp_shard=3")).empty());
  EXPECT_EQ(in_other_orders(Mesh::parse("dp_shard=2,cp=2,tp=2")).size(), 1U) << "cp has to follow dp_shard";
}

TEST(MeshOrder, the_harness_refuses_a_strategy_exactly_where_the_library_does) {
  int64_t refused = 0;
  for (const char* text : {"dp_replicate=2,dp_shard=2", "dp_shard=2,dp_replicate=2"})
    for (const auto* rows : {&shardproof::strategies(), &shardproof::free_rows()})
      for (const shardproof::Strategy& row : *rows) {
        const Mesh mesh = Mesh::parse(text);
        const bool fits = can_sum_on(shardproof::on_mesh(row, mesh), mesh);
        EXPECT_EQ(fits, is_taken_by_the_library(row, mesh)) << row.name << " on " << text;
        refused += !fits;
      }
  EXPECT_GT(refused, 0);
}

TEST(MeshOrder, what_needs_replicas_outside_of_shards_is_refused) {
  Case c = on("dp_shard=2,dp_replicate=2");
  c.strategy = "ddp";
  EXPECT_TRUE(is_valid(c));
  c.mode = Mode::ordered;
  expect_error([&] { validate(c); }, {"dp_shard=2,dp_replicate=2", "ddp sums gradients along both axes at once",
                                      "the golden run begins with dp_shard"});
  c.mesh = Mesh::parse("dp_shard=2,dp_replicate=1");
  EXPECT_TRUE(is_valid(c)) << "an axis of one rank has no order";
  c.mesh = Mesh::parse("dp_shard=2,dp_replicate=2");
  for (const char* after_each_microbatch : {"zero2", "zero3", "hsdp", "hfsdp", "hzero2"}) {
    c.strategy = after_each_microbatch;
    c.options.set("reduce_replicas_every_microbatch", "false");
    EXPECT_TRUE(is_valid(c)) << c.strategy;
    c.options.set("reduce_replicas_every_microbatch", "true");
    EXPECT_FALSE(is_valid(c)) << c.strategy;
  }
  c.mode = Mode::fast;
  c.strategy = "hfsdp";
  expect_error([&] { validate(c); },
               {"dp_shard=2,dp_replicate=2", "hfsdp with reduce_replicas_every_microbatch=true", "dp_replicate come first"});
}

TEST(MeshOrder, cases_that_are_drawn_on_a_mesh_of_another_order_suit_it) {
  Limits limits;
  limits.mesh = Mesh::parse("dp_shard=2,dp_replicate=2");
  std::set<Mode> modes;
  for (int64_t i = 0; i < 100; ++i) {
    const Case c = generate(9, i, limits);
    EXPECT_TRUE(is_valid(c)) << c.str();
    modes.insert(c.mode);
  }
  EXPECT_EQ(modes.size(), 4U);
  limits.mesh = Mesh::parse("cp=2,dp_shard=2");
  expect_error([&] { generate(9, 1, limits); }, {"cp=2,dp_shard=2", "cp must follow dp_shard"});
}

TEST(MeshOrder, units_on_a_view_of_their_own_keep_the_order_of_the_axes) {
  Case c = on("tp=2,dp_shard=4");
  c.options.unit_mesh = 1;
  EXPECT_EQ(unit_mesh(c).str(), "tp=2,dp_replicate=2,dp_shard=2");
  c.mesh = Mesh::parse("dp_replicate=3,tp=2,dp_shard=4");
  EXPECT_EQ(unit_mesh(c), c.mesh) << "which replicas are neighbours cannot be told by one axis";
}

TEST(MeshOrder, a_good_part_of_the_meshes_with_several_axes_is_drawn_in_another_order) {
  int64_t several = 0, others = 0, of_loads = 0;
  for (int64_t i = 0; i < 2000; ++i) {
    const Case c = generate(9, i, {});
    several += !in_other_orders(c.mesh).empty();
    others += !is_in_usual_order(c.mesh);
    for (const StepPlan& step : c.steps) of_loads += step.load_mesh && !is_in_usual_order(*step.load_mesh);
  }
  EXPECT_GE(others * 100, 15 * several);
  EXPECT_GE(others, 60);
  EXPECT_GE(of_loads, 8);
}
