// Laws of splits: how one length is cut among the ranks along one axis.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>

#include "properties/kit/expect_error.h"
#include "properties/kit/gen_layout.h"
#include "properties/kit/spec_layout.h"

namespace shardproof {
namespace {

RC_GTEST_PROP(Split, pieces_tile_the_length, ()) {
  const int64_t parts = *rc::gen::inRange(1, 9), length = *rc::gen::inRange(0, 30);
  Split split{"dp", {}};
  if (*rc::gen::arbitrary<bool>()) {
    split.bounds =
        *rc::gen::container<std::vector<int64_t>>(parts - 1, rc::gen::inRange<int64_t>(0, length + 4));
    split.bounds.insert(split.bounds.end(), {0, length + *rc::gen::inRange<int64_t>(0, 4)});
    std::sort(split.bounds.begin(), split.bounds.end());
  }
  int64_t end = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const Interval interval = piece(split, length, parts, part);
    RC_ASSERT(interval.begin == end || interval.size() == 0);
    RC_ASSERT(interval.size() >= 0);
    end = std::max(end, interval.end);
  }
  RC_ASSERT(end == length);
}

RC_GTEST_PROP(Split, pieces_are_what_dealing_leaves_and_first_copies_tile_the_length, ()) {
  const int64_t parts = *rc::gen::inRange(1, 9), longest = *rc::gen::inRange(0, 30);
  const Split split = *gen::split("dp", longest, parts);  // of a length that may be clamped
  const int64_t length = *rc::gen::inRange<int64_t>(0, longest + 1);
  RC_CLASSIFY(!split.segments.empty(), "segments");
  RC_CLASSIFY(split.balanced, "balanced");
  bool has_copies = false;
  std::vector<int64_t> firsts;
  for (int64_t part = 0; part < parts; ++part) {
    std::vector<int64_t> held;
    const std::vector<SplitRun> runs = pieces(split, length, parts, part);
    for (size_t i = 0; i < runs.size(); ++i) {
      RC_ASSERT(runs[i].whole.size() > 0);
      RC_ASSERT(runs[i].local == std::ssize(held));
      if (i > 0)
        RC_ASSERT(runs[i].whole.begin > runs[i - 1].whole.end ||
                  (runs[i].whole.begin == runs[i - 1].whole.end && runs[i].copies != runs[i - 1].copies));
      for (int64_t at = runs[i].whole.begin; at < runs[i].whole.end; ++at) {
        held.push_back(at);
        if (runs[i].first_copy) firsts.push_back(at);
      }
      has_copies |= runs[i].copies > 1;
    }
    RC_ASSERT(held == spec::dealt(split, length, parts, part));
    RC_ASSERT(piece_size(split, length, parts, part) == std::ssize(held));
  }
  RC_CLASSIFY(has_copies, "copies");
  std::sort(firsts.begin(), firsts.end());
  RC_ASSERT(std::ssize(firsts) == length);
  for (int64_t at = 0; at < length; ++at) RC_ASSERT(firsts[at] == at);
}

namespace {

// The split that a text of Split::str says.
Split said_by(const std::string& text) {
  const size_t colon = text.find(':');
  Split split{text.substr(0, colon)};
  std::string rule = colon == std::string::npos ? "" : text.substr(colon + 1);
  split.balanced = rule == "balanced";
  if (split.balanced) return split;
  const bool in_segments = rule.find('/') != std::string::npos;
  while (!rule.empty()) {
    const size_t end = std::min(rule.find(in_segments ? '+' : '|'), rule.size());
    const std::string one = rule.substr(0, end);
    if (in_segments)
      split.segments.push_back({std::stoll(one), std::stoll(one.substr(one.find('/') + 1)), one.ends_with('*')});
    else
      split.bounds.push_back(std::stoll(one));
    rule.erase(0, end + 1);
  }
  return split;
}

}  // namespace

RC_GTEST_PROP(Split, the_text_of_a_split_says_all_of_it, ()) {
  const Split split = *gen::split("dp", *rc::gen::inRange(0, 30), *rc::gen::inRange(1, 9));
  RC_ASSERT(said_by(split.str()) == split);
}

TEST(Split, balanced_parts_have_equal_work_under_a_causal_mask) {
  for (int64_t parts = 1; parts <= 8; ++parts) {
    const int64_t length = 6 * parts;
    for (int64_t part = 0; part < parts; ++part) {
      int64_t work = 0;
      for (const SplitRun& run : pieces(balanced_split("cp"), length, parts, part))
        for (int64_t at = run.whole.begin; at < run.whole.end; ++at) work += at + 1;
      EXPECT_EQ(work * parts, length * (length + 1) / 2) << part << " of " << parts;
    }
  }
}

TEST(Split, even_pieces_are_those_of_torch_chunk) {
  const std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> sizes{
      {{5, 4}, {2, 2, 1, 0}},  {{3, 4}, {1, 1, 1, 0}}, {{9, 8}, {2, 2, 2, 2, 1, 0, 0, 0}},
      {{8, 4}, {2, 2, 2, 2}},  {{0, 3}, {0, 0, 0}},    {{7, 1}, {7}},
      {{10, 4}, {3, 3, 3, 1}}, {{1, 2}, {1, 0}},
  };
  for (const auto& [cut, expected] : sizes) {
    std::vector<int64_t> found;
    for (int64_t part = 0; part < cut.second; ++part)
      found.push_back(piece({"dp", {}}, cut.first, cut.second, part).size());
    EXPECT_EQ(found, expected) << cut.first << " over " << cut.second;
  }
}

TEST(Layout, the_worked_examples_of_segments_and_balanced_splits_hold) {
  using Runs = std::vector<SplitRun>;
  const Split fused = split_in_segments("tp", {{8, 2}, {4, 2, true}, {4, 2, true}});
  EXPECT_EQ(pieces(fused, 16, 2, 0), (Runs{{{0, 4}, 0}, {{8, 10}, 4}, {{12, 14}, 6}}));
  EXPECT_EQ(pieces(fused, 16, 2, 1), (Runs{{{4, 8}, 0}, {{10, 12}, 4}, {{14, 16}, 6}}));
  EXPECT_EQ(pieces(fused, 16, 4, 0), (Runs{{{0, 2}, 0}, {{8, 10}, 2, 2, true}, {{12, 14}, 4, 2, true}}));
  EXPECT_EQ(pieces(fused, 16, 4, 1), (Runs{{{2, 4}, 0}, {{8, 10}, 2, 2, false}, {{12, 14}, 4, 2, false}}));
  EXPECT_EQ(pieces(fused, 16, 4, 3), (Runs{{{6, 8}, 0}, {{10, 12}, 2, 2, false}, {{14, 16}, 4, 2, false}}));
  EXPECT_EQ(copies_held(fused, 4), 2);
  const Split balanced = balanced_split("cp");
  EXPECT_EQ(pieces(balanced, 8, 2, 0), (Runs{{{0, 2}, 0}, {{6, 8}, 2}}));
  EXPECT_EQ(pieces(balanced, 8, 2, 1), (Runs{{{2, 6}, 0}}));
  EXPECT_EQ(pieces(balanced, 5, 2, 0), (Runs{{{0, 2}, 0}}));
  EXPECT_EQ(pieces(balanced, 5, 2, 1), (Runs{{{2, 5}, 0}}));
  const Mesh mesh = Mesh::parse("dp=2,tp=2");
  const Layout nested = split_dim(split_dim(replicated(), 0, fused), 0, {"dp"});
  EXPECT_EQ(owned({16}, mesh, nested, 0), (std::vector<Box>{{{0, 4}}}));
  EXPECT_EQ(owned({16}, mesh, nested, 2), (std::vector<Box>{{{8, 10}}, {{12, 14}}}));
  EXPECT_EQ(split_dim(nested, 1, balanced).str(), "dim0[tp:8/2+4/2*+4/2*,dp] dim1[cp:balanced]");
}

TEST(Layout, segments_that_are_a_plain_cut_have_the_canonical_form_of_one) {
  const Mesh mesh = Mesh::parse("dp=2,tp=2");
  const auto form = [&](const Split& split) { return canonical({8}, mesh, split_dim(replicated(), 0, split)); };
  EXPECT_EQ(form(split_in_segments("tp", {{8, 2}})), split_dim(replicated(), 0, {"tp"}));
  EXPECT_EQ(form(split_in_segments("tp", {{8, 8}})), split_dim(replicated(), 0, {"tp", {0, 8, 8}}));
  EXPECT_EQ(form(split_in_segments("tp", {{8, 8, true}})), split_dim(replicated(), 0, split_in_segments("tp", {{8, 8, true}})));
  EXPECT_EQ(form(split_in_segments("tp", {{4, 2}, {4, 2}})),
            split_dim(replicated(), 0, split_in_segments("tp", {{4, 2}, {4, 2}})));
}

TEST(Layout, rules_that_do_not_fit_are_refused) {
  const Mesh mesh = Mesh::parse("dp=2,tp=3");
  const auto refused = [&](const Split& split, std::initializer_list<std::string> parts) {
    expect_error([&] { validate({6, 3}, mesh, split_dim(replicated(), 0, split)); }, parts);
  };
  refused(split_in_segments("tp", {{4, 2}}), {"[layout]", "`tp` on dim 0", "4 rows in total", "length is 6", "dim0[tp:4/2]"});
  refused(split_in_segments("tp", {{4, 3}, {2, 1}}), {"a segment of 4 rows", "granules of 3"});
  refused(split_in_segments("tp", {{6, 0}}), {"a segment of 6 rows", "granules of 0"});
  refused(split_in_segments("tp", {{6, 3, true}}), {"2 granules (heads) on 3 ranks", "must divide the ranks"});
  refused({"tp", {0, 2, 4, 6}, {{6, 1}}}, {"more than one of bounds, segments and balanced"});
  refused({"tp", {}, {{6, 1}}, true}, {"more than one of"});
  expect_error([&] { validate({6, 3}, mesh, split_flat(replicated(), balanced_split("tp"))); },
               {"[layout]", "the flat run", "tp:balanced", "split a dim so"});
  expect_error([&] { piece(balanced_split("cp"), 4, 2, 0); }, {"[layout]", "piece asks for one run", "cp:balanced"});
  expect_error([&] { copies_held(split_in_segments("tp", {{4, 2, true}, {2, 2, true}}), 4); },
               {"in 2 and in 4 copies on 4 ranks"});
}

}  // namespace
}  // namespace shardproof
