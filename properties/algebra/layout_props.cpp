// Laws of layouts: who holds what.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "properties/kit/expect_error.h"
#include "properties/kit/gen_layout.h"
#include "properties/kit/spec_layout.h"

namespace shardproof {
namespace {

using gen::Placed;

bool is_contiguous(const Layout& layout) {
  for (const auto& splits : layout.dims)
    for (const Split& split : splits)
      if (!split.is_contiguous()) return false;
  return true;
}

std::vector<int64_t> offsets(const Shape& shape, const std::vector<Box>& boxes) {
  std::vector<int64_t> all;
  for (const Box& box : boxes)
    for (const int64_t offset : spec::offsets(shape, box)) all.push_back(offset);
  return all;
}

RC_GTEST_PROP(Layout, owned_boxes_are_the_elements_that_dealing_leaves, ()) {
  const Placed placed = *gen::placed();
  RC_CLASSIFY(placed.mesh.size() == 1, "one rank");
  RC_CLASSIFY(numel(placed.shape) == 0, "no elements");
  RC_CLASSIFY(placed.shape.empty(), "0-dim");
  RC_CLASSIFY(!placed.layout.flat.empty(), "flat");
  RC_CLASSIFY(!placed.layout.partial.empty(), "partial");
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank) {
    const auto boxes = owned(placed.shape, placed.mesh, placed.layout, rank);
    const auto elements = spec::held(placed.shape, placed.mesh, placed.layout, rank);
    RC_ASSERT(offsets(placed.shape, boxes) == elements);
    RC_ASSERT(owned_numel(placed.shape, placed.mesh, placed.layout, rank) == std::ssize(elements));
  }
}

RC_GTEST_PROP(Layout, one_copy_tiles_the_tensor, ()) {
  const Placed placed = *gen::placed();
  std::map<std::vector<int64_t>, std::vector<int64_t>>
      held_of_copy;  // by coordinates along axes that split nothing
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank) {
    std::vector<int64_t> copy = placed.mesh.coordinates(rank);
    for (size_t i = 0; i < copy.size(); ++i)
      if (placed.layout.splits(placed.mesh.axes()[i].name)) copy[i] = 0;
    auto& held = held_of_copy[copy];
    for (const int64_t offset : offsets(placed.shape, owned(placed.shape, placed.mesh, placed.layout, rank)))
      held.push_back(offset);
  }
  std::vector<int64_t> all;
  for (int64_t i = 0; i < numel(placed.shape); ++i) all.push_back(i);
  for (auto& [copy, held] : held_of_copy) {
    std::sort(held.begin(), held.end());
    if (is_contiguous(placed.layout)) RC_ASSERT(held == all);
    held.erase(std::unique(held.begin(), held.end()), held.end());  // segments may be held in copies
    RC_ASSERT(held == all);
  }
}

RC_GTEST_PROP(Layout, a_rank_holds_few_boxes_and_no_empty_one, ()) {
  const Placed placed = *gen::placed();
  const int64_t dims = std::ssize(placed.shape);
  const int64_t boxes_max = placed.layout.flat.empty() || dims == 0 ? 1 : 2 * dims - 1;
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank) {
    const auto boxes = owned(placed.shape, placed.mesh, placed.layout, rank);
    if (is_contiguous(placed.layout)) RC_ASSERT(std::ssize(boxes) <= boxes_max);
    for (const Box& box : boxes) RC_ASSERT(numel(box) > 0);
  }
}

RC_GTEST_PROP(Layout, local_shape_counts_what_the_splits_of_dims_leave, ()) {
  const Placed placed = *gen::placed();
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank) {
    const Shape local = local_shape(placed.shape, placed.mesh, placed.layout, rank);
    RC_ASSERT(local == spec::local_shape(placed.shape, placed.mesh, {placed.layout.dims, {}, {}}, rank));
  }
}

