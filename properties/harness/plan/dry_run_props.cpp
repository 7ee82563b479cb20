// A rank that runs alone, on a device without memory, counts what a rank of a real world of threads counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "harness/case/network.h"
#include "harness/case/parallel.h"
#include "harness/plan/dry_run.h"
#include "harness/plan/meta_device.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"
#include "shardproof/comm/threads/threads.h"
#include "shardproof/comm/traced.h"
#include "shardproof/sharding/named_options.h"
#include "shardproof/shardproof.h"

using namespace harness;
using namespace shardproof;

namespace {

struct Planned {
  const char* model;
  const char* mesh;
  const char* strategy;
  const char* dtype = "float32";
  int64_t rounds = 1;
  bool sequence_parallel = false, recompute = false;
  int64_t prefetch = 0;
  bool offload_activations = false;
  int64_t overlap_pieces = 1;
  int64_t delayed_bytes = 0;
  bool side_by_side = false;
  int64_t expert_ranks = 1;
  bool cut_experts = false;
  ContextAttention attention = ContextAttention::ring;
};

constexpr const char* kGpt = "gpt(layers=2,hidden=16,heads=4,vocab=24,positions=8,tied)";
constexpr const char* kLlama = "llama(layers=2,hidden=16,heads=4,kv_heads=2,intermediate=24,vocab=20,positions=8)";
// With windows and documents.
constexpr const char* kSeeing =
    "llama(layers=2,hidden=16,heads=4,kv_heads=2,intermediate=24,vocab=20,positions=8,window=3,full_layers=1,document_end=1)";
// Each token has all experts, so that routing is even.
constexpr const char* kMoe =
    "llama(layers=2,hidden=16,heads=4,kv_heads=2,intermediate=24,vocab=20,positions=8,experts=4,top_k=4,expert_width=6)";
constexpr const char* kBusyMoe =
    "llama(layers=3,hidden=8,heads=2,kv_heads=2,intermediate=6,vocab=20,positions=8,experts=3,top_k=3,expert_width=5,"
    "shared_width=4,dense_layers=1,score=sigmoid,expert_balance=0.5,expert_z=0.25,expert_bias=0.5)";
constexpr const char* kMlp = "mlp(widths=6-10-9-4,bias)";

const std::vector<Planned>& all_planned() {
  static const std::vector<Planned> all = {
      {kMlp, "dp_shard=3", "zero3"},
      {kMlp, "dp_shard=4", "zero1", "float32", 3},
      {kGpt, "dp_shard=3", "zero3", "bf16", 2},
      {kGpt, "dp_shard=2", "zero2", "float32", 2},
      {kGpt, "dp_replicate=2,dp_shard=2", "hsdp", "bf16", 2},
      {kGpt, "dp_replicate=2,dp_shard=2", "hfsdp"},
      {kGpt, "dp_shard=2,tp=2", "zero3", "float32", 1, true},
      {kLlama, "dp_shard=2,tp=2", "zero3", "bf16", 2, true},
      {kLlama, "dp_shard=2,tp=2", "zero1"},
      {kGpt, "dp_shard=2,tp=2", "zero3", "float32", 1, true, false, 0, false, 2},
      {kLlama, "dp_shard=1,tp=2", "zero1", "bf16", 2, false, false, 0, false, 3},
      {kLlama, "dp_shard=3", "zero3", "float32", 2, false, true},
      {kLlama, "dp_shard=3", "zero3", "bf16", 2, false, false, 2},
      {kLlama, "dp_shard=2,cp=2", "zero3"},
      {kGpt, "dp_shard=2,cp=2", "ddp"},
      {.model = kLlama, .mesh = "dp_shard=1,cp=3", .strategy = "zero3", .attention = ContextAttention::gathered},
      {.model = kLlama, .mesh = "dp_shard=2,cp=2", .strategy = "zero3", .attention = ContextAttention::ulysses},
      {.model = kSeeing, .mesh = "dp_shard=1,cp=2", .strategy = "zero1", .dtype = "bf16"},
      {.model = kSeeing, .mesh = "dp_shard=1,cp=3", .strategy = "zero3", .attention = ContextAttention::ulysses},
      {"odd(width=3,calls=2,gain,cube,empty,side,never,tied)", "dp_shard=2", "zero3"},
      {kMlp, "dp_shard=3", "zero3", "float32", 2, false, false, 0, true},
      {kGpt, "dp_shard=2", "zero3", "bf16", 2, false, false, 1, true},
      {kGpt, "dp_shard=3", "zero1", "float32", 1, false, false, 0, true},
      {kLlama, "dp_shard=2", "zero3", "bf16", 2, false, false, 1, true},
      {kLlama, "dp_shard=2,tp=2", "zero2", "float32", 1, true, false, 0, true},
      {kLlama, "dp_shard=3", "zero3", "float32", 2, false, true, 0, true},
      {kMlp, "dp_shard=3", "zero3", "float32", 2, false, false, 0, false, 1, 1 << 20},
      {kGpt, "dp_shard=2", "zero3", "bf16", 2, false, false, 1, false, 1, 1 << 20},
      {kGpt, "dp_shard=3", "zero1", "float32", 3, false, false, 0, false, 1, 5000},
      {kLlama, "dp_shard=2,tp=2", "zero3", "float32", 2, true, false, 0, false, 1, 1 << 20},
      {kLlama, "dp_shard=3", "zero3", "float32", 2, false, true, 0, false, 1, 1 << 20},
      {kLlama, "dp_shard=2,tp=2", "zero3", "float32", 2, true, false, 0, false, 2, 1 << 20},
      {.model = kMlp, .mesh = "dp_shard=3", .strategy = "zero3", .rounds = 2, .side_by_side = true},
      {.model = kGpt, .mesh = "dp_shard=2,tp=2", .strategy = "zero3", .dtype = "bf16", .side_by_side = true},
      {.model = kLlama, .mesh = "dp_replicate=2,dp_shard=2", .strategy = "hsdp", .prefetch = 1, .side_by_side = true},
      {.model = kMoe, .mesh = "dp_shard=2", .strategy = "zero3"},
      {.model = kMoe, .mesh = "dp_shard=4", .strategy = "zero3", .dtype = "bf16", .rounds = 2, .expert_ranks = 2},
      {.model = kMoe, .mesh = "dp_shard=2,tp=2", .strategy = "zero2", .sequence_parallel = true, .expert_ranks = 2},
      {.model = kMoe, .mesh = "dp_shard=1,tp=4", .strategy = "zero3", .rounds = 2, .cut_experts = true},
      {.model = kMoe, .mesh = "dp_shard=2,tp=2", .strategy = "zero3", .expert_ranks = 2, .cut_experts = true},
      {.model = kMoe, .mesh = "dp_replicate=2,dp_shard=2", .strategy = "hfsdp", .recompute = true, .expert_ranks = 2},
      {.model = kBusyMoe, .mesh = "dp_shard=2,cp=2", .strategy = "zero3", .rounds = 2, .expert_ranks = 4},
      {.model = kBusyMoe, .mesh = "dp_shard=2", .strategy = "zero1", .expert_ranks = 2},
  };
  return all;
}

std::string words(const Planned& planned) {
  return fmt::format("{} {} on {} in {}{}{}, {} bytes of delayed gradients, experts over {}{}, attention {}", planned.strategy,
                     planned.model, planned.mesh, planned.dtype, planned.offload_activations ? ", activations on the host" : "",
                     planned.side_by_side ? ", side by side" : "", planned.delayed_bytes, planned.expert_ranks,
                     planned.cut_experts ? " and cut inside" : "", static_cast<int>(planned.attention));
}

DryRun dry_of(const Planned& planned) {
  DryRun run;
  run.what.model = parse_model(planned.model);
  run.what.mesh = Mesh::parse(planned.mesh);
  run.what.strategy = planned.strategy;
  run.what.options.sequence_parallel = planned.sequence_parallel;
  run.what.options.overlap_pieces = planned.overlap_pieces;
  run.what.options.ep = planned.expert_ranks;
  run.what.options.etp = planned.cut_experts;
  run.what.options.context_attention = static_cast<int64_t>(planned.attention);
  run.rounds = planned.rounds;
  run.samples = 2;
  run.dtype = planned.dtype;
  run.recompute = planned.recompute;
  run.offload_activations = planned.offload_activations;
  run.sharding = {fmt::format("prefetch_forward={}", planned.prefetch), fmt::format("prefetch_backward={}", planned.prefetch),
                  fmt::format("delayed_gradient_bytes_max={}", planned.delayed_bytes),
                  planned.side_by_side ? "gather=side_by_side" : "gather=copied"};
  return run;
}

using Calls = std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>>;  // group, op -> calls, bytes

struct Counted {
  MemoryUse memory;
  Calls calls;
};

golden::Microbatch some_data(const golden::Model& model, int64_t samples) {
  if (model.of_tokens()) {
    const at::Tensor tokens = at::arange(samples * model.positions(), at::kLong).remainder(model.vocab());
    return {tokens.view({samples, model.positions()}), tokens.view({samples, model.positions()})};
  }
  if (model.kind == golden::Model::Kind::odd)
    return {at::ones({samples, model.odd.width}), at::ones({samples, model.odd.width})};
  return {at::ones({samples, model.mlp.widths.front()}), at::ones({samples, model.mlp.widths.back()})};
}

// Then all scores of a router are equal, and every token chooses the first experts.
void clear_gates(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (const auto& item : module.named_parameters())
    if (item.key().ends_with(".mlp.gate.weight")) item.value().zero_();
}

// The second step of every rank, of models with values, on threads that talk to each other.
std::vector<Counted> really(const DryRun& run, bool to_first_experts = false) {
  const Case& c = run.what;
  std::vector<Counted> counted(static_cast<size_t>(c.mesh.size()));
  run_threads(c.mesh.size(), [&](std::shared_ptr<Comm> world) {
    auto trace = std::make_shared<Trace>();
    const int64_t rank = world->rank();
    auto comms = std::make_shared<MeshComm>(traced(std::move(world), trace), c.mesh);
    Comm* const tensor_group = c.tensor_ranks() > 1 ? &comms->along({"tp"}) : nullptr;
    Network network = make_network(c.model, tensor_group);
    initialize_parameters(*network.module, /*seed=*/3);
    if (to_first_experts) clear_gates(*network.module);
    std::optional<TensorParallel> parallel;
    if (tensor_group || expert_ranks(c) > 1) {
      ParallelPlan plan = parallel_plan(c);
      plan.compare_replicas = false;
      parallel = parallelize(network.module, comms, std::move(plan));
    }
    std::optional<ContextParallel> context;
    if (c.context_ranks() > 1) context = context_parallel(network.module, comms, context_options(c));
    ShardOptions options;
    set_options(options, run.sharding);
    options.strategy = strategy(c.strategy);
    options.units = [parts = network.parts](const std::string&, const torch::nn::Module& module) {
      return std::ranges::any_of(parts, [&](const auto& part) { return part.get() == &module; });
    };
    if (run.recompute) options.recompute = by_type<LlamaLayerImpl>();
    if (run.offload_activations) options.offload_activations = options.units;
    if (run.dtype == "bf16") options.precision = {.main = at::kFloat, .compute = at::kBFloat16, .reduce = at::kBFloat16};
    Sharded sharded = fully_shard(network.module, comms, options);
    Optimizer optimizer = adamw(sharded, {.lr = 0});
    golden::Microbatch data = some_data(c.model, run.samples);
    if (context) data.input = context->cut(data.input), data.target = context->cut(data.target);
    size_t first = 0;
    for (int step = 0; step < 2; ++step) {
      first = trace->of_rank(rank).size();
      sharded.reset_peak_memory();
      for (int64_t round = 0; round < run.rounds; ++round) {
        sharded.set_last_microbatch(round + 1 == run.rounds);
        network.loss(data).backward();
      }
      optimizer.step();
      update_router_biases(*network.module, *comms);
    }
    Counted& mine = counted[static_cast<size_t>(rank)];
    mine.memory = sharded.memory();
    const std::vector<TraceRecord> records = trace->of_rank(rank);
    for (size_t i = first; i < records.size(); ++i) {
      auto& [calls, bytes] = mine.calls[{records[i].group, records[i].op}];
      ++calls;
      bytes += records[i].bytes;
    }
  });
  return counted;
}

Calls calls_of(const DryRunResult& result) {
  Calls calls;
  for (const Traffic& traffic : result.traffic) {
    auto& [count, bytes] = calls[{traffic.group, traffic.op}];
    count += traffic.calls;
    bytes += traffic.bytes;
  }
  return calls;
}

// Of a model whose products are known.
DryRunResult of_mlp(int64_t samples) {
  DryRun run;
  run.what.model = parse_model("mlp(widths=6-10-4,bias=0,act=tanh)");
  run.what.mesh = Mesh::parse("dp_shard=2");
  run.what.strategy = "zero3";
  run.samples = samples;
  return dry_run(run);
}

}  // namespace

