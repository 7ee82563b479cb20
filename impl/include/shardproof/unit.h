// A unit is a module whose parameters are gathered, freed and reduced together. LibTorch has no forward hooks, so a unit is
// entered through `call`: a model is written once with `call(block, x)` instead of `block->forward(x)`, and where the module
// is no unit (unsharded, or not chosen) that is all it does.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace shardproof {

// What a sharded module does around its forward. Private to the library; seen here because `call` is a template.
class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  // Makes the parameters whole.
  virtual void before_forward() = 0;
  // Identity; its backward marks the end of the unit's backward.
  virtual at::Tensor watch_input(const at::Tensor& input) = 0;
  // Its gradient's arrival makes the parameters whole for the backward.
  virtual void watch_output(const at::Tensor& output) = 0;
  virtual void after_forward() = 0;
};

// The hooks of a module, null when it is not a unit.
UnitHooks* unit_hooks(const torch::nn::Module& module);

namespace detail {

template <class Value, class Visit>
void visit_tensors(Value& value, Visit&& visit) {
  using Plain = std::remove_cvref_t<Value>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    if (value.defined()) visit(value);
  } else if constexpr (requires { value.begin(); value.end(); value.size(); } && !std::is_convertible_v<Plain, std::string>) {
    for (auto& element : value) visit_tensors(element, visit);
  } else if constexpr (requires { std::tuple_size<Plain>::value; }) {
    std::apply([&](auto&... elements) { (visit_tensors(elements, visit), ...); }, value);
  }
}

template <class Module>
auto& module_of(Module& module) {
  if constexpr (std::is_base_of_v<torch::nn::Module, std::remove_cvref_t<Module>>) {
    return module;
  } else if constexpr (requires { module.ptr(); }) {
    return *module.ptr();
  } else {
    return *module;
  }
}

}  // namespace detail

// module.forward(args...), as a unit if the module is one. `module` is a torch::nn::Module, a LibTorch holder or a shared
// pointer. Tensors in arguments and results are found directly and inside vectors, arrays, pairs and tuples. Every rank of
// the mesh must call the same units in the same order.
template <class Module, class... Args>
auto call(Module&& module, Args... args) {
  auto& callee = detail::module_of(module);
  UnitHooks* hooks = unit_hooks(callee);
  if (!hooks) return callee.forward(std::move(args)...);
  hooks->before_forward();
  (detail::visit_tensors(args, [&](at::Tensor& input) { input = hooks->watch_input(input); }), ...);
  auto result = callee.forward(std::move(args)...);
  detail::visit_tensors(result, [&](at::Tensor& output) { hooks->watch_output(output); });
  hooks->after_forward();
  return result;
}

}  // namespace shardproof