RC_GTEST_PROP(Layout, owned_runs_are_the_owned_elements_and_neighbours_are_joined, ()) {
  const Placed placed = *gen::placed();
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank) {
    std::vector<int64_t> elements;
    const auto runs = owned_runs(placed.shape, placed.mesh, placed.layout, rank);
    for (size_t i = 0; i < runs.size(); ++i) {
      RC_ASSERT(runs[i].local == std::ssize(elements));
      RC_ASSERT(runs[i].whole.size() > 0);
      if (i > 0) RC_ASSERT(runs[i].whole.begin != runs[i - 1].whole.end);
      for (int64_t at = runs[i].whole.begin; at < runs[i].whole.end; ++at) elements.push_back(at);
    }
    RC_ASSERT(elements == spec::held(placed.shape, placed.mesh, placed.layout, rank));
  }
}

// The coordinates along partial axes: ranks with others have terms of their own.
std::vector<int64_t> term_of(const Placed& placed, int64_t rank) {
  std::vector<int64_t> term;
  for (const std::string& axis : placed.layout.partial) term.push_back(placed.mesh.coordinate(rank, axis));
  return term;
}

RC_GTEST_PROP(Layout, first_copies_tile_the_tensor, ()) {
  const Placed placed = *gen::placed();
  std::map<std::vector<int64_t>, std::multiset<int64_t>> counted;
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank) {
    const auto held = spec::held(placed.shape, placed.mesh, placed.layout, rank);
    std::multiset<int64_t>& elements = counted[term_of(placed, rank)];
    int64_t end = -1;
    for (const Interval& run : first_copies(placed.shape, placed.mesh, placed.layout, rank)) {
      RC_ASSERT(end < run.begin && run.begin < run.end && run.end <= std::ssize(held));
      end = run.end;
      elements.insert(held.begin() + run.begin, held.begin() + run.end);
    }
  }
  std::multiset<int64_t> all;
  for (int64_t i = 0; i < numel(placed.shape); ++i) all.insert(i);
  for (const auto& [term, elements] : counted) RC_ASSERT(elements == all);
}

RC_GTEST_PROP(Layout, first_holders_and_replicas_are_the_ranks_that_hold_the_same, ()) {
  const Placed placed = *gen::placed();
  const auto held = [&](int64_t rank) { return spec::held(placed.shape, placed.mesh, placed.layout, rank); };
  const auto first = first_holders(placed.shape, placed.mesh, placed.layout);
  const bool is_once = is_contiguous(placed.layout);
  RC_CLASSIFY(is_once);
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank) {
    const auto same = replicas(placed.mesh, placed.layout, rank);
    RC_ASSERT(std::ranges::is_sorted(same));
    RC_ASSERT(first[rank] <= same.front());
    for (int64_t other = 0; other < placed.mesh.size(); ++other) {
      const bool is_same = std::ranges::count(same, other) > 0;
      if (is_same) RC_ASSERT(first[other] == first[rank]);
      if (first[other] == first[rank]) {
        RC_ASSERT(held(other) == held(rank));
        RC_ASSERT(term_of(placed, other) == term_of(placed, rank));
      } else if (is_once && held(rank).size() > 0) {
        RC_ASSERT(held(other) != held(rank) || term_of(placed, other) != term_of(placed, rank));
      }
      if (is_once) RC_ASSERT(is_same == (first[other] == first[rank]));
    }
  }
}

RC_GTEST_PROP(Layout, canonical_form_holds_the_same_and_is_its_own_canonical_form, ()) {
  const Placed placed = *gen::placed();
  const Layout same = canonical(placed.shape, placed.mesh, placed.layout);
  RC_ASSERT(canonical(placed.shape, placed.mesh, same) == same);
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank)
    RC_ASSERT(owned(placed.shape, placed.mesh, same, rank) ==
              owned(placed.shape, placed.mesh, placed.layout, rank));
}

RC_GTEST_PROP(Layout, layouts_of_one_canonical_form_hold_the_same, ()) {
  const Placed placed = *gen::placed();
  const Layout other = *gen::related_layout(placed.shape, placed.mesh, placed.layout);
  const bool equal =
      canonical(placed.shape, placed.mesh, placed.layout) == canonical(placed.shape, placed.mesh, other);
  RC_CLASSIFY(equal);
  if (!equal) return;
  for (int64_t rank = 0; rank < placed.mesh.size(); ++rank)
    RC_ASSERT(owned(placed.shape, placed.mesh, placed.layout, rank) ==
              owned(placed.shape, placed.mesh, other, rank));
}