TEST(Plan, calls_and_bytes_are_exactly_those_that_ranks_of_threads_make) {
  for (const Planned& planned : all_planned()) {
    DryRun run = dry_of(planned);
    const std::vector<Counted> counted = really(run);
    for (run.rank = 0; run.rank < run.what.mesh.size(); ++run.rank)
      EXPECT_EQ(calls_of(dry_run(run)), counted[static_cast<size_t>(run.rank)].calls)
          << words(planned) << ", rank " << run.rank;
  }
}

// Of experts 0 to 5 over two ranks every token chooses the first ones. Where it chooses four, only three can be of rank 0.
TEST(Plan, the_worst_bytes_of_experts_are_those_of_a_rank_that_all_tokens_choose) {
  struct Sizes {
    const char* mesh;
    int64_t positions;
    const char* routing;
    int64_t even, worst;  // rows
  };
  // Two sequences of each rank or, with cp, of both; with a capacity an expert takes 5 tokens of a sequence.
  for (const Sizes& sizes : {Sizes{"dp_shard=2", 6, "top_k=1", 12, 24}, Sizes{"dp_shard=4", 6, "top_k=2", 24, 48},
                             Sizes{"dp_shard=2", 6, "top_k=4", 48, 72}, Sizes{"dp_shard=2,cp=2", 7, "top_k=4", 24, 42},
                             Sizes{"tp=2,dp_shard=2", 6, "top_k=4", 48, 72},
                             Sizes{"dp_shard=2", 6, "top_k=4,expert_capacity=1.25", 48, 60}}) {
    const std::string model = fmt::format(
        "llama(layers=2,hidden=8,heads=2,kv_heads=2,intermediate=6,vocab=20,positions={},experts=6,"
        "expert_width=5,{})",
        sizes.positions, sizes.routing);
    DryRun run = dry_of({.model = model.c_str(),
                         .mesh = sizes.mesh,
                         .strategy = "zero3",
                         .recompute = true,
                         .expert_ranks = 2,
                         .cut_experts = std::string_view(sizes.mesh).starts_with("tp")});
    const std::vector<Counted> counted = really(run, /*to_first_experts=*/true);
    for (run.rank = 0; run.rank < run.what.mesh.size(); run.rank += 2) {
      const DryRunResult result = dry_run(run);
      EXPECT_EQ(result.expert_rows.even, sizes.even) << model;
      EXPECT_EQ(result.expert_rows.worst, sizes.worst) << model;
      const auto is_routed = [](const Traffic& traffic) { return traffic.group == "ep" || traffic.group == "tp"; };
      const auto really_sent = [&](const Traffic& traffic) {
        return counted[static_cast<size_t>(run.rank)].calls.at({traffic.group, traffic.op}).second;
      };
      for (const Traffic& traffic : result.traffic)
        EXPECT_EQ(traffic.worst_bytes, is_routed(traffic) ? really_sent(traffic) : traffic.bytes)
            << str(run.what.model) << ", rank " << run.rank << ", " << traffic.op << " of " << traffic.group;
    }
  }
}

