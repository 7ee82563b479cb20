// The timeline of a training and the file that shows it: everything that happened is there once, and fits its thread.
#include "harness/run/trace_file.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <tuple>

#include "shardproof/base/check.h"
#include "shardproof/comm/counted.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using harness::SpansOfRanks;
using nlohmann::json;

namespace {

constexpr GptOptions kModel{.layers = 2, .hidden = 16, .heads = 4, .vocab = 32, .positions = 8};
constexpr int64_t kSteps = 2;

struct Training {
  Mesh mesh;
  std::string strategy;
  bool sequence_parallel = false, recompute = false;
};

// One rank's training, whose calls and spans go to `trace` and `timeline`. Before the last step `last_begins` is called.
void train(const Training& what, const std::shared_ptr<Comm>& comm, const std::shared_ptr<Trace>& trace,
           const std::shared_ptr<Timeline>& timeline, const std::function<void()>& last_begins = [] {}) {
  const auto comms = std::make_shared<MeshComm>(traced(comm, trace, timeline), what.mesh);
  Gpt model(kModel);
  initialize_parameters(*model, /*seed=*/1);
  std::optional<TensorParallel> parallel;
  if (what.mesh.has("tp")) {
    ParallelPlan plan = gpt_plan(kModel, what.sequence_parallel);
    plan.compare_replicas = false;  // a rank that is alone has nobody to compare with
    parallel = parallelize(model.ptr(), comms, plan);
  }
  ShardOptions options{.strategy = strategy(what.strategy), .units = by_type<GptBlockImpl>()};
  if (what.recompute) options.recompute = by_type<GptBlockImpl>();
  options.broadcast_initial_values = false;
  options.check_gradients = false;
  Sharded sharded = fully_shard(model.ptr(), comms, options);
  Optimizer optimizer = adamw(sharded, {});
  const at::Tensor tokens = at::arange(2 * kModel.positions).remainder(kModel.vocab).view({2, kModel.positions});
  for (int64_t step = 0; step < kSteps; ++step) {
    if (step + 1 == kSteps) last_begins();
    const TimedSpan span(timeline.get(), comm->rank(), fmt::format("step {}", step));
    const at::Tensor logits = call(model, tokens);
    const at::Tensor loss = parallel ? vocab_parallel_cross_entropy(logits, tokens, kModel.vocab, comms->along({"tp"}))
                                     : at::cross_entropy_loss(logits.flatten(0, 1), tokens.flatten());
    loss.backward();
    optimizer.step();
  }
}

// The spans of the last step of every rank.
SpansOfRanks spans_of(const Training& what) {
  const auto timeline = std::make_shared<Timeline>();
  run_threads(what.mesh.size(), [&](std::shared_ptr<Comm> comm) { train(what, comm, std::make_shared<Trace>(), timeline); });
  SpansOfRanks spans;
  for (int64_t rank = 0; rank < what.mesh.size(); ++rank) spans[rank] = timeline->of_rank(rank);
  const std::string prefix = (std::filesystem::temp_directory_path() / fmt::format("spans_{}", getpid())).string();
  harness::write_spans(spans, fmt::format("step {}", kSteps - 1), prefix);
  SpansOfRanks read = harness::read_spans(prefix, what.mesh.size());
  for (int64_t rank = 0; rank < what.mesh.size(); ++rank) std::filesystem::remove(fmt::format("{}.{}", prefix, rank));
  return read;
}

using Counts = std::map<std::tuple<std::string, std::string, int64_t>, int64_t>;  // by group, op and bytes

std::string text(const json& object, const char* key) { return object.at(key).get<std::string>(); }
int64_t number(const json& object, const char* key) { return object.at(key).get<int64_t>(); }

Counts counts_of_trace(const json& trace, int64_t rank) {
  Counts counts;
  for (const json& event : trace.at("traceEvents"))
    if (number(event, "pid") == rank && event.at("ph") == "X" && event.at("cat") == "collective")
      ++counts[{text(event.at("args"), "group"), text(event.at("args"), "what"), number(event.at("args"), "bytes")}];
  return counts;
}

// What the rank calls in the last step when it is alone and nothing is measured.
Counts counts_alone(const Training& what, int64_t rank) {
  const auto trace = std::make_shared<Trace>();
  size_t first = 0;
  train(what, counted(what.mesh.size(), rank), trace, nullptr, [&] { first = trace->of_rank(rank).size(); });
  Counts counts;
  const std::vector<TraceRecord> records = trace->of_rank(rank);
  for (size_t i = first; i < records.size(); ++i) ++counts[{records[i].group, records[i].op, records[i].bytes}];
  return counts;
}

const std::vector<Training>& trainings() {
  static const std::vector<Training> all = {
      {Mesh::parse("dp_shard=2"), "zero3"},
      {Mesh::parse("dp_shard=3"), "zero1"},
      {Mesh::parse("dp_shard=2"), "zero3", false, /*recompute=*/true},
      {Mesh::parse("dp_replicate=2,dp_shard=2"), "hfsdp"},
      {Mesh::parse("dp_shard=2,tp=2"), "zero3", /*sequence_parallel=*/true},
      {Mesh::parse("tp=2"), "ddp"},
  };
  return all;
}

// The events of each thread, as (begin, end) in nanoseconds.
using Threads = std::map<std::pair<int64_t, int64_t>, std::vector<std::pair<int64_t, int64_t>>>;
Threads threads_of(const json& trace, bool collectives) {
  Threads threads;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X" || (event.at("cat") == "collective") != collectives) continue;
    const int64_t begin = std::llround(event.at("ts").get<double>() * 1000);
    const int64_t end = begin + std::llround(event.at("dur").get<double>() * 1000);
    threads[{number(event, "pid"), number(event, "tid")}].emplace_back(begin, end);
  }
  return threads;
}

