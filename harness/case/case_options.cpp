#include "harness/case/case_options.h"

#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::named_option;
using shardproof::named_options;
using shardproof::NamedOption;

size_t number_of(const NamedOption& option) {
  return static_cast<size_t>(&option - named_options().data());
}

std::vector<OptionRow> rows_of_fully_shard() {
  std::vector<OptionRow> rows;
  for (const NamedOption& option : named_options()) {
    if (option.drawn.empty()) continue;
    const bool is_flag = option.kind == NamedOption::Kind::flag, is_whole = option.kind == NamedOption::Kind::whole;
    rows.push_back({option.name,
                    nullptr,
                    is_flag ? std::vector<std::string>{"false", "true"} : option.words,
                    {option.drawn.begin(), option.drawn.end()},
                    option.often,
                    static_cast<int64_t>(is_whole ? option.least : option.standard()),  // the least of numbers is simplest
                    /*draws_apart=*/true,
                    number_of(option)});
  }
  return rows;
}

std::vector<OptionRow> rows_of_cases() {
  using O = CaseOptions;
  return {
      {"units",
       &O::units,
       {"root", "block", "leaf", "some", "listed"},
       {units_root, units_leaf, units_some, units_listed},
       0.8,
       units_root},
      {"reshard", &O::reshard, {}, {0, 2, 2, 3}, 0.3, 1},
      {"recompute", &O::recompute, {}, {1, 2}, 0.2, 0},
      {"meta", &O::meta, {}, {1}, 0.12, 0},
      {"loss", &O::loss, {"mean", "sum", "tokens"}, {loss_sum, loss_tokens}, 0.45, loss_sum},
      {"divide",
       &O::divide,
       {"after", "before", "split", "in_collective"},
       {divide_before, divide_split, divide_collective},
       0.2,
       0},
      {"compute", &O::compute, {"fp32", "bf16", "fp16"}, {bf16, bf16, fp16}, 0.15, 0},
      {"gradient", &O::gradient, {"fp32", "bf16"}, {bf16}, 0.08, 0},
      {"reduce", &O::reduce, {"fp32", "bf16", "fp16"}, {bf16, bf16, fp16}, 0.15, 0},
      {"float32_sums", &O::float32_sums, {}, {1}, 0.08, 0},
      {"scale", &O::loss_scale, {}, {4, 1024, 1'000'000'000}, 0.2, 0},
      {"scale_min", &O::scale_min, {}, {2, 2, 600}, 1, 0, /*draws_apart=*/true},
      {"arithmetic", &O::arithmetic, {"native", "canonical"}, {1}, 0.4, 0},
      {"sp", &O::sequence_parallel, {}, {1}, 0.6, 0},
      {"overlap_pieces", &O::overlap_pieces, {}, {2, 2, 3}, 0.6, 1, /*draws_apart=*/true},
      {"attention", &O::context_attention, {"ring", "gathered", "ulysses"}, {1, 2}, 0.8, 1},
      {"context", &O::context_contiguous, {"balanced", "contiguous"}, {1}, 0.8, 1},
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
      {"ep", &O::ep, {}, {2, 3, 4, 8, 8, 8}, 0.7, 1, /*draws_apart=*/true},
      {"etp", &O::etp, {}, {1}, 0.9, 0, /*draws_apart=*/true},
      {"strided", &O::strided, {}, {1}, 0.3, 0, /*draws_apart=*/true},
      {"fingerprint", &O::fingerprint, {}, {1}, 0.5, 0, /*draws_apart=*/true},
      {"passes",
       &O::passes,
       {"apart", "in_order", "reversed", "alternating", "split"},
       {passes_in_order, passes_reversed, passes_alternating, passes_split},
       0.3,
       passes_apart,
       /*draws_apart=*/true},
      {"within", &O::within, {"none", "attention", "some"}, {1, 2}, 0.3, 0, /*draws_apart=*/true},
      {"activations", &O::activations, {"device", "host", "some"}, {1, 2}, 0.25, 0, /*draws_apart=*/true},
      {"lora", &O::lora, {}, {1, 2, 3}, 0.18, 0, /*draws_apart=*/true},
      {"lora_alpha", &O::lora_alpha, {}, {1, 3}, 0.8, 0, /*draws_apart=*/true},
      {"lora_layers", &O::lora_layers, {}, {1, 2, 3, 4, 5, 6, 7}, 0.9, 0, /*draws_apart=*/true},
      {"lora_dropout", &O::lora_dropout, {}, {10, 25, 50}, 0.6, 0, /*draws_apart=*/true},
      {"dims", &O::dims, {"one", "chosen"}, {1}, 0.3, 0, /*draws_apart=*/true},
      {"granules", &O::granules, {"one", "rows", "whole", "chosen"}, {1, 2, 3, 3}, 0.25, 0, /*draws_apart=*/true},
      {"ema", &O::ema, {}, {50, 90, 99}, 0.3, 0, /*draws_apart=*/true},
  };
}

}  // namespace

std::vector<int64_t> standard_sharding() {
  static const std::vector<int64_t> values = [] {
    std::vector<int64_t> made;
    for (const NamedOption& option : named_options())
      made.push_back(option.drawn.empty() ? 0 : static_cast<int64_t>(option.standard()));
    return made;
  }();
  return values;
}

int64_t CaseOptions::of(const std::string& name) const {
  const NamedOption& option = named_option(name);
  SHARD_REQUIRE(!option.drawn.empty(), "case", "{} is no option of a case", name);
  return sharding.at(number_of(option));
}

bool CaseOptions::has(const std::string& name, const std::string& value) const {
  return of(name) == static_cast<int64_t>(named_option(name).value(value));
}

void CaseOptions::set(const std::string& name, const std::string& value) {
  const NamedOption& option = named_option(name);
  SHARD_REQUIRE(!option.drawn.empty(), "case", "{} is no option of a case", name);
  sharding.at(number_of(option)) = static_cast<int64_t>(option.value(value));
}

const std::vector<OptionRow>& option_rows() {
  static const std::vector<OptionRow> rows = [] {
    std::vector<OptionRow> all = rows_of_cases();
    const std::vector<OptionRow> own = rows_of_fully_shard();
    all.insert(all.begin() + 1, own.begin(), own.end());  // behind the units
    return all;
  }();
  return rows;
}

void apply(const CaseOptions& options, shardproof::ShardOptions& to) {
  for (const OptionRow& row : option_rows())
    if (!row.member) named_options()[row.number].set(to, static_cast<double>(row.of(options)));
}

std::string value_text(const OptionRow& row, int64_t value) {
  const bool named = value >= 0 && value < static_cast<int64_t>(row.names.size());
  return named ? row.names[static_cast<size_t>(value)] : std::to_string(value);
}

}  // namespace harness
