// docs/strategies.md as tests: what each strategy calls, moves and holds, in closed form.
#include <gtest/gtest.h>

#include <map>

#include "properties/kit/bits.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;

namespace {

// A chain of equal units: `kUnits` linear layers without bias, kBytes each, and nothing in the root.
constexpr int64_t kWidth = 16, kUnits = 5, kBytes = kWidth * kWidth * 4;

Mlp chain() { return Mlp(MlpOptions{.widths = std::vector<int64_t>(kUnits + 1, kWidth), .bias = false}); }

struct Plan {
  std::string strategy;
  int64_t replicas = 1, shards = 1, rounds = 1, steps = 1;
  int64_t prefetch = 0;
  Reshard reshard = Reshard::always();
  at::ScalarType compute = at::kFloat;
  Mesh mesh() const { return Mesh({{"dp_replicate", replicas}, {"dp_shard", shards}}); }
  bool shards_parameters() const { return strategy == "zero3" || strategy == "hsdp" || strategy == "hfsdp"; }
  bool shards_state_twice() const { return strategy == "hfsdp" || strategy == "hzero2"; }
  bool reduces_late() const { return strategy == "ddp" || strategy == "zero1"; }
};

std::vector<Plan> runs() {
  std::vector<Plan> all;
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "hzero2"})
    for (const auto& [replicas, shards] : {std::pair<int64_t, int64_t>{1, 2}, {1, 4}, {2, 2}, {2, 4}})
      for (const int64_t rounds : {1, 3}) all.push_back({strategy, replicas, shards, rounds});
  return all;
}

ShardOptions options_of(const Plan& run) {
  ShardOptions options;
  options.strategy = strategy(run.strategy);
  options.units = by_type<torch::nn::LinearImpl>();
  options.prefetch_forward = options.prefetch_backward = run.prefetch;
  options.reshard_after_forward = run.reshard;
  options.precision = {.main = at::kFloat, .compute = run.compute};
  return options;
}

// Trains on every rank, and calls look(sharded) after each step.
void train(const Plan& run, const std::shared_ptr<Trace>& trace, const std::function<void(Sharded&)>& look) {
  run_threads(run.replicas * run.shards, [&](std::shared_ptr<Comm> comm) {
    Mlp model = chain();
    Sharded sharded =
        fully_shard(model.ptr(), std::make_shared<MeshComm>(trace ? traced(comm, trace) : comm, run.mesh()), options_of(run));
    Optimizer optimizer = adamw(sharded, {});
    for (int64_t step = 0; step < run.steps; ++step) {
      for (int64_t round = 0; round < run.rounds; ++round) {
        sharded.set_last_microbatch(round + 1 == run.rounds);
        call(model, toy::data({3, kWidth}, comm->rank())).square().sum().backward();
      }
      optimizer.step();
      look(sharded);
    }
  });
}

using Counts = std::map<std::string, std::pair<int64_t, int64_t>>;  // "op group" -> calls, bytes

// Of one step, all units together.
Counts expected_collectives(const Plan& run) {
  const int64_t s = run.shards, r = run.replicas;
  Counts counts;
  const auto add = [&](const char* op, const char* axis, int64_t ranks, int64_t calls, int64_t bytes) {
    if (ranks > 1) counts[std::string(op) + " " + axis] = {calls * kUnits, calls * kUnits * bytes};
  };
  if (run.shards_parameters()) add("all_gather", "dp_shard", s, 2 * run.rounds, kBytes);
  if (run.strategy == "zero1" || run.strategy == "zero2") add("all_gather", "dp_shard", s, 1, kBytes);
  if (run.strategy == "ddp") add("all_reduce", "dp_shard", s, 1, kBytes);
  else add("reduce_scatter", "dp_shard", s, run.reduces_late() ? 1 : run.rounds, kBytes);
  const int64_t outer = run.strategy == "ddp" ? kBytes : kBytes / s;
  if (run.strategy == "hzero2") add("all_gather", r > 1 ? "dp_shard+dp_replicate" : "dp_shard", s * r, 1, kBytes);
  add(run.shards_state_twice() ? "reduce_scatter" : "all_reduce", "dp_replicate", r, 1, outer);
  if (run.strategy == "hfsdp") add("all_gather", "dp_replicate", r, 1, outer);
  return counts;
}

struct Bytes {
  int64_t parameter = 0, gathered = 0, gradient = 0, optimizer = 0;
};

