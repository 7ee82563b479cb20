#include "harness/plan/operator_cost.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

namespace harness {
namespace {

// They have the underscore of operators that write, and change what a tensor says of itself, not its elements.
constexpr std::array<std::string_view, 7> kOfTensorsThemselves = {"aten::detach_",       "aten::set_",       "aten::resize_",
                                                                  "aten::squeeze_",      "aten::unsqueeze_", "aten::transpose_",
                                                                  "aten::requires_grad_"};

bool writes_its_input(std::string_view name) {
  return name.ends_with('_') && std::ranges::find(kOfTensorsThemselves, name) == kOfTensorsThemselves.end();
}

double elements(const OperatorTensor& tensor) {
  double count = 1;
  for (const int64_t size : tensor.sizes) count *= static_cast<double>(size);
  return count;
}

// Of a matrix product, each element of the result is a sum over the last dim of the left factor.
double flops(std::string_view name, const std::vector<OperatorTensor>& inputs, const OperatorTensor& output) {
  const bool adds = name == "aten::addmm" || name == "aten::baddbmm";
  if (!adds && name != "aten::mm" && name != "aten::bmm") return 0;
  const OperatorTensor& left = inputs.at(adds ? 1 : 0);
  return 2 * elements(output) * static_cast<double>(left.sizes.back());
}

}  // namespace

void add_tensors(const c10::IValue& value, std::vector<OperatorTensor>& to) {
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage())
      to.push_back({tensor.storage().unsafeGetStorageImpl(), static_cast<double>(tensor.nbytes()), tensor.sizes().vec(),
                    tensor.scalar_type()});
  };
  if (value.isTensor()) add(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
}

std::optional<Operator> operator_of(std::string_view name, const std::vector<OperatorTensor>& inputs,
                                    const std::vector<OperatorTensor>& outputs) {
  if (outputs.empty() || name.starts_with("aten::empty") || name.starts_with("aten::new_empty")) return std::nullopt;
  const auto is_input = [&](const OperatorTensor& output) {
    return std::ranges::any_of(inputs, [&](const OperatorTensor& input) { return input.storage == output.storage; });
  };
  if (!writes_its_input(name) && std::ranges::any_of(outputs, is_input)) return std::nullopt;
  Operator what{.flops = flops(name, inputs, outputs.front()), .dtype = outputs.front().dtype};
  for (const auto* tensors : {&inputs, &outputs})
    for (const OperatorTensor& tensor : *tensors) what.bytes += tensor.bytes;
  if (what.bytes == 0) return std::nullopt;
  return what;
}

}  // namespace harness
