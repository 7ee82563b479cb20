#include "shardproof/nn/gradient_place.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "internal/device/matrix.h"

namespace shardproof::direct {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// A backward gets a tensor that a keeper of saved tensors kept as another tensor, which shares the accumulator of gradients.
at::Tensor parameter_of(const at::Tensor& saved) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(saved);
  const auto* of_parameter = dynamic_cast<const torch::autograd::AccumulateGrad*>(accumulator.get());
  return of_parameter ? of_parameter->variable : saved;
}

GradientTaker* taker_of(const at::Tensor& weight) {
  if (!weight.defined() || !weight.requires_grad() || !weight.is_leaf()) return nullptr;
  return dynamic_cast<GradientTaker*>(torch::autograd::impl::post_acc_grad_hooks(parameter_of(weight)).get());
}

// Whether a program looks at the gradient before it is taken over.
bool has_hooks(const at::Tensor& weight) {
  if (!torch::autograd::impl::hooks(parameter_of(weight)).empty()) return true;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(weight);
  return accumulator && (!accumulator->post_hooks().empty() || !accumulator->pre_hooks().empty() ||
                         !accumulator->tensor_pre_hooks().empty());
}

// Autograd adds up what comes through several edges, in an order of its own. Edges keep the accumulator, and a backward keeps
// its graph, so none of them is missed. Those of other graphs that are alive count, too.
bool has_one_edge(const at::Tensor& weight) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(weight);
  return accumulator.use_count() == 2;  // the edge's, and this one
}

// Null where autograd, a hook or a caller is to have the gradient.
GradientTaker* only_taker_of(const at::Tensor& weight) {
  GradientTaker* taker = taker_of(weight);
  if (!taker || c10::GradMode::is_enabled() || has_hooks(weight)) return nullptr;
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen && !chosen->empty() ? nullptr : taker;
}

bool is_under_autocast(c10::DeviceType type) {
  return at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
}

// Whether the operator's backward is known here, and its weight's gradient is worth a backward of its own.
bool applies(const at::Tensor& x, const at::Tensor& weight) {
  return c10::GradMode::is_enabled() && taker_of(weight) && weight.dim() == 2 && weight.is_contiguous() && x.numel() > 0 &&
         weight.numel() > 0 && !is_under_autocast(weight.device().type());
}

// Autograd's own formulas for addmm and mm, operation by operation.
struct Linear : torch::autograd::Function<Linear> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const Variable& weight,
                          const c10::optional<Variable>& bias) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["bias"] = bias.has_value();
    ctx->save_for_backward({x, weight});
    return at::linear(x, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    if (!dys[0].defined()) return {{}, {}, {}};
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], dy = rows_of(dys[0]);
    at::Tensor dx, dw;
    if (ctx->needs_input_grad(0)) dx = gradient_of_rows(dy, rows_of(x), weight).view(x.sizes());
    if (ctx->needs_input_grad(1) && !is_delayed(dy, rows_of(x), weight)) dw = weight_gradient(dy, rows_of(x), weight);
    const bool has_bias = ctx->saved_data["bias"].toBool();
    return {dx, dw, has_bias ? dy : at::Tensor()};  // autograd itself sums the last one to the sizes of the bias
  }
};

struct Embedding : torch::autograd::Function<Embedding> {
  static Variable forward(AutogradContext* ctx, const Variable& weight, const at::Tensor& tokens, int64_t padding) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["padding"] = padding;
    ctx->save_for_backward({weight, tokens});
    return at::embedding(weight, tokens, padding);
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const at::Tensor& dy = dys[0];
    if (!dy.defined()) return {{}, {}, {}};
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &weight = saved[0], &tokens = saved[1];
    const int64_t padding = ctx->saved_data["padding"].toInt();
    // Of smaller dtypes autograd's own adds up rows in float32.
    const bool adds_in_dtype = dy.scalar_type() == at::kFloat || dy.scalar_type() == at::kDouble;
    const at::Tensor place = adds_in_dtype ? place_of_gradient(weight) : at::Tensor();
    if (!place.defined()) return {at::embedding_dense_backward(dy, tokens, weight.size(0), padding, false), {}, {}};
    place.zero_().index_add_(0, tokens.reshape({-1}), rows_of(dy));
    if (padding >= 0) place.select(0, padding).zero_();
    return {place, {}, {}};
  }
};

}  // namespace

at::Tensor place_of_gradient(const at::Tensor& weight) {
  GradientTaker* taker = only_taker_of(weight);
  return taker ? taker->place() : at::Tensor();
}

at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) {
  at::Tensor place = place_of_gradient(weight);
  return place.defined() ? at::mm_out(place, dy.t(), x) : dy.t().mm(x);
}

bool is_delayed(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) {
  GradientTaker* taker = only_taker_of(weight);
  return taker && has_one_edge(weight) && taker->delay(dy, x);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const c10::optional<at::Tensor> given = bias.defined() ? c10::make_optional(bias) : c10::nullopt;
  if (x.dim() < 2 || !x.is_contiguous() || !applies(x, weight)) return at::linear(x, weight, given);
  return Linear::apply(x, weight, given);
}

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens, int64_t padding) {
  const bool is_kept_order = weight.is_cpu();  // where rows are added in the order of tokens, whoever adds them
  if (!is_kept_order || !applies(tokens, weight)) return at::embedding(weight, tokens, padding);
  return Embedding::apply(weight, tokens, padding);
}

}  // namespace shardproof::direct