// The largest that each kind of memory becomes.
Bytes expected_memory(const Plan& run) {
  const int64_t P = kBytes, n = kUnits, s = run.shards, r = run.replicas;
  const int64_t state = run.strategy == "ddp" ? P : run.shards_state_twice() ? P / (s * r) : P / s;
  Bytes bytes;
  bytes.parameter = run.shards_parameters() ? n * P / s : n * P;
  if (run.shards_parameters()) bytes.gathered = run.reshard.keeps_everything() ? n * P : (1 + run.prefetch) * P;
  bytes.optimizer = 2 * n * state;
  if (run.strategy == "ddp") bytes.gradient = n * P;
  else if (run.strategy == "zero1" && run.rounds > 1) bytes.gradient = n * P + 2 * P / s;
  // Of one unit the whole gradient is made while two are on their way, with their results, and the others are final.
  else if (run.rounds == 1) bytes.gradient = 3 * P + 2 * P / s + (n - 3) * state;
  // Besides, everybody's sum so far is there; when units become final one by one, only those of the others are larger.
  else bytes.gradient = 3 * P + 2 * P / s + n * P / s;
  // And one sum over replicas runs beside the backward of the next unit, from what was accumulated to what is final.
  if (run.shards_state_twice() && r > 1) bytes.gradient += run.rounds == 1 ? P / s : state;
  return bytes;
}

std::string name(const Plan& run) {
  return run.strategy + " " + run.mesh().str() + " rounds " + std::to_string(run.rounds) + " prefetch " +
         std::to_string(run.prefetch);
}

}  // namespace

TEST(Formulas, collectives_and_bytes_of_a_step_are_those_of_the_strategy) {
  for (const Plan& run : runs()) {
    auto trace = std::make_shared<Trace>();
    std::vector<size_t> before(static_cast<size_t>(run.replicas * run.shards), 0);
    Plan two = run;
    two.steps = 2;
    train(two, trace, [&](Sharded& sharded) {
      const auto rank = static_cast<size_t>(sharded.rank());
      const auto records = trace->of_rank(static_cast<int64_t>(rank));
      if (sharded.step() == 2) {
        Counts counts;
        for (size_t i = before[rank]; i < records.size(); ++i) {
          if (records[i].op == "split") continue;
          auto& [calls, bytes] = counts[records[i].op + " " + records[i].group];
          ++calls;
          bytes += records[i].bytes;
        }
        EXPECT_EQ(counts, expected_collectives(run)) << name(run);
      }
      before[rank] = records.size();
    });
  }
}

TEST(Formulas, memory_of_each_kind_peaks_at_the_bytes_of_the_strategy) {
  std::vector<Plan> all = runs();
  for (const int64_t prefetch : {1, 2}) all.push_back({.strategy = "zero3", .shards = 2, .prefetch = prefetch});
  all.push_back({.strategy = "hsdp", .replicas = 2, .shards = 2, .reshard = Reshard::never()});
  for (Plan run : all) {
    run.steps = 3;
    train(run, nullptr, [&](Sharded& sharded) {
      const MemoryUse use = sharded.memory();
      const Bytes expected = expected_memory(run);
      EXPECT_EQ(use.peak(MemoryKind::parameter), expected.parameter) << name(run);
      EXPECT_EQ(use.peak(MemoryKind::gathered), expected.gathered) << name(run);
      EXPECT_EQ(use.peak(MemoryKind::optimizer), expected.optimizer) << name(run);
      EXPECT_EQ(use.peak(MemoryKind::communication), 0) << name(run);
      EXPECT_EQ(use.peak(MemoryKind::gradient), expected.gradient) << name(run);
      EXPECT_EQ(use.now_total(), expected.parameter + expected.optimizer) << name(run) << ": between steps";
    });
  }
}

TEST(Formulas, where_a_gather_can_round_main_parameters_no_copy_in_the_compute_dtype_rests_beside_them) {
  constexpr int64_t kElements = kWidth * kWidth;
  for (Plan run : runs()) {
    run.compute = at::kBFloat16, run.steps = 3;
    const int64_t s = run.shards, r = run.replicas;
    const bool alone = run.shards_parameters() && (run.strategy != "hfsdp" || r == 1);
    const int64_t state = run.strategy == "ddp" ? kElements : kElements / s / (run.shards_state_twice() ? r : 1);
    const int64_t copy = alone ? 0 : run.shards_parameters() ? kElements / s : kElements;
    train(run, nullptr, [&](Sharded& sharded) {
      const MemoryUse use = sharded.memory();
      EXPECT_EQ(use.now(MemoryKind::parameter), kUnits * (4 * state + 2 * copy)) << name(run);
      EXPECT_EQ(use.peak(MemoryKind::parameter), kUnits * (4 * state + 2 * copy)) << name(run);
      EXPECT_EQ(use.now_total(), kUnits * (4 * state + 2 * copy + 8 * state)) << name(run);
      EXPECT_EQ(use.peak(MemoryKind::gathered), run.shards_parameters() ? 2 * kElements : 0) << name(run);
      const std::string rests = fmt::format(" {} bytes at rest", alone ? 4 * state : 2 * copy);
      EXPECT_NE(sharded.describe().find(rests), std::string::npos) << name(run) << rests << "\n" << sharded.describe();
    });
  }
}

