#include "harness/train/train_case.h"

namespace harness {

Case train_case(const TrainOptions& options, const Stretch& stretch) {
  Case c;
  c.model = options.model;
  c.mesh = stretch.mesh;
  c.strategy = stretch.strategy;
  c.options.sequence_parallel = options.sequence_parallel;
  c.options.overlap_pieces = options.overlap_pieces;
  c.options.ep = options.expert_ranks;
  c.options.etp = options.cut_experts;
  c.options.context_attention = options.context_attention;
  c.options.arithmetic = options.model.canonical;
  c.options.compute = options.bf16 ? bf16 : fp32;
  shardproof::ShardOptions named;
  set_options(named, options.sharding);
  for (const shardproof::NamedOption& option : shardproof::named_options())
    if (!option.drawn.empty()) c.options.set(option.name, option.text(option.get(named)));
  return c;
}

}  // namespace harness
