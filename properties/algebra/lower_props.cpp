// Laws of `lower`: a step is the plan, and general means that no single collective is.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>

#include "properties/kit/expect_error.h"
#include "properties/kit/gen_layout.h"
#include "properties/kit/spec_layout.h"

namespace shardproof {
namespace {

using gen::Move;

CollectiveStep lowered(const Move& move) {
  return lower(move.shape, move.from.mesh, move.from.layout, move.to.layout);
}

std::string described(const Move& move, const CollectiveStep& step) {
  std::string axes;
  for (const std::string& axis : step.axes) axes += " " + axis;
  return fmt::format("{} -> {} on {}: {} along{} dim {} to {}", move.from.layout.str(), move.to.layout.str(),
                     move.from.mesh.str(), to_string(step.step), axes, step.dim, step.dim_to);
}

spec::Scene scene(const Move& move) {
  return spec::scene(move.shape, move.from.mesh, move.from.layout, move.to.layout);
}

bool gives(const CollectiveStep& step, const spec::Scene& scene, const spec::World& wanted) {
  const auto made = spec::run(step, scene);
  return made && spec::same_values(*made, wanted);
}

spec::World executed(const Move& move) {
  return spec::execute(move.shape, move.from, move.to, plan(move.shape, move.from, move.to),
                       spec::start(move.shape, move.from));
}

RC_GTEST_PROP(Lower, every_step_run_on_data_equals_the_plan, ()) {
  const Move move = *gen::move_on_one_mesh();
  const CollectiveStep step = lowered(move);
  RC_TAG(std::string(to_string(step.step)));
  // Canonical layouts are what a step speaks of: a 1-dim tensor has no flat run.
  const Mesh& mesh = move.from.mesh;
  const Move canon{move.shape,
                   {mesh, canonical(move.shape, mesh, move.from.layout)},
                   {mesh, canonical(move.shape, mesh, move.to.layout)}};
  if (step.step != Step::general) RC_ASSERT(gives(step, scene(canon), executed(move)));
}

// Every order of every non-empty choice of axes.
std::vector<std::vector<std::string>> axis_sequences(const Mesh& mesh) {
  std::vector<std::vector<std::string>> sequences{{}};
  for (size_t i = 0; i < sequences.size(); ++i)
    for (const Axis& axis : mesh.axes())
      if (std::count(sequences[i].begin(), sequences[i].end(), axis.name) == 0) {
        sequences.push_back(sequences[i]);
        sequences.back().push_back(axis.name);
      }
  sequences.erase(sequences.begin());
  return sequences;
}

// Tries every step there is on the data. Lengths must be such that different layouts do not happen to
// coincide.
std::vector<CollectiveStep> steps_that_would_do(const Move& move) {
  const spec::World wanted = executed(move);
  const spec::Scene its_scene = scene(move);
  std::vector<CollectiveStep> candidates{{Step::none, {}, kFlat, kFlat}, {Step::slice, {}, kFlat, kFlat}};
  const int64_t dims = std::ssize(move.shape);
  for (const auto& axes : axis_sequences(move.from.mesh)) {
    candidates.push_back({Step::all_reduce, axes, kFlat, kFlat});
    for (int64_t dim = kFlat; dim < dims; ++dim) {
      candidates.push_back({Step::all_gather, axes, dim, kFlat});
      candidates.push_back({Step::reduce_scatter, axes, dim, kFlat});
      for (int64_t dim_to = kFlat; dim_to < dims; ++dim_to)
        candidates.push_back({Step::all_to_all, axes, dim, dim_to});
    }
  }
  std::erase_if(candidates, [&](const CollectiveStep& step) { return !gives(step, its_scene, wanted); });
  return candidates;
}

// Each axis replicated, partial, or a split of a dim or the flat run, in every order.
std::vector<Layout> all_layouts(const Shape& shape, const Mesh& mesh) {
  std::vector<Layout> layouts{replicated()};
  for (const Axis& axis : mesh.axes()) {
    std::vector<Layout> more;
    for (const Layout& layout : layouts) {
      more.push_back(layout);
      more.push_back(add_partial(layout, axis.name));
      for (int64_t d = 0; d <= std::ssize(shape); ++d) {
        Layout base = layout;
        base.dims.resize(shape.size());
        const size_t places = (d < std::ssize(shape) ? base.dims[d] : base.flat).size() + 1;
        for (size_t place = 0; place < places; ++place) {
          Layout next = base;
          auto& splits = d < std::ssize(shape) ? next.dims[d] : next.flat;
          splits.insert(splits.begin() + place, {axis.name, {}});
          more.push_back(canonical(shape, mesh, next));
        }
      }
    }
    layouts = more;
  }
  return layouts;
}

TEST(Lower, of_every_pair_of_layouts_of_two_axes_is_a_step_that_does_it_and_general_only_if_none_would) {
  const Shape shape{11, 7};
  const Mesh mesh = Mesh::parse("b=2,a=3");
  std::map<Step, int64_t> counts;
  for (const Layout& from : all_layouts(shape, mesh))
    for (const Layout& to : all_layouts(shape, mesh)) {
      const Move move{shape, {mesh, from}, {mesh, to}};
      const CollectiveStep step = lowered(move);
      ++counts[step.step];
      if (step.step != Step::general)
        ASSERT_TRUE(gives(step, scene(move), executed(move))) << described(move, step);
      else
        for (const CollectiveStep& other : steps_that_would_do(move)) ADD_FAILURE() << described(move, other);
    }
  EXPECT_EQ(counts.size(), 7u) << "every kind of step occurs";
}

RC_GTEST_PROP(Lower, says_general_only_where_no_single_collective_would_do, ()) {
  const Shape shape{13, 11};  // no cut of a flat run falls on the rows of a dim's pieces on every rank
  const Mesh mesh(std::vector<Axis>{{"tp", 2}, {"dp_shard", *rc::gen::inRange(2, 4)}, {"cp", 2}});
  Layout from = *gen::layout(shape, mesh), to = *gen::related_layout(shape, mesh, from);
  for (Layout* layout : {&from, &to}) {  // evenly, or a bound happens to lie where another cut does
    for (auto& splits : layout->dims)
      for (Split& split : splits) split = {split.axis};
    for (Split& split : layout->flat) split = {split.axis};
    layout->bucket = {};
  }
  const Move move{shape, {mesh, from}, {mesh, to}};
  if (lowered(move).step != Step::general) return;
  for (const CollectiveStep& step : steps_that_would_do(move)) RC_FAIL(described(move, step));
}

struct Example {
  const char* mesh;
  Layout from, to;
  CollectiveStep lowered;
};

void expect_examples(const Shape& shape, const std::vector<Example>& examples) {
  for (const Example& example : examples) {
    const Move move{
        shape, {Mesh::parse(example.mesh), example.from}, {Mesh::parse(example.mesh), example.to}};
    const CollectiveStep step = lowered(move);
    EXPECT_EQ(step, example.lowered) << described(move, step);
  }
}

const Split s{"dp_shard", {}}, r{"dp_replicate", {}}, tp{"tp", {}};

TEST(Lower, names_one_collective_for_one_innermost_change) {
  const char* mesh = "dp_replicate=2,dp_shard=3,tp=2";
  const Layout b = split_dim(replicated(), 1, tp), bs = split_dim(b, 0, s), bf = split_flat(b, s);
  expect_examples(
      {11, 7},
      {
          {mesh, b, b, {Step::none, {}, kFlat, kFlat}},
          {mesh, b, bs, {Step::slice, {"dp_shard"}, 0, kFlat}},
          {mesh, bs, b, {Step::all_gather, {"dp_shard"}, 0, kFlat}},
          {mesh, bf, b, {Step::all_gather, {"dp_shard"}, kFlat, kFlat}},
          {mesh, add_partial(b, "dp_shard"), b, {Step::all_reduce, {"dp_shard"}, kFlat, kFlat}},
          {mesh, add_partial(b, "dp_shard"), bs, {Step::reduce_scatter, {"dp_shard"}, 0, kFlat}},
          {mesh, add_partial(b, "dp_shard"), bf, {Step::reduce_scatter, {"dp_shard"}, kFlat, kFlat}},
          {mesh,
           split_dim(replicated(), 0, s),
           split_dim(replicated(), 1, s),
           {Step::all_to_all, {"dp_shard"}, 0, 1}},
          {mesh, bs, bf, {Step::all_to_all, {"dp_shard"}, 0, kFlat}},
          {mesh, bs, split_dim(b, 0, {"dp_shard", {0, 1, 9, 11}}), {Step::all_to_all, {"dp_shard"}, 0, 0}},
          {mesh, b, add_partial(b, "dp_shard"), {Step::slice, {"dp_shard"}, kFlat, kFlat}},
      });
}

TEST(Lower, names_one_collective_for_several_axes_where_their_order_allows) {
  const char* mesh = "dp_replicate=2,dp_shard=3,tp=2";
  const Layout none = replicated(), terms = add_partial(add_partial(none, "dp_replicate"), "dp_shard");
  const Layout rs = split_dim(split_dim(none, 0, r), 0, s), sr = split_dim(split_dim(none, 0, s), 0, r);
  expect_examples(
      {11, 7},
      {
          {mesh, terms, none, {Step::all_reduce, {"dp_replicate", "dp_shard"}, kFlat, kFlat}},
          {mesh, terms, add_partial(none, "dp_shard"), {Step::all_reduce, {"dp_replicate"}, kFlat, kFlat}},
          {mesh, terms, rs, {Step::reduce_scatter, {"dp_replicate", "dp_shard"}, 0, kFlat}},
          {mesh, terms, sr, {Step::general, {}, kFlat, kFlat}},  // cut in one order, summed in the other
          {mesh,
           terms,
           split_dim(none, 0, s),
           {Step::general, {}, kFlat, kFlat}},  // reduce-scatter, then all-reduce
          {mesh, sr, none, {Step::all_gather, {"dp_shard", "dp_replicate"}, 0, kFlat}},
          {mesh, sr, split_dim(none, 0, s), {Step::all_gather, {"dp_replicate"}, 0, kFlat}},
          {mesh, sr, split_dim(none, 0, r), {Step::general, {}, kFlat, kFlat}},  // the outer split goes
          {mesh, sr, rs, {Step::general, {}, kFlat, kFlat}},                     // a permutation
          {mesh, none, split_dim(split_dim(none, 0, s), 1, tp), {Step::slice, {"dp_shard", "tp"}, 0, kFlat}},
          {mesh,
           split_dim(split_dim(none, 0, s), 1, tp),
           none,
           {Step::general, {}, kFlat, kFlat}},  // two dims
          {mesh,
           sr,
           split_dim(split_dim(none, 1, s), 1, r),
           {Step::all_to_all, {"dp_shard", "dp_replicate"}, 0, 1}},
          {mesh,
           split_flat(split_dim(none, 0, s), r),
           none,
           {Step::all_gather, {"dp_shard", "dp_replicate"}, kFlat, kFlat}},
      });
}

// The planted mistake that sizes alone do not show: both axes have two ranks and every piece has its size.
TEST(Lower, does_not_call_a_move_to_another_axis_an_all_to_all) {
  const char* mesh = "dp_shard=2,tp=2";
  const Layout one = split_dim(replicated(), 0, s);
  expect_examples({4, 4}, {
                              {mesh, one, split_dim(replicated(), 0, tp), {Step::general, {}, kFlat, kFlat}},
                              {mesh, one, split_dim(replicated(), 1, tp), {Step::general, {}, kFlat, kFlat}},
                              {mesh, one, split_flat(replicated(), tp), {Step::general, {}, kFlat, kFlat}},
                          });
}

TEST(Lower, leaves_out_axes_of_one_rank_and_sees_the_flat_run_of_a_1_dim_tensor_as_its_dim) {
  const char* mesh = "dp_replicate=1,dp_shard=3";
  const Layout terms = add_partial(add_partial(replicated(), "dp_replicate"), "dp_shard");
  expect_examples(
      {11},
      {
          {mesh, terms, replicated(), {Step::all_reduce, {"dp_shard"}, kFlat, kFlat}},
          {mesh, add_partial(replicated(), "dp_replicate"), replicated(), {Step::none, {}, kFlat, kFlat}},
          {mesh,
           split_flat(split_flat(replicated(), r), s),
           replicated(),
           {Step::all_gather, {"dp_shard"}, 0, kFlat}},
          {mesh, split_flat(replicated(), s), split_dim(replicated(), 0, s), {Step::none, {}, kFlat, kFlat}},
      });
}

TEST(Lower, refuses_a_layout_that_does_not_fit) {
  const Mesh mesh = Mesh::parse("dp=2");
  expect_error(
      [&] {
        lower({4}, mesh, replicated(), split_dim(replicated(), 1, {"dp", {}}));
      },
      {"[layout]", "dim 1"});
  expect_error([&] { lower({4}, mesh, add_partial(replicated(), "cp"), replicated()); },
               {"[layout]", "`cp`"});
}

}  // namespace
}  // namespace shardproof
