// A case: one experiment as a value that prints, parses, shrinks and replays on one line.
//
//   gpt(layers=2,hidden=24,heads=3,vocab=37,positions=7,tied) mesh(dp_replicate=2,dp_shard=4)
//   hsdp(units=leaf,bucket_count=2) adamw(lr=0.01,clip=1) ordered seed=7 : step*2 accumulate(3) eval step
//   mlp(widths=5-3-4,act=relu) mesh(dp_shard=2,tp=3) zero3 sgd(lr=0.1) exact seed=8 : step
//
// Model, mesh, strategy with its options, optimizer, mode, seed, and after the colon the history. Data, initial values,
// microbatch sizes and the schedule of ranks follow from the seed. A schedule of its own, threads(...), may stand behind it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "golden/golden.h"
#include "harness/case/axes.h"
#include "harness/case/case_options.h"
#include "harness/case/interleaving.h"
#include "shardproof/algebra/mesh.h"
#include "shardproof/algebra/strategy.h"

namespace harness {

// How the sharded run is compared with the golden one.
enum class Mode {
  exact,      // data whose sums are exact in any order: bit for bit, whatever order the backend adds in
  ordered,    // bit for bit, both told the order of sums
  canonical,  // bit for bit, sums in fixed point: no order matters, backend's included
  fast        // backend order and plain norms, within a tolerance derived from a float64 run
};

// One optimizer step and what happens before and in it. In the text, words that hold until they change: accumulate(N), sync(N),
// freeze(N), lr(PERCENT); words for the next step: eval, discard, unshard,
// and, what happens first and in this order, save, crash-during-save, load@mesh(AXIS=SIZE,...), load@strategy(NAME).
struct StepPlan {
  int64_t rounds = 1;      // of accumulation
  int64_t sync_every = 1;  // rounds: the others run without gradient sync. The last round is always synced
  int64_t frozen = 0;      // 0: nothing; else about a third of the parameters, chosen by this number
  int64_t lr_percent = 100;
  bool eval = false;     // an evaluation first
  bool discard = false;  // a forward and backward first, whose gradients are forgotten
  bool unshard = false;  // units are gathered by hand first, and some of them freed again
  bool save = false;     // a checkpoint
  bool crash = false;    // another one, during which every rank, or the first, dies
  // A new run, on this mesh and under this strategy from here on, loads the last checkpoint. What is not given stays.
  std::optional<shardproof::Mesh> load_mesh = {};
  std::string load_strategy = {};
  bool loads() const { return load_mesh.has_value() || !load_strategy.empty(); }
  bool operator==(const StepPlan&) const = default;
};

struct Case {
  golden::Model model;
  shardproof::Mesh mesh;
  std::string strategy = "zero3";
  CaseOptions options;

  golden::Optimizer optimizer;  // without groups
  int64_t groups = 0;           // which of `optimizer_groups`
  double clip_norm = 0;         // 0: no clipping
  int64_t norm_order = 2;       // 1, 2, or 0 for infinity
  Mode mode = Mode::ordered;
  uint64_t seed = 0;
  std::optional<Interleaving> interleaving = {};  // of the threads; where there is none, they take turns by the seed
  std::vector<StepPlan> steps = {StepPlan{}};

  // The case with the mesh and strategy that it has in that step.
  Case at(size_t step) const;
  // The step after which the checkpoint was saved that this step loads, -1 being the start; -2: there is none.
  int64_t loaded_after(size_t step) const;

  bool operator==(const Case& other) const { return str() == other.str(); }

  // Of each mesh axis; 1 when the mesh lacks it.
  int64_t shards() const { return along(axes::dp_shard); }
  int64_t replicas() const { return along(axes::dp_replicate); }
  int64_t context_ranks() const { return along(axes::cp); }
  int64_t tensor_ranks() const { return along(axes::tp); }
  // Ranks that work on one microbatch, and how many such groups there are: the data-parallel ranks.
  int64_t microbatch_ranks() const { return context_ranks() * tensor_ranks(); }
  int64_t data_ranks() const { return mesh.size() / microbatch_ranks(); }
  // The data-parallel rank of each rank of the world. The axis dp_shard varies fastest, wherever it is on the mesh.
  std::vector<int64_t> data_rank_of_each() const;

  // Ranks of the largest mesh of the history.
  int64_t largest_world() const;

  int64_t along(const char* axis) const { return mesh.has(axis) ? mesh.size(axis) : 1; }

  // Law: parse(str()).str() == str().
  std::string str() const;
  // Throws Error that shows the text with a mark under the column, and what was expected there.
  static Case parse(std::string_view text);
};

const char* to_string(Mode mode);
const std::vector<Mode>& modes();
const char* to_string(golden::Optimizer::Kind kind);
const std::vector<golden::Optimizer::Kind>& optimizer_kinds();
const char* to_string(golden::Model::Kind kind);

// Parameter groups by the case's number; 0 has none, and the last one is the library's without_decay_of_norms_and_biases.
std::vector<golden::Optimizer::Group> optimizer_groups(const Case& c);
constexpr int64_t kOptimizerGroups = 4;
constexpr int64_t kUndecayedGroups = 4;

// Whether some units of the case are sharded otherwise than the rest; and those units' strategy and mesh.
bool has_unit_sharding(const Case& c);
const shardproof::Strategy& unit_strategy(const Case& c);
shardproof::Mesh unit_mesh(const Case& c);

// The ranks that share experts on the case's mesh: `ep`, or the largest of its divisors that this mesh allows.
int64_t expert_ranks(const Case& c);
// Whether the parameter of this name holds one matrix for each expert.
bool is_of_experts(const std::string& parameter);

// A schedule of the learning rate warms up in so many steps, and has fallen to this factor at that step. It does not depend on
// the length of the history, so that a shorter one begins with the same steps.
constexpr int64_t kWarmup = 2, kScheduleSteps = 6;
constexpr double kScheduleLast = 0.25;

// The model with the adapters that the options ask for.
golden::Model model_of(const Case& c);

// Names of the parameters that a plan freezes; one that every loss depends on never is. Beside adapters all else is frozen.
std::vector<std::string> frozen_parameters(const Case& c, const StepPlan& plan);

// Reads "gpt(...)", "mlp(...)", ... alone.
golden::Model parse_model(std::string_view text);
std::string str(const golden::Model& model);

// Throws Error, naming what does not fit and what would, unless the case can be run.
void validate(const Case& c);
bool is_valid(const Case& c);

// Changes the case, unless it would not be valid then.
template <class Change>
void try_change(Case& c, Change change) {
  const Case before = c;
  change();
  if (!is_valid(c)) c = before;
}
void validate(const golden::Model& model);

}  // namespace harness
