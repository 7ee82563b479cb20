// A unit is one module, or several, whose parameters are gathered, freed and reduced together. LibTorch has no forward hooks,
// so a unit is entered through `call`: a model writes `call(block, x)` instead of `block->forward(x)`. Where the module is not
// a unit, because the model is unsharded or the module was not chosen, `call` just calls forward. The children of a
// torch::nn::Sequential need no change: the library makes it enter those that are units.
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

class Comm;

// What the library does around the forward of a unit. It is private to the library and stands here because `call` is a
// template.
class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  // Gathers the unit's parameters.
  virtual void before_forward(const torch::nn::Module& module) = 0;
  // Returns the input on which the unit computes: the very tensor, unless it has to be cast.
  virtual at::Tensor watch_input(const at::Tensor& input) = 0;
  // Returns the output that the caller gets. When its gradient arrives, the parameters are gathered for the backward.
  virtual at::Tensor watch_output(const at::Tensor& output) = 0;
  virtual void after_forward(const torch::nn::Module& module) = 0;
  // Whether a backward through the forward under way will be known by an output, or need not be.
  virtual bool backward_is_seen() const = 0;
  // Whether the unit keeps no activations and computes them again in the backward.
  virtual bool recomputes() const = 0;

  // Runs the forward once more, on these inputs. What it returns is of no use.
  using Again = std::function<void(const std::vector<at::Tensor>& inputs)>;
  // Until the returned object is gone, nobody keeps what autograd saves on this thread. The backward runs `again` to have it,
  // on these inputs, and with buffers that have the values of now.
  virtual std::shared_ptr<void> forget_saved(Again again, const std::vector<at::Tensor>& inputs,
                                             const std::vector<at::Tensor>& buffers) = 0;
};

// What `parallelize` puts around the forward of a module that takes one tensor and returns one. It is private to the library
// too.
class ParallelHooks {
 public:
  virtual ~ParallelHooks() = default;
  using Forward = std::function<at::Tensor(at::Tensor)>;
  virtual at::Tensor run(const Forward& forward, at::Tensor input) = 0;
  // Whether it only says what the module has, so that `run` is the forward itself and any forward will do.
  virtual bool only_places() const { return false; }
  // The ranks that have other experts of the module; null where it has all that there are.
  virtual std::shared_ptr<Comm> expert_group() const { return nullptr; }
  // The ranks that have other slices of its experts; null where its experts are whole.
  virtual std::shared_ptr<Comm> slice_group() const { return nullptr; }
};

// What `add_lora` (models/lora.h) adds to the output of a module that takes one tensor and returns one. It is private to the
// library too.
class AdapterHooks {
 public:
  virtual ~AdapterHooks() = default;
  // `input` and `output` are the module's, within its unit and outside of its style of tensor parallelism.
  virtual at::Tensor add_to(const at::Tensor& output, const at::Tensor& input) = 0;
  // What must live as long as the module is trained.
  virtual std::shared_ptr<void> held() const = 0;
  // Whether `add_to` only looks and adds nothing, so that a forward that it cannot take does without it.
  virtual bool only_looks() const { return false; }
};

// The hooks of a module; null when it is not a unit, has no style of tensor parallelism, or no adapter. As long as the process
// has no unit, no style and no adapter, these calls cost next to nothing.
UnitHooks* unit_hooks(const torch::nn::Module& module);
ParallelHooks* parallel_hooks(const torch::nn::Module& module);
AdapterHooks* adapter_hooks(const torch::nn::Module& module);