// Writes out the bounds of even splits wherever every rank cuts the same length.
Layout spelled_out(const Placed& placed) {
  Layout layout = placed.layout;
  const auto spell = [&](std::vector<Split>& splits, int64_t length) {
    for (Split& split : splits) {
      const int64_t parts = placed.mesh.size(split.axis);
      if (!split.is_contiguous()) return;
      const bool uneven = !split.bounds.empty() || length % parts != 0;
      const int64_t chunk = (length + parts - 1) / parts;
      if (split.bounds.empty())
        for (int64_t part = 0; part <= parts; ++part) split.bounds.push_back(std::min(part * chunk, length));
      if (uneven) return;
      length = chunk;
    }
  };
  for (size_t d = 0; d < layout.dims.size(); ++d) spell(layout.dims[d], placed.shape[d]);
  if (layout.dims.empty()) spell(layout.flat, layout.bucket.length > 0 ? layout.bucket.length : numel(placed.shape));
  return layout;
}

RC_GTEST_PROP(Layout, spelled_out_even_bounds_and_axes_of_one_rank_change_nothing, ()) {
  Placed placed = *gen::placed();
  const Layout plain = canonical(placed.shape, placed.mesh, placed.layout);
  std::vector<Axis> axes = placed.mesh.axes();
  axes.insert(axes.begin() + *rc::gen::inRange<size_t>(0, axes.size() + 1), Axis{"one", 1});
  placed.mesh = Mesh(axes);
  const Layout layout = spelled_out(placed);
  const int64_t use = *rc::gen::inRange<int64_t>(-1, std::ssize(placed.shape) + 1);
  const Layout more = use < 0                          ? add_partial(layout, "one")
                      : use < std::ssize(placed.shape) ? split_dim(layout, use, {"one", {}})
                                                       : split_flat(layout, {"one", {}});
  RC_ASSERT(canonical(placed.shape, placed.mesh, more) == plain);
}

TEST(Layout, a_bucket_that_its_tensor_fills_or_that_nothing_cuts_is_none) {
  const Mesh mesh = Mesh::parse("dp=2,tp=2");
  const Layout flat = split_flat(replicated(), {"dp", {}});
  EXPECT_EQ(canonical({5, 3}, mesh, in_bucket({}, flat, {0, 15})), flat);
  EXPECT_EQ(canonical({15}, mesh, in_bucket({}, flat, {0, 15})), split_dim(replicated(), 0, {"dp", {}}));
  EXPECT_EQ(canonical({5, 3}, mesh, in_bucket({}, replicated(), {2, 20})), replicated());
  for (const BucketPlace place : {BucketPlace{0, 16}, BucketPlace{1, 16}})
    EXPECT_EQ(canonical({5, 3}, mesh, in_bucket({}, flat, place)), in_bucket({}, flat, place));
  // Rows 3 + 2 along tp: the longer piece fills the bucket, and the other one does not.
  const Layout rows = split_dim(replicated(), 0, {"tp", {}});
  EXPECT_EQ(canonical({5, 3}, mesh, in_bucket(rows.dims, flat, {0, 9})), in_bucket(rows.dims, flat, {0, 9}));
}

TEST(Layout, a_flat_cut_of_a_1_dim_tensor_is_a_cut_of_its_dim) {
  const Mesh mesh = Mesh::parse("dp=2,tp=3");
  const Layout flat = split_flat(split_dim(replicated(), 0, {"tp", {}}), {"dp", {0, 1, 4}});
  const Layout dims = split_dim(split_dim(replicated(), 0, {"tp", {}}), 0, {"dp", {0, 1, 4}});
  EXPECT_EQ(canonical({11}, mesh, flat), canonical({11}, mesh, dims));
  EXPECT_NE(flat, dims);
}

