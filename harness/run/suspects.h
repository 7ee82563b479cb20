// Mistakes as values: what the gradients of a step would be if some term were left out, added twice, or not summed.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/case/case.h"

namespace harness {

using Values = std::vector<at::Tensor>;  // float64, 1-D, one a trained parameter, in the golden order

// A mistake, and what each rank would then hold.
struct Suspect {
  std::string text;
  std::function<Values(int64_t rank)> values;
  bool apart = false;  // ranks hold different values under this mistake
};

// The step's gradients under each mistake. `run` is the failing step alone, begun with the parameters that it found.
std::vector<Suspect> gradient_suspects(const Case& c, const golden::Run& run);

// The gradients of each microbatch by itself, [round][data-parallel rank]. `run` as above.
std::vector<std::vector<Values>> gradient_terms(const golden::Run& run);

// What a factor between two values may be, in words: "2, the ranks along dp_shard"; "" when nothing of the case has this size.
std::string factor_in_words(const Case& c, const golden::Step& step, double factor);

// One step of a run by itself, which begins with these parameters: in plain float64, and without what comes after the sum.
golden::Run plain_step(golden::Run run, size_t step, const golden::Named& parameters);

Values in_double(const golden::Named& tensors);
// The tensors that have these names, in their order; nothing if one is not there or has another number of elements.
std::optional<Values> in_order(const golden::Named& tensors, const golden::Named& names);
// Null where there is none of this name.
const at::Tensor* find_tensor(const golden::Named& tensors, const std::string& name);

// Whether `a` is `b` but for rounding, and both are finite.
bool near(double a, double b);

}  // namespace harness