// Rank 1 has experts 4 to 7, which are two of the second group of three and two of the third.
TEST(Plan, the_worst_rows_of_experts_are_of_as_many_groups_as_a_token_may_use) {
  const auto worst = [](const char* routing) {
    const std::string model = fmt::format(
        "llama(layers=1,hidden=8,heads=2,kv_heads=2,intermediate=6,vocab=20,positions=4,experts=12,"
        "expert_width=5,{})",
        routing);
    DryRun run = dry_of({.model = model.c_str(), .mesh = "dp_shard=3", .strategy = "zero3", .expert_ranks = 3});
    run.rank = 1;
    return dry_run(run).expert_rows.worst;
  };
  constexpr int64_t kTokens = 3 * 2 * 4;
  EXPECT_EQ(worst("top_k=3"), kTokens * 3);
  EXPECT_EQ(worst("top_k=3,expert_groups=4,groups_per_token=1"), kTokens * 2);
  EXPECT_EQ(worst("top_k=3,expert_groups=4,groups_per_token=2"), kTokens * 3);
}

// The counts of a rank alone on the meta device, and those that ranks exchange: token n chooses experts k * n to k * n + k - 1.
TEST(Plan, without_values_choices_are_dealt_out_evenly) {
  constexpr int64_t kTokens = 7, kExperts = 5, kChosen = 3, kRanks = 3;
  EXPECT_EQ(even_counts(kTokens * kChosen, kExperts), (std::vector<int64_t>{5, 4, 4, 4, 4}));
  EXPECT_EQ(even_counts(2, kExperts), (std::vector<int64_t>{1, 1, 0, 0, 0}));
  const at::Tensor chosen = at::arange(kTokens * kChosen, at::kLong).remainder(kExperts).view({kTokens, kChosen});
  std::vector<std::vector<int64_t>> blocks(kRanks);
  run_threads(kRanks, [&](std::shared_ptr<Comm> world) {
    blocks[static_cast<size_t>(world->rank())] = Dispatch(chosen, kExperts, world).blocks();
  });
  StepRecorder recorder;
  const MetaDevice device(recorder);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const Dispatch dry(at::empty_like(chosen, at::kMeta), kExperts, counted(kRanks, rank));
    EXPECT_EQ(dry.blocks(), blocks[static_cast<size_t>(rank)]) << "rank " << rank;
    const at::Tensor rows = dry.rows(at::empty({kTokens, 2}, at::kMeta));
    EXPECT_EQ(rows.size(0), std::accumulate(dry.blocks().begin(), dry.blocks().end(), int64_t{0}));
    EXPECT_EQ(dry.outputs(rows).sizes(), (std::vector<int64_t>{kTokens, kChosen, 2}));
  }
}