// Under an uneven outer cut, bounds that equal the even cut of the longest piece differ from it on the
// shorter one.
TEST(Layout, ragged_bounds_that_are_even_on_some_ranks_only_stay_ragged) {
  const Mesh mesh = Mesh::parse("dp=2,tp=2");
  const Layout ragged = split_dim(split_dim(replicated(), 0, {"tp", {}}), 0, {"dp", {0, 2, 4}});
  EXPECT_EQ(
      canonical({6}, mesh, split_dim(split_dim(replicated(), 0, {"tp", {0, 4, 6}}), 0, {"dp", {0, 2, 4}})),
      split_dim(split_dim(replicated(), 0, {"tp", {0, 4, 6}}), 0, {"dp", {0, 2, 4}}));
  EXPECT_EQ(canonical({8}, mesh, ragged), split_dim(split_dim(replicated(), 0, {"tp", {}}), 0, {"dp", {}}));
}

TEST(Layout, splits_of_different_dims_commute) {
  const Split dp{"dp", {}}, tp{"tp", {}};
  EXPECT_EQ(split_dim(split_dim(replicated(), 0, dp), 1, tp),
            split_dim(split_dim(replicated(), 1, tp), 0, dp));
  EXPECT_NE(split_dim(split_dim(replicated(), 0, dp), 0, tp),
            split_dim(split_dim(replicated(), 0, tp), 0, dp));
  EXPECT_EQ(add_partial(add_partial(replicated(), "tp"), "dp"),
            add_partial(add_partial(replicated(), "dp"), "tp"));
}

std::vector<Interval> rows(int64_t length, const Layout& layout) {
  const Mesh mesh = Mesh::parse("dp_shard=2,tp=2");
  std::vector<Interval> rows;
  for (int64_t rank = 0; rank < 4; ++rank) {
    const auto boxes = owned({length, 3}, mesh, layout, rank);
    rows.push_back(boxes.empty() ? Interval{1, 1} : boxes[0][0]);
  }
  return rows;
}

// What PyTorch's _StridedShard documents, and the uneven tails it got wrong.
TEST(Layout, fsdp_after_tp_on_one_dim_is_the_documented_table_uneven_tails_included) {
  const Layout tp_first = split_dim(split_dim(replicated(), 0, {"tp", {}}), 0, {"dp_shard", {}});
  EXPECT_EQ(rows(8, tp_first), (std::vector<Interval>{{0, 2}, {4, 6}, {2, 4}, {6, 8}}));
  EXPECT_EQ(rows(6, tp_first), (std::vector<Interval>{{0, 2}, {3, 5}, {2, 3}, {5, 6}}));
  EXPECT_EQ(rows(5, tp_first), (std::vector<Interval>{{0, 2}, {3, 4}, {2, 3}, {4, 5}}));
  EXPECT_EQ(rows(1, tp_first), (std::vector<Interval>{{0, 1}, {1, 1}, {1, 1}, {1, 1}}));
  const Layout dp_first = split_dim(split_dim(replicated(), 0, {"dp_shard", {}}), 0, {"tp", {}});
  EXPECT_EQ(rows(8, dp_first), (std::vector<Interval>{{0, 2}, {2, 4}, {4, 6}, {6, 8}}));
  EXPECT_EQ(rows(5, dp_first), (std::vector<Interval>{{0, 2}, {2, 3}, {3, 4}, {4, 5}}));
  const Layout columns = split_dim(split_dim(replicated(), 1, {"tp", {}}), 0, {"dp_shard", {}});
  EXPECT_EQ(rows(5, columns), (std::vector<Interval>{{0, 3}, {0, 3}, {3, 5}, {3, 5}}));
}

