#include "harness/case/together.h"

#include <algorithm>
#include <vector>

#include "harness/case/axes.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/parallel/context/context_parallel.h"

namespace harness {
namespace {

// Whether ranks hold parts of the parameters between steps, so that units are gathered and freed.
bool splits_parameters(const Case& c) {
  return shardproof::strategy(c.strategy).parameter.splits(axes::dp_shard) && c.shards() * c.context_ranks() > 1;
}

// A checkpoint of adapters beside layers that are cut. The two matrices of an adapter lie differently even where they have one
// shape, which they have in a square layer as wide as the adapter's rank.
void save_cut_adapters(Chooser& choose, Case& c) {
  if (c.tensor_ranks() == 1) return;
  const bool saves = choose.chance(0.7), is_square = choose.chance(0.35);
  const int64_t rank = choose.integer(1, 3);
  std::vector<int64_t>& widths = c.model.mlp.widths;
  if (!saves) return;
  if (c.model.kind == golden::Model::Kind::mlp && is_square)
    try_change(c, [&] { widths[widths.size() - 2] = widths.back() = c.options.lora = rank; });
  if (c.options.lora > 0) try_change(c, [&] { c.steps.back().save = true; });
}

// A gather of updated parameters that is under way while neighbours read the shards: replicas update parts of them.
void publish_beside_neighbours(Chooser& choose, Case& c) {
  const shardproof::Strategy layouts = shardproof::strategy(c.strategy);
  const bool gathers = layouts.state.splits(axes::dp_replicate) && !layouts.parameter.splits(axes::dp_replicate);
  if (!gathers || !layouts.parameter.splits(axes::dp_shard) || !choose.chance(0.3)) return;
  try_change(c, [&] { c.options.set("gather", "side_by_side"); });
  try_change(c, [&] { c.options.set("publish", "at_first_use"); });
  if (c.steps.size() == 1) try_change(c, [&] { c.steps.emplace_back(); });
}

// A unit that is freed in the backward, whose frozen parameters are read after the gradients of its trained ones were made.
// Only a unit whose input needs no gradient, as the root, may be taken for done too early. Beside adapters all else is frozen.
void freeze_within_units(Chooser& choose, Case& c) {
  if (!splits_parameters(c) || !choose.chance(c.options.lora > 0 ? 0.6 : 0.3)) return;
  const int64_t units = choose.one_of<int64_t>({units_some, units_some, units_listed});
  const int64_t frozen = choose.integer(1, 9);
  try_change(c, [&] {
    c.options.units = units;
    c.options.set("reshard_after_backward", "true");
  });
  try_change(c, [&] {
    for (StepPlan& step : c.steps) step.frozen = frozen;
  });
}

// Adapters within a transformer whose units are named one by one, two modules a unit. In one of three such cases a unit reads a
// frozen parameter after its last gradient has arrived.
void adapt_listed_units(Chooser& choose, Case& c) {
  if (!c.model.of_tokens() || !splits_parameters(c) || !choose.chance(0.3)) return;
  const int64_t rank = choose.integer(1, 3);
  try_change(c, [&] {
    c.options.units = units_listed;
    c.options.set("reshard_after_backward", "true");
    if (c.options.lora == 0) c.options.lora = rank;
  });
}

// The norms of cut heads, whose gradients are sums over the ranks, with and without sequence parallelism.
void normalise_cut_heads(Chooser& choose, Case& c) {
  golden::Llama& m = c.model.llama;
  const int64_t head = m.head_size > 0 ? m.head_size : m.hidden / m.heads;
  if (c.model.kind != golden::Model::Kind::llama || c.tensor_ranks() == 1 || head < 4 || !choose.chance(0.4)) return;
  try_change(c, [&] { m.qk_norm = true; });
  if (choose.chance(0.5)) try_change(c, [&] { c.options.sequence_parallel = 0; });
}

// A collective that averages needs groups of 1, 2, 4, ... ranks, and losses that are means. Groups of experts are others.
void average_in_collectives(Chooser& choose, Case& c) {
  if (c.data_ranks() == 1 || !choose.chance(c.model.llama.experts > 0 ? 0.5 : 0.04)) return;
  try_change(c, [&] {
    c.options.loss = loss_mean;
    c.options.divide = divide_collective;
  });
}

// Beside a wire of less precision: sums that wait for the round that is synced, buckets that train in part, and sums of terms
// that are widened before.
void narrow_the_wire(Chooser& choose, Case& c) {
  if (c.options.reduce == fp32) return;
  const bool waits = choose.chance(0.8), freezes = choose.chance(0.3), widens = choose.chance(0.3);
  const int64_t frozen = choose.integer(1, 9);
  if (waits) try_change(c, [&] { c.steps.back().rounds = c.steps.back().sync_every = 4; });
  if (freezes) try_change(c, [&] { c.steps.front().frozen = frozen; });
  if (widens) try_change(c, [&] { c.options.float32_sums = 1; });
}

// What a unit keeps after a step is wrong in the next one. Of experts fewer neighbours hold the same ones.
void keep_over_steps(Chooser& choose, Case& c) {
  const double often = c.model.llama.experts > 0 ? 0.4 : 0.1;
  if (splits_parameters(c) && choose.chance(often)) try_change(c, [&] { c.options.reshard = 2; });
  const bool keeps = c.options.reshard != 1 || c.options.of("reshard_after_backward") == 0;
  if (keeps && c.steps.size() == 1 && choose.chance(0.7)) try_change(c, [&] { c.steps.emplace_back(); });
}

// Statistics that each rank moves by itself, and a checkpoint has from one of them.
void normalise_over_batches(Chooser& choose, Case& c) {
  if (c.model.kind != golden::Model::Kind::conv || !c.model.conv.norm || !choose.chance(0.6)) return;
  try_change(c, [&] { c.model.conv.batch = true; });
}

// Buffers whose first values nobody gave when the model was built without memory.
void build_buffers_without_memory(Chooser& choose, Case& c) {
  const bool has = c.model.kind == golden::Model::Kind::odd || (c.model.kind == golden::Model::Kind::conv && c.model.conv.norm);
  if (has && choose.chance(0.15)) try_change(c, [&] { c.options.meta = 1; });
}

// A step whose learning rate is zero moves nothing, and the check of fingerprints must not complain.
void stand_still_under_watch(Chooser& choose, Case& c) {
  if (c.options.fingerprint == 0 || !choose.chance(0.2)) return;
  try_change(c, [&] { c.steps.back().lr_percent = 0; });
}

// A scale at which some ranks' gradients leave float16's range and others' do not: all have to skip the step then. Most of the
// time it is the least scale as well, and the next step shows whether it stayed.
void overflow(Chooser& choose, Case& c) {
  if (!choose.chance(c.options.loss_scale > 0 ? 0.6 : 0.08)) return;
  const bool on_the_wire = choose.chance(0.5);
  const int64_t scale = choose.one_of<int64_t>({16'384, 65'536, 262'144});
  const bool is_least = choose.chance(0.6);
  try_change(c, [&] {
    if (is_least) c.options.scale_min = scale;
    (on_the_wire ? c.options.reduce : c.options.compute) = fp16;
    c.options.loss_scale = scale;
    if (is_least && c.steps.size() == 1) c.steps.emplace_back();
  });
}

// Experts on several ranks. In the mode ordered these are all along dp_shard, and rounds or dtypes may stand in the way.
void share_experts(Chooser& choose, Case& c) {
  const int64_t ranks = c.shards();
  if (c.model.llama.experts == 0) return;
  if (ranks > 1 && expert_ranks(c) == 1 && choose.chance(0.95)) {
    try_change(c, [&] { c.options.ep = ranks; });
    if (c.options.ep != ranks)
      try_change(c, [&] {
        c.options.ep = ranks;
        c.options.compute = c.options.gradient = fp32;  // a narrow wire is rare enough
        for (StepPlan& step : c.steps) step.rounds = step.sync_every = 1;
      });
  }
  // Where pairs of ranks hold the same experts, fewer neighbours can keep those than keep all else after a forward.
  const int64_t all = ranks * c.context_ranks();
  if (c.mode != Mode::ordered && all % 2 == 0 && all > 2 && splits_parameters(c) && choose.chance(0.8))
    try_change(c, [&] { c.options.ep = all / 2, c.options.reshard = all; });
}

// A checkpoint of experts, of which each rank has to get its own back.
void load_experts(Chooser& choose, Case& c) {
  if (!choose.chance(0.5) || c.model.llama.experts == 0) return;
  try_change(c, [&] {
    c.steps.emplace_back().save = true;
    c.steps.emplace_back().load_strategy = c.strategy;
  });
}

// Attention to keys that other ranks have: heads and positions that come from where they are, and documents that end on the
// ranks before. In a sequence this short one ends where the vocabulary is small. Experts are balanced over such a sequence.
void attend_over_ranks(Chooser& choose, Case& c) {
  if (c.context_ranks() == 1) return;
  golden::Llama& m = c.model.llama;
  const bool is_llama = c.model.kind == golden::Model::Kind::llama;
  double& dropout = is_llama ? m.dropout : c.model.gpt.dropout;
  const bool exchanges = choose.chance(0.4), balances = choose.chance(0.4), drops = choose.chance(0.4);
  const bool ends = choose.chance(0.5), is_busy = choose.chance(0.7);
  const int64_t end = choose.integer(0, 1), tokens = std::max<int64_t>(c.tensor_ranks(), 2) * choose.integer(1, 2);
  constexpr auto kExchanged = static_cast<int64_t>(shardproof::ContextAttention::ulysses);
  if (exchanges) try_change(c, [&] { c.options.context_attention = kExchanged; });
  if (balances) try_change(c, [&] { c.options.context_contiguous = 0; });
  if (drops && dropout == 0) try_change(c, [&] { dropout = 0.25; });
  if (is_busy && m.experts > 1 && m.expert_balance == 0) try_change(c, [&] { m.expert_balance = 0.5; });
  if (!is_llama || !ends || (c.mode == Mode::fast && !has_long_documents(m))) return;
  try_change(c, [&] {
    m.document_end = end;
    if (c.mode != Mode::fast) m.vocab = tokens;
  });
}

// Slices of experts, of all that there are and of those that ranks share.
void cut_experts(Chooser& choose, Case& c) {
  golden::Llama& m = c.model.llama;
  if (c.model.kind != golden::Model::Kind::llama || c.tensor_ranks() == 1 || !choose.chance(0.7)) return;
  const int64_t width = choose.integer(2, 5);
  const bool shares = choose.chance(0.9);
  if (m.experts == 0) try_change(c, [&] { m.experts = 4, m.experts_per_token = 2, m.expert_width = width; });
  try_change(c, [&] { c.options.etp = 1; });
  if (shares && expert_ranks(c) == 1) try_change(c, [&] { c.options.ep = c.shards(); });
}

}  // namespace

bool has_long_documents(const golden::Llama& llama) {
  return llama.vocab >= 8 && llama.positions >= 4;
}

void bring_together(Chooser choose, Case& c) {
  save_cut_adapters(choose, c);
  publish_beside_neighbours(choose, c);
  freeze_within_units(choose, c);
  adapt_listed_units(choose, c);
  normalise_cut_heads(choose, c);
  average_in_collectives(choose, c);
  stand_still_under_watch(choose, c);
  build_buffers_without_memory(choose, c);
  normalise_over_batches(choose, c);
  overflow(choose, c);
  narrow_the_wire(choose, c);
  keep_over_steps(choose, c);
  share_experts(choose, c);
  attend_over_ranks(choose, c);
  load_experts(choose, c);
  cut_experts(choose, c);
}

}  // namespace harness
