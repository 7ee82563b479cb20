#include "properties/kit/drawn_sharding.h"

#include <fmt/ranges.h>
#include <rapidcheck.h>

namespace kit {

using namespace shardproof;

namespace {

Strategy drawn_row() {
  std::vector<Strategy> rows = strategies();
  rows.insert(rows.end(), free_rows().begin(), free_rows().end());
  return rows[*rc::gen::inRange<size_t>(0, rows.size())];
}

UnitOptions options_of(const DrawnSharding& d, const std::string& unit) {
  UnitOptions own;
  if (unit.empty()) return own;
  own.strategy = d.row_of_blocks;
  const int64_t ranks = d.mesh.size("dp_replicate") * d.mesh.size("dp_shard");
  if (d.blocks_on_one_axis) own.mesh = Mesh({{"dp_shard", ranks}, {"tp", d.mesh.size("tp")}});
  return own;
}

}  // namespace

std::string DrawnSharding::str() const {
  return fmt::format(
      "{} {} ({} in blocks{}) on {}: {} heads, {} of keys, tied {}, sequence {}, aligned to {}, buckets of {} bytes, cut by {} "
      "along dim {}, in granules of {}",
      llama ? "llama" : "gpt", row.name, row_of_blocks.name, blocks_on_one_axis ? ", on one axis" : "", mesh.str(), heads,
      kv_heads, tied, sequence, alignment, bucket_bytes_max,
      named_option("granularity").text(static_cast<double>(granularity)), shard_dim, granule);
}

DrawnModel DrawnSharding::make() const {
  DrawnModel made;
  if (llama) {
    const LlamaOptions options{
        .layers = 1, .hidden = 4 * heads, .heads = heads, .kv_heads = kv_heads, .intermediate = 10, .vocab = 13, .tied = tied};
    Llama model(options);
    made = {model.ptr(), llama_plan(options, mesh.size("tp"), sequence),
            [model](at::Tensor x) mutable { return call(model, x); }};
  } else {
    const GptOptions options{.layers = 1, .hidden = 2 * heads, .heads = heads, .vocab = 13, .positions = 8, .tied = tied};
    Gpt model(options);
    made = {model.ptr(), gpt_plan(options, sequence), [model](at::Tensor x) mutable { return call(model, x); }};
  }
  initialize_parameters(*made.module, 7, 0.3);
  return made;
}

std::optional<TensorParallel> DrawnSharding::cut(const DrawnModel& model, const std::shared_ptr<MeshComm>& comms) const {
  std::optional<TensorParallel> parallel;
  if (mesh.size("tp") > 1) parallel.emplace(parallelize(model.module, comms, model.plan));
  return parallel;
}

int64_t DrawnSharding::granule_of(const Shape& part) const {
  return granule > 0 ? granule : part.empty() ? 1 : numel(part) / part[0];
}

ShardOptions DrawnSharding::options() const {
  ParameterGranule by_rows;
  if (granule == 0)
    by_rows = [d = *this](const std::string&, const at::Tensor& part) { return d.granule_of(part.sizes().vec()); };
  return {.strategy = row,
          .units = by_type<GptBlockImpl, LlamaLayerImpl>(),
          .bucket_bytes_max = bucket_bytes_max,
          .alignment_bytes = alignment,
          .granularity = granularity,
          .shard_dim = shard_dim,
          .granule = std::max<int64_t>(1, granule),
          .granule_of = by_rows,
          .precision = {.main = at::kFloat, .compute = at::kBFloat16},
          .unit_options = [d = *this](const std::string& unit) { return options_of(d, unit); }};
}

DrawnSharding drawn_sharding() {
  DrawnSharding d;
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
  d.granularity = *rc::gen::element(Granularity::element, Granularity::tensor, Granularity::row);
  d.shard_dim = *rc::gen::element<int64_t>(0, 1);
  if (d.granularity == Granularity::element) d.granule = *rc::gen::element<int64_t>(1, 0, 0, 3, 32);
  return d;
}

DrawnSharding drawn_elsewhere(const DrawnSharding& d) {
  DrawnSharding other = drawn_sharding();
  other.llama = d.llama, other.tied = d.tied, other.heads = d.heads, other.kv_heads = d.kv_heads;
  // Those along which the model's heads were chosen leave no rank without one; fewer that divide them do not either.
  const int64_t tp = d.mesh.size("tp"), drawn = other.mesh.size("tp"), fits = tp % drawn == 0 ? drawn : tp;
  other.mesh =
      Mesh({{"dp_replicate", other.mesh.size("dp_replicate")}, {"dp_shard", other.mesh.size("dp_shard")}, {"tp", fits}});
  return other;
}

}  // namespace kit