// Parameters lie in a bucket with padding between them. What a rank has of the bucket is what it has of each parameter, and
// padding, however many axes cut the bucket and whatever another axis has cut off the parameters before.
RC_GTEST_PROP(Layout, a_rank_has_of_each_parameter_what_lies_in_its_part_of_the_bucket, ()) {
  const int64_t align = *rc::gen::element<int64_t>(1, 4, 16);
  const auto shapes = *rc::gen::container<std::vector<Shape>>(gen::shape());
  const Mesh mesh(
      std::vector<Axis>{{"r", *rc::gen::inRange(1, 4)}, {"s", *rc::gen::element<int64_t>(1, 2, 3, 5, 32)}, {"tp", 2}});
  std::vector<int64_t> begins;
  std::vector<Layout> cuts;  // what tensor parallelism leaves of each
  int64_t bucket = 0;
  for (const Shape& shape : shapes) {
    const bool is_cut = !shape.empty() && *rc::gen::arbitrary<bool>();
    cuts.push_back(is_cut ? split_dim(replicated(), *rc::gen::inRange<int64_t>(0, std::ssize(shape)), {"tp", {}})
                          : replicated());
    begins.push_back(bucket);
    bucket = (bucket + numel(local_shape(shape, mesh, cuts.back(), 0)) + align - 1) / align * align;
  }
  const Layout both = split_flat(split_flat(replicated(), {"s", {}}), {"r", {}});
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const std::vector<int64_t> mine = offsets({bucket}, owned({bucket}, mesh, both, rank));
    for (size_t p = 0; p < shapes.size(); ++p) {
      const std::vector<int64_t> local = offsets(shapes[p], owned(shapes[p], mesh, cuts[p], rank));
      std::vector<int64_t> wanted;
      for (const int64_t at : mine)
        if (begins[p] <= at && at < begins[p] + std::ssize(local)) wanted.push_back(local[at - begins[p]]);
      const Layout layout = in_bucket(cuts[p].dims, both, {begins[p], bucket});
      RC_ASSERT(offsets(shapes[p], owned(shapes[p], mesh, layout, rank)) == wanted);
    }
  }
}

// Every length 0 to 6, every pair of axis sizes 1 to 4, both orders on one dim, on two dims, and with one of
// them flat.
TEST(Layout, every_small_layout_of_two_axes_is_what_dealing_leaves) {
  const Split a{"a", {}}, b{"b", {}};
  const Layout layouts[] = {
      split_dim(split_dim(replicated(), 0, a), 0, b), split_dim(split_dim(replicated(), 0, b), 0, a),
      split_dim(split_dim(replicated(), 0, a), 1, b), split_flat(split_dim(replicated(), 0, a), b),
      split_flat(split_dim(replicated(), 1, b), a),   split_flat(split_flat(replicated(), b), a),
  };
  int64_t checked = 0;
  for (int64_t length = 0; length <= 6; ++length)
    for (int64_t parts = 0; parts < 16; ++parts)
      for (const Layout& layout : layouts) {
        const Mesh mesh(std::vector<Axis>{{"a", 1 + parts / 4}, {"b", 1 + parts % 4}});
        const Shape shape{length, 3};
        for (int64_t rank = 0; rank < mesh.size(); ++rank, ++checked)
          ASSERT_EQ(offsets(shape, owned(shape, mesh, layout, rank)), spec::held(shape, mesh, layout, rank))
              << layout.str() << " on " << mesh.str() << " of length " << length << ", rank " << rank;
      }
  EXPECT_EQ(checked, 7 * 100 * 6);  // (1+2+3+4)^2 ranks over the pairs of sizes
}

TEST(Layout, the_worked_examples_of_the_documentation_hold) {
  EXPECT_EQ(piece({"dp", {0, 1, 1, 4, 5}}, 5, 4, 1).size(), 0);
  EXPECT_EQ(piece({"dp", {0, 1, 1, 4, 5}}, 5, 4, 2), (Interval{1, 4}));
  const Mesh three = Mesh::parse("dp_shard=3");
  const Layout flat = split_flat(replicated(), {"dp_shard", {}});
  EXPECT_EQ(owned({4, 5}, three, flat, 0), (std::vector<Box>{{{0, 1}, {0, 5}}, {{1, 2}, {0, 2}}}));
  EXPECT_EQ(owned({4, 5}, three, flat, 1), (std::vector<Box>{{{1, 2}, {2, 5}}, {{2, 3}, {0, 4}}}));
  EXPECT_EQ(owned({4, 5}, three, flat, 2), (std::vector<Box>{{{2, 3}, {4, 5}}, {{3, 4}, {0, 5}}}));
  const Layout clamped = split_dim(split_dim(replicated(), 0, {"tp", {}}), 0, {"dp_shard", {0, 1, 3}});
  EXPECT_EQ(rows(5, clamped), (std::vector<Interval>{{0, 1}, {3, 4}, {1, 3}, {4, 5}}));
  const Layout bucket = split_flat(replicated(), {"dp_shard", {}});
  const Mesh two = Mesh::parse("dp_shard=2");
  EXPECT_EQ(owned_numel({3, 3}, two, in_bucket({}, bucket, {0, 16}), 0), 8);
  EXPECT_EQ(owned_numel({3, 3}, two, in_bucket({}, bucket, {0, 16}), 1), 1);
  EXPECT_EQ(owned_numel({3}, two, in_bucket({}, bucket, {10, 16}), 0), 0);
  EXPECT_EQ(owned_numel({3}, two, in_bucket({}, bucket, {10, 16}), 1), 3);
}

