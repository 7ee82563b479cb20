#include "parallel/tensor/parallel_linear.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>

#include "internal/device/matrix.h"
#include "internal/nn/canonical/fixed_point.h"
#include "parallel/kept_group.h"
#include "shardproof/algebra/layout.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/gradient_place.h"
#include "shardproof/parallel/collective_ops.h"

namespace shardproof {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// The same tensor, whose pieces are matrices without a copy.
at::Tensor as_rows(const at::Tensor& x) {
  return rows_of(x).view(x.sizes());
}

// What rows are multiplied by.
struct Factor {
  at::Tensor matrix;     // [n, columns]
  at::Tensor bias = {};  // [columns]; undefined in canonical arithmetic
  std::optional<fixed::Operand> exact = {};  // the matrix in canonical arithmetic
  std::string what = {};                     // in messages of it

  void multiply(const at::Tensor& x, const at::Tensor& out) const {
    const at::Tensor rows = rows_of(x);
    const std::vector<int64_t> sizes{rows.size(0), matrix.size(1)};
    at::Tensor place = out.is_contiguous() ? out.view(sizes) : at::empty(sizes, out.options());
    if (exact)
      fixed::product_into(place, fixed::Operand(rows, what), *exact, what);
    else if (bias.defined())
      at::addmm_out(place, bias, rows, matrix);
    else
      at::mm_out(place, rows, matrix);
    if (!out.is_contiguous()) out.copy_(place.view(out.sizes()));
  }
};

// What the node of a layer knows besides tensors. The sequence, dim `dim` of `length` positions, is whole on one side of the
// layer and cut on the other. Where dim is -1, it is whole on both.
struct Layer {
  int64_t dim = -1, length = 0;
  LinearArithmetic arithmetic;

  void keep(AutogradContext* ctx) const {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["length"] = length;
    ctx->saved_data["canonical"] = arithmetic.canonical;
    ctx->saved_data["name"] = arithmetic.name;
    ctx->saved_data["pieces"] = arithmetic.pieces;
  }
  static Layer in(AutogradContext* ctx) {
    const auto kept = [ctx](const char* name) -> const c10::IValue& { return ctx->saved_data[name]; };
    return {kept("dim").toInt(),
            kept("length").toInt(),
            {kept("canonical").toBool(), kept("name").toStringRef(), kept("pieces").toInt()}};
  }

  bool has_sequence() const { return dim >= 0; }
  int64_t own_length(const Comm& group) const { return piece({}, length, group.size(), group.rank()).size(); }
  std::string of_input() const { return arithmetic.name + ", gradient of the input"; }
  // How ranks' terms of `what` are added.
  collective::Sum sum(const std::string& what) const {
    return arithmetic.canonical ? collective::Sum::exact(what) : collective::Sum();
  }
  Factor factor(const at::Tensor& matrix, const std::string& what, const at::Tensor& bias = {}) const {
    if (!arithmetic.canonical) return {matrix, bias};
    return {matrix, {}, fixed::Operand(matrix, what), what};
  }
  // Memory for a tensor [.., features] with the leading dims of x. Its sequence, if there is one, has `positions`.
  at::Tensor memory(const at::Tensor& x, int64_t positions, int64_t features) const {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = features;
    if (has_sequence()) sizes[static_cast<size_t>(dim)] = positions;
    return at::empty(sizes, x.options());
  }
  at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) const {
    const at::Tensor left = rows_of(dy), right = rows_of(x);
    return arithmetic.canonical ? fixed::product(left.t(), right, arithmetic.name + ", gradient of the weight")
                                : direct::weight_gradient(left, right, weight);
  }
  // Whether it is made later, and not where the backward comes by.
  bool delays_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) const {
    return !arithmetic.canonical && direct::is_delayed(rows_of(dy), rows_of(x), weight);
  }
};

// Cuts of a tensor [.., n] along its first dim that is neither the sequence nor the last. They follow from sizes that all ranks
// have in common, since each piece has a collective of its own. A tensor without such a dim is one piece.
class Pieces {
 public:
  Pieces(const Layer& layer, const at::Tensor& x) : dim_(layer.dim == 0 ? 1 : 0) {
    if (dim_ + 1 >= x.dim()) return;
    length_ = x.size(dim_);
    const int64_t wanted = std::clamp<int64_t>(layer.arithmetic.pieces, 1, std::max<int64_t>(1, length_));
    each_ = std::max<int64_t>(1, (length_ + wanted - 1) / wanted);
    count_ = std::max<int64_t>(1, (length_ + each_ - 1) / each_);
  }
  int64_t count() const { return count_; }
  at::Tensor of(const at::Tensor& tensor, int64_t number) const {
    if (count_ == 1) return tensor;
    return tensor.narrow(dim_, number * each_, std::min(each_, length_ - number * each_));
  }

