#include "parallel/exact_collectives.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/canonical/fixed_point.h"
#include "parallel/kept_group.h"
#include "shardproof/parallel/collective_ops.h"

namespace shardproof::exact {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor summed(const at::Tensor& terms, Comm& group, const std::string& what) {
  return fixed::from_units(collective::start_all_reduce(fixed::to_units(terms, what), group).result());
}
at::Tensor summed_pieces(const at::Tensor& terms, int64_t dim, Comm& group, const std::string& what) {
  return fixed::from_units(collective::start_reduce_scatter(fixed::to_units(terms, what), dim, group).result());
}

void keep(AutogradContext* ctx, Comm* group, int64_t dim, int64_t length, const std::string& what) {
  keep_group(ctx, *group);
  ctx->saved_data["dim"] = dim;
  ctx->saved_data["length"] = length;
  ctx->saved_data["what"] = what + ", gradient of the input";
}
int64_t dim_in(AutogradContext* ctx) {
  return ctx->saved_data["dim"].toInt();
}
std::string what_in(AutogradContext* ctx) {
  return ctx->saved_data["what"].toStringRef();
}

struct Copy : torch::autograd::Function<Copy> {
  static Variable forward(AutogradContext* ctx, const Variable& x, Comm* group, const std::string& what) {
    keep(ctx, group, 0, 0, what);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {summed(dy[0], group_in(ctx), what_in(ctx)), {}, {}};
  }
};

struct ReduceSum : torch::autograd::Function<ReduceSum> {
  static Variable forward(AutogradContext*, const Variable& x, Comm* group, const std::string& what) {
    return summed(x, *group, what);
  }
  static variable_list backward(AutogradContext*, variable_list dy) { return {dy[0], {}, {}}; }
};

struct AllGather : torch::autograd::Function<AllGather> {
  static Variable forward(AutogradContext* ctx, const Variable& x, int64_t dim, int64_t length, Comm* group,
                          const std::string& what) {
    keep(ctx, group, dim, length, what);
    return collective::start_all_gather(x, dim, length, *group).result();
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {summed_pieces(dy[0], dim_in(ctx), group_in(ctx), what_in(ctx)), {}, {}, {}, {}};
  }
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
  static Variable forward(AutogradContext* ctx, const Variable& x, int64_t dim, Comm* group, const std::string& what) {
    keep(ctx, group, dim, x.size(dim), what);
    return summed_pieces(x, dim, *group, what);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const int64_t length = ctx->saved_data["length"].toInt();
    return {collective::start_all_gather(dy[0], dim_in(ctx), length, group_in(ctx)).result(), {}, {}, {}};
  }
};

// In one collective, for the order in which a backward would enter two is not the same on every rank.
struct SumToFirst : torch::autograd::Function<SumToFirst> {
  static variable_list forward(AutogradContext* ctx, const Variable& k, const Variable& v, Comm* group,
                               const std::string& what) {
    keep(ctx, group, 0, 0, what);
    return {k.view_as(k), v.view_as(v)};
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    Comm& group = group_in(ctx);
    const at::Tensor sum = summed(at::stack({dys[0], dys[1]}), group, what_in(ctx));
    const at::Tensor own = group.rank() == 0 ? sum : at::zeros_like(sum);
    return {own[0], own[1], {}, {}};
  }
};

int64_t normal_dim(const at::Tensor& x, int64_t dim) {
  return dim < 0 ? dim + x.dim() : dim;
}

}  // namespace

at::Tensor copy(const at::Tensor& x, Comm& group, const std::string& what) {
  return group.size() == 1 ? x : Copy::apply(x, &group, what);
}

at::Tensor reduce(const at::Tensor& x, Comm& group, const std::string& what) {
  return group.size() == 1 ? x : ReduceSum::apply(x, &group, what);
}

at::Tensor all_gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group, const std::string& what) {
  return group.size() == 1 ? x : AllGather::apply(x, normal_dim(x, dim), length, &group, what);
}

at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, Comm& group, const std::string& what) {
  return group.size() == 1 ? x : ReduceScatter::apply(x, normal_dim(x, dim), &group, what);
}

std::pair<at::Tensor, at::Tensor> sum_to_first(const at::Tensor& k, const at::Tensor& v, Comm& group, const std::string& what) {
  if (group.size() == 1) return {k, v};
  const variable_list both = SumToFirst::apply(k, v, &group, what);
  return {both[0], both[1]};
}

}  // namespace shardproof::exact
