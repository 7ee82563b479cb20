#include <algorithm>
#include <bit>
#include <cmath>

#include "harness/case/axes.h"
#include "harness/case/case.h"
#include "harness/case/mesh_order.h"
#include "harness/case/model_fields.h"
#include "harness/case/parallel_sizes.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/threads/threads.h"

namespace harness {
namespace {

using Kind = golden::Model::Kind;

// Products of two sizes, or of a size and a world, are far from overflowing.
constexpr int64_t kSizeMax = int64_t{1} << 30;
constexpr int64_t kLayersMax = 1000;

void validate(const golden::Optimizer& o) {
  SHARD_REQUIRE(o.lr >= 0 && o.weight_decay >= 0 && o.momentum >= 0 && o.eps >= 0, "case",
                "lr, decay, momentum and eps must not be negative, got lr={} decay={} momentum={} eps={}", o.lr, o.weight_decay,
                o.momentum, o.eps);
  SHARD_REQUIRE(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "case",
                "beta1 and beta2 must be at least 0 and below 1, got beta1={} beta2={}", o.beta1, o.beta2);
  SHARD_REQUIRE(!o.nesterov || o.momentum > 0, "case", "nesterov needs a momentum above 0");
  SHARD_REQUIRE(o.kind != golden::Optimizer::Kind::muon || o.momentum < 1, "case", "muon: momentum must be below 1, got {}",
                o.momentum);
}

// What needs replicas to be outside of shards.
void validate_order(const Case& c, const shardproof::Strategy& strategy, const shardproof::Mesh& mesh) {
  const bool every_time = c.options.of("reduce_replicas_every_microbatch") != 0;
  const shardproof::Strategy row = every_time ? shardproof::reducing_replicas_every_time(strategy) : strategy;
  const std::string name = row.name + (every_time ? " with reduce_replicas_every_microbatch=true" : "");
  SHARD_REQUIRE(can_sum_on(row, mesh), "case",
                "mesh '{}': {} sums gradients along both axes at once, which begins with dp_replicate there, and splits them "
                "along dp_shard first. Let dp_replicate come first",
                c.mesh.str(), name);
  SHARD_REQUIRE(
      c.mode != Mode::ordered || !sums_replicas_first(row, mesh), "case",
      "mesh '{}': {} sums gradients along both axes at once, which begins with dp_replicate there, and the golden run "
      "begins with dp_shard. Let dp_replicate come first, or leave the mode ordered",
      c.mesh.str(), name);
}

void validate_mesh(const Case& c) {
  const shardproof::Strategy& strategy = shardproof::strategy(c.strategy);  // throws for unknown ones
  for (const shardproof::Axis& axis : c.mesh.axes())
    SHARD_REQUIRE(
        std::ranges::find(mesh_axes(), axis.name) != mesh_axes().end(), "case",
        "mesh axis '{}' is not used by strategy {}; it shards over dp_shard and replicates over dp_replicate, context "
        "parallelism cuts over cp and tensor parallelism over tp",
        axis.name, c.strategy);
  const shardproof::Mesh mesh = shardproof::data_parallel_mesh(c.mesh);
  validate_order(c, shardproof::on_mesh(strategy, mesh), mesh);
  SHARD_REQUIRE(c.mesh.size() <= shardproof::kThreadsWorldMax, "case",
                "mesh {} has {} ranks; the threads backend runs at most {}", c.mesh.str(), c.mesh.size(),
                shardproof::kThreadsWorldMax);
}

void validate_parallel(const Case& c) {
  const int64_t tp = c.tensor_ranks(), cp = c.context_ranks();
  const CaseOptions& o = c.options;
  if (c.microbatch_ranks() == 1) return;
  SHARD_REQUIRE(
      c.mode == Mode::exact || c.mode == Mode::fast || o.arithmetic != 0, "case",
      "cp={} and tp={} split sums inside of a model, which keep their bits in the mode exact, and in the mode canonical "
      "with arithmetic=canonical, and are judged by a tolerance in the mode fast",
      cp, tp);
  SHARD_REQUIRE(o.arithmetic == 0 || tp == 1 || c.optimizer.kind != golden::Optimizer::Kind::muon, "case",
                "muon with arithmetic=canonical needs whole matrices, and tp={} cuts them", tp);
  SHARD_REQUIRE(c.model.of_tokens() || (c.model.kind == Kind::mlp && cp == 1), "case",
                "tp={} needs an mlp, a gpt or a llama, cp={} one of the latter two", tp, cp);
  if (c.model.kind == Kind::mlp) return;
  const golden::Gpt& g = c.model.gpt;
  SHARD_REQUIRE(c.model.kind != Kind::gpt || (all_get_some(g.heads, tp) && all_get_some(g.vocab, tp)), "case",
                "gpt: heads={} and vocab={} must leave none of tp={} ranks without one", g.heads, g.vocab, tp);
  const golden::Llama& m = c.model.llama;
  SHARD_REQUIRE(
      c.model.kind != Kind::llama || (heads_fit(m, tp) && all_get_some(m.intermediate, tp) && all_get_some(m.vocab, tp)),
      "case",
      "llama: heads={} kv_heads={} intermediate={} vocab={} must leave none of tp={} ranks without one; fewer kv_heads must "
      "divide tp, which must then divide heads",
      m.heads, m.kv_heads, m.intermediate, m.vocab, tp);
  SHARD_REQUIRE(sequence_fits(c, c.model.positions()), "case",
                "positions={} allows no sequence that gives each of cp={} x tp={} ranks a token", c.model.positions(), cp, tp);
}

// Options of axes that no mesh of the history has.
void validate_axes(const Case& c) {
  const CaseOptions& o = c.options;
  const auto any_has = [&](const std::string& axis) {
    return c.mesh.has(axis) ||
           std::ranges::any_of(c.steps, [&](const StepPlan& step) { return step.load_mesh && step.load_mesh->has(axis); });
  };
  SHARD_REQUIRE(o.sequence_parallel == 0 || (any_has(axes::tp) && c.model.of_tokens()), "case",
                "sp splits the sequence of a gpt or a llama over the mesh axis tp");
  SHARD_REQUIRE(o.etp == 0 || (any_has(axes::tp) && c.model.kind == Kind::llama && c.model.llama.experts > 0), "case",
                "etp cuts the experts of a llama over the mesh axis tp; write experts=4 and an axis tp, or leave etp out");
  SHARD_REQUIRE(o.overlap_pieces >= 1, "case", "overlap_pieces={} must be at least 1", o.overlap_pieces);
  SHARD_REQUIRE(o.overlap_pieces == 1 || any_has(axes::tp), "case",
                "overlap_pieces cuts the products of layers that are cut over the mesh axis tp");
  SHARD_REQUIRE((o.context_attention == 0 && o.context_contiguous == 0) || any_has(axes::cp), "case",
                "attention and context say how sequences are cut over the mesh axis cp");
  SHARD_REQUIRE(c.model.llama.expert_capacity == 0 || !any_has(axes::cp), "case",
                "expert_capacity={} keeps choices of whole sequences, which the mesh axis cp cuts; leave one of the two out",
                c.model.llama.expert_capacity);
}

// Before anything asks for the parameters of the case.
void validate_adapters(const Case& c) {
  const CaseOptions& o = c.options;
  SHARD_REQUIRE(o.lora > 0 || (o.lora_alpha == 0 && o.lora_layers == 0 && o.lora_dropout == 0), "case",
                "lora_alpha, lora_layers and lora_dropout are about adapters: write lora=1, the rank");
  SHARD_REQUIRE(o.lora == 0 || (o.meta == 0 && (c.model.kind == Kind::mlp || c.model.of_tokens())), "case",
                "lora={} needs an mlp, a gpt or a llama, which is not made on meta", o.lora);
  SHARD_REQUIRE(o.lora_dropout < 100, "case", "lora_dropout={} is in percent, below 100", o.lora_dropout);
}

void validate_options(const Case& c) {
  const CaseOptions& o = c.options;
  shardproof::ShardOptions applied;
  apply(o, applied);
  const int64_t alignment = applied.alignment_bytes;
  SHARD_REQUIRE(std::has_single_bit(static_cast<uint64_t>(alignment)), "case", "alignment_bytes={} must be a power of two",
                alignment);
  SHARD_REQUIRE(applied.bucket_bytes_max == 0 || applied.bucket_count == 0, "case",
                "give bucket_bytes_max or bucket_count, not both");
  SHARD_REQUIRE(!o.has("granularity", "row") || o.has("gather", "copied"), "case",
                "granularity=row leaves no parameter in one piece in memory that ranks share; leave out gather=side_by_side");
  SHARD_REQUIRE((applied.granule == 1 && o.granules == 0) || o.has("granularity", "element"), "case",
                "granule and granules say where granularity=element cuts; leave out granularity={}",
                shardproof::named_option("granularity").text(static_cast<double>(applied.granularity)));
  for (const auto& [strategy, mesh] : {std::pair{shardproof::strategy(c.strategy), shardproof::data_parallel_mesh(c.mesh)},
                                       std::pair{unit_strategy(c), unit_mesh(c)}}) {
    const int64_t split = mesh.has(axes::dp_shard) ? mesh.size(axes::dp_shard) : 1;
    SHARD_REQUIRE(o.reshard <= 1 || split % o.reshard == 0, "case", "reshard={} must divide dp_shard x cp={}", o.reshard,
                  split);
    SHARD_REQUIRE(o.reshard <= 1 || !strategy.parameter.splits(axes::dp_replicate), "case",
                  "reshard={} counts neighbours along dp_shard, and {} gathers over dp_replicate as well", o.reshard,
                  strategy.name);
  }
  SHARD_REQUIRE(c.optimizer.kind != golden::Optimizer::Kind::muon || o.has("granularity", "tensor") || c.strategy == "ddp" ||
                    c.mesh.size() == 1,
                "case", "muon needs whole parameters: write {}(granularity=tensor)", c.strategy);
  SHARD_REQUIRE(o.loss != loss_tokens || o.divide == divide_after, "case",
                "loss=tokens divides after the sum; leave out divide");
  const auto power = [](int64_t ranks) { return std::has_single_bit(static_cast<uint64_t>(ranks)); };
  SHARD_REQUIRE(
      o.divide != divide_collective ||
          (o.loss == loss_mean && c.context_ranks() == 1 && o.reduce != fp16 && power(c.shards()) && power(c.replicas())),
      "case",
      "divide=in_collective averages over the ranks of each group: it needs loss=mean, no cp, and, to be exact, groups "
      "of 1, 2, 4, 8, ... ranks and no reduce=fp16");
  SHARD_REQUIRE(o.loss_scale == 0 || c.mode == Mode::ordered, "case", "scale needs the mode ordered");
  SHARD_REQUIRE(o.ema < 100, "case", "ema={} is a decay in percent, below 100", o.ema);
  SHARD_REQUIRE(o.within == 0 || c.model.of_tokens(), "case", "within is about modules of a gpt or a llama");
  SHARD_REQUIRE(o.scale_min <= o.loss_scale, "case", "scale_min={} is above scale={}", o.scale_min, o.loss_scale);
  SHARD_REQUIRE(o.unchecked == 0 || std::ranges::any_of(c.steps, [](const StepPlan& step) { return step.loads(); }), "case",
                "unchecked is about loads; write load@ before a step");
  SHARD_REQUIRE(o.passes != passes_reversed || c.mode != Mode::ordered, "case",
                "passes=reversed adds the last microbatch first, which the mode ordered does not; write passes=in_order");
  SHARD_REQUIRE(o.strided == 0 || c.mode == Mode::exact || c.mode == Mode::fast || o.arithmetic != 0, "case",
                "strided=1 lets kernels take other paths, which round differently; it needs the mode exact or fast, or "
                "arithmetic=canonical");
  const bool plain = o.compute == fp32 && o.gradient == fp32 && o.reduce == fp32;
  const bool sums_in_fp32 = o.gradient == fp32 && o.reduce == fp32;
  SHARD_REQUIRE(plain || c.mode == Mode::ordered || (c.mode == Mode::fast && sums_in_fp32), "case",
                "compute other than fp32 needs the mode ordered or fast, gradient and reduce other than fp32 the mode ordered");
}

// Some units under another strategy, or on another view of the ranks.
void validate_units(const Case& c) {
  if (!has_unit_sharding(c)) return;
  const auto on = [](const shardproof::Strategy& row, const shardproof::Mesh& mesh) { return shardproof::on_mesh(row, mesh); };
  const shardproof::Mesh mesh = shardproof::data_parallel_mesh(c.mesh);
  const shardproof::Strategy own = on(unit_strategy(c), unit_mesh(c)), others = on(shardproof::strategy(c.strategy), mesh);
  validate_order(c, own, unit_mesh(c));
  SHARD_REQUIRE(c.options.unit_mesh <= 1, "case", "unit_mesh={} is 0 or 1", c.options.unit_mesh);
  const bool has_several = mesh.has(axes::dp_shard) && mesh.size(axes::dp_shard) > 1;
  SHARD_REQUIRE(c.options.unit_mesh == 0 || unit_mesh(c) != mesh, "case",
                "unit_mesh=1 takes the ranks along dp_shard apart, and {} on mesh '{}'",
                has_several ? "dp_replicate, if it is there, has to stand directly before dp_shard" : "there is at most one",
                c.mesh.str());
  SHARD_REQUIRE(c.mode != Mode::ordered || (c.options.unit_mesh == 0 && shardproof::accumulates_before_reducing(own) ==
                                                                            shardproof::accumulates_before_reducing(others)),
                "case",
                "the mode ordered has one order of sums for all parameters: leave out unit_mesh, and choose a unit_strategy "
                "that reduces when {} does",
                c.strategy);
  SHARD_REQUIRE(c.optimizer.kind != golden::Optimizer::Kind::muon || c.options.has("granularity", "tensor"), "case",
                "muon with units of several strategies needs whole parameters: write {}(granularity=tensor)", c.strategy);
}

// Ranks that share experts add up their gradients at once, and only then is anything divided, rounded or kept for later.
void validate_experts(const Case& c) {
  const CaseOptions& o = c.options;
  if (o.ep == 1) return;
  SHARD_REQUIRE(o.ep > 1 && c.model.kind == Kind::llama && c.model.llama.experts > 0, "case",
                "ep={} shares the experts of a llama; write experts=4, or leave ep out", o.ep);
  SHARD_REQUIRE(c.mode == Mode::ordered || c.mode == Mode::fast || o.arithmetic != 0, "case",
                "ep={} adds gradients of several ranks in float32, which the mode {} does not; write arithmetic=canonical with "
                "it, or leave out ep",
                o.ep, to_string(c.mode));
  const int64_t ranks = expert_ranks(c);
  if (c.mode != Mode::ordered || ranks == 1) return;
  SHARD_REQUIRE(
      ranks == c.shards(), "case",
      "the mode ordered adds gradients along dp_shard first: {} ranks share experts, and {} lie along it; write ep={}", ranks,
      c.shards(), c.shards());
  const auto accumulates = [&](const shardproof::Strategy& row) { return shardproof::accumulates_before_reducing(row); };
  const bool adds_rounds_first = accumulates(shardproof::strategy(c.strategy)) || accumulates(unit_strategy(c));
  for (const StepPlan& step : c.steps)
    SHARD_REQUIRE(step.rounds == 1 || (!adds_rounds_first && step.sync_every == 1), "case",
                  "the mode ordered has one order of sums for all parameters, and ep={} adds ranks before rounds; leave out "
                  "accumulate, or take a strategy that reduces every time, such as zero2, without sync",
                  o.ep);
  SHARD_REQUIRE(o.compute == fp32 && o.gradient == fp32 && o.reduce == fp32, "case",
                "ep={} adds gradients of several ranks before they are rounded to `gradient` or `reduce`: leave dtypes out",
                o.ep);
  SHARD_REQUIRE(o.divide != divide_before || std::has_single_bit(static_cast<uint64_t>(c.data_ranks())), "case",
                "ep={} adds gradients of several ranks before divide=before divides them, which {} ranks would see", o.ep,
                c.data_ranks());
}

void validate_mode(const Case& c) {
  const CaseOptions& o = c.options;
  if (c.mode == Mode::canonical) {
    SHARD_REQUIRE(o.loss != loss_mean, "case",
                  "canonical sums need losses that do not depend on the mesh: loss=sum or loss=tokens");
    SHARD_REQUIRE(o.divide == divide_after && o.float32_sums == 0, "case",
                  "canonical sums are in fixed point: leave out divide");
  }
  SHARD_REQUIRE(o.arithmetic == 0 || c.model.kind != Kind::gpt || !c.model.gpt.tanh_gelu, "case",
                "arithmetic=canonical has the exact GELU; leave out tanh_gelu");
  SHARD_REQUIRE(o.arithmetic == 0 || (c.mode == Mode::canonical && (c.model.kind == Kind::mlp || c.model.of_tokens())), "case",
                "arithmetic=canonical needs the mode canonical, and an mlp, a gpt or a llama");
  if (c.mode != Mode::exact) return;
  SHARD_REQUIRE(o.lora == 0, "case",
                "exact needs sums that are exact in any order, and those of adapters are not; leave out lora");
  using golden::Activation;
  const bool linear = c.model.kind == Kind::mlp &&
                      (c.model.mlp.activation == Activation::identity || c.model.mlp.activation == Activation::relu);
  const bool powers = c.optimizer.kind == golden::Optimizer::Kind::sgd || c.optimizer.kind == golden::Optimizer::Kind::adamw;
  SHARD_REQUIRE(
      linear && powers && c.steps.size() == 1 && !c.steps[0].discard && o.divide == divide_after && o.loss != loss_tokens,
      "case",
      "exact needs sums that are exact in any order: an mlp with act=identity or act=relu, sgd or adamw, one step, and no "
      "division before a sum");
}

// Each place where the run goes on has to suit the rest of the case.
void validate_loads(const Case& c) {
  for (size_t s = 0; s < c.steps.size(); ++s) {
    if (!c.steps[s].loads()) continue;
    SHARD_REQUIRE(c.loaded_after(s) >= -1, "case", "load@ before step {} needs a save before it", s + 1);
    const Case there = c.at(s);
    validate_mesh(there);
    validate_options(there);
    validate_units(there);
    validate_experts(there);
    validate_parallel(there);
  }
}

using Sizes = std::initializer_list<std::pair<const char*, int64_t>>;

void require_sizes(Kind kind, Sizes sizes) {
  for (const auto& [name, value] : sizes)
    SHARD_REQUIRE(value >= 1 && value <= kSizeMax, "case", "{}: {} must be at least 1 and at most {}, got {}", to_string(kind),
                  name, kSizeMax, value);
}

void validate_mixture(const golden::Llama& m) {
  const golden::Llama dense;
  if (m.experts == 0) {
    SHARD_REQUIRE(expert_fields(m) == expert_fields(dense), "case",
                  "llama: without experts nothing can be said of them; write experts=4, or leave out all that is about them");
    return;
  }
  require_sizes(Kind::llama, {{"experts", m.experts},
                              {"top_k", m.experts_per_token},
                              {"expert_width", m.expert_width},
                              {"expert_groups", m.expert_groups},
                              {"groups_per_token", m.groups_per_token}});
  SHARD_REQUIRE(m.shared_width >= 0 && m.shared_width <= kSizeMax, "case",
                "llama: shared_width={} must be at most {}; 0 is no shared MLP", m.shared_width, kSizeMax);
  SHARD_REQUIRE(m.dense_layers >= 0 && m.dense_layers < m.layers, "case",
                "llama: dense_layers={} must leave some of layers={} to experts", m.dense_layers, m.layers);
  SHARD_REQUIRE(std::isfinite(m.expert_scale) && m.expert_scale > 0, "case", "llama: expert_scale={} must be above 0",
                m.expert_scale);
  for (const double value : {m.expert_balance, m.expert_z, m.expert_bias, m.expert_capacity})
    SHARD_REQUIRE(std::isfinite(value) && value >= 0, "case",
                  "llama: expert_balance={}, expert_z={}, expert_bias={} and expert_capacity={} must not be below 0",
                  m.expert_balance, m.expert_z, m.expert_bias, m.expert_capacity);
  SHARD_REQUIRE(std::isfinite(m.expert_lean), "case", "llama: expert_lean={} must be finite", m.expert_lean);
  SHARD_REQUIRE(m.experts % m.expert_groups == 0 && m.groups_per_token <= m.expert_groups, "case",
                "llama: expert_groups={} must divide experts={} and be no less than groups_per_token={}", m.expert_groups,
                m.experts, m.groups_per_token);
  const int64_t available = m.experts / m.expert_groups * m.groups_per_token;
  SHARD_REQUIRE(m.experts_per_token <= available, "case", "llama: top_k={} must be at most the {} experts of a token's groups",
                m.experts_per_token, available);
}

void validate_latents(const golden::Llama& m) {
  const int64_t head = m.head();
  SHARD_REQUIRE(m.rotary_size >= 0 && m.rotary_size <= head && m.rotary_size % 2 == 0, "case",
                "llama: rotary_size={} must be even and at most the {} features of a head; 0 is all of them", m.rotary_size,
                head);
  SHARD_REQUIRE(
      m.kv_rank > 0 || (m.kv_rank == 0 && m.query_rank == 0 && m.value_size == 0 && !m.interleaved && !m.rope_yarn), "case",
      "llama: kv_rank={} and query_rank={} value_size={}, or interleaved or rope_yarn, which are of latent attention; write "
      "kv_rank=8, or leave them out",
      m.kv_rank, m.query_rank, m.value_size);
  SHARD_REQUIRE((m.rope_mscale == 0 || m.rope_yarn) && std::isfinite(m.rope_mscale) && m.rope_mscale >= 0, "case",
                "llama: rope_mscale={} must not be below 0, and is of rope_yarn", m.rope_mscale);
  if (m.kv_rank == 0) return;
  require_sizes(Kind::llama, {{"kv_rank", m.kv_rank}});
  SHARD_REQUIRE(m.heads == m.kv_heads && !m.qk_norm && !m.qkv_bias && m.turning() < head, "case",
                "llama: latent attention (kv_rank={}) has as many kv_heads={} as heads={}, neither qk_norm nor qkv_bias, and a "
                "rotary_size={} below the {} features of a head",
                m.kv_rank, m.kv_heads, m.heads, m.turning(), head);
  SHARD_REQUIRE(m.query_rank >= 0 && m.query_rank <= kSizeMax && m.value_size >= 0 && m.value_size <= head, "case",
                "llama: query_rank={} must not be below 0, and value_size={} at most the {} features of a head", m.query_rank,
                m.value_size, head);
  SHARD_REQUIRE(!m.rope_yarn || m.theta > 1, "case", "llama: with rope_yarn theta={} must be above 1", m.theta);
}

void validate(const golden::Llama& m) {
  require_sizes(Kind::llama, {{"layers", m.layers},
                              {"hidden", m.hidden},
                              {"heads", m.heads},
                              {"kv_heads", m.kv_heads},
                              {"intermediate", m.intermediate},
                              {"vocab", m.vocab},
                              {"positions", m.positions}});
  SHARD_REQUIRE(m.layers <= kLayersMax, "case", "llama: layers must be at most {}, got {}", kLayersMax, m.layers);
  SHARD_REQUIRE(m.head_size >= 0 && m.head_size <= kSizeMax && m.head_size % 2 == 0, "case",
                "llama: head_size={} must be even and at most {}; 0 is hidden / heads", m.head_size, kSizeMax);
  SHARD_REQUIRE(
      m.theta > 0 && m.eps > 0 && m.rope_factor > 0 && m.rope_low > 0 && m.rope_high > m.rope_low && m.rope_positions >= 1,
      "case",
      "llama: theta={} eps={} rope_factor={} rope_low={} and rope_positions={} must be above 0, and rope_high={} above "
      "rope_low",
      m.theta, m.eps, m.rope_factor, m.rope_low, m.rope_positions, m.rope_high);
  SHARD_REQUIRE(m.window >= 0 && m.full_layers >= 0 && (m.window > 0 || m.full_layers == 0), "case",
                "llama: window={} and full_layers={} must not be below 0; without a window every layer is full", m.window,
                m.full_layers);
  SHARD_REQUIRE(m.document_end >= -1 && m.document_end < m.vocab, "case",
                "llama: document_end={} must be one of the vocab={} tokens; leave it out where none ends a document",
                m.document_end, m.vocab);
  SHARD_REQUIRE((m.head_size > 0 || m.hidden % (2 * m.heads) == 0) && m.heads % m.kv_heads == 0, "case",
                "llama: hidden={} must be a multiple of twice heads={}, and heads of kv_heads={}. Choose hidden={} or heads={}",
                m.hidden, m.heads, m.kv_heads, (m.hidden / (2 * m.heads) + 1) * 2 * m.heads, m.kv_heads);
  validate_latents(m);
  validate_mixture(m);
}

}  // namespace

void validate(const golden::Model& model) {
  const auto positive = [&](Sizes sizes) { require_sizes(model.kind, sizes); };
  SHARD_REQUIRE(model.dropout() >= 0 && model.dropout() < 1, "case", "dropout={} must be at least 0 and below 1",
                model.dropout());
  switch (model.kind) {
    case Kind::mlp:
      SHARD_REQUIRE(model.mlp.widths.size() >= 2, "case", "mlp needs at least two widths, e.g. widths=5-7-3, got {}",
                    model.mlp.widths.size());
      for (const int64_t width : model.mlp.widths) positive({{"widths", width}});
      return;
    case Kind::gpt: {
      const golden::Gpt& g = model.gpt;
      positive(
          {{"layers", g.layers}, {"hidden", g.hidden}, {"heads", g.heads}, {"vocab", g.vocab}, {"positions", g.positions}});
      SHARD_REQUIRE(g.layers <= kLayersMax, "case", "gpt: layers must be at most {}, got {}", kLayersMax, g.layers);
      SHARD_REQUIRE(g.hidden % g.heads == 0, "case",
                    "gpt: hidden={} is not divisible by heads={}. Choose hidden={} or heads={}", g.hidden, g.heads,
                    (g.hidden / g.heads + 1) * g.heads, 1);
      return;
    }
    case Kind::llama:
      return validate(model.llama);
    case Kind::conv: {
      const golden::Conv& v = model.conv;
      SHARD_REQUIRE(v.channels.size() >= 2, "case", "conv needs at least two channels, e.g. channels=1-4, got {}",
                    v.channels.size());
      for (const int64_t channels : v.channels) positive({{"channels", channels}});
      positive({{"kernel", v.kernel}, {"size", v.size}, {"classes", v.classes}});
      SHARD_REQUIRE(v.kernel % 2 == 1, "case", "conv: kernel must be odd, got {}", v.kernel);
      SHARD_REQUIRE(!v.batch || (v.norm && v.size >= 2), "case",
                    "conv: batch says which norm it has, so it needs norm, and a size of at least 2, got size={}", v.size);
      return;
    }
    case Kind::odd:
      positive({{"width", model.odd.width}, {"calls", model.odd.calls}});
      SHARD_REQUIRE(model.odd.calls <= 3, "case", "odd: calls must be at most 3, got {}", model.odd.calls);
      return;
  }
}

void validate(const Case& c) {
  validate(c.model);
  validate_mesh(c);
  for (const OptionRow& row : option_rows()) {
    const int64_t value = row.of(c.options);
    SHARD_REQUIRE(value >= 0, "case", "{}={} must not be negative", row.key, value);
    const double least = row.member ? 0 : shardproof::named_options()[row.number].least;
    SHARD_REQUIRE(static_cast<double>(value) >= least, "case", "{}={} must be at least {:g}", row.key, value, least);
  }
  validate_adapters(c);
  validate(c.optimizer);
  SHARD_REQUIRE(c.clip_norm >= 0 && c.groups >= 0 && c.groups <= kOptimizerGroups, "case",
                "clip must not be negative, and groups 0 to {}, got clip={} groups={}", kOptimizerGroups, c.clip_norm,
                c.groups);
  SHARD_REQUIRE(c.groups != kUndecayedGroups || c.optimizer.kind != golden::Optimizer::Kind::muon, "case",
                "groups={} give all parameters one rule, and muon has two", c.groups);
  SHARD_REQUIRE(!c.steps.empty(), "case", "the history has no step; write ': step'");
  for (const StepPlan& step : c.steps) {
    SHARD_REQUIRE(step.rounds >= 1 && step.sync_every >= 1 && step.lr_percent >= 0 && step.frozen >= 0, "case",
                  "accumulate({}) and sync({}) must be at least 1, lr({}) and freeze({}) at least 0", step.rounds,
                  step.sync_every, step.lr_percent, step.frozen);
    require_rounds(c.model, step.rounds, "case", fmt::format("leave out accumulate({})", step.rounds));
    SHARD_REQUIRE(frozen_parameters(c, step).size() < golden::parameter_shapes(model_of(c)).size(), "case",
                  "freeze({}) freezes all", step.frozen);
  }
  SHARD_REQUIRE(!c.model.conv.batch || c.options.compute == fp32, "case",
                "conv(batch) has statistics in float32, and LibTorch wants parameters of their dtype: leave out compute");
  validate_options(c);
  validate_units(c);
  validate_experts(c);
  validate_mode(c);
  validate_axes(c);
  validate_parallel(c);
  validate_loads(c);
}

bool is_valid(const Case& c) {
  try {
    validate(c);
    return true;
  } catch (const shardproof::Error&) {
    return false;
  }
}

}  // namespace harness
