#include "harness/run/engine.h"

#include <ATen/ATen.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "golden/engine.h"
#include "harness/case/axes.h"
#include "harness/case/mesh_order.h"
#include "harness/case/problem.h"
#include "harness/compare/pieces.h"
#include "harness/run/beside_program.h"
#include "harness/run/message.h"
#include "harness/run/sharded_run.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Mesh;

// What an engine can do, and the strategy in whose place it stands.
struct Abilities {
  std::string name;
  bool shards = false;     // cuts parameters over dp_shard; else data-parallel ranks are replicas
  bool tensor = false;     // cuts the model over tp
  bool data = true;        // has data-parallel ranks
  bool precision = false;  // computes in low precision
  bool one_axis = false;   // replicas and shards lie along one axis of its mesh
  std::string strategy_on(const Mesh& mesh) const { return !shards ? "ddp" : mesh.has(axes::dp_replicate) ? "hsdp" : "zero3"; }
};

const std::vector<Abilities>& engines() {
  static const std::vector<Abilities> all = {{.name = "torch-ddp"},
                                             {.name = "torch-fsdp2", .shards = true, .precision = true},
                                             {.name = "torch-tp", .tensor = true, .data = false},
                                             {.name = "torch-fsdp2-tp", .shards = true, .tensor = true},
                                             {.name = "torch-fsdp2-ep", .shards = true, .one_axis = true}};
  return all;
}

// Of the user's function: data-parallel ranks are all that it is asked for.
Abilities abilities_of(const std::string& name) {
  for (const Abilities& engine : engines())
    if (engine.name == name) return engine;
  return {.name = name};
}

std::string why_not_on(const Abilities& engine, const Case& c) {
  if (!is_in_usual_order(c.mesh)) return "mesh axes in another order than dp_replicate, dp_shard, cp, tp";
  if (c.context_ranks() > 1) return "context parallelism";
  if (!engine.tensor && c.tensor_ranks() > 1) return "tensor parallelism";
  if (engine.tensor && c.tensor_ranks() == 1) return "a mesh without tensor parallelism";
  if (!engine.data && c.data_ranks() > 1) return "data-parallel ranks beside tensor parallelism";
  if (engine.shards && engine.tensor && c.mesh.has(axes::dp_replicate)) return "replicas beside tensor parallelism";
  if (engine.shards && !c.mesh.has(axes::dp_shard)) return "a mesh without ranks to shard over";
  return {};
}

bool is_tied(const golden::Model& model) {
  return (model.kind == golden::Model::Kind::gpt && model.gpt.tied) ||
         (model.kind == golden::Model::Kind::llama && model.llama.tied);
}

std::string why_not_model(const Abilities& engine, const Case& c) {
  using Kind = golden::Optimizer::Kind;
  const bool odd = c.model.kind == golden::Model::Kind::odd;
  const golden::Llama& m = c.model.llama;
  if (c.model.kind == golden::Model::Kind::llama &&
      (m.expert_balance != 0 || m.expert_z != 0 || m.expert_bias != 0 || m.expert_capacity != 0))
    return "losses, biases and capacities of routers, which are the harness' own";
  if (m.kv_rank != 0 || m.rotary_size != 0 || m.expert_lean != 0)
    return "latent attention, heads of which a part turns, or biases of routers, which the models of Python have not";
  if (c.model.dropout() > 0) return "dropout, whose masks are the harness' own";
  if (c.optimizer.kind == Kind::lion || c.optimizer.kind == Kind::muon) return "an optimizer that torch.optim lacks";
  if (c.options.arithmetic != 0) return "canonical arithmetic";
  if (c.options.lora != 0) return "adapters";
  if (c.options.compute != fp32 && !engine.precision) return "low precision";
  if (c.options.sequence_parallel != 0) return "sequence parallelism";
  if (engine.shards && odd && c.model.odd.gain) return "a parameter without dims";
  if (engine.shards && branches_differ(c)) return "a parameter that some ranks do not use";
  if (engine.tensor && is_tied(c.model)) return "tied weights under tensor parallelism";
  return {};
}

std::string why_not_history(const Abilities& engine, const Case& c) {
  for (size_t s = 0; s < c.steps.size(); ++s) {
    if (c.steps[s].crash) return "a save during which ranks die";
    if (frozen_parameters(c, c.steps[s]) != frozen_parameters(c, c.steps[0])) return "freezing between steps";
    if (std::string reason = why_not_on(engine, c.at(s)); !reason.empty()) return reason;
  }
  return {};
}

bool a_rank_has_an_empty_gradient(const Abilities& engine, const Case& c) {
  for (size_t s = 0; s < c.steps.size(); ++s) {
    const Mesh& mesh = c.at(s).mesh;
    const int64_t ranks = engine.shards && mesh.has(axes::dp_shard) ? mesh.size(axes::dp_shard) : 1;
    for (const auto& [name, shape] : golden::parameter_shapes(c.model)) {
      const int64_t rows = shape.empty() ? 1 : shape[0], most = (rows + ranks - 1) / ranks;
      if (c10::multiply_integers(shape) == 0 || (ranks - 1) * most >= rows) return true;
    }
  }
  return false;
}

