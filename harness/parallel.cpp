#include "harness/parallel.h"

#include <fmt/format.h>

#include "harness/parallel_sizes.h"
#include "harness/random.h"
#include "shardproof/models.h"
#include "shardproof/shard_options.h"

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

bool cut_by(const ParallelStyle& style, const std::string& parameter) {
  const bool weight = parameter.ends_with("weight");
  return std::holds_alternative<ColumnParallel>(style) || std::holds_alternative<VocabParallel>(style) ||
         (weight && std::holds_alternative<RowParallel>(style));
}

}  // namespace

ParallelPlan parallel_plan(const Case& c) {
  if (c.model.kind == golden::Model::Kind::mlp) return mlp_plan(c);
  const golden::Gpt& g = c.model.gpt;
  const GptOptions options{
      .layers = g.layers, .hidden = g.hidden, .heads = g.heads, .vocab = g.vocab, .positions = g.positions, .tied = g.tied};
  return gpt_plan(options, c.options.sequence_parallel != 0);
}

ContextOptions context_options(const Case& c) {
  return {.attention = c.options.context_gathered ? ContextAttention::gathered : ContextAttention::ring,
          .split = context_split(c)};
}

std::vector<std::string> cut_parameters(const Case& c) {
  std::vector<std::string> names;
  if (c.tensor_ranks() == 1) return names;
  const ParallelPlan plan = parallel_plan(c);
  for (const auto& [name, shape] : golden::parameter_shapes(c.model))
    for (const auto& [pattern, style] : plan.styles)
      if (name_matches(pattern, name.substr(0, name.rfind('.')))) {
        if (cut_by(style, name)) names.push_back(name);
        break;
      }
  return names;
}

}  // namespace harness
