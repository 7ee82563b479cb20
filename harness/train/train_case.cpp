#include "harness/train/train_case.h"

namespace harness {

Case train_case(const TrainOptions& options, const Stretch& stretch) {
  Case c;
  c.model = options.model;
  c.mesh = stretch.mesh;
  c.strategy = stretch.strategy;
  c.options.sequence_parallel = options.sequence_parallel;
  c.options.overlap_pieces = options.overlap_pieces;
  c.options.arithmetic = options.model.canonical;
  c.options.compute = options.bf16 ? bf16 : fp32;
  for (const std::string& text : options.sharding) {
    const std::string name = text.substr(0, text.find('='));
    if (!shardproof::named_option(name).drawn.empty()) c.options.set(name, text.substr(name.size() + 1));
  }
  return c;
}

}  // namespace harness
