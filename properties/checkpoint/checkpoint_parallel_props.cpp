// Models cut by tensor parallelism: whole tensors in the checkpoint, loaded under any other cut.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>

#include "properties/kit/checkpoint_scratch.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/comm/traced.h"
#include "shardproof/shardproof.h"

namespace shardproof::checkpoint {
namespace {

struct Cut {
  int64_t dp = 1, tp = 1;
  bool sequence = false;
  std::string strategy = "zero3";
  std::string str() const { return fmt::format("dp {} tp {} {} {}", dp, tp, sequence ? "sequence" : "", strategy); }
};

struct Built {
  std::shared_ptr<torch::nn::Module> module;
  ParallelPlan plan;
};
using Build = std::function<Built(const Cut&)>;

// Element i of a tensor of that name; exact in float32 for all that is here.
float value_of(const std::string& name, int64_t i) {
  return static_cast<float>(i * 5 + static_cast<int64_t>(std::hash<std::string>{}(name) % 10007));
}

void set(const std::vector<Piece>& pieces, const std::string& state_name) {
  for (const Piece& piece : pieces)
    for (int64_t i = 0; i < piece.run.size(); ++i)
      piece.data.data_ptr<float>()[i] = value_of(piece.name + state_name, piece.run.begin + i);
}

bool is_set(const std::vector<Piece>& pieces, const std::string& state_name) {
  for (const Piece& piece : pieces)
    for (int64_t i = 0; i < piece.run.size(); ++i)
      if (piece.data.data_ptr<float>()[i] != value_of(piece.name + state_name, piece.run.begin + i)) return false;
  return true;
}

// One rank's part of a model.
struct Part {
  Part(const Build& build, const Cut& cut, const std::shared_ptr<Comm>& comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", cut.dp}, {"tp", cut.tp}}));
    const Built built = build(cut);
    initialize_parameters(*built.module, 3, 0.3);
    parallel.emplace(parallelize(built.module, comms, built.plan));
    sharded.emplace(fully_shard(built.module, comms, {.strategy = strategy(cut.strategy)}));
    optimizer.emplace(adamw(*sharded, {.lr = 0.01}));
  }
  // All values become those of `value_of`, without training.
  void fill() {
    const at::NoGradGuard no_grad;
    set(sharded->main_parameters(), "");
    sharded->main_parameters_changed();
    for (const Optimizer::Group& group : optimizer->groups())
      for (const std::string& name : group.parameters) optimizer->restore(name, 7, true);
    for (const std::string& state_name : optimizer->state_names()) set(optimizer->state(state_name), state_name);
  }
  bool filled() {
    bool all = is_set(sharded->main_parameters(), "");
    for (const std::string& state_name : optimizer->state_names()) {
      all &= is_set(optimizer->state(state_name), state_name);
      all &= optimizer->state(state_name).size() == sharded->main_parameters().size();
    }
    for (const auto& [name, whole] : sharded->gather_parameters()) {
      const at::Tensor flat = whole.contiguous().view({-1});
      const std::string first = names_like(name);
      for (int64_t i = 0; i < flat.numel(); ++i) all &= flat.data_ptr<float>()[i] == value_of(first, i);
    }
    for (const Optimizer::Group& group : optimizer->groups())
      for (const std::string& name : group.parameters) all &= optimizer->updates(name) == 7;
    return all;
  }
  // Tied parameters have the values of their first name.
  std::string names_like(const std::string& name) const { return name == "lm_head.weight" && tied ? "wte.weight" : name; }