 private:
  int64_t dim_, length_ = 0, each_ = 1, count_ = 1;
};

// Gathers x along the sequence, and returns it whole. Each piece is multiplied into its part of `product` while the next one is
// gathered.
at::Tensor gather_and_multiply(const at::Tensor& x, const Layer& layer, const Factor& factor, const at::Tensor& product,
                               Comm& group) {
  const Pieces pieces(layer, x);
  const at::Tensor whole = layer.memory(x, layer.length, x.size(-1));
  const auto start = [&](int64_t number) {
    return collective::start_all_gather(pieces.of(x, number), layer.dim, layer.length, group, pieces.of(whole, number));
  };
  std::optional<collective::Pending> gathering = start(0);
  for (int64_t i = 0; i < pieces.count(); ++i) {
    gathering->result();
    if (i + 1 < pieces.count()) gathering.emplace(start(i + 1));
    factor.multiply(pieces.of(whole, i), pieces.of(product, i));
  }
  return whole;
}

// Multiplies x, and sums the products over the ranks into `total`. Each piece is summed while the next one is multiplied. The
// sum of the last one is under way when this returns.
collective::Pending multiply_and_sum(const at::Tensor& x, const Layer& layer, const Factor& factor, const at::Tensor& total,
                                     Comm& group) {
  const Pieces pieces(layer, x);
  const collective::Sum sum = layer.sum(factor.what);
  std::optional<collective::Pending> before;
  for (int64_t i = 0;; ++i) {
    const at::Tensor rows = pieces.of(x, i), out = pieces.of(total, i);
    const at::Tensor terms = layer.has_sequence() ? layer.memory(rows, layer.length, factor.matrix.size(1)) : out;
    factor.multiply(rows, terms);
    collective::Pending summing = layer.has_sequence() ? collective::start_reduce_scatter(terms, layer.dim, group, sum, out)
                                                       : collective::start_all_reduce(terms, group, sum, out);
    if (before) before->result();
    if (i + 1 == pieces.count()) return summing;
    before.emplace(std::move(summing));
  }
}

struct ColumnLinear : torch::autograd::Function<ColumnLinear> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const Variable& weight, const c10::optional<Variable>& bias,
                          const Layer& layer, Comm* group) {
    keep_group(ctx, *group);
    layer.keep(ctx);
    ctx->saved_data["bias"] = bias.has_value();
    const Factor factor = layer.factor(weight.t(), layer.arithmetic.name, bias.value_or(at::Tensor()));
    const at::Tensor y = layer.memory(x, layer.length, weight.size(0));
    at::Tensor whole = x;
    if (layer.has_sequence())
      whole = gather_and_multiply(x, layer, factor, y, *group);
    else
      factor.multiply(x, y);
    ctx->save_for_backward({whole, weight});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], dy = as_rows(dys[0]);
    const Layer layer = Layer::in(ctx);
    Comm& group = group_in(ctx);
    at::Tensor dx, dw, db;
    std::optional<collective::Pending> summing;
    if (ctx->needs_input_grad(0)) {
      dx = layer.memory(dy, layer.own_length(group), weight.size(1));
      summing.emplace(multiply_and_sum(dy, layer, layer.factor(weight, layer.of_input()), dx, group));
    }
    if (ctx->needs_input_grad(1)) dw = layer.weight_gradient(dy, x, weight);
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) db = rows_of(dy).sum(0);
    if (summing) summing->result();
    return {dx, dw, db, {}, {}};
  }
};

struct RowLinear : torch::autograd::Function<RowLinear> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const Variable& weight, const Layer& layer, Comm* group) {
    keep_group(ctx, *group);
    layer.keep(ctx);
    ctx->save_for_backward({x, weight});
    const at::Tensor y = layer.memory(x, layer.own_length(*group), weight.size(0));
    multiply_and_sum(x, layer, layer.factor(weight.t(), layer.arithmetic.name), y, *group).result();
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const Layer layer = Layer::in(ctx);
    const Factor factor = layer.factor(weight, layer.of_input());
    Comm& group = group_in(ctx);
    at::Tensor dy = as_rows(dys[0]), dx, dw;
    if (ctx->needs_input_grad(0)) dx = layer.memory(dy, layer.length, weight.size(1));
    if (layer.has_sequence() && dx.defined())
      dy = gather_and_multiply(dy, layer, factor, dx, group);
    else if (layer.has_sequence())
      dy = collective::start_all_gather(dy, layer.dim, layer.length, group).result();
    else if (dx.defined())
      factor.multiply(dy, dx);
    if (ctx->needs_input_grad(1) && !layer.delays_weight_gradient(dy, x, weight)) dw = layer.weight_gradient(dy, x, weight);
    return {dx, dw, {}, {}};
  }
};