std::string known_of(const Abilities& engine, const Case& c) {
  // So that there is a state to save, PyTorch lets the optimizer step once with gradients and learning rates of zero.
  const golden::Optimizer& o = c.optimizer;
  const bool steps_alter = o.kind != golden::Optimizer::Kind::sgd || (o.momentum > 0 && o.weight_decay > 0);
  if (c.steps[0].save && steps_alter)
    return "a save before the first step, which changes the optimizer's state in PyTorch (docs/findings/019.md)";
  if (c.norm_order == 0 && a_rank_has_an_empty_gradient(engine, c))
    return "the largest gradient, where a rank has an empty one, which PyTorch refuses (docs/findings/001.md)";
  return {};
}

// The options that mean something to the engine; the library's are as they are by default.
CaseOptions options_of(const Abilities& engine, const CaseOptions& o) {
  CaseOptions kept{.loss = o.loss, .compute = o.compute, .schedule = o.schedule};
  kept.units = !engine.shards ? int64_t{units_root} : o.units == units_some || o.units == units_listed ? units_block : o.units;
  if (engine.shards) kept.reshard = o.reshard;
  return kept;
}

// Fewer ranks share experts than were drawn where not all would have equally many.
void share_equally(Case& c) {
  const auto is_equal = [&] {
    for (size_t s = 0; s < c.steps.size(); ++s)
      if (c.model.llama.experts % expert_ranks(c.at(s)) != 0) return false;
    return true;
  };
  while (!is_equal()) --c.options.ep;
}

void give_strategy(const Abilities& engine, Case& c) {
  for (size_t s = 0; s < c.steps.size(); ++s)
    if (c.steps[s].loads()) c.steps[s].load_mesh = c.at(s).mesh;
  c.strategy = engine.strategy_on(c.mesh);
  std::string before = c.strategy;
  for (StepPlan& step : c.steps) {
    if (!step.load_mesh) continue;
    const std::string there = engine.strategy_on(*step.load_mesh);
    step.load_strategy = there == before ? "" : there;
    before = there;
  }
}

// The folder of the Python package: the one that this program was installed in, or the build folder's.
std::string package_folder() {
  std::error_code none;
  const std::filesystem::path installed = beside_program("../..");
  return (std::filesystem::exists(installed / "shardproof" / "check" / "server.py", none)
              ? installed
              : beside_program(SHARDPROOF_PYTHON_PACKAGE))
      .string();
}

nlohmann::ordered_json mesh_of(const Abilities& engine, const Case& c) {
  if (engine.shards && !engine.one_axis && c.mesh.has(axes::dp_replicate))
    return {{axes::dp_replicate, c.replicas()}, {axes::dp_shard, c.shards()}};
  if (!engine.tensor) return {{"dp", c.data_ranks()}};
  if (!engine.data) return {{axes::tp, c.tensor_ranks()}};
  return {{"dp", c.data_ranks()}, {axes::tp, c.tensor_ranks()}};
}

// As shardproof.check.given reads it.
std::string setup_of(const Abilities& engine, const Case& c, const char* ranks) {
  static constexpr const char* kUnits[] = {"root", "block", "leaf"};
  static constexpr const char* kDtypes[] = {"float32", "bfloat16", "float16"};
  nlohmann::ordered_json segments = nlohmann::json::array(), steps = nlohmann::json::array();
  for (size_t s = 0; s < c.steps.size(); ++s) {
    const StepPlan& plan = c.steps[s];
    const Case there = c.at(s);
    const auto begin = [&](const nlohmann::ordered_json& load) {
      segments.push_back(
          {{"mesh", mesh_of(engine, there)}, {"ep", expert_ranks(there)}, {"first", s}, {"last", s}, {"load", load}});
    };
    if (s == 0) begin(nullptr);
    if (plan.loads()) begin(c.loaded_after(s) + 1);
    segments.back()["last"] = s + 1;
    nlohmann::ordered_json sync = nlohmann::json::array();
    for (int64_t round = 1; round <= plan.rounds; ++round)
      sync.push_back(round == plan.rounds || round % plan.sync_every == 0);
    steps.push_back({{"sync", sync},
                     {"eval", plan.eval},
                     {"discard", plan.discard},
                     {"unshard", plan.unshard},
                     {"save", plan.save}});
  }
  return nlohmann::ordered_json{{"engine", engine.name},
                                {"ranks", ranks},
                                {"units", kUnits[c.options.units]},
                                {"reshard", c.options.reshard},
                                {"precision", kDtypes[c.options.compute]},
                                {"segments", segments},
                                {"steps", steps}}
      .dump();
}

