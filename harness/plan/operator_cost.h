// What LibTorch's operators compute and move, by their names and the sizes of their tensors.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string_view>
#include <vector>

#include "harness/plan/step_record.h"

namespace harness {

struct OperatorTensor {
  const void* storage = nullptr;
  double bytes = 0;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
};

// The tensors in an argument or a result: one, or a list of them.
void add_tensors(const c10::IValue& value, std::vector<OperatorTensor>& to);

// Nothing where an operator moves nothing: a view, or new memory. The overload says whether results go into given tensors.
// Matrix products count two operations for each term.
std::optional<Operator> operator_of(std::string_view name, std::string_view overload, const std::vector<OperatorTensor>& inputs,
                                    const std::vector<OperatorTensor>& outputs);

}  // namespace harness
