// Sharded::placements: what all ranks hold, told by each of them alone.
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>

#include "shardproof/comm/traced.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

// A model under tensor parallelism, cut unevenly where heads, rows or words do not divide.
struct Drawn {
  Mesh mesh;
  bool llama = false;
  int64_t heads = 1, kv_heads = 1;
  bool tied = false, sequence = false;
  Strategy row, row_of_blocks;
  bool blocks_on_one_axis = false;  // see dp_replicate and dp_shard as one axis
  int64_t alignment = 64, bucket_bytes_max = 0;
  Granularity granularity = Granularity::element;

  std::string str() const {
    return fmt::format(
        "{} {} ({} in blocks{}) on {}: {} heads, {} of keys, tied {}, sequence {}, aligned to {}, buckets of {} bytes, {}",
        llama ? "llama" : "gpt", row.name, row_of_blocks.name, blocks_on_one_axis ? ", on one axis" : "", mesh.str(), heads,
        kv_heads, tied, sequence, alignment, bucket_bytes_max,
        granularity == Granularity::tensor ? "whole tensors" : "elements");
  }
};

Strategy drawn_row() {
  std::vector<Strategy> rows = strategies();
  rows.insert(rows.end(), free_rows().begin(), free_rows().end());
  return rows[*rc::gen::inRange<size_t>(0, rows.size())];
}

Drawn drawn() {
  Drawn d;
  const int64_t replicate = *rc::gen::element<int64_t>(1, 2), shard = *rc::gen::element<int64_t>(1, 2, 3),
                tp = *rc::gen::element<int64_t>(1, 2, 3, 4);
  d.mesh = Mesh({{"dp_replicate", replicate}, {"dp_shard", shard}, {"tp", tp}});
  d.llama = *rc::gen::arbitrary<bool>();
  d.tied = *rc::gen::arbitrary<bool>();
  d.sequence = *rc::gen::arbitrary<bool>();
  // Every rank along tp has a head; a fifth of four ranks' heads lies alone on the last.
  d.heads = d.llama   ? tp * *rc::gen::inRange<int64_t>(1, 3)
            : tp == 4 ? 7
                      : *rc::gen::elementOf(std::vector<int64_t>{tp, 2 * tp, 2 * tp - 1});
  d.kv_heads = d.llama && *rc::gen::arbitrary<bool>() ? 1 : d.heads;
  d.row = drawn_row();
  d.blocks_on_one_axis = *rc::gen::arbitrary<bool>();
  d.row_of_blocks = d.blocks_on_one_axis ? strategy("zero1") : drawn_row();
  d.alignment = *rc::gen::element<int64_t>(64, 128, 512);
  d.bucket_bytes_max = *rc::gen::element<int64_t>(0, 200, 2000);
  d.granularity = *rc::gen::element(Granularity::element, Granularity::tensor);
  return d;
}

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  ParallelPlan plan;
  std::function<at::Tensor(at::Tensor)> forward;
};

Model make(const Drawn& d) {
  Model made;
  if (d.llama) {
    const LlamaOptions options{.layers = 1,
                               .hidden = 4 * d.heads,
                               .heads = d.heads,
                               .kv_heads = d.kv_heads,
                               .intermediate = 10,
                               .vocab = 13,
                               .tied = d.tied};
    Llama model(options);
    made = {model.ptr(), llama_plan(options, d.mesh.size("tp"), d.sequence),
            [model](at::Tensor x) mutable { return call(model, x); }};
  } else {
    const GptOptions options{.layers = 1, .hidden = 2 * d.heads, .heads = d.heads, .vocab = 13, .positions = 8, .tied = d.tied};
    Gpt model(options);
    made = {model.ptr(), gpt_plan(options, d.sequence), [model](at::Tensor x) mutable { return call(model, x); }};
  }
  initialize_parameters(*made.module, 7, 0.3);
  return made;
}

// The pieces of one parameter, in storage order.
std::map<std::string, std::vector<Piece>> by_name(const std::vector<Piece>& pieces) {
  std::map<std::string, std::vector<Piece>> sorted;
  for (const Piece& piece : pieces) sorted[piece.name].push_back(piece);
  return sorted;
}