std::vector<shardproof::Piece> whole_pieces(const golden::Named& tensors) {
  std::vector<shardproof::Piece> pieces;
  for (const auto& [name, value] : tensors)
    if (value.numel() > 0)
      pieces.push_back({name, value.sizes().vec(), {0, value.numel()}, value.to(at::kFloat).contiguous().view({-1})});
  return pieces;
}

RankStep to_rank_step(const golden::StepTrace& held) {
  RankStep step{.losses = {},
                .gradient_norm = held.gradient_norm,
                .gradients = whole_pieces(held.gradients),
                .parameters = whole_pieces(held.parameters)};
  for (const std::vector<double>& round : held.losses) step.losses.push_back(round.at(0));
  for (const auto& [name, values] : held.state) step.state.emplace_back(name, whole_pieces(values));
  return step;
}

class EngineRanks final : public Ranks {
 public:
  EngineRanks(Abilities engine, const char* ranks) : engine_(std::move(engine)), ranks_(ranks) {}

  Steps train(const Case& c, const golden::Run& run) override {
    Steps steps;
    for (const auto& held : train_in_engine(c, run)) {
      std::vector<RankStep>& step = steps.emplace_back();
      for (const golden::StepTrace& rank : held) step.push_back(to_rank_step(rank));
      require_finite(steps.size() - 1, step);
    }
    return steps;
  }

  // How many ranks hold a tensor is the engine's affair: a whole one is on the first of those that hold the same bits.
  Copies copies(const Case& c) const override {
    Copies copies{
        .holders = {}, .compute = copies_of(c).compute, .compute_parameters = false, .buffers = false,
        .data_ranks = c.data_rank_of_each()};
    for (int64_t ranks = 1; ranks <= c.mesh.size(); ++ranks) copies.holders.push_back({ranks, ranks, ranks});
    return copies;
  }

  bool is_library() const override { return false; }

 private:
  golden::EngineTrace train_in_engine(const Case& c, const golden::Run& run) const {
    try {
      return golden::train_in_engine({.package = package_folder(), .setup = setup_of(engine_, c, ranks_), .run = &run});
    } catch (const golden::EnvironmentError&) {
      throw;
    } catch (const std::exception& error) {
      // What ranks raised stands behind who they are.
      static const std::string kRaised = " raised: ";
      const std::string text = message_of(error);
      const size_t raised = text.find(kRaised);
      throw shardproof::Error(text, words_of(raised == std::string::npos ? text : text.substr(raised + kRaised.size())));
    }
  }

  // As the library does by itself.
  static void require_finite(size_t step, const std::vector<RankStep>& ranks) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      bool finite = std::isfinite(ranks[rank].gradient_norm);
      for (const double loss : ranks[rank].losses) finite &= std::isfinite(loss);
      if (!finite)
        throw shardproof::NonFiniteError(fmt::format("rank {}, step {}: the loss or the norm is not finite", rank, step + 1));
    }
  }

  Abilities engine_;
  const char* ranks_;
};

}  // namespace

const std::vector<std::string>& Engine::names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> made;
    for (const Abilities& engine : engines()) made.push_back(engine.name);
    return made;
  }();
  return names;
}

Engine::Engine(std::string name)
    : name_(std::move(name)),
      threads_(std::make_unique<EngineRanks>(abilities_of(name_), "threads")),
      processes_(std::make_unique<EngineRanks>(abilities_of(name_), "processes")) {
  const golden::EngineFacts facts = golden::facts_of_engine(package_folder(), name_);
  if (!facts.why_not.empty())
    throw golden::EnvironmentError(fmt::format("--engine {} cannot run here: {}", name_, facts.why_not));
  takes_ep_ = facts.takes_ep;
}

Engine::Fitted Engine::fit(const Case& drawn) const {
  const Abilities engine = abilities_of(name_);
  Case c = drawn;
  c.mode = Mode::fast;
  for (const auto& why_not : {why_not_on, why_not_model, why_not_history})
    if (std::string reason = why_not(engine, c); !reason.empty()) return {drawn, std::move(reason), {}};
  c.options = options_of(engine, c.options);
  if (takes_ep_) c.options.ep = drawn.options.ep;
  for (StepPlan& step : c.steps) step.unshard &= engine.shards;
  give_strategy(engine, c);
  share_equally(c);
  try {
    validate(c);
  } catch (const shardproof::Error&) {
    return {drawn, "an option that does not suit its mesh", {}};
  }
  std::string known = known_of(engine, c);
  return {std::move(c), {}, std::move(known)};
}

Verdict Engine::run(const Case& c) const {
  const Verdict verdict = run_case(c, *threads_);
  return verdict.held() || verdict.diverged() ? verdict : run_case(c, *processes_);
}

}  // namespace harness