TEST(Formulas, nothing_leaks_over_a_thousand_steps) {
  for (const char* strategy : {"zero1", "zero3"}) {
    Plan run{.strategy = strategy, .shards = 2, .rounds = 2, .steps = 1000, .prefetch = 1};
    int64_t first_bytes[2] = {0, 0};
    train(run, nullptr, [&](Sharded& sharded) {
      int64_t& first = first_bytes[sharded.rank()];
      if (sharded.step() == 1) first = sharded.memory().now_total();
      if (sharded.step() % 100 == 0) {
        EXPECT_EQ(sharded.memory().now_total(), first) << "step " << sharded.step();
      }
    });
  }
}

// One rank of 1,024 of a model of 64 GiB, 256 GiB to train: only the owned part exists, with the bits of any other mesh.
TEST(Formulas, one_rank_of_a_thousand_holds_its_part_of_a_model_larger_than_memory) {
  constexpr int64_t kRanks = 1024, kHidden = 16384, kLayers = 64;
  std::shared_ptr<torch::nn::Module> model;
  {
    const MetaInit meta;
    model = Mlp(MlpOptions{.widths = std::vector<int64_t>(kLayers + 1, kHidden), .bias = false}).ptr();
  }
  const int64_t whole = kLayers * kHidden * kHidden * 4;
  EXPECT_GE(whole, int64_t{64} << 30);
  const int64_t rank = 700;
  auto comms = std::make_shared<MeshComm>(counted(kRanks, rank), Mesh({{"dp_shard", kRanks}}));
  ShardOptions options;
  options.units = by_type<torch::nn::LinearImpl>();
  options.initialize = normal_initializer(5);
  options.broadcast_initial_values = false;
  Sharded sharded = fully_shard(model, comms, options);
  Optimizer optimizer = adamw(sharded, {});
  EXPECT_EQ(sharded.memory().now(MemoryKind::parameter), whole / kRanks);
  EXPECT_EQ(sharded.memory().now(MemoryKind::optimizer), 2 * whole / kRanks);
  EXPECT_EQ(sharded.memory().peak_total_bytes, 3 * whole / kRanks);
  for (const Piece& piece : sharded.parameters()) {
    at::Tensor expected = at::empty({100});
    normal_initializer(5)(piece.name, piece.shape, {piece.run.begin, piece.run.begin + 100}, expected);
    ASSERT_TRUE(kit::same_bits(piece.data.narrow(0, 0, 100), expected)) << piece.name;
    ASSERT_EQ(piece.run.begin, rank * kHidden * kHidden / kRanks);
  }
}

// It was padded to the square of the ranks once: on 16,384 of them every unit would have taken a GiB.
TEST(Formulas, a_part_of_a_bucket_is_padded_by_less_than_an_element_for_each_rank_that_sums_it) {
  constexpr int64_t kElements = 100 * 100;
  for (const auto& [replicas, shards] : {std::pair<int64_t, int64_t>{1, 7}, {1, 1000}, {1, 16'384}, {4, 256}, {16, 1024}}) {
    const Mlp model(MlpOptions{.widths = {100, 100}, .bias = false});
    const Mesh mesh({{"dp_replicate", replicas}, {"dp_shard", shards}});
    ShardOptions options;
    options.strategy = strategy(replicas > 1 ? "hsdp" : "zero3");
    options.broadcast_initial_values = false;
    const Sharded sharded =
        fully_shard(model.ptr(), std::make_shared<MeshComm>(counted(mesh.size(), /*rank=*/0), mesh), options);
    const int64_t part = (kElements + shards - 1) / shards, elements = sharded.memory().now(MemoryKind::parameter) / 4;
    EXPECT_GE(elements, part) << mesh.str();
    EXPECT_LT(elements, part + replicas) << mesh.str();
  }
}
