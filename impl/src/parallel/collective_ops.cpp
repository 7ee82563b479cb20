#include "shardproof/parallel/collective_ops.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/canonical/fixed_point.h"
#include "parallel/kept_group.h"
#include "shardproof/algebra/layout.h"
#include "shardproof/base/check.h"

namespace shardproof::collective {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

int64_t normal_dim(const at::Tensor& x, int64_t dim, const char* name) {
  SHARD_REQUIRE(dim >= -x.dim() && dim < x.dim(), "collective", "{} of a tensor of {} dims along dim {}", name,
                x.dim(), dim);
  return dim < 0 ? dim + x.dim() : dim;
}

Interval piece_of(int64_t length, const Comm& group) { return piece({}, length, group.size(), group.rank()); }
int64_t chunk_of(int64_t length, const Comm& group) { return (length + group.size() - 1) / group.size(); }

// The cut dim first, contiguous, with zeros up to `rows`.
at::Tensor rows_first(const at::Tensor& x, int64_t dim, int64_t rows) {
  const at::Tensor moved = x.movedim(dim, 0);
  if (moved.size(0) == rows) return moved.contiguous();
  std::vector<int64_t> sizes = moved.sizes().vec();
  sizes[0] = rows;
  at::Tensor padded = at::zeros(sizes, x.options());
  padded.narrow(0, 0, moved.size(0)).copy_(moved);
  return padded;
}

at::Tensor own_piece(const at::Tensor& x, int64_t dim, const Comm& group) {
  const Interval own = piece_of(x.size(dim), group);
  return x.narrow(dim, own.begin, own.size()).contiguous();
}

void require_piece(const at::Tensor& x, int64_t dim, int64_t length, const Comm& group, const char* name) {
  const int64_t expected = piece_of(length, group).size();
  SHARD_REQUIRE(x.size(dim) == expected, "collective",
                "{}: rank {} of {} in '{}' must hold {} of the {} rows along dim {}, and holds {}. Cut as torch.chunk does",
                name, group.rank(), group.size(), group.name(), expected, length, dim, x.size(dim));
}

at::Tensor raw_all_to_all(const at::Tensor& x, int64_t split_dim, int64_t concat_dim, int64_t concat_length, Comm& group) {
  const int64_t split_length = x.size(split_dim), ranks = group.size();
  std::vector<at::Tensor> parts;
  std::vector<int64_t> sent, received;
  std::vector<std::vector<int64_t>> shapes;
  for (int64_t r = 0; r < ranks; ++r) {
    const Interval to = piece({}, split_length, ranks, r);
    parts.push_back(x.narrow(split_dim, to.begin, to.size()).reshape({-1}));
    sent.push_back(parts.back().numel());
    std::vector<int64_t> shape = x.sizes().vec();
    shape[split_dim] = piece_of(split_length, group).size();
    shape[concat_dim] = piece({}, concat_length, ranks, r).size();
    received.push_back(c10::multiply_integers(shape));
    shapes.push_back(std::move(shape));
  }
  int64_t total = 0;
  for (const int64_t count : received) total += count;
  at::Tensor output = at::empty({total}, x.options());
  group.all_to_all(output, at::cat(parts), received, sent).wait();
  std::vector<at::Tensor> pieces = output.split_with_sizes(received);
  for (int64_t r = 0; r < ranks; ++r) pieces[r] = pieces[r].view(shapes[r]);
  return at::cat(pieces, concat_dim);
}

int64_t kept(AutogradContext* ctx, const char* name) { return ctx->saved_data[name].toInt(); }

void keep_sum(AutogradContext* ctx, const Sum& sum) { ctx->saved_data["exact"] = sum.what(); }
Sum sum_in(AutogradContext* ctx) {
  const std::string& what = ctx->saved_data["exact"].toStringRef();
  return what.empty() ? Sum() : Sum::exact(what);
}

struct Copy : torch::autograd::Function<Copy> {
  static Variable forward(AutogradContext* ctx, const Variable& x, Comm* group, const Sum& sum) {
    keep_group(ctx, *group);
    keep_sum(ctx, sum);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {start_all_reduce(dy[0], group_in(ctx), sum_in(ctx)).result(), {}, {}};
  }
};

struct ReduceSum : torch::autograd::Function<ReduceSum> {
  static Variable forward(AutogradContext*, const Variable& x, Comm* group, const Sum& sum) {
    return start_all_reduce(x, *group, sum).result();
  }
  static variable_list backward(AutogradContext*, variable_list dy) { return {dy[0], {}, {}}; }
};

// What a piece of the whole is made from, or goes into: the own piece of it, or terms that the ranks add.
struct Whole {
  bool terms = false;
  Sum sum = {};
};
void keep_whole(AutogradContext* ctx, const Whole& whole) {
  ctx->saved_data["terms"] = whole.terms;
  keep_sum(ctx, whole.sum);
}
at::Tensor piece_from(const at::Tensor& x, int64_t dim, const Whole& whole, Comm& group) {
  return whole.terms ? start_reduce_scatter(x, dim, group, whole.sum).result() : own_piece(x, dim, group);
}

struct Gather : torch::autograd::Function<Gather> {
  static Variable forward(AutogradContext* ctx, const Variable& x, int64_t dim, int64_t length, const Whole& gradient,
                          Comm* group) {
    keep_group(ctx, *group);
    keep_whole(ctx, gradient);
    ctx->saved_data["dim"] = dim;
    return start_all_gather(x, dim, length, *group).result();
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const Whole gradient{ctx->saved_data["terms"].toBool(), sum_in(ctx)};
    return {piece_from(dy[0], kept(ctx, "dim"), gradient, group_in(ctx)), {}, {}, {}, {}};
  }
};

struct Scatter : torch::autograd::Function<Scatter> {
  static Variable forward(AutogradContext* ctx, const Variable& x, int64_t dim, const Whole& whole, Comm* group) {
    keep_group(ctx, *group);
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["length"] = x.size(dim);
    return piece_from(x, dim, whole, *group);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {start_all_gather(dy[0], kept(ctx, "dim"), kept(ctx, "length"), group_in(ctx)).result(), {}, {}, {}};
  }
};

struct AllToAll : torch::autograd::Function<AllToAll> {
  static Variable forward(AutogradContext* ctx, const Variable& x, int64_t split, int64_t concat, int64_t length, Comm* group) {
    keep_group(ctx, *group);
    ctx->saved_data["split"] = split;
    ctx->saved_data["concat"] = concat;
    ctx->saved_data["length"] = x.size(split);
    return raw_all_to_all(x, split, concat, length, *group);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {raw_all_to_all(dy[0], kept(ctx, "concat"), kept(ctx, "split"), kept(ctx, "length"), group_in(ctx)), {}, {}, {}, {}};
  }
};

at::Tensor joined(const at::Tensor& x, int64_t dim, int64_t length, const Whole& gradient, const char* name, Comm& group) {
  dim = normal_dim(x, dim, name);
  require_piece(x, dim, length, group, name);
  return group.size() == 1 ? x : Gather::apply(x, dim, length, gradient, &group);
}

at::Tensor cut(const at::Tensor& x, int64_t dim, const Whole& whole, const char* name, Comm& group) {
  dim = normal_dim(x, dim, name);
  return group.size() == 1 ? x : Scatter::apply(x, dim, whole, &group);
}

}  // namespace