TEST(Plan, experts_are_refused_where_a_step_takes_memory_or_as_many_ranks_cannot_share_them) {
  DryRun run = dry_of({.model = kMoe, .mesh = "dp_shard=3", .strategy = "zero3", .expert_ranks = 2});
  expect_error([&] { dry_run(run); }, {"--expert-ranks 2", "dp_shard=3", "so many ranks cannot share"});
  run.what.model = parse_model(kLlama);
  expect_error([&] { dry_run(run); }, {"--expert-ranks 2", "a llama with experts"});
  run = dry_of({.model = kMoe, .mesh = "dp_shard=2", .strategy = "zero3"});
  run.sharding = {"offload=pageable"};
  expect_error([&] { dry_run(run); }, {"offload", "leave offload out"});
}

TEST(Plan, an_exchange_of_a_ring_goes_to_one_rank) {
  const StepRecord record = dry_run(dry_of({kLlama, "dp_shard=1,cp=3", "zero3"})).record;
  int64_t exchanges = 0;
  for (const Collective& what : record.collectives) {
    EXPECT_EQ(what.to_one, what.op == Op::all_to_all);
    exchanges += what.to_one;
  }
  EXPECT_GT(exchanges, 0);
}

TEST(Plan, memory_is_exactly_what_the_ledgers_of_ranks_of_threads_measure) {
  for (const Planned& planned : all_planned()) {
    DryRun run = dry_of(planned);
    const std::vector<Counted> counted = really(run);
    for (run.rank = 0; run.rank < run.what.mesh.size(); ++run.rank) {
      const MemoryUse plan = dry_run(run).stepped, real = counted[static_cast<size_t>(run.rank)].memory;
      const auto expect_equal = [&](const MemoryBytes& planned_bytes, const MemoryBytes& real_bytes, const char* place) {
        const std::string where = fmt::format("{}, rank {}, {}", words(planned), run.rank, place);
        EXPECT_EQ(planned_bytes.now_bytes, real_bytes.now_bytes) << where;
        EXPECT_EQ(planned_bytes.peak_bytes, real_bytes.peak_bytes) << where;
        EXPECT_EQ(planned_bytes.peak_total_bytes, real_bytes.peak_total_bytes) << where;
      };
      expect_equal(plan, real, "device");
      expect_equal(plan.host, real.host, "host");
      EXPECT_EQ(plan.host.peak(MemoryKind::activation) > 0, planned.offload_activations) << words(planned);
      EXPECT_EQ(plan.peak(MemoryKind::activation) > 0, planned.offload_activations || planned.delayed_bytes > 0)
          << words(planned);
    }
  }
}

