// The picture of a failure: owners are those that hold the elements, and calls are those that ranks make.
#include <gtest/gtest.h>

#include <set>

#include "harness/case/problem.h"
#include "harness/run/picture.h"
#include "harness/run/sharded_run.h"
#include "properties/kit/harness_env.h"

using namespace harness;
using shardproof::TraceRecord;

namespace {

using Calls = std::vector<std::vector<TraceRecord>>;

TraceRecord call(const std::string& op, const std::string& group) {
  return {.op = op, .group = group, .call = op, .bytes = 4};
}

using Runs = std::set<std::tuple<std::string, int64_t, int64_t>>;

Runs held(const std::vector<shardproof::Piece>& pieces) {
  Runs runs;
  for (const shardproof::Piece& piece : pieces) runs.insert({piece.name, piece.run.begin, piece.run.end});
  return runs;
}

Runs drawn(const nlohmann::json& picture, const char* kind, size_t rank) {
  Runs runs;
  for (const nlohmann::json& tensor : picture["tensors"])
    for (const nlohmann::json& run : tensor[kind]["ranks"][rank])
      runs.emplace(tensor["name"].get<std::string>(), run[0].get<int64_t>(), run[1].get<int64_t>());
  return runs;
}

}  // namespace

TEST(Picture, draws_the_elements_that_ranks_hold_and_no_others) {
  for (const char* text : {"mlp(widths=5-7-3) mesh(dp_shard=3) zero3(units=leaf) sgd(lr=0.1) ordered seed=3 : step*2",
                           "mlp(widths=5-7-3) mesh(dp_replicate=2,dp_shard=2) hsdp sgd(lr=0.1) ordered seed=4 : step",
                           "mlp(widths=6-8-4) mesh(dp_shard=2,tp=2) zero1 sgd(lr=0.1) fast seed=5 : step",
                           "odd(width=3,calls=2,gain,tied) mesh(dp_shard=2) zero2 sgd(lr=0.1) ordered seed=6 : step"}) {
    const Case c = Case::parse(text);
    const auto last = static_cast<int64_t>(c.steps.size()) - 1;
    const nlohmann::json picture = to_json(picture_of(c, last));
    EXPECT_EQ(picture["step"], last);
    const Steps steps = run_sharded({c, make_run(c)});
    for (size_t rank = 0; rank < steps.back().size(); ++rank) {
      const RankStep& step = steps.back()[rank];
      EXPECT_EQ(drawn(picture, "parameter", rank), held(step.parameters)) << text << ", rank " << rank;
      EXPECT_EQ(drawn(picture, "state", rank), held(step.gradients)) << text << ", rank " << rank;
    }
  }
}

TEST(Picture, has_the_calls_of_its_step_and_each_collective_in_one_column) {
  const Case c =
      Case::parse("mlp(widths=5-7-3) mesh(dp_shard=3) zero3(units=leaf) sgd(lr=0.1) ordered seed=3 : step accumulate(3) step");
  const Picture first = picture_of(c, 0), second = picture_of(c, 1), last = picture_of(c, -1);
  EXPECT_EQ(last.step, 1) << "without a step, the last that began";
  ASSERT_EQ(first.calls.size(), 3u);
  EXPECT_GT(first.calls[0].size(), 0u);
  EXPECT_GT(second.calls[0].size(), first.calls[0].size()) << "three microbatches call more than one";
  for (const auto& calls : second.calls) {
    ASSERT_EQ(calls.size(), second.calls[0].size());
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i].record.call, second.calls[0][i].record.call);
      EXPECT_EQ(calls[i].column, second.calls[0][i].column);
      EXPECT_FALSE(calls[i].differs);
    }
  }
}

TEST(Picture, of_a_case_that_ends_in_an_error_shows_what_was_called_until_then) {
  const Case c = Case::parse("mlp(widths=3-4) mesh(dp_shard=2) zero3 sgd(lr=1e+30) ordered seed=1 : step*3");
  const Picture picture = picture_of(c, -1);
  EXPECT_GT(picture.step, 0);
  EXPECT_FALSE(picture.placements.empty());
}

TEST(Picture, columns_keep_the_order_of_every_rank) {
  const Calls calls = {{call("all_gather", "a"), call("all_reduce", "world")},
                       {call("all_gather", "a"), call("all_reduce", "b"), call("all_reduce", "world")},
                       {call("all_reduce", "world")}};
  const auto placed = in_columns(calls);
  EXPECT_EQ(placed[0][0].column, 0);
  EXPECT_EQ(placed[1][0].column, 0);
  EXPECT_EQ(placed[1][1].column, 1);
  for (const auto& own : placed) EXPECT_EQ(own.back().column, 2) << "the world's call lies behind all others";
}

TEST(Picture, calls_in_another_order_and_other_calls_are_marked) {
  const auto crossed =
      in_columns({{call("all_gather", "a"), call("all_gather", "b")}, {call("all_gather", "b"), call("all_gather", "a")}});
  ASSERT_EQ(crossed[0].size() + crossed[1].size(), 4u) << "each call is shown, also where ranks would wait for ever";
  EXPECT_TRUE(crossed[0][0].differs);
  const auto other = in_columns({{call("all_gather", "a")}, {call("all_reduce", "a")}});
  EXPECT_TRUE(other[0][0].differs && other[1][0].differs);
  const auto two = in_columns({{call("send", "a")}, {call("recv", "a")}});
  EXPECT_FALSE(two[0][0].differs) << "a send meets a recv";
}