Pending::~Pending() {
  if (std::uncaught_exceptions() > exceptions_) return;
  try {
    work_.wait();
  } catch (...) {
    // What ended the world is thrown by the next collective as well.
  }
}

at::Tensor Pending::result() {
  work_.wait();
  const at::Tensor output = dim_ < 0 ? buffer_ : buffer_.narrow(0, 0, rows_).movedim(0, dim_).contiguous();
  return in_units_ ? fixed::from_units(output) : output;
}

Sum Sum::exact(std::string what) {
  Sum sum;
  sum.what_ = what.empty() ? "a sum over ranks" : std::move(what);
  return sum;
}

Pending start_all_reduce(const at::Tensor& x, Comm& group, const Sum& sum) {
  const at::Tensor terms = x.detach();
  at::Tensor total = sum.is_exact() ? fixed::to_units(terms, sum.what()) : terms.clone(at::MemoryFormat::Contiguous);
  Work work = group.all_reduce(total);
  return {std::move(work), total, -1, 0, sum.is_exact()};
}

// The pieces are whole chunks but for the last ones, so the padding ends up behind the rows.
Pending start_all_gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group) {
  const int64_t chunk = chunk_of(length, group);
  const at::Tensor mine = rows_first(x.detach(), dim, chunk);
  std::vector<int64_t> sizes = mine.sizes().vec();
  sizes[0] = chunk * group.size();
  at::Tensor whole = at::empty(sizes, x.options());
  Work work = group.all_gather(whole, mine);
  return {std::move(work), whole, dim, length};
}

Pending start_reduce_scatter(const at::Tensor& x, int64_t dim, Comm& group, const Sum& sum) {
  const int64_t length = x.size(dim), chunk = chunk_of(length, group);
  const at::Tensor terms = sum.is_exact() ? fixed::to_units(x.detach(), sum.what()) : x.detach();
  const at::Tensor whole = rows_first(terms, dim, chunk * group.size());
  std::vector<int64_t> sizes = whole.sizes().vec();
  sizes[0] = chunk;
  at::Tensor mine = at::empty(sizes, whole.options());
  Work work = group.reduce_scatter(mine, whole);
  return {std::move(work), mine, dim, piece_of(length, group).size(), sum.is_exact()};
}

at::Tensor copy(const at::Tensor& x, Comm& group, const Sum& sum) {
  return group.size() == 1 ? x : Copy::apply(x, &group, sum);
}

at::Tensor reduce(const at::Tensor& x, Comm& group, const Sum& sum) {
  return group.size() == 1 ? x : ReduceSum::apply(x, &group, sum);
}

at::Tensor gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group) {
  return joined(x, dim, length, {}, "gather", group);
}

at::Tensor all_gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group, const Sum& sum) {
  return joined(x, dim, length, {.terms = true, .sum = sum}, "all_gather", group);
}

at::Tensor scatter(const at::Tensor& x, int64_t dim, Comm& group) { return cut(x, dim, {}, "scatter", group); }

at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, Comm& group, const Sum& sum) {
  return cut(x, dim, {.terms = true, .sum = sum}, "reduce_scatter", group);
}

at::Tensor all_to_all(const at::Tensor& x, int64_t split_dim, int64_t concat_dim, int64_t concat_length, Comm& group) {
  split_dim = normal_dim(x, split_dim, "all_to_all");
  concat_dim = normal_dim(x, concat_dim, "all_to_all");
  SHARD_REQUIRE(split_dim != concat_dim, "all_to_all", "splits and joins one dim, {}; give two", split_dim);
  require_piece(x, concat_dim, concat_length, group, "all_to_all");
  return group.size() == 1 ? x : AllToAll::apply(x, split_dim, concat_dim, concat_length, &group);
}

}  // namespace shardproof::collective
