// The generators themselves: what they draw is valid, so is all they shrink to, and the end of it is one
// rank.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/kit/gen_layout.h"

namespace shardproof {
namespace {

bool is_valid(const gen::Move& move) {
  try {
    validate(move.shape, move.from.mesh, move.from.layout);
    validate(move.shape, move.to.mesh, move.to.layout);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

RC_GTEST_PROP(GenLayout, draws_and_shrinks_to_valid_moves_only, ()) {
  const uint64_t seed = *rc::gen::arbitrary<uint64_t>();
  for (const auto& moves : {gen::move(), gen::move_on_one_mesh()}) {
    rc::Shrinkable<gen::Move> drawn = moves(rc::Random(seed), 50);
    RC_ASSERT(is_valid(drawn.value()));
    auto shrinks = drawn.shrinks();
    for (int i = 0; i < 20; ++i) {
      const auto shrunk = shrinks.next();
      if (!shrunk) break;
      RC_ASSERT(is_valid(shrunk->value()));
    }
  }
}

RC_GTEST_PROP(GenLayout, shrinks_towards_one_rank_holding_a_scalar, ()) {
  const uint64_t seed = *rc::gen::arbitrary<uint64_t>();
  const auto anything = [](const gen::Move&) { return true; };
  const gen::Move least = rc::shrinkable::findLocalMin(gen::move()(rc::Random(seed), 50), anything).first;
  RC_ASSERT(least.shape.empty());
  for (const Placement& placement : {least.from, least.to}) {
    RC_ASSERT(placement.mesh.size() == 1);
    RC_ASSERT(placement.layout == replicated());
  }
}

// So that nobody believes in a thousand trivial cases.
TEST(GenLayout, most_cases_have_several_ranks_elements_and_something_split) {
  int64_t several_ranks = 0, elements = 0, split = 0, ragged = 0, flat = 0, nested = 0, balanced = 0, segments = 0, copies = 0,
          buckets = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    const gen::Placed placed = gen::placed()(rc::Random(seed), 80).value();
    several_ranks += placed.mesh.size() > 1;
    elements += numel(placed.shape) > 1;
    flat += !placed.layout.flat.empty();
    buckets += placed.layout.bucket.length > numel(placed.shape);
    bool any = !placed.layout.flat.empty(), any_ragged = false, any_nested = false;
    for (const auto& splits : placed.layout.dims) {
      any |= !splits.empty();
      any_nested |= splits.size() > 1;
      for (const Split& each : splits) {
        any_ragged |= !each.bounds.empty();
        balanced += each.balanced;
        segments += !each.segments.empty();
        for (const CutSegment& segment : each.segments)
          copies += segment.copied && segment.length > 0 && segment.length / segment.granule < placed.mesh.size(each.axis);
      }
    }
    split += any;
    ragged += any_ragged;
    nested += any_nested;
  }
  EXPECT_GT(several_ranks, 600);
  EXPECT_GT(elements, 500);
  EXPECT_GT(split, 500);
  EXPECT_GT(ragged, 60);
  EXPECT_GT(balanced, 60);
  EXPECT_GT(segments, 60);
  EXPECT_GT(copies, 20);
  EXPECT_GT(flat, 150);
  EXPECT_GT(buckets, 40);
  EXPECT_GT(nested, 50);
}

}  // namespace
}  // namespace shardproof
