// What the model of a case is made of, in one table for each kind. A field in it is printed, parsed and shrunk.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "golden/golden.h"
#include "harness/case/case_scanner.h"

namespace harness {

struct ModelField {
  const char* key;
  // As in the text of a case, e.g. "layers=2" or "tied"; empty where the value is the usual one and left out.
  std::function<std::string(const golden::Model&)> text;
  // Takes the value of "key=value". Throws Error that shows the column.
  std::function<void(golden::Model&, const Scanner&, const Scanner::Argument&)> read;
  // Models with a simpler value, the largest jumps first. Some may be invalid.
  std::function<std::vector<golden::Model>(const golden::Model&)> simpler;
};

// In the order of the text.
const std::vector<ModelField>& model_fields(golden::Model::Kind kind);

// What only a llama with experts has a use for; at their defaults in one without.
template <class Llama>
auto expert_fields(Llama& m) {
  return std::tie(m.experts_per_token, m.expert_width, m.shared_width, m.dense_layers, m.score, m.normalized, m.expert_scale,
                  m.expert_groups, m.groups_per_token, m.expert_balance, m.expert_z, m.expert_bias, m.expert_capacity,
                  m.expert_lean, m.balance_over);
}

// Numbers from `least` to below `value`: the least, one halfway, and the one before.
std::vector<int64_t> smaller(int64_t value, int64_t least);

// Throws Error when the model's balance of experts is over a step, and a step has several microbatches. `to_do`: about those.
void require_rounds(const golden::Model& model, int64_t rounds, const char* command, const std::string& to_do);

}  // namespace harness