// Whether a rank holds what its placement says, and, where values are given, the values of those elements.
void expect_held(const std::string& where, const ParameterPlacement& of, const Placement& placement, int64_t rank,
                 const std::vector<Piece>& pieces, const at::Tensor& values, at::ScalarType dtype) {
  std::vector<Interval> wanted, held;
  for (const OwnedRun& run : owned_runs(of.shape, placement.mesh, placement.layout, rank)) {
    if (!wanted.empty() && wanted.back().end == run.whole.begin)
      wanted.back().end = run.whole.end;
    else
      wanted.push_back(run.whole);
  }
  for (const Piece& piece : pieces) {
    EXPECT_EQ(piece.shape, of.shape) << where;
    EXPECT_EQ(piece.data.scalar_type(), dtype) << where;
    if (!held.empty() && held.back().end == piece.run.begin)
      held.back().end = piece.run.end;
    else
      held.push_back(piece.run);
    if (!values.defined()) continue;
    const at::Tensor part = values.reshape({-1}).narrow(0, piece.run.begin, piece.run.size()).to(dtype);
    EXPECT_TRUE(piece.data.equal(part)) << where << " elements from " << piece.run.begin;
  }
  EXPECT_EQ(held, wanted) << where << " under " << placement.layout.str();
}

UnitOptions options_of(const Drawn& d, const std::string& unit) {
  UnitOptions own;
  if (unit.empty()) return own;
  own.strategy = d.row_of_blocks;
  const int64_t ranks = d.mesh.size("dp_replicate") * d.mesh.size("dp_shard");
  if (d.blocks_on_one_axis) own.mesh = Mesh({{"dp_shard", ranks}, {"tp", d.mesh.size("tp")}});
  return own;
}

std::string str(const std::map<std::string, ParameterPlacement>& placements) {
  std::string text;
  for (const auto& [name, placed] : placements) {
    text += fmt::format("{} [{}] {} {}", name, fmt::join(placed.shape, ","), c10::toString(placed.compute),
                        c10::toString(placed.main));
    for (const Placement* each : {&placed.parameter, &placed.gradient, &placed.state})
      text += fmt::format(" {} on {}", each->layout.str(), each->mesh.str());
    text += "\n";
  }
  return text;
}

void expect_told_alone(const Drawn& d) {
  std::vector<std::string> told(static_cast<size_t>(d.mesh.size()));
  const auto trace = std::make_shared<Trace>();
  run_threads(d.mesh.size(), [&](std::shared_ptr<Comm> world) {
    const int64_t rank = world->rank();
    const auto comms = std::make_shared<MeshComm>(traced(std::move(world), trace), d.mesh);
    const Model model = make(d);
    std::map<std::string, at::Tensor> whole;
    for (const auto& item : model.module->named_parameters()) whole[item.key()] = item.value().detach().clone();
    std::optional<TensorParallel> parallel;
    if (d.mesh.size("tp") > 1) parallel.emplace(parallelize(model.module, comms, model.plan));
    Sharded sharded = fully_shard(model.module, comms,
                                  {.strategy = d.row,
                                   .units = by_type<GptBlockImpl, LlamaLayerImpl>(),
                                   .bucket_bytes_max = d.bucket_bytes_max,
                                   .alignment_bytes = d.alignment,
                                   .granularity = d.granularity,
                                   .precision = {.main = at::kFloat, .compute = at::kBFloat16},
                                   .unit_options = [&](const std::string& unit) { return options_of(d, unit); }});
    Optimizer optimizer = adamw(sharded, {});
    const size_t calls = trace->of_rank(rank).size();
    const auto placements = sharded.placements();
    EXPECT_EQ(trace->of_rank(rank).size(), calls) << "placements are known without a call";
    told[static_cast<size_t>(rank)] = str(placements);

    auto parameters = by_name(sharded.parameters()), main = by_name(sharded.main_parameters());
    auto state = by_name(optimizer.state("exp_avg"));
    for (const auto& [name, placed] : placements) {
      const std::string where = fmt::format("{}, rank {}, {}", d.str(), rank, name);
      expect_held(where, placed, placed.parameter, rank, parameters[name], whole.at(name), at::kBFloat16);
      expect_held(where, placed, placed.state, rank, main[name], whole.at(name), at::kFloat);
      expect_held(where + ".exp_avg", placed, placed.state, rank, state[name], {}, at::kFloat);
    }
    for (const auto* pieces : {&parameters, &main})
      for (const auto& [name, of_name] : *pieces) EXPECT_TRUE(placements.contains(name)) << name;

    const at::Tensor tokens = at::arange(16, at::kLong).remainder(13).view({2, 8});
    model.forward(tokens).to(at::kFloat).square().sum().backward();
    auto gradients = by_name(sharded.gradients());
    for (const auto& [name, placed] : placements)
      expect_held(fmt::format("{}, rank {}, gradient of {}", d.str(), rank, name), placed, placed.gradient, rank,
                  gradients[name], {}, at::kFloat);
  });
  for (const std::string& one : told) EXPECT_EQ(one, told.front()) << d.str();
}

}  // namespace

RC_GTEST_PROP(Placements, are_what_every_rank_holds_and_each_knows_them_alone, ()) {
  const Drawn d = drawn();
  expect_told_alone(d);
  if (::testing::Test::HasFailure()) RC_FAIL(d.str());
}
