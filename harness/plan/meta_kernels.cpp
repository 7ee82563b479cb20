#include "harness/plan/meta_kernels.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <tuple>

namespace harness {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty()) sizes.at(static_cast<size_t>(dim < 0 ? dim + self.dim() : dim)) = index.numel();
  return at::empty(sizes, self.options());
}

at::Tensor floor_divide(const at::Tensor& self, const at::Tensor& other) {
  return at::div(self, other, "floor");
}

at::Tensor embedding_dense_backward(const at::Tensor& gradient, const at::Tensor&, c10::SymInt rows, c10::SymInt, bool) {
  return at::empty({rows.expect_int(), gradient.size(-1)}, gradient.options());
}

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

ThreeTensors native_layer_norm(const at::Tensor& input, c10::SymIntArrayRef shape, const std::optional<at::Tensor>&,
                               const std::optional<at::Tensor>&, double) {
  std::vector<int64_t> of_rows = input.sizes().vec();
  for (size_t i = of_rows.size() - shape.size(); i < of_rows.size(); ++i) of_rows[i] = 1;
  return {at::empty(input.sizes(), input.options()), at::empty(of_rows, input.options()), at::empty(of_rows, input.options())};
}

ThreeTensors native_layer_norm_backward(const at::Tensor& gradient, const at::Tensor&, c10::SymIntArrayRef, const at::Tensor&,
                                        const at::Tensor&, const std::optional<at::Tensor>& weight,
                                        const std::optional<at::Tensor>& bias, std::array<bool, 3> wanted) {
  const auto like = [](const std::optional<at::Tensor>& tensor, bool is_wanted) {
    return is_wanted && tensor && tensor->defined() ? at::empty(tensor->sizes(), tensor->options()) : at::Tensor();
  };
  return {like(gradient, wanted[0]), like(weight, wanted[1]), like(bias, wanted[2])};
}

at::Tensor& of_one(const at::Tensor& self, at::Tensor& out) {
  out.resize_(self.sizes());
  return out;
}

at::Tensor& of_two(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  out.resize_(at::infer_size(self.sizes(), other.sizes()));
  return out;
}

at::Tensor where(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  const at::DimVector sizes = at::infer_size_dimvector(self.sizes(), other.sizes());
  return at::empty(at::infer_size(condition.sizes(), sizes), condition.options().dtype(at::result_type(self, other)));
}

// Questions that the library asks of values, all of which are zero: is a token outside the vocabulary, a position outside the
// table?
at::Scalar local_scalar_dense(const at::Tensor& self) {
  return self.scalar_type() == at::kBool                                 ? at::Scalar(false)
         : at::isIntegralType(self.scalar_type(), /*includeBool=*/false) ? at::Scalar(int64_t{0})
                                                                         : at::Scalar(0.0);
}

// Of [.., T, head] queries and [.., S, head] keys: a product for the scores and one for the values; half of them are masked.
double attention_flops(const at::Tensor& query, const at::Tensor& key, bool is_causal) {
  return 4.0 * static_cast<double>(query.numel()) * static_cast<double>(key.size(-2)) * (is_causal ? 0.5 : 1);
}

double bytes_of(std::initializer_list<at::Tensor> tensors) {
  double bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<double>(tensor.nbytes());
  return bytes;
}

// The fused kernel turns a mask of bools into numbers that it adds to the scores, and keeps them for the backward. The result
// is empty when there is no mask.
at::Tensor added_to_scores(const std::optional<at::Tensor>& mask, const at::Tensor& query) {
  if (!mask || !mask->defined()) return at::empty({0}, query.options());
  return mask->scalar_type() == at::kBool ? at::empty(mask->sizes(), query.options()) : *mask;
}

// The backward computes the scores again and takes four more products.
struct FusedAttention : torch::autograd::Function<FusedAttention> {
  static Variable forward(AutogradContext* ctx, const Variable& query, const Variable& key, const Variable& value,
                          const Variable& mask, bool is_causal) {
    std::vector<int64_t> rows = query.sizes().vec();
    rows.pop_back();
    const at::Tensor output = at::empty_like(query);  // in its order of dims, on which it depends whether a reshape copies
    const at::Tensor sums = at::empty(rows, query.options().dtype(at::kFloat));
    ctx->save_for_backward({query, key, value, output, sums, mask});
    ctx->saved_data["causal"] = is_causal;
    record_inside(
        {attention_flops(query, key, is_causal), bytes_of({query, key, value, output, sums, mask}), query.scalar_type()});
    return output;
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    const bool is_causal = ctx->saved_data["causal"].toBool();
    variable_list results;
    for (size_t i = 0; i < 3; ++i) results.push_back(at::empty(saved[i].sizes(), saved[i].options()));
    record_inside({2.5 * attention_flops(saved[0], saved[1], is_causal),
                   bytes_of({saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], gradients[0]}) +
                       bytes_of({results[0], results[1], results[2]}),
                   saved[0].scalar_type()});
    results.resize(5);
    return results;
  }
};

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double, bool is_causal, std::optional<double>, bool) {
  return FusedAttention::apply(query, key, value, added_to_scores(mask, query), is_causal);
}

std::unique_ptr<torch::Library> library(c10::DispatchKey key) {
  return std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
}

}  // namespace

std::unique_ptr<torch::Library> meta_kernels() {
  auto kernels = library(c10::DispatchKey::Meta);
  kernels->impl("index_select", &index_select);
  kernels->impl("floor_divide", &floor_divide);
  kernels->impl("embedding_dense_backward", &embedding_dense_backward);
  kernels->impl("native_layer_norm", &native_layer_norm);
  kernels->impl("native_layer_norm_backward", &native_layer_norm_backward);
  for (const char* name : {"logical_and.out", "logical_or.out"}) kernels->impl(name, &of_two);
  for (const char* name : {"logical_not.out", "abs.out"}) kernels->impl(name, &of_one);
  kernels->impl("where.self", &where);
  kernels->impl("_local_scalar_dense", &local_scalar_dense);
  kernels->impl("scaled_dot_product_attention", &attention);
  return kernels;
}

std::unique_ptr<torch::Library> meta_autograd_kernels() {
  auto kernels = library(c10::DispatchKey::AutogradMeta);
  kernels->impl("scaled_dot_product_attention", &attention);
  return kernels;
}

}  // namespace harness
