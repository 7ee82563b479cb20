// Laws of plans: what moves.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>

#include "properties/kit/expect_error.h"
#include "properties/kit/gen_layout.h"
#include "properties/kit/spec_layout.h"

namespace shardproof {
namespace {

using gen::Move;

spec::World executed(const Move& move) {
  return spec::execute(move.shape, move.from, move.to, plan(move.shape, move.from, move.to),
                       spec::start(move.shape, move.from));
}

RC_GTEST_PROP(Plan, executed_gives_every_target_what_it_wants_sums_in_rank_order, ()) {
  const Move move = *gen::move();
  RC_CLASSIFY(move.from.mesh == move.to.mesh, "one mesh");
  RC_CLASSIFY(!move.from.layout.partial.empty(), "from partial");
  RC_CLASSIFY(!move.to.layout.partial.empty(), "to partial");
  RC_CLASSIFY(numel(move.shape) == 0, "no elements");
  RC_ASSERT(spec::same_values(executed(move), spec::wanted(move.shape, move.from, move.to)));
}

RC_GTEST_PROP(Plan, there_and_back_gives_the_same_values, ()) {
  const Shape shape = *gen::shape();
  const Mesh mesh = *gen::mesh(), other = *gen::mesh();
  const Placement here{mesh, *gen::whole_layout(shape, mesh)}, there{other, *gen::layout(shape, other)};
  const spec::World start = spec::start(shape, here);
  const spec::World away = spec::execute(shape, here, there, plan(shape, here, there), start);
  RC_ASSERT(spec::same_values(spec::execute(shape, there, here, plan(shape, there, here), away), start));
}

RC_GTEST_PROP(Plan, without_terms_each_wanted_element_arrives_once, ()) {
  const Shape shape = *gen::shape();
  const Mesh mesh = *gen::mesh(), other = *gen::mesh();
  const Placement from{mesh, *gen::whole_layout(shape, mesh)}, to{other, *gen::whole_layout(shape, other)};
  std::set<std::pair<int64_t, int64_t>> arrived;
  int64_t wanted = 0;
  for (const Transfer& transfer : plan(shape, from, to))
    for (const int64_t offset : spec::offsets(shape, transfer.box))
      RC_ASSERT(arrived.insert({transfer.target, offset}).second);
  for (int64_t rank = 0; rank < other.size(); ++rank)
    wanted += spec::held(shape, other, to.layout, rank).size();
  RC_ASSERT(std::ssize(arrived) == wanted);
}

RC_GTEST_PROP(Plan, is_ordered_by_target_source_and_first_element, ()) {
  const Move move = *gen::move();
  const std::vector<Transfer> transfers = plan(move.shape, move.from, move.to);
  const auto key = [&](const Transfer& transfer) {
    RC_ASSERT(numel(transfer.box) > 0);
    return std::tuple(transfer.target, transfer.source, spec::offsets(move.shape, transfer.box).front());
  };
  for (size_t i = 1; i < transfers.size(); ++i) RC_ASSERT(key(transfers[i - 1]) < key(transfers[i]));
}

RC_GTEST_PROP(Plan, its_rows_and_columns_are_those_computed_alone, ()) {
  const Move move = *gen::move();
  std::map<int64_t, std::vector<Transfer>> rows, columns;
  for (const Transfer& transfer : plan(move.shape, move.from, move.to)) {
    rows[transfer.target].push_back(transfer);
    columns[transfer.source].push_back(transfer);
  }
  for (int64_t target = 0; target < move.to.mesh.size(); ++target)
    RC_ASSERT(plan_for_target(move.shape, move.from, move.to, target) == rows[target]);
  for (int64_t source = 0; source < move.from.mesh.size(); ++source)
    RC_ASSERT(plan_for_source(move.shape, move.from, move.to, source) == columns[source]);
}

RC_GTEST_PROP(Plan, does_not_change_when_its_layouts_are_made_canonical, ()) {
  const Move move = *gen::move();
  const Placement from{move.from.mesh, canonical(move.shape, move.from.mesh, move.from.layout)};
  const Placement to{move.to.mesh, canonical(move.shape, move.to.mesh, move.to.layout)};
  RC_ASSERT(plan(move.shape, from, to) == plan(move.shape, move.from, move.to));
}

RC_GTEST_PROP(Plan, between_equal_placements_moves_nothing, ()) {
  const gen::Placed placed = *gen::placed();
  const Placement placement{placed.mesh, placed.layout};
  int64_t elements = 0, held = 0;
  for (const Transfer& transfer : plan(placed.shape, placement, placement)) {
    RC_ASSERT(transfer.source == transfer.target);
    elements += numel(transfer.box);
  }
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank)
    held += owned_numel(placed.shape, placed.mesh, placed.layout, rank);
  RC_ASSERT(elements == held);
}

// On one mesh a replica of the source takes from the ranks at its own coordinates along the replicated axes.
RC_GTEST_PROP(Plan, a_rank_takes_from_its_own_replica, ()) {
  const Move move = *gen::move_on_one_mesh();
  const Mesh& mesh = move.from.mesh;
  const auto& partial = move.from.layout.partial;
  for (const Transfer& transfer : plan(move.shape, move.from, move.to)) {
    const auto source = spec::coordinates(mesh, transfer.source),
               target = spec::coordinates(mesh, transfer.target);
    for (size_t i = 0; i < source.size(); ++i) {
      const std::string& axis = mesh.axes()[i].name;
      const bool replicated =
          !move.from.layout.splits(axis) && std::count(partial.begin(), partial.end(), axis) == 0;
      if (replicated) RC_ASSERT(source[i] == target[i]);
    }
  }
}

// Also on two meshes, where rank r of one need not be a replica of rank r of the other.
RC_GTEST_PROP(Plan, a_rank_that_has_what_it_wants_takes_it_from_itself, ()) {
  const Shape shape = *gen::shape();
  const Mesh mesh = *gen::mesh(), other = *gen::mesh();
  const Placement from{mesh, *gen::whole_layout(shape, mesh)}, to{other, *gen::whole_layout(shape, other)};
  for (const Transfer& transfer : plan(shape, from, to)) {
    if (transfer.target >= mesh.size()) continue;
    const auto mine = spec::held(shape, mesh, from.layout, transfer.target);
    const bool has = std::count(mine.begin(), mine.end(), spec::offsets(shape, transfer.box).front()) > 0;
    if (has) RC_ASSERT(transfer.source == transfer.target);
  }
}

RC_GTEST_PROP(Plan, on_two_meshes_replicas_share_the_load, ()) {
  const Mesh from(std::vector<Axis>{{"dp", *rc::gen::inRange(1, 9)}}),
      to(std::vector<Axis>{{"tp", *rc::gen::inRange(1, 33)}});
  std::vector<int64_t> loads(from.size());
  for (const Transfer& transfer : plan({5}, {from, replicated()}, {to, replicated()}))
    ++loads[transfer.source];
  const auto [least, most] = std::minmax_element(loads.begin(), loads.end());
  RC_ASSERT(*most - *least <= 1);
}

// Every way two axes can lie on a 2-dim tensor, to every other, for small lengths and parts.
TEST(Plan, every_small_move_gives_what_is_wanted) {
  const Split a{"a", {}}, b{"b", {}};
  const Layout layouts[] = {
      replicated(),
      split_dim(replicated(), 0, a),
      split_dim(split_dim(replicated(), 0, a), 0, b),
      split_dim(split_dim(replicated(), 0, b), 0, a),
      split_dim(split_dim(replicated(), 0, b), 1, a),
      split_flat(split_dim(replicated(), 1, a), b),
      split_flat(split_flat(replicated(), b), a),
      add_partial(split_dim(replicated(), 0, a), "b"),
      add_partial(add_partial(replicated(), "a"), "b"),
  };
  for (int64_t length = 0; length <= 6; ++length)
    for (int64_t parts = 0; parts < 16; ++parts) {
      const Mesh mesh(std::vector<Axis>{{"a", 1 + parts / 4}, {"b", 1 + parts % 4}});
      for (const Layout& from : layouts)
        for (const Layout& to : layouts) {
          const Move move{{length, 2}, {mesh, from}, {mesh, to}};
          ASSERT_TRUE(spec::same_values(executed(move), spec::wanted(move.shape, move.from, move.to)))
              << from.str() << " -> " << to.str() << " on " << mesh.str() << ", length " << length;
        }
    }
}

// 16,384 ranks: the plan is as long as what it moves, and its rows and columns come alone.
TEST(Plan, of_16384_ranks_moves_every_element_once_and_agrees_with_its_rows_and_columns) {
  const Shape shape{4099, 1031};
  const Mesh mesh = Mesh::parse("dp_replicate=8,dp_shard=256,tp=8"),
             other = Mesh::parse("pp=4,dp_shard=512,tp=8");
  const Layout rows = split_dim(split_dim(replicated(), 0, {"tp", {}}), 0, {"dp_shard", {}});
  const Layout bucket = split_flat(split_dim(replicated(), 1, {"tp", {}}), {"dp_shard", {}});
  const Placement from{mesh, rows};
  for (const Placement& to : {Placement{mesh, bucket}, Placement{other, bucket}, Placement{other, rows}}) {
    const std::vector<Transfer> transfers = plan(shape, from, to);
    const int64_t copies = to.mesh == mesh ? 8 : 4;
    std::map<int64_t, std::vector<Transfer>> sample_rows, sample_columns;
    int64_t elements = 0;
    for (const Transfer& transfer : transfers) {
      elements += numel(transfer.box);
      if (transfer.target % 509 == 0) sample_rows[transfer.target].push_back(transfer);
      if (transfer.source % 509 == 0) sample_columns[transfer.source].push_back(transfer);
    }
    EXPECT_EQ(elements, copies * numel(shape));
    for (int64_t rank = 0; rank < mesh.size(); rank += 509) {
      EXPECT_EQ(plan_for_target(shape, from, to, rank), sample_rows[rank]);
      EXPECT_EQ(plan_for_source(shape, from, to, rank), sample_columns[rank]);
    }
  }
}

TEST(Plan, of_16384_ranks_sums_256_terms_for_each_element_of_a_shard) {
  const Shape shape{4099, 64};
  const Mesh mesh = Mesh::parse("dp_replicate=8,dp_shard=256,tp=8");
  const Layout columns = split_dim(replicated(), 1, {"tp", {}});
  const Placement produced{mesh, add_partial(columns, "dp_shard")};
  const Placement rest{mesh, split_dim(columns, 0, {"dp_shard", {}})};
  for (int64_t rank = 0; rank < mesh.size(); rank += 509) {
    const int64_t mine = owned_numel(shape, mesh, rest.layout, rank);
    std::map<int64_t, int64_t> terms;
    for (const Transfer& transfer : plan_for_target(shape, produced, rest, rank))
      terms[transfer.source] += numel(transfer.box);
    EXPECT_EQ(std::ssize(terms), mine > 0 ? 256 : 0);
    for (const auto& [source, elements] : terms) EXPECT_EQ(elements, mine);
    int64_t sent = 0;
    for (const Transfer& transfer : plan_for_source(shape, produced, rest, rank)) sent += numel(transfer.box);
    EXPECT_EQ(sent, numel(shape) / 8);
  }
}

TEST(Plan, the_worked_example_of_the_documentation_holds) {
  const Placement saved{Mesh::parse("dp=3"), split_flat(replicated(), {"dp", {}})};
  const Placement wanted{Mesh::parse("tp=2"), split_dim(replicated(), 0, {"tp", {}})};
  EXPECT_EQ(plan({6}, saved, wanted),
            (std::vector<Transfer>{{0, 0, {{0, 2}}}, {1, 0, {{2, 3}}}, {1, 1, {{3, 4}}}, {2, 1, {{4, 6}}}}));
}

TEST(Plan, questions_that_make_no_sense_are_refused) {
  const Placement one{Mesh::parse("dp=2"), replicated()},
      other{Mesh::parse("tp=3"), split_dim(replicated(), 0, {"dp", {}})};
  expect_error([&] { plan({4}, one, other); }, {"[layout]", "`dp`", "tp=3"});
  expect_error([&] { plan({4}, other, one); }, {"[layout]", "`dp`", "tp=3"});
  expect_error([&] { plan_for_target({4}, one, one, 2); }, {"[mesh]", "rank 2"});
  expect_error([&] { plan_for_source({4}, one, one, -1); }, {"[mesh]", "rank -1"});
}

}  // namespace
}  // namespace shardproof