  bool tied = false;
  std::optional<TensorParallel> parallel;
  std::optional<Sharded> sharded;
  std::optional<Optimizer> optimizer;
};

// Saves under the first cut, loads under each of the others; returns the first that is wrong.
std::string first_wrong(const Build& build, const Cut& from, const std::vector<Cut>& to, bool tied = false) {
  const Scratch scratch;
  run_threads(from.dp * from.tp, [&](std::shared_ptr<Comm> comm) {
    Part part(build, from, comm);
    part.fill();
    save(scratch / "at", *part.sharded, &*part.optimizer);
  });
  const Built whole = build({});
  const Checkpoint checkpoint = open_checkpoint(system_files(), scratch / "at");
  for (const auto& item : whole.module->named_parameters())
    if (checkpoint.tensors.at("model." + item.key()).sizes != item.value().sizes().vec()) return "shape of " + item.key();
  for (const Problem& problem : verify_checkpoint(system_files(), scratch / "at").problems) return problem.str();
  for (const Cut& cut : to) {
    std::atomic<bool> wrong = false;
    run_threads(cut.dp * cut.tp, [&](std::shared_ptr<Comm> comm) {
      Part part(build, cut, comm);
      part.tied = tied;
      load(scratch / "at", *part.sharded, &*part.optimizer);
      if (!part.filled()) wrong = true;
    });
    if (wrong) return from.str() + " -> " + cut.str();
  }
  return "";
}

TEST(CutState, a_linear_of_any_small_size_loads_under_any_cut) {
  for (const bool columns : {true, false})
    for (int64_t rows = 1; rows <= 7; ++rows)
      for (int64_t tp = 1; tp <= 4; ++tp) {
        const Build build = [&](const Cut&) {
          ParallelPlan plan;
          if (columns)
            plan.styles = {{"", ColumnParallel{}}};
          else
            plan.styles = {{"", RowParallel{}}};
          return Built{columns ? torch::nn::Linear(3, rows).ptr() : torch::nn::Linear(rows, 3).ptr(), plan};
        };
        std::vector<Cut> to;
        for (int64_t other = 1; other <= 4; ++other)
          to.push_back({1 + (rows + other) % 2, other, false, other % 2 ? "zero3" : "ddp"});
        EXPECT_EQ(first_wrong(build, {1 + rows % 2, tp}, to), "") << rows << (columns ? " columns" : " rows");
      }
}

TEST(CutState, grouped_queries_with_fewer_key_heads_than_ranks_load_under_any_cut) {
  for (const int64_t kv_heads : {1, 2, 3, 6}) {
    const Build build = [&](const Cut& cut) {
      const LlamaOptions options{
          .layers = 1, .hidden = 24, .heads = 6, .kv_heads = kv_heads, .intermediate = 10, .vocab = 13, .tied = false};
      return Built{Llama(options).ptr(), llama_plan(options, cut.tp, cut.sequence)};
    };
    std::vector<Cut> cuts;
    for (const int64_t tp : {1, 2, 3, 6})
      if (kv_heads % tp == 0 || tp % kv_heads == 0) cuts.push_back({tp < 3 ? 2 : 1, tp, tp == 2, tp == 3 ? "zero1" : "zero3"});
    for (const Cut& from : cuts) EXPECT_EQ(first_wrong(build, from, cuts), "") << kv_heads;
  }
}

TEST(CutState, a_gpt_with_fused_queries_loads_under_any_cut) {
  for (const bool tied : {false, true}) {
    const GptOptions options{.layers = 1, .hidden = 14, .heads = 7, .vocab = 13, .positions = 8, .tied = tied};
    const Build build = [&](const Cut& cut) { return Built{Gpt(options).ptr(), gpt_plan(options, cut.sequence)}; };
    std::vector<Cut> cuts;
    for (const int64_t tp : {1, 2, 3, 4}) cuts.push_back({tp % 2 ? 2 : 1, tp, tp == 3, tp == 4 ? "zero2" : "zero3"});
    for (const Cut& from : cuts) EXPECT_EQ(first_wrong(build, from, cuts, tied), "") << tied;
  }
}

// Who writes what is planned from placements, so only these are calls: the folder's name, what was written (its length and its
// bytes), and that the checkpoint has its name.
TEST(CutState, a_save_makes_four_calls_whatever_is_saved) {
  const GptOptions options{.layers = 2, .hidden = 14, .heads = 7, .vocab = 13, .positions = 8, .tied = true};
  const Build build = [&](const Cut& cut) { return Built{Gpt(options).ptr(), gpt_plan(options, cut.sequence)}; };
  for (const Cut& cut : {Cut{2, 3, true, "zero3"}, Cut{2, 2, false, "ddp"}, Cut{3, 1, false, "zero1"}}) {
    const Scratch scratch;
    const auto trace = std::make_shared<Trace>();
    run_threads(cut.dp * cut.tp, [&](std::shared_ptr<Comm> comm) {
      Part part(build, cut, traced(comm, trace));
      part.fill();
      Manager manager(scratch.path(), {.keep = 1});
      manager.begin(*comm);  // once in a run
      const auto calls_of = [&](const std::function<void()>& save) {
        const size_t before = trace->of_rank(comm->rank()).size();
        save();
        return trace->of_rank(comm->rank()).size() - before;
      };
      EXPECT_LE(calls_of([&] { save(scratch / "at", *part.sharded, &*part.optimizer); }), 4u) << cut.str();
      for (const int64_t step : {1, 2})
        EXPECT_LE(calls_of([&] { manager.save(*part.sharded, &*part.optimizer, {.step = step}); }), 4u) << cut.str();
    });
    EXPECT_EQ(committed_steps(scratch.path()), std::vector<int64_t>{2});
  }
}

}  // namespace
}  // namespace shardproof::checkpoint