TEST(Plan, activations_of_an_mlp_are_what_its_layers_keep) {
  // The result of tanh, which the second layer reads too; the difference from the target, for its square; and the loss.
  for (const int64_t samples : {1, 7}) EXPECT_EQ(of_mlp(samples).activation_bytes, 4 * (samples * (10 + 4) + 1));
}

TEST(Plan, products_of_an_mlp_are_those_of_its_layers) {
  constexpr double kFirst = 6 * 10, kSecond = 10 * 4, kSamples = 7;
  double flops = 0;
  for (const Operator& what : of_mlp(7).record.operators) flops += what.flops;
  // Forwards, gradients of both weights, and of the second layer's input; nobody wants that of the first.
  EXPECT_EQ(flops, 2 * kSamples * (kFirst + kSecond + kFirst + kSecond + kSecond));
}

TEST(Plan, a_composed_operator_counts_as_its_parts_and_views_as_nothing) {
  const auto meta = at::TensorOptions(at::kMeta);
  StepRecorder recorder;
  const MetaDevice device(recorder);
  const at::Tensor x = at::empty({2, 3, 4}, meta), weight = at::empty({5, 4}, meta), bias = at::empty({5}, meta);
  at::linear(x, weight, bias).view({6, 5}).t();
  ASSERT_EQ(recorder.record().operators.size(), 1U);
  EXPECT_EQ(recorder.record().operators.front().flops, 2 * 6 * 4 * 5);
  EXPECT_EQ(recorder.record().operators.front().bytes, 4 * (24 + 20 + 5 + 30));
  recorder.clear();
  at::Tensor out = at::empty({6, 5}, meta);
  at::mm_out(out, x.view({6, 4}), weight.t());  // the result is written and not read
  out.addmm_(x.view({6, 4}), weight.t());       // and here it is both
  ASSERT_EQ(recorder.record().operators.size(), 2U);
  for (const Operator& what : recorder.record().operators) EXPECT_EQ(what.flops, 2 * 6 * 4 * 5);
  EXPECT_EQ(recorder.record().operators[0].bytes, 4 * (24 + 20 + 30));
  EXPECT_EQ(recorder.record().operators[1].bytes, 4 * (24 + 20 + 30 + 30));
}

