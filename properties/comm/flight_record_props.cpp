// What a process leaves of its last calls when its run fails.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "properties/kit/checkpoint_scratch.h"
#include "internal/comm/flight_call.h"
#include "internal/comm/flight_record.h"

using namespace shardproof;
using nlohmann::json;
using State = FlightCall::State;

namespace {

FlightCall call(int64_t sequence, const char* op, int64_t numel, std::string label = "") {
  static const auto world = std::make_shared<const FlightGroup>(FlightGroup{.id = 7, .name = "world", .ranks = {0, 1}});
  return {.group = world,
          .sequence = sequence,
          .op = op,
          .reduce = numel > 0 ? "sum" : "",
          .dtype = "float32",
          .numel = numel,
          .label = std::move(label)};
}

// The lines of rank 1's file, of which the first is about the rank.
std::vector<json> written(const FlightRecord& record) {
  const checkpoint::Scratch scratch;
  EXPECT_EQ(record.write(scratch.path(), "why"), "");
  std::ifstream file(scratch / "rank_1.jsonl");
  std::vector<json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
  return lines;
}

TEST(FlightRecord, keeps_the_last_calls_and_marks_each_of_them) {
  FlightRecord record(1, 2, 3);
  for (int64_t sequence = 0; sequence < 3; ++sequence) EXPECT_EQ(record.add(call(sequence, "barrier", 0)), sequence);
  record.mark(0, State::done);  // the oldest that is kept
  std::vector<json> lines = written(record);
  ASSERT_EQ(lines.size(), 4);
  EXPECT_EQ(lines[0]["calls"], 3);
  EXPECT_EQ(lines[1]["state"], "done");
  EXPECT_EQ(lines[2]["state"], "started");
  record.add(call(3, "barrier", 0));
  record.mark(0, State::failed);  // no longer kept, and call 3 is in its place
  lines = written(record);
  ASSERT_EQ(lines.size(), 4);
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_EQ(lines[i]["sequence"], i);
    EXPECT_EQ(lines[i]["state"], "started");
  }
}

TEST(FlightRecord, describes_the_last_call_with_what_it_moves) {
  FlightRecord record(1, 2, 3);
  EXPECT_EQ(record.last(), "");
  record.add(call(3, "all_reduce", 1, "unit 'h.3'"));
  EXPECT_EQ(record.last(), "all_reduce(sum, float32 x 1), call 3 on 'world', for unit 'h.3'");
  record.add(call(4, "barrier", 0));
  EXPECT_EQ(record.last(), "barrier, call 4 on 'world'");
}

TEST(FlightRecord, its_lines_are_json_whatever_a_name_contains) {
  const std::string label = "unit \"a\\b\"\n\t";
  FlightRecord record(1, 2, 3);
  record.add(call(0, "barrier", 0, label));
  EXPECT_EQ(written(record).at(1)["for"], label);
}

TEST(FlightCall, says_what_a_call_moves_and_of_a_sum_how_it_is_taken) {
  const auto recorded = [](const Call& call) { return flight_call(call, nullptr, 3, "unit 'h.3'"); };
  const at::Tensor four = at::zeros({4}), eight = at::zeros({8}, at::kDouble);
  using Words = std::vector<std::string_view>;
  using Numbers = std::vector<int64_t>;
  const FlightCall sum = recorded({.op = Op::all_reduce, .output = four, .input = four, .reduce = Reduce::max});
  EXPECT_EQ((Words{sum.op, sum.reduce, sum.dtype, sum.label}), (Words{"all_reduce", "max", "float32", "unit 'h.3'"}));
  EXPECT_EQ((Numbers{sum.sequence, sum.numel, sum.bytes}), (Numbers{3, 4, 32}));
  const FlightCall gather = recorded({.op = Op::all_gather, .output = eight, .input = eight.narrow(0, 0, 4)});
  EXPECT_EQ((Words{gather.op, gather.reduce, gather.dtype}), (Words{"all_gather", "", "float64"}));
  EXPECT_EQ((Numbers{gather.numel, gather.bytes}), (Numbers{4, 96}));
  const FlightCall sent = recorded({.op = Op::send, .output = {}, .input = four, .peer = 1});
  EXPECT_EQ(sent.dtype, "float32");
  EXPECT_EQ((Numbers{sent.numel, sent.bytes, sent.peer}), (Numbers{4, 16, 1}));
  for (const Op op : {Op::barrier, Op::split}) {
    Call call;
    call.op = op;
    const FlightCall none = recorded(call);
    EXPECT_EQ((Words{none.reduce, none.dtype}), (Words{"", ""})) << none.op;
    EXPECT_EQ((Numbers{none.numel, none.bytes}), (Numbers{0, 0})) << none.op;
  }
}

}  // namespace
