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
  if (name.ends_with('_')) name.remove_suffix(1);
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

std::optional<Operator> operator_of(std::string_view name, std::string_view overload, const std::vector<OperatorTensor>& inputs,
                                    const std::vector<OperatorTensor>& outputs) {
  if (outputs.empty() || name.starts_with("aten::empty") || name.starts_with("aten::new_empty")) return std::nullopt;
  const auto is_in = [](const OperatorTensor& tensor, const std::vector<OperatorTensor>& others) {
    return std::ranges::any_of(others, [&](const OperatorTensor& other) { return other.storage == tensor.storage; });
  };
  const bool fills = overload.ends_with("out");
  const bool is_view = std::ranges::any_of(outputs, [&](const OperatorTensor& output) { return is_in(output, inputs); });
  if (is_view && !fills && !writes_its_input(name)) return std::nullopt;
  Operator what{.flops = flops(name, inputs, outputs.front()), .dtype = outputs.front().dtype};
  for (const OperatorTensor& input : inputs)
    if (!fills || !is_in(input, outputs)) what.bytes += input.bytes;
  for (const OperatorTensor& output : outputs) what.bytes += output.bytes;
  if (what.bytes == 0) return std::nullopt;
  return what;
}

}  // namespace harness