// Whether no two events cross: of any two the one ends before the other begins, or one holds the other.
bool nest(const std::vector<std::pair<int64_t, int64_t>>& events, bool may_hold) {
  for (size_t i = 0; i < events.size(); ++i)
    for (size_t k = i + 1; k < events.size(); ++k) {
      const auto& [a, b] = std::minmax(events[i], events[k]);
      const bool apart = a.second <= b.first;
      const bool holds = b.second <= a.second || (a.first == b.first && a.second <= b.second);
      if (!apart && !(may_hold && holds)) return false;
    }
  return true;
}

void expect_fits_threads(const json& trace) {
  for (const bool collectives : {false, true})
    for (const auto& [thread, events] : threads_of(trace, collectives))
      EXPECT_TRUE(nest(events, !collectives)) << "rank " << thread.first << ", thread " << thread.second;
}

}  // namespace

TEST(TraceFile, every_collective_of_a_step_is_there_once_on_every_rank_as_one_that_is_alone_counts_them) {
  for (const Training& training : trainings()) {
    const json trace = json::parse(harness::chrome_trace(spans_of(training)).dump());
    for (int64_t rank = 0; rank < training.mesh.size(); ++rank) {
      const Counts expected = counts_alone(training, rank);
      EXPECT_FALSE(expected.empty());
      EXPECT_EQ(counts_of_trace(trace, rank), expected) << training.mesh.str() << " " << training.strategy << ", rank " << rank;
    }
  }
}

TEST(TraceFile, spans_of_a_thread_nest_and_its_collectives_do_not_overlap) {
  for (const Training& training : trainings()) expect_fits_threads(harness::chrome_trace(spans_of(training)));
}

