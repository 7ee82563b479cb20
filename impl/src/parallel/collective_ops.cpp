#include "shardproof/parallel/collective_ops.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "internal/nn/canonical/fixed_point.h"
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

// Whether the pieces of ranks along dim lie one behind the other in a contiguous tensor.
bool is_outermost(const at::Tensor& x, int64_t dim) {
  return c10::multiply_integers(x.sizes().slice(0, dim)) == 1;
}

std::vector<int64_t> with_length(const at::Tensor& x, int64_t dim, int64_t length) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[static_cast<size_t>(dim)] = length;
  return sizes;
}

// A buffer [ranks, .., chunk, ..] beside the whole [.., length, ..]. Chunks but for the last ones are full, so all of the whole
// is in at most two runs: visits the full chunks and the rest, as views of equal sizes.
template <class Visit>
void visit_chunks(const at::Tensor& buffer, const at::Tensor& whole, int64_t dim, const Visit& visit) {
  const int64_t length = whole.size(dim), chunk = buffer.size(dim + 1), full = chunk == 0 ? 0 : length / chunk;
  if (full > 0)
    visit(buffer.narrow(0, 0, full).movedim(0, dim), whole.narrow(dim, 0, full * chunk).unflatten(dim, {full, chunk}));
  const int64_t rest = length - full * chunk;
  if (rest > 0) visit(buffer.select(0, full).narrow(dim, 0, rest), whole.narrow(dim, full * chunk, rest));
}

// What a rank sends to be gathered: contiguous, with zeros up to `chunk`.
at::Tensor padded(const at::Tensor& x, int64_t dim, int64_t chunk) {
  if (x.size(dim) == chunk) return x.contiguous();
  at::Tensor sent = at::zeros(with_length(x, dim, chunk), x.options());
  sent.narrow(dim, 0, x.size(dim)).copy_(x);
  return sent;
}

// The whole as ranks' chunks one behind the other, with zeros behind the last row.
at::Tensor in_chunks(const at::Tensor& whole, int64_t dim, const Comm& group) {
  const int64_t length = whole.size(dim), chunk = chunk_of(length, group), ranks = group.size();
  if (length == chunk * ranks && is_outermost(whole, dim)) return whole.contiguous();
  std::vector<int64_t> sizes = with_length(whole, dim, chunk);
  sizes.insert(sizes.begin(), ranks);
  at::Tensor chunks = length == chunk * ranks ? at::empty(sizes, whole.options()) : at::zeros(sizes, whole.options());
  visit_chunks(chunks, whole, dim, [](const at::Tensor& into, const at::Tensor& from) { into.copy_(from); });
  return chunks;
}

bool is_contiguous(const at::Tensor& out) {
  return out.defined() && out.is_contiguous();
}

// The values, in the memory of `out` where that is defined.
at::Tensor in_memory_of(const at::Tensor& out, const at::Tensor& values) {
  return out.defined() ? out.copy_(values) : values;
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

// Elements of a contiguous tensor: `sent` to each rank, and `received` from it, one behind the other.
at::Tensor exchanged(const at::Tensor& input, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                     Comm& group) {
  at::Tensor output = at::empty({std::accumulate(received.begin(), received.end(), int64_t{0})}, input.options());
  group.all_to_all(output, input, received, sent).wait();
  return output;
}

at::Tensor raw_exchange_rows(const at::Tensor& x, std::vector<int64_t> sent, std::vector<int64_t> received, Comm& group) {
  const int64_t rows = std::accumulate(received.begin(), received.end(), int64_t{0});
  for (std::vector<int64_t>* counts : {&sent, &received})
    for (int64_t& count : *counts) count *= x.size(1);
  return exchanged(x.detach().contiguous(), sent, received, group).view({rows, x.size(1)});
}

at::Tensor raw_all_to_all(const at::Tensor& x, int64_t split_dim, int64_t concat_dim, int64_t concat_length, Comm& group) {
  const int64_t split_length = x.size(split_dim), ranks = group.size();
  at::Tensor input = at::empty({x.numel()}, x.options());
  std::vector<int64_t> sent, received;
  std::vector<std::vector<int64_t>> shapes;
  int64_t begin = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const Interval to = piece({}, split_length, ranks, r);
    const at::Tensor part = x.narrow(split_dim, to.begin, to.size());
    sent.push_back(part.numel());
    input.narrow(0, begin, part.numel()).view(part.sizes()).copy_(part);
    begin += part.numel();
    std::vector<int64_t> shape = x.sizes().vec();
    shape[split_dim] = piece_of(split_length, group).size();
    shape[concat_dim] = piece({}, concat_length, ranks, r).size();
    received.push_back(c10::multiply_integers(shape));
    shapes.push_back(std::move(shape));
  }
  std::vector<at::Tensor> pieces = exchanged(input, sent, received, group).split_with_sizes(received);
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

struct ExchangeRows : torch::autograd::Function<ExchangeRows> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const std::vector<int64_t>& sent,
                          const std::vector<int64_t>& received, Comm* group) {
    keep_group(ctx, *group);
    ctx->saved_data["sent"] = sent;
    ctx->saved_data["received"] = received;
    return raw_exchange_rows(x, sent, received, *group);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const auto counts = [ctx](const char* name) { return ctx->saved_data[name].toIntVector(); };
    return {raw_exchange_rows(dy[0], counts("received"), counts("sent"), group_in(ctx)), {}, {}, {}};
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
  return arrange_ ? arrange_(buffer_) : buffer_;
}