namespace detail {

// Calls visit(tensor) for every defined tensor in a value. A value is a tensor, or a vector, array, optional, pair or tuple of
// values; anything else is passed over.
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
[[noreturn]] void refuse_adapted_call(const torch::nn::Module& module);

// Calls forward(args...) within the module's style of tensor parallelism, if it has one.
template <class Forward, class... Args>
auto forward_in_parallel(const torch::nn::Module& module, const Forward& forward, Args... args) {
  if (ParallelHooks* hooks = parallel_hooks(module)) {
    using Result = decltype(forward(args...));
    if constexpr (sizeof...(Args) == 1 && (std::is_same_v<Args, at::Tensor> && ...) && std::is_same_v<Result, at::Tensor>)
      return hooks->run(forward, std::move(args)...);
    else if (!hooks->only_places())
      refuse_parallel_call(module);
  }
  return forward(std::move(args)...);
}

// The same, and adds what the module's adapter gives, if it has one.
template <class Forward, class... Args>
auto forward_adapted(const torch::nn::Module& module, const Forward& forward, Args... args) {
  if (AdapterHooks* adapter = adapter_hooks(module)) {
    using Result = decltype(forward(args...));
    if constexpr (sizeof...(Args) == 1 && (std::is_same_v<Args, at::Tensor> && ...) && std::is_same_v<Result, at::Tensor>)
      return [&](const at::Tensor& input) {
        // The gradients of both are added before those of other uses of the input, wherever units begin and end.
        const at::Tensor own = input.view_as(input);
        return adapter->add_to(forward_in_parallel(module, forward, own), own);
      }(args...);
    else if (!adapter->only_looks())
      refuse_adapted_call(module);
  }
  return forward_in_parallel(module, forward, std::move(args)...);
}

template <class Forward, class... Args>
auto forward_recomputed(UnitHooks& hooks, const torch::nn::Module& module, const Forward& forward, std::tuple<Args...> args) {
  const std::vector<at::Tensor> inputs = tensors_of(args);
  auto without_inputs = args;  // they are kept with their graph, or in the host's memory
  set_tensors(without_inputs, std::vector<at::Tensor>(inputs.size(), at::empty({0})));
  const auto again = [forward, without_inputs](const std::vector<at::Tensor>& values) {
    auto current = without_inputs;
    set_tensors(current, values);
    std::apply(forward, std::move(current));
  };
  const std::shared_ptr<void> forgetting = hooks.forget_saved(again, inputs, module.buffers());
  return std::apply(forward, std::move(args));
}

}  // namespace detail

// Calls forward(args...) as a forward of `module`. It is for entry points other than the method `forward`. Tensors may be
// arguments and results themselves, or lie inside vectors, arrays, optionals, pairs and tuples. Every rank of the mesh must
// call the same units in the same order.
template <class Module, class Forward, class... Args>
auto call_as(Module&& module, Forward forward, Args... args) {
  const torch::nn::Module& callee = detail::module_of(module);
  const auto run = [&callee, forward](Args... values) {
    return detail::forward_adapted(callee, forward, std::move(values)...);
  };
  UnitHooks* hooks = unit_hooks(callee);
  if (!hooks) return run(std::move(args)...);
  hooks->before_forward(callee);
  (detail::visit_tensors(args, [&](at::Tensor& input) { input = hooks->watch_input(input); }), ...);
  auto result = hooks->recomputes() && c10::GradMode::is_enabled()
                    ? detail::forward_recomputed(*hooks, callee, run, std::make_tuple(std::move(args)...))
                    : run(std::move(args)...);
  detail::visit_tensors(result, [&](at::Tensor& output) { output = hooks->watch_output(output); });
  hooks->after_forward(callee);
  return result;
}

// Calls module.forward(args...), and enters the module as a unit if it is one. `module` is a torch::nn::Module, a LibTorch
// holder or a shared pointer. The module must live until the backward is over.
template <class Module, class... Args>
auto call(Module&& module, Args... args) {
  auto& callee = detail::module_of(module);
  if (!unit_hooks(callee) && !parallel_hooks(callee) && !adapter_hooks(callee)) return callee.forward(std::move(args)...);
  return call_as(callee, [&callee](Args... values) { return callee.forward(std::move(values)...); }, std::move(args)...);
}

}  // namespace shardproof