TEST(TraceFile, every_unit_runs_forward_and_backward_once_in_a_step_inside_of_it) {
  for (const Training& training : trainings())
    for (const auto& [rank, spans] : spans_of(training)) {
      const Span& step = spans.front();
      for (const std::string unit : {"the root unit", "unit 'h.0'", "unit 'h.1'"})
        for (const std::string what : {"forward", "backward"}) {
          int64_t count = 0;
          for (const Span& span : spans) {
            if (span.kind != Span::Kind::computation || span.name != what || span.unit != unit) continue;
            ++count;
            EXPECT_TRUE(step.begin_ns <= span.begin_ns && span.end_ns <= step.end_ns) << what << " of " << unit;
          }
          EXPECT_EQ(count, 1) << what << " of " << unit << " on rank " << rank << " of " << training.mesh.str();
        }
      const auto of = [&spans = spans](const std::string& what, const std::string& unit) {
        return *std::find_if(spans.begin(), spans.end(), [&](const Span& s) { return s.name == what && s.unit == unit; });
      };
      EXPECT_LE(of("forward", "unit 'h.0'").end_ns, of("forward", "unit 'h.1'").begin_ns);
      EXPECT_LE(of("backward", "unit 'h.1'").end_ns, of("backward", "unit 'h.0'").begin_ns);
    }
}

TEST(TraceFile, a_wait_ends_with_its_collective_and_every_gather_is_for_a_unit) {
  for (const Training& training : trainings())
    for (const auto& [rank, spans] : spans_of(training))
      for (const Span& span : spans) {
        if (span.kind == Span::Kind::computation) continue;
        EXPECT_FALSE(training.strategy != "ddp" && span.name == "all_gather" && span.unit.empty()) << span.group;
        if (span.kind == Span::Kind::collective) continue;
        const auto same = std::count_if(spans.begin(), spans.end(), [&](const Span& other) {
          return other.kind == Span::Kind::collective && other.name == span.name && other.group == span.group &&
                 other.begin_ns <= span.begin_ns && other.end_ns >= span.end_ns;
        });
        EXPECT_GE(same, 1) << "wait for " << span.name << " of " << span.unit;
      }
}

TEST(TraceFile, a_communicator_that_nobody_measures_has_no_timeline) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    EXPECT_EQ(timeline_of(*comm), nullptr);
    EXPECT_EQ(timeline_of(*traced(comm, std::make_shared<Trace>())), nullptr);
    const auto timeline = std::make_shared<Timeline>();
    EXPECT_EQ(timeline_of(*traced(comm, std::make_shared<Trace>(), timeline)), timeline);
  });
}

TEST(TraceFile, spans_of_a_rank_that_left_none_are_an_error_that_names_it) {
  try {
    harness::read_spans("/nowhere/spans", 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 0 left no spans"), std::string::npos) << error.what();
  }
}

RC_GTEST_PROP(TraceFile, any_spans_fit_their_threads_and_none_is_lost, ()) {
  std::vector<Span> spans(*rc::gen::inRange<size_t>(1, 24));
  for (Span& span : spans) {
    span.kind = *rc::gen::element(Span::Kind::computation, Span::Kind::wait, Span::Kind::collective);
    span.name = "x";
    if (span.kind == Span::Kind::collective) span.group = *rc::gen::element<std::string>("dp_shard", "tp");
    span.begin_ns = 1000 + *rc::gen::inRange(0, 30);
    span.end_ns = span.begin_ns + *rc::gen::inRange(1, 12);
  }
  const json trace = harness::chrome_trace({{0, spans}, {3, spans}});
  size_t count = 0;
  std::set<std::pair<int64_t, int64_t>> named, used;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("name") == "thread_name") RC_ASSERT(named.emplace(number(event, "pid"), number(event, "tid")).second);
    if (event.at("ph") != "X") continue;
    ++count;
    RC_ASSERT(event.at("ts").get<double>() >= 0);
    used.emplace(number(event, "pid"), number(event, "tid"));
  }
  RC_ASSERT(count == 2 * spans.size());
  RC_ASSERT(named == used);
  for (const bool collectives : {false, true})
    for (const auto& [thread, events] : threads_of(trace, collectives)) RC_ASSERT(nest(events, !collectives));
}