TEST(Layout, owned_tiles_the_tensor_on_16384_ranks) {
  const Mesh mesh = Mesh::parse("dp_replicate=8,dp_shard=256,tp=8");
  const Shape shape{4099, 1031};  // primes
  const Layout layouts[] = {
      split_dim(split_dim(replicated(), 0, {"tp", {}}), 0, {"dp_shard", {}}),
      split_flat(split_dim(replicated(), 1, {"tp", {}}), {"dp_shard", {}}),
      split_flat(split_flat(replicated(), {"dp_shard", {}}), {"tp", {}}),
      split_dim(split_dim(replicated(), 0, split_in_segments("tp", {{4099 - 64, 1}, {64, 8}})), 0, balanced_split("dp_shard")),
  };
  for (const Layout& layout : layouts) {
    int64_t elements = 0;
    for (int64_t rank = 0; rank < mesh.size(); ++rank) {
      int64_t mine = 0;
      for (const Box& box : owned(shape, mesh, layout, rank)) mine += numel(box);
      ASSERT_EQ(mine, owned_numel(shape, mesh, layout, rank));
      elements += mine;
    }
    EXPECT_EQ(elements, 8 * numel(shape)) << layout.str();
  }
}

TEST(Layout, prints_what_it_splits) {
  EXPECT_EQ(replicated().str(), "replicated");
  const Layout layout = add_partial(
      split_flat(split_dim(split_dim(replicated(), 1, {"tp", {}}), 1, {"dp_shard", {}}), {"cp", {0, 3, 5}}),
      "dp_replicate");
  EXPECT_EQ(layout.str(), "dim1[tp,dp_shard] flat[cp:0|3|5] partial[dp_replicate]");
  EXPECT_EQ(in_bucket({}, split_flat(replicated(), {"cp", {}}), {10, 16}).str(), "flat[cp]@10/16");
}

TEST(Layout, that_does_not_fit_is_refused_with_layout_mesh_and_shape) {
  const Mesh mesh = Mesh::parse("dp=2,tp=3");
  const auto refused = [&](const Shape& shape, const Layout& layout,
                           std::initializer_list<std::string> parts) {
    expect_error([&] { validate(shape, mesh, layout); }, parts);
    expect_error([&] { owned(shape, mesh, layout, 0); }, parts);
    expect_error([&] { canonical(shape, mesh, layout); }, parts);
  };
  const Split dp{"dp", {}}, tp{"tp", {}};
  refused({4, 3}, split_dim(replicated(), 0, {"cp", {}}),
          {"[layout]", "`cp`", "dim0[cp]", "dp=2,tp=3", "[4,3]"});
  refused({4}, add_partial(replicated(), "cp"), {"[layout]", "`cp`", "partial[cp]"});
  refused({4}, split_flat(replicated(), {"", {}}), {"[layout]", "axis ``"});
  refused({4, 3}, split_dim(split_dim(replicated(), 0, dp), 1, dp),
          {"[layout]", "`dp` is used twice", "dim0[dp] dim1[dp]"});
  refused({4}, split_flat(split_dim(replicated(), 0, tp), tp), {"[layout]", "`tp` is used twice"});
  refused({4}, add_partial(split_flat(replicated(), dp), "dp"), {"[layout]", "`dp` is used twice"});
  refused({4}, add_partial(add_partial(replicated(), "dp"), "dp"), {"[layout]", "`dp` is used twice"});
  refused({4}, split_dim(replicated(), 1, dp), {"[layout]", "dim 1", "`dp`", "1 dims"});
  refused({}, split_dim(replicated(), 0, dp), {"[layout]", "dim 0", "0 dims"});
  refused({-1}, replicated(), {"[layout]", "dim 0", "at least 0", "got -1"});
  refused({int64_t{1} << 31, int64_t{1} << 31, 2}, replicated(), {"[layout]", "2^62"});
  refused({int64_t{1} << 40, int64_t{1} << 40}, replicated(), {"[layout]", "2^62"});
  refused({(int64_t{1} << 62) + 1}, replicated(), {"[layout]", "2^62"});
  EXPECT_EQ(numel(Shape{int64_t{1} << 31, int64_t{1} << 31}), int64_t{1} << 62);  // the most that a shape may have
}

