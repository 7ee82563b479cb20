// What can be trained. Every function throws std::invalid_argument saying what is wrong and what would be
// right.
#pragma once

#include <string>

#include "golden/golden.h"

namespace golden {

// Throws std::invalid_argument.
[[noreturn]] void refuse(const std::string& what);

void require_valid(const Model& model);
// Exactly the model's own parameters, float32, in its order.
void require_valid(const Model& model, const Named& parameters);
// Input and target of fitting shape and dtype, none empty, every token below vocab.
void require_valid(const Model& model, const Microbatch& microbatch);
void require_valid(const Model& model, const Step& step);
void require_valid(const Optimizer& optimizer);
void require_valid(const SumOrder& order);
// That the step has the ranks which the order wants.
void require_valid(const SumOrder& order, const Step& step);
void require_valid(const Precision& precision);
void require_valid(const LossScaling& scaling);
void require_valid(const Run& run);

}  // namespace golden