Sum Sum::exact(std::string what) {
  Sum sum;
  sum.what_ = what.empty() ? "a sum over ranks" : std::move(what);
  return sum;
}

Pending start_all_reduce(const at::Tensor& x, Comm& group, const Sum& sum, const at::Tensor& out) {
  const at::Tensor terms = x.detach();
  const bool in_place = !sum.is_exact() && is_contiguous(out);
  at::Tensor total = sum.is_exact() ? fixed::to_units(terms, sum.what())
                     : in_place     ? out
                                    : terms.clone(at::MemoryFormat::Contiguous);
  if (in_place && !out.is_same(x)) total.copy_(terms);
  Work work = group.all_reduce(total);
  if (in_place) return {std::move(work), total};
  return {std::move(work), total, [out, exact = sum.is_exact()](const at::Tensor& buffer) {
            return in_memory_of(out, exact ? fixed::from_units(buffer) : buffer);
          }};
}

Pending start_all_gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group, const at::Tensor& out) {
  const int64_t chunk = chunk_of(length, group), ranks = group.size();
  const at::Tensor mine = padded(x.detach(), dim, chunk);
  const bool is_whole = is_outermost(mine, dim) && length == chunk * ranks && (!out.defined() || out.is_contiguous());
  std::vector<int64_t> sizes = is_whole ? with_length(mine, dim, length) : mine.sizes().vec();
  if (!is_whole) sizes.insert(sizes.begin(), ranks);
  at::Tensor chunks = is_whole && out.defined() ? out : at::empty(sizes, mine.options());
  Work work = group.all_gather(chunks, mine);
  if (is_whole) return {std::move(work), chunks};
  return {std::move(work), chunks, [=](const at::Tensor& buffer) {
            if (!out.defined() && is_outermost(mine, dim))
              return buffer.view(with_length(mine, dim, chunk * ranks)).narrow(dim, 0, length).detach();
            const at::Tensor whole = out.defined() ? out : at::empty(with_length(mine, dim, length), mine.options());
            visit_chunks(buffer, whole, dim, [](const at::Tensor& from, const at::Tensor& into) { into.copy_(from); });
            return whole;
          }};
}

Pending start_reduce_scatter(const at::Tensor& x, int64_t dim, Comm& group, const Sum& sum, const at::Tensor& out) {
  const int64_t length = x.size(dim), chunk = chunk_of(length, group), own = piece_of(length, group).size();
  const at::Tensor chunks = in_chunks(sum.is_exact() ? fixed::to_units(x.detach(), sum.what()) : x.detach(), dim, group);
  const bool in_place = !sum.is_exact() && own == chunk && is_contiguous(out);
  at::Tensor mine = in_place ? out : at::empty(with_length(x, dim, chunk), chunks.options());
  Work work = group.reduce_scatter(mine, chunks);
  if (in_place) return {std::move(work), mine};
  return {std::move(work), mine, [=, exact = sum.is_exact()](const at::Tensor& buffer) {
            const at::Tensor rows = buffer.narrow(dim, 0, own);
            return in_memory_of(out, exact ? fixed::from_units(rows) : rows.contiguous().detach());
          }};
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

at::Tensor exchange_rows(const at::Tensor& x, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                         Comm& group) {
  const auto ranks = static_cast<size_t>(group.size());
  const int64_t rows = std::accumulate(sent.begin(), sent.end(), int64_t{0});
  SHARD_REQUIRE(x.dim() == 2 && sent.size() == ranks && received.size() == ranks && rows == x.size(0), "exchange_rows",
                "x of {} dims and {} elements with counts of {} and {} ranks, in a group of {}, to which {} "
                "rows go",
                x.dim(), x.numel(), sent.size(), received.size(), ranks, rows);
  return group.size() == 1 ? x : ExchangeRows::apply(x, sent, received, &group);
}

}  // namespace shardproof::collective