TEST(Layout, ragged_bounds_that_do_not_fit_are_refused) {
  const Mesh mesh = Mesh::parse("dp=2,tp=3");
  const auto refused = [&](const Layout& layout, std::initializer_list<std::string> parts) {
    expect_error([&] { validate({4, 3}, mesh, layout); }, parts);
  };
  refused(split_dim(replicated(), 0, {"dp", {0, 2, 5}}),
          {"`dp`", "dim 0", "3 ascending points from 0 to 4", "got 0|2|5"});
  refused(split_dim(replicated(), 0, {"dp", {0, 2, 3}}), {"from 0 to 4", "got 0|2|3"});
  refused(split_dim(replicated(), 0, {"dp", {1, 2, 4}}), {"from 0 to 4", "got 1|2|4"});
  refused(split_dim(replicated(), 0, {"dp", {0, 5, 4}}), {"ascending", "got 0|5|4"});
  refused(split_dim(replicated(), 0, {"dp", {0, 4}}), {"3 ascending points", "got 0|4"});
  refused(split_dim(replicated(), 0, {"tp", {0, 2, 4}}), {"4 ascending points", "got 0|2|4"});
  refused(split_flat(replicated(), {"dp", {0, 2, 4}}), {"the flat run", "from 0 to 12"});
  // Inside a cut of 4 into 2, 2, 0 the longest piece is 2.
  refused(split_dim(split_dim(replicated(), 0, {"tp", {}}), 0, {"dp", {0, 2, 4}}),
          {"from 0 to 2", "got 0|2|4"});
  refused(split_flat(split_dim(replicated(), 0, {"tp", {}}), {"dp", {0, 2, 12}}),
          {"the flat run", "from 0 to 6"});
}

TEST(Layout, questions_out_of_range_are_refused) {
  const Mesh mesh = Mesh::parse("dp=2");
  const Layout layout = split_dim(replicated(), 0, {"dp", {}});
  expect_error([&] { owned({4}, mesh, layout, 2); }, {"[mesh]", "rank 2"});
  expect_error([&] { local_shape({4}, mesh, layout, -1); }, {"[mesh]", "rank -1"});
  expect_error([&] { owned_numel({4}, mesh, layout, 2); }, {"[mesh]", "rank 2"});
  expect_error([&] { split_dim(replicated(), -1, {"dp", {}}); }, {"[layout]", "got -1", "`dp`"});
  expect_error([&] { piece({"dp", {}}, 4, 2, 2); }, {"[layout]", "piece 2"});
  expect_error([&] { piece({"dp", {0, 1, 3}}, 4, 2, 0); }, {"[layout]", "from 0 to 4", "0|1|3"});
  expect_error([&] { owned({4}, mesh, in_bucket({}, layout, {3, 6}), 0); }, {"[layout]", "4 elements at offset 3", "of 6"});
  expect_error([&] { owned({4}, mesh, in_bucket({}, layout, {-1, 6}), 0); }, {"[layout]", "4 elements at offset -1"});
  expect_error([&] { in_bucket({}, in_bucket({}, layout, {0, 9}), {0, 9}); }, {"[layout]", "in no other bucket"});
  expect_error([&] { numel(Shape{3, -2}); }, {"[layout]", "[3,-2]", "at least 0"});
}

}  // namespace
}  // namespace shardproof
