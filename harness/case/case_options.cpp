#include "harness/case/case_options.h"

namespace harness {

const std::vector<OptionRow>& option_rows() {
  using O = CaseOptions;
  static const std::vector<OptionRow> rows = {
      {"units",
       &O::units,
       {"root", "block", "leaf", "some", "listed"},
       {units_root, units_leaf, units_some, units_listed},
       0.8,
       units_root},
      {"bucket", &O::bucket_bytes, {}, {64, 256, 1000, 4096}, 0.2, 0},
      {"buckets", &O::buckets, {}, {2, 3}, 0.1, 0},
      {"align", &O::alignment_bytes, {}, {64, 128}, 0.7, 64},
      {"reshard", &O::reshard, {}, {0, 2, 2, 3}, 0.3, 1},
      {"reshard_backward", &O::reshard_backward, {}, {0}, 0.1, 1},
      {"prefetch", &O::prefetch, {}, {1, 2, 3}, 0.3, 0},
      {"pooled", &O::pooled, {}, {1}, 0.2, 0},
      {"side_by_side", &O::side_by_side, {}, {1}, 0.15, 0},
      {"in_flight", &O::in_flight_bytes, {}, {1, 700, 5000}, 0.15, 0},
      {"recompute", &O::recompute, {}, {1, 2}, 0.2, 0},
      {"whole", &O::whole, {}, {1}, 0.12, 0},
      {"meta", &O::meta, {}, {1}, 0.12, 0},
      {"loss", &O::loss, {"mean", "sum", "tokens"}, {loss_sum, loss_tokens}, 0.45, loss_sum},
      {"divide",
       &O::divide,
       {"after", "before", "split", "collective"},
       {divide_before, divide_split, divide_collective},
       0.2,
       0},
      {"replicas_each", &O::replicas_each, {}, {1}, 0.15, 0},
      {"compute", &O::compute, {"fp32", "bf16", "fp16"}, {bf16, bf16, fp16}, 0.15, 0},
      {"gradient", &O::gradient, {"fp32", "bf16"}, {bf16}, 0.08, 0},
      {"reduce", &O::reduce, {"fp32", "bf16", "fp16"}, {bf16, bf16, fp16}, 0.15, 0},
      {"float32_sums", &O::float32_sums, {}, {1}, 0.08, 0},
      {"scale", &O::loss_scale, {}, {4, 1024, 1'000'000'000}, 0.1, 0},
      {"scale_min", &O::scale_min, {}, {2, 2, 600}, 1, 0, /*draws_apart=*/true},
      {"arithmetic", &O::arithmetic, {"native", "canonical"}, {1}, 0.4, 0},
      {"sp", &O::sequence_parallel, {}, {1}, 0.9, 0},
      {"attention", &O::context_gathered, {"ring", "gathered"}, {1}, 0.8, 1},
      {"context", &O::context_contiguous, {"balanced", "contiguous"}, {1}, 0.8, 1},
      {"offload",
       &O::offload,
       {"none", "pinned", "pageable"},
       {offload_pinned, offload_pinned, offload_pageable},
       0.25,
       offload_none,
       /*draws_apart=*/true},
      {"schedule",
       &O::schedule,
       {"constant", "cosine", "linear"},
       {schedule_cosine, schedule_linear},
       0.15,
       schedule_constant,
       /*draws_apart=*/true},
      {"unchecked", &O::unchecked, {}, {1}, 0.4, 0, /*draws_apart=*/true},
      {"unit_strategy",
       &O::unit_strategy,
       {"none", "ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "hzero2"},
       {1, 2, 3, 4, 5, 6, 7},
       0.3,
       0,
       /*draws_apart=*/true},
      {"unit_mesh", &O::unit_mesh, {}, {1}, 0.2, 0, /*draws_apart=*/true},
      {"multiple", &O::bucket_multiple, {}, {3, 64, 1000, 4096}, 0.15, 1, /*draws_apart=*/true},
      {"keep_whole", &O::keep_whole, {}, {1, 8, 40, 300}, 0.15, 0, /*draws_apart=*/true},
      {"publish", &O::publish, {"in_step", "at_first_use"}, {1}, 0.3, 0, /*draws_apart=*/true},
      {"strided", &O::strided, {}, {1}, 0.3, 0, /*draws_apart=*/true},
      {"fingerprint", &O::fingerprint, {}, {1}, 0.5, 0, /*draws_apart=*/true},
      {"within", &O::within, {"none", "attention", "some"}, {1, 2}, 0.3, 0, /*draws_apart=*/true},
      {"activations", &O::activations, {"device", "host", "some"}, {1, 2}, 0.25, 0, /*draws_apart=*/true},
      {"lora", &O::lora, {}, {1, 2, 3}, 0.12, 0, /*draws_apart=*/true},
      {"lora_alpha", &O::lora_alpha, {}, {1, 3}, 0.8, 0, /*draws_apart=*/true},
      {"lora_layers", &O::lora_layers, {}, {1, 2, 3, 4, 5, 6, 7}, 0.9, 0, /*draws_apart=*/true},
      {"lora_dropout", &O::lora_dropout, {}, {10, 25, 50}, 0.6, 0, /*draws_apart=*/true},
      {"delayed", &O::delayed_bytes, {}, {200, 1'000'000'000, 1'000'000'000}, 0.3, 0, /*draws_apart=*/true},
      {"ema", &O::ema, {}, {50, 90, 99}, 0.3, 0, /*draws_apart=*/true},
  };
  return rows;
}

std::string value_text(const OptionRow& row, int64_t value) {
  const bool named = value >= 0 && value < static_cast<int64_t>(row.names.size());
  return named ? row.names[static_cast<size_t>(value)] : std::to_string(value);
}

}  // namespace harness