TEST(Plan, products_of_a_language_model_are_six_a_parameter_and_token_and_those_of_attention) {
  DryRun run = dry_of({kLlama, "dp_shard=1", "zero3"});
  double flops = 0, weights = 0;
  for (const Operator& what : dry_run(run).record.operators) flops += what.flops;
  for (const auto& [name, shape] : golden::parameter_shapes(run.what.model))
    if (shape.size() == 2 && name != "model.embed_tokens.weight") weights += static_cast<double>(shape[0] * shape[1]);
  // Two layers; scores and values of 2 samples, 8 x 8 positions, 16 features, half of them masked; 2.5 times that backwards.
  const double attention = 2 * 3.5 * (4.0 * 2 * 8 * 8 * 16) / 2;
  EXPECT_EQ(flops, 6 * weights * 2 * 8 + attention);
}

TEST(Plan, all_memory_is_at_least_what_the_ledger_counts_and_recomputation_keeps_less) {
  DryRun run = dry_of({kLlama, "dp_shard=4", "zero3"});
  const DryRunResult keeps = dry_run(run);
  run.recompute = true;
  const DryRunResult recomputes = dry_run(run);
  EXPECT_GE(keeps.peak_bytes, keeps.stepped.peak_total_bytes);
  EXPECT_GE(keeps.peak_bytes, keeps.activation_bytes);
  EXPECT_LT(recomputes.activation_bytes, keeps.activation_bytes / 2);
}

