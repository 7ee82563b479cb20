#include "harness/case/smallest_models.h"

#include <algorithm>
#include <numeric>

#include "harness/case/parallel_sizes.h"

namespace harness {
namespace {

using Kind = golden::Model::Kind;

// The numbers of ranks over which some part of the history cuts layers.
std::vector<int64_t> tensor_ranks(const Case& c) {
  std::vector<int64_t> counts;
  for (size_t step = 0; step < c.steps.size(); ++step) counts.push_back(c.at(step).tensor_ranks());
  return counts;
}

// The shortest sequence of which every rank gets a token, in every part of the history.
int64_t shortest_sequence(const Case& c) {
  int64_t length = 1;
  const auto fits = [&] {
    for (size_t step = 0; step < c.steps.size(); ++step)
      if (!sequence_fits(c.at(step), length)) return false;
    return true;
  };
  while (length < c.model.positions() && !fits()) ++length;
  return length;
}

// One without experts comes before one with some, where the case has some.
std::vector<golden::Model> smallest(Kind kind, const Case& c) {
  const std::vector<int64_t> counts = tensor_ranks(c);
  const int64_t most = std::ranges::max(counts);
  const int64_t multiple = std::accumulate(counts.begin(), counts.end(), int64_t{1}, std::lcm<int64_t, int64_t>);
  const int64_t vocab = std::max<int64_t>(2, multiple);  // one word is predicted without error, so no gradient is left
  const int64_t positions = c.model.of_tokens() ? shortest_sequence(c) : 1;
  golden::Model model;
  model.kind = kind;
  model.canonical = c.model.canonical;
  model.mlp = {.widths = {most, most}, .activation = golden::Activation::identity};
  model.odd = {.width = 1, .gain = false, .cube = false, .empty = false, .side = false, .never = false, .tied = false};
  model.gpt = {.hidden = multiple, .heads = multiple, .vocab = vocab, .positions = positions};
  model.llama = {.hidden = 2 * multiple, .heads = multiple, .intermediate = multiple, .vocab = vocab, .positions = positions};
  std::vector<golden::Model> models = {model};
  if (kind == Kind::llama && c.model.llama.experts > 0) {
    models.push_back(model);
    models.back().llama.experts = 2;
    models.back().llama.expert_width = 1;
  }
  return models;
}

int64_t elements_of(const golden::Model& model) {
  int64_t elements = 0;
  for (const auto& [name, shape] : golden::parameter_shapes(model))
    elements += std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  return elements;
}

// Only those options of the case that its model has a use for. The second round puts back what had to wait for another option.
void keep_what_fits(const CaseOptions& options, Case& c) {
  c.options = {};
  for (int round = 0; round < 2; ++round)
    for (const OptionRow& row : option_rows()) try_change(c, [&] { row.of(c.options) = row.of(options); });
}

}  // namespace

std::vector<Case> with_smallest_models(const Case& c) {
  std::vector<Case> list;
  for (const Kind kind : {Kind::mlp, Kind::odd, Kind::gpt, Kind::llama}) {
    const bool own = kind == c.model.kind;
    for (golden::Model& model : smallest(kind, c)) {
      if (own && elements_of(model) >= elements_of(c.model)) continue;
      Case variant = c;
      variant.model = std::move(model);
      if (!is_valid(variant)) keep_what_fits(c.options, variant);
      if (is_valid(variant)) list.push_back(std::move(variant));
    }
    if (own) break;
  }
  return list;
}

}  // namespace harness
