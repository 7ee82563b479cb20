#include "harness/case/parallel.h"

#include <fmt/format.h>

#include "harness/case/axes.h"
#include "harness/case/network.h"
#include "harness/case/parallel_sizes.h"
#include "harness/case/random.h"
#include "shardproof/base/check.h"
#include "shardproof/base/name_pattern.h"
#include "shardproof/models/models.h"
#include "shardproof/sharding/shard_options.h"

namespace harness {
namespace {

using namespace shardproof;

ParallelPlan mlp_plan(const Case& c) {
  const auto layers = static_cast<int64_t>(c.model.mlp.widths.size()) - 1;
  ParallelPlan plan;
  for (int64_t i = 0; i < layers; ++i) {
    const auto add = [&](int64_t layer, ParallelStyle style) {
      plan.styles.emplace_back(fmt::format("layers.{}", layer), style);
    };
    const auto drawn = Draws(c.seed, "tp").integer(i, 0, 5);
    if (drawn < 3 && i + 1 < layers) {
      add(i, ColumnParallel{});
      add(++i, RowParallel{});
    } else if (drawn == 5 && i + 1 < layers) {
      continue;  // whole; not all are, which the library refuses
    } else if (drawn % 2 == 0) {
      add(i, ColumnParallel{.gather_output = true});
    } else {
      add(i, RowParallel{.input_is_parallel = false});
    }
  }
  return plan;
}

ParallelPlan plan_of_llama(const Case& c) {
  ParallelPlan plan;
  if (c.tensor_ranks() > 1) plan = llama_plan(llama_options(c.model.llama), c.tensor_ranks(), c.options.sequence_parallel != 0);
  const ExpertParallel experts{.ranks = expert_ranks(c), .cut_inside = c.options.etp != 0 && c.tensor_ranks() > 1};
  if (experts.ranks > 1 || experts.cut_inside) plan.styles.emplace_back("model.layers.*.mlp.experts", experts);
  return plan;
}

ParallelPlan bare_plan(const Case& c) {
  if (c.model.kind == golden::Model::Kind::mlp) return mlp_plan(c);
  if (c.model.kind == golden::Model::Kind::llama) return plan_of_llama(c);
  return gpt_plan(gpt_options(c.model.gpt), c.options.sequence_parallel != 0);
}

// How many ranks along tp hold the same piece of the parameter; 0: the style leaves it whole.
int64_t copies_by(const ParallelStyle& style, const std::string& parameter, int64_t ranks) {
  if (const auto* column = std::get_if<ColumnParallel>(&style))
    return copies_held(split_in_segments(axes::tp, column->segments), ranks);
  if (std::holds_alternative<VocabParallel>(style)) return 1;
  if (const auto* experts = std::get_if<ExpertParallel>(&style)) return experts->cut_inside;
  return std::holds_alternative<RowParallel>(style) && parameter.ends_with("weight");
}

}  // namespace

ParallelPlan parallel_plan(const Case& c) {
  const golden::Model model = model_of(c);
  ParallelPlan plan = bare_plan(c);
  plan.overlap_pieces = c.options.overlap_pieces;
  if (model.adapters.layers.empty()) return plan;
  std::map<std::string, int64_t> inputs;
  for (const auto& [name, shape] : golden::parameter_shapes(c.model))
    if (shape.size() == 2) inputs[name.substr(0, name.rfind('.'))] = shape[1];
  return described_lora(model.adapters.layers, lora_options(model.adapters), inputs).with_styles(std::move(plan));
}

void require_expert_ranks(const Case& c, const char* command) {
  const int64_t ranks = c.options.ep;
  if (ranks == 1 && c.options.etp == 0) return;
  const bool has_experts = c.model.kind == golden::Model::Kind::llama && c.model.llama.experts > 0;
  const std::string option = ranks > 1 ? fmt::format("--expert-ranks {}", ranks) : "--cut-experts";
  if (!has_experts)
    throw shardproof::Error(fmt::format(
        "[{}] {} needs a llama with experts, as in --model 'llama(..,experts=8,top_k=2,expert_width=64)'", command, option));
  if (c.options.etp != 0 && c.tensor_ranks() == 1)
    throw shardproof::Error(fmt::format(
        "[{}] --cut-experts cuts experts along the mesh axis tp, and mesh '{}' has no ranks along it; add tp=2 to it, or leave "
        "--cut-experts out",
        command, c.mesh.str()));
  if (expert_ranks(c) != ranks)
    throw shardproof::Error(
        fmt::format("[{}] --expert-ranks {} on mesh '{}': so many ranks cannot share experts there. Their number has to divide "
                    "those along dp_shard and cp, or be a multiple of these that divides all data-parallel ranks",
                    command, ranks, c.mesh.str()));
}

ContextOptions context_options(const Case& c) {
  return {.attention = static_cast<ContextAttention>(c.options.context_attention), .split = context_split(c)};
}

std::map<std::string, int64_t> cut_parameters(const Case& c) {
  std::map<std::string, int64_t> copies;
  if (c.tensor_ranks() == 1) return copies;
  const ParallelPlan plan = parallel_plan(c);
  for (const auto& [name, shape] : golden::parameter_shapes(model_of(c)))
    for (const auto& [pattern, style] : plan.styles)
      if (name_matches(pattern, name.substr(0, name.rfind('.')))) {
        if (const int64_t held = copies_by(style, name, c.tensor_ranks()); held > 0) copies[name] = held;
        break;
      }
  return copies;
}

}  // namespace harness