// Of four ranks, with units of which none is half of the model.
TEST(Plan, memory_that_ranks_share_counts_once_for_all_of_them) {
  DryRun run =
      dry_of({"llama(layers=6,hidden=32,heads=4,kv_heads=4,intermediate=64,vocab=20,positions=2)", "dp_shard=4", "zero3"});
  const DryRunResult copies = dry_run(run);
  run.sharding = {"gather=side_by_side"};
  const DryRunResult shares = dry_run(run);
  EXPECT_EQ(shares.built.now_total(), copies.built.now_total());
  EXPECT_EQ(shares.stepped.peak(MemoryKind::gathered), 0);
  EXPECT_LT(shares.peak_bytes, copies.peak_bytes);
}

// Four equal blocks: the device holds at most what two of them keep, and the host what all keep.
TEST(Plan, offloaded_activations_are_those_of_two_units_on_the_device_and_of_all_on_the_host) {
  DryRun run = dry_of({"llama(layers=4,hidden=64,heads=4,kv_heads=2,intermediate=128,vocab=20,positions=64)", "dp_shard=4",
                       "zero3"});
  const DryRunResult keeps = dry_run(run);
  run.offload_activations = true;
  const DryRunResult offloads = dry_run(run);
  const int64_t host = offloads.stepped.host.peak(MemoryKind::activation);
  EXPECT_GT(host, keeps.activation_bytes * 9 / 10);
  EXPECT_LE(offloads.stepped.peak(MemoryKind::activation), host * 6 / 10);
  EXPECT_LT(offloads.activation_bytes, keeps.activation_bytes * 7 / 10);
  EXPECT_LT(offloads.peak_bytes, keeps.peak_bytes);
  EXPECT_EQ(keeps.stepped.host.peak_total_bytes, 0);
}

TEST(Plan, a_large_model_on_many_ranks_takes_seconds_and_little_memory) {
  DryRun run;
  run.what.model =
      parse_model("llama(layers=126,hidden=16384,heads=128,kv_heads=8,intermediate=53248,vocab=128256,positions=8192)");
  run.what.mesh = Mesh::parse("dp_replicate=16,dp_shard=128,tp=8");
  run.what.strategy = "hsdp";
  run.what.options.sequence_parallel = true;
  run.dtype = "bf16";
  const DryRunResult result = dry_run(run);
  EXPECT_EQ(result.parameters, 405'853'388'800);  // what the transformers package counts for Llama 3.1 405B
  EXPECT_EQ(result.record.groups.front().ranks.size(), 16384U);
}