// What at::linear computes on where autocast is on.
at::Tensor as_autocast(const at::Tensor& tensor) {
  const c10::DeviceType device = tensor.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

// The number from 0 on of the dim that is the sequence.
int64_t sequence_dim_of(const at::Tensor& x, int64_t given) {
  const int64_t dim = given < 0 ? given + x.dim() : given;
  SHARD_REQUIRE(dim >= 0 && dim + 1 < x.dim(), "tensor_parallel",
                "dim {} of an input of {} dims is no sequence. Give a dim before the last, which has the features", given,
                x.dim());
  return dim;
}

void require_pieces(int64_t pieces) {
  SHARD_REQUIRE(pieces >= 1, "tensor_parallel", "overlap_pieces={} must be at least 1, with which products stay whole", pieces);
}

}  // namespace

at::Tensor column_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                         std::optional<SequenceSplit> sequence, const LinearArithmetic& arithmetic) {
  SHARD_REQUIRE(
      x.size(-1) == weight.size(1), "column_parallel_linear",
      "rank {} of '{}': the input has {} features, the weight takes {}; an input that is cut belongs in a row-parallel layer",
      group.rank(), group.name(), x.size(-1), weight.size(1));
  require_pieces(arithmetic.pieces);
  if (group.size() == 1)
    return arithmetic.canonical ? canonical_ops::linear(x, weight, bias, arithmetic.name) : direct::linear(x, weight, bias);
  Layer layer{.arithmetic = arithmetic};
  if (sequence) {
    layer.dim = sequence_dim_of(x, sequence->dim);
    layer.length = sequence->length;
    SHARD_REQUIRE(x.size(layer.dim) == layer.own_length(group), "column_parallel_linear",
                  "rank {} of {} in '{}' must hold {} of the {} positions along dim {}, and holds {}. Cut as torch.chunk does",
                  group.rank(), group.size(), group.name(), layer.own_length(group), layer.length, layer.dim,
                  x.size(layer.dim));
  }
  // Canonical arithmetic rounds before it adds the bias.
  const bool adds = bias.defined() && arithmetic.canonical;
  c10::optional<at::Tensor> added;
  if (bias.defined() && !adds) added = as_autocast(bias);
  const at::Tensor y = ColumnLinear::apply(as_autocast(x), as_autocast(weight), added, layer, &group);
  return adds ? canonical_ops::add_bias(y, bias, arithmetic.name) : y;
}

at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                      std::optional<int64_t> sequence_dim, const LinearArithmetic& arithmetic) {
  SHARD_REQUIRE(x.size(-1) == weight.size(1), "row_parallel_linear",
                "rank {} of '{}': the input has {} features, this rank's columns of the weight take {}", group.rank(),
                group.name(), x.size(-1), weight.size(1));
  require_pieces(arithmetic.pieces);
  if (group.size() == 1)
    return arithmetic.canonical ? canonical_ops::linear(x, weight, bias, arithmetic.name) : direct::linear(x, weight, bias);
  Layer layer{.arithmetic = arithmetic};
  if (sequence_dim) {
    layer.dim = sequence_dim_of(x, *sequence_dim);
    layer.length = x.size(layer.dim);
  }
  const at::Tensor y = RowLinear::apply(as_autocast(x), as_autocast(weight), layer, &group);
  if (!bias.defined()) return y;
  return arithmetic.canonical ? canonical_ops::add_bias(y, bias, arithmetic.name) : y + bias;
}

at::Tensor column_parallel_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                                  std::optional<SequenceSplit> sequence, int64_t overlap_pieces) {
  return column_linear(x, weight, bias, group, sequence, {.pieces = overlap_pieces});
}

at::Tensor row_parallel_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                               std::optional<int64_t> sequence_dim, int64_t overlap_pieces) {
  return row_linear(x, weight, bias, group, sequence_dim, {.pieces = overlap_pieces});
}

}  // namespace shardproof
