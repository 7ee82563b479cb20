// A unit is a module, or several, whose parameters are gathered, freed and reduced together. LibTorch has no forward hooks, so
// a unit is entered through `call`: a model is written once with `call(block, x)` instead of `block->forward(x)`, and where the
// module is no unit (unsharded, or not chosen) that is all it does. Children of a torch::nn::Sequential need no change: it is
// told to enter those that are units.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <functional>
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
  virtual void before_forward(const torch::nn::Module& module) = 0;
  // The input as the unit computes on it; its backward marks the end of the unit's backward.
  virtual at::Tensor watch_input(const at::Tensor& input) = 0;
  // The output as the caller gets it; its gradient's arrival makes the parameters whole for the backward.
  virtual at::Tensor watch_output(const at::Tensor& output) = 0;
  virtual void after_forward(const torch::nn::Module& module) = 0;
  // Whether activations are not kept.
  virtual bool recomputes() const = 0;

  using Body = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
  // Runs the body without a graph, and once more, with one, in the backward of what it returned.
  virtual std::vector<at::Tensor> run_without_graph(Body body, std::vector<at::Tensor> inputs) = 0;
};

// What `parallelize` put around the forward of a module that takes one tensor and returns one. Private to the library as well.
class ParallelHooks {
 public:
  virtual ~ParallelHooks() = default;
  using Forward = std::function<at::Tensor(at::Tensor)>;
  virtual at::Tensor run(const Forward& forward, at::Tensor input) = 0;
};

// The hooks of a module, null when it is not a unit, or not parallel. Free where nothing in the process is.
UnitHooks* unit_hooks(const torch::nn::Module& module);
ParallelHooks* parallel_hooks(const torch::nn::Module& module);

namespace detail {

// Calls visit(tensor) on every defined tensor in a value: a tensor, or vectors, arrays, optionals, pairs and tuples of values.
template <class Value, class Visit>
void visit_tensors(Value& value, Visit&& visit) {
  using Plain = std::remove_cvref_t<Value>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    if (value.defined()) visit(value);
  } else if constexpr (requires { value.begin(); value.end(); value.size(); } && !std::is_convertible_v<Plain, std::string>) {
    for (auto& element : value) visit_tensors(element, visit);
  } else if constexpr (requires { std::tuple_size<Plain>::value; }) {
    std::apply([&](auto&... elements) { (visit_tensors(elements, visit), ...); }, value);
  } else if constexpr (requires { value.has_value(); *value; }) {
    if (value.has_value()) visit_tensors(*value, visit);
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

template <class Value>
std::vector<at::Tensor> tensors_of(Value& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

template <class Value>
void set_tensors(Value& value, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  visit_tensors(value, [&](at::Tensor& tensor) { tensor = tensors.at(next++); });
}

[[noreturn]] void refuse_parallel_call(const torch::nn::Module& module);

// forward(args...), within the module's style.
template <class Forward, class... Args>
auto forward_in_parallel(const torch::nn::Module& module, const Forward& forward, Args... args) {
  if (ParallelHooks* hooks = parallel_hooks(module)) {
    using Result = decltype(forward(args...));
    if constexpr (sizeof...(Args) == 1 && (std::is_same_v<Args, at::Tensor> && ...) && std::is_same_v<Result, at::Tensor>)
      return hooks->run(forward, std::move(args)...);
    else
      refuse_parallel_call(module);
  }
  return forward(std::move(args)...);
}

template <class Forward, class... Args>
auto forward_without_graph(UnitHooks& hooks, const Forward& forward, std::tuple<Args...> args) {
  using Result = std::remove_cvref_t<decltype(std::apply(forward, args))>;
  const std::vector<at::Tensor> inputs = tensors_of(args);
  auto first = std::make_shared<std::unique_ptr<Result>>();  // for all that is not a tensor in it
  std::vector<at::Tensor> outputs = hooks.run_without_graph(
      [forward, args, first](const std::vector<at::Tensor>& values) mutable {
        auto current = args;
        set_tensors(current, values);
        auto result = std::make_unique<Result>(std::apply(forward, std::move(current)));
        std::vector<at::Tensor> tensors = tensors_of(*result);
        if (first) *first = std::move(result);
        first.reset();
        return tensors;
      },
      inputs);
  Result result = std::move(**first);
  set_tensors(result, outputs);
  return result;
}

}  // namespace detail

// forward(args...) as a forward of `module`: for entry points other than the method `forward`. Tensors in arguments and results
// are found directly and inside vectors, arrays, optionals, pairs and tuples. Every rank of the mesh must call the same units
// in the same order.
template <class Module, class Forward, class... Args>
auto call_as(Module&& module, Forward forward, Args... args) {
  const torch::nn::Module& callee = detail::module_of(module);
  const auto run = [&callee, forward](Args... values) {
    return detail::forward_in_parallel(callee, forward, std::move(values)...);
  };
  UnitHooks* hooks = unit_hooks(callee);
  if (!hooks) return run(std::move(args)...);
  hooks->before_forward(callee);
  (detail::visit_tensors(args, [&](at::Tensor& input) { input = hooks->watch_input(input); }), ...);
  auto result = hooks->recomputes() && c10::GradMode::is_enabled()
                    ? detail::forward_without_graph(*hooks, run, std::make_tuple(std::move(args)...))
                    : run(std::move(args)...);
  detail::visit_tensors(result, [&](at::Tensor& output) { output = hooks->watch_output(output); });
  hooks->after_forward(callee);
  return result;
}

// module.forward(args...), as a unit if the module is one. `module` is a torch::nn::Module, a LibTorch holder or a shared
// pointer; the module must live until the backward is over.
template <class Module, class... Args>
auto call(Module&& module, Args... args) {
  auto& callee = detail::module_of(module);
  if (!unit_hooks(callee) && !parallel_hooks(callee)) return callee.forward(std::move(args)...);
  return call_as(callee, [&callee](Args... values) { return callee.forward(std::move(values)...); }, std::move(args)...);
}

}  // namespace shardproof
