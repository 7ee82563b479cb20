#include "internal/nn/canonical/canonical_blocks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "shardproof/device/device.h"
#include "shardproof/device/model_math.h"

// Every sum is an exact product of a head's rows, or goes by index in a kernel of ours, and everything else is single IEEE
// operations on elements, so a block has the same bits on every device.
namespace shardproof::canonical_blocks {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

struct Sizes {
  int64_t batch, heads, kv_heads, queries, keys, width;
  Sizes(const at::Tensor& q, const at::Tensor& k)
      : batch(q.size(0)), heads(q.size(1)), kv_heads(k.size(1)), queries(q.size(2)), keys(k.size(2)), width(q.size(3)) {}
  double scale() const { return 1 / std::sqrt(static_cast<double>(width)); }

  // f(a head of queries, the head of keys that serves it), for every sample.
  template <class F>
  void each_head(const F& f) const {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h) f(b * heads + h, b * kv_heads + h / (heads / kv_heads));
  }
};

at::Tensor swapped(const at::Tensor& rows) {
  return rows.transpose(-2, -1);
}

fixed::Operand operand(const at::Tensor& heads) {
  return {heads, "attention"};
}
// Powers and shares, times a mask where there is one. Without one nobody has to look at them: a power of a score minus the
// largest of its row is 1 at most, and so is its share of a sum to which the largest adds 1. This holds for scores that had
// terms out of range, too: they are wrong, but finite, and `Terms` has the error.
fixed::Operand operand_within_one(const at::Tensor& heads, const at::Tensor& mask) {
  if (mask.defined()) return operand(heads * mask);
  return {heads, "attention", 1};
}

// Products of heads: the matrices of `a` and `b`, or their transposes, which lie behind one another in float64, by the numbers
// of their heads.
class HeadProducts {
 public:
  HeadProducts(const fixed::Operand& a, const fixed::Operand& b, fixed::Terms& terms)
      : math_(model_math(device_math(a.memory))),
        a_(a),
        b_(b),
        rows_(a.rows()),
        inner_(a.columns()),
        columns_(b.columns()),
        terms_(terms) {}

  // out's head of `a` = a's times b's times the scale; only the first `seen` columns of each row, and `unseen` in the others.
  void write(const at::Tensor& out, int64_t head, int64_t other, const at::Tensor& seen, double scale, double unseen) {
    ExactProduct product = of(head, other);
    product.out = at_head(out, head, out.mutable_data_ptr<double>());
    product.seen = seen.const_data_ptr<int64_t>();
    product.unseen = unseen;
    product.scale = scale;
    run(product);
  }
  // sums' head `to` += a's times b's, in units. A row of a's is 0 before its term `first` and from `end` on, where those are
  // defined.
  void add(const at::Tensor& sums, int64_t to, int64_t head, int64_t other, const at::Tensor& first, const at::Tensor& end) {
    ExactProduct product = of(head, other);
    if (first.defined()) product.first_term = first.const_data_ptr<int64_t>();
    if (end.defined()) product.end_term = end.const_data_ptr<int64_t>();
    product.units = at_head(sums, to, sums.mutable_data_ptr<int64_t>());
    run(product);
  }

 private:
  template <class T>
  static T* at_head(const at::Tensor& x, int64_t head, T* data) {
    return data + head * x.size(-2) * x.size(-1);
  }
  ExactProduct of(int64_t head, int64_t other) const {
    return {.a = at_head(a_.memory, head, a_.memory.const_data_ptr<double>()),
            .b = at_head(b_.memory, other, b_.memory.const_data_ptr<double>()),
            .rows = rows_,
            .inner = inner_,
            .columns = columns_,
            .largest_term = a_.magnitude * b_.magnitude,
            .a_transposed = a_.transposed,
            .b_transposed = b_.transposed};
  }
  void run(const ExactProduct& product) { terms_.note(math_.exact_product(product)); }

  const ModelMath& math_;
  fixed::Operand a_, b_;
  int64_t rows_, inner_, columns_;
  fixed::Terms& terms_;
};

}  // namespace

Sight::Sight(const std::vector<int64_t>& queries, const std::vector<int64_t>& keys, bool causal, c10::Device device,
             at::Tensor hidden_too)
    : hidden(std::move(hidden_too)) {
  std::vector<int64_t> of_queries, of_keys;
  for (const int64_t query : queries) {
    const int64_t seen_keys = causal ? std::upper_bound(keys.begin(), keys.end(), query) - keys.begin() : std::ssize(keys);
    for (int64_t key = std::ssize(of_keys); key < seen_keys; ++key) of_keys.push_back(std::ssize(of_queries));
    of_queries.push_back(seen_keys);
  }
  of_keys.resize(keys.size(), std::ssize(queries));
  const auto queries_end = std::ssize(of_queries);
  of_queries.insert(of_queries.end(), of_keys.begin(), of_keys.end());
  const at::Tensor both = at::tensor(of_queries, at::kLong).to(device);  // the host waits for one copy
  seen = both.narrow(0, 0, queries_end);
  first = both.narrow(0, queries_end, std::ssize(keys));
}

void write_scores(const at::Tensor& q, const at::Tensor& k, const Sight& sight, at::Tensor out, fixed::Terms& terms) {
  const Sizes s(q, k);
  HeadProducts products(operand(q), operand(swapped(k)), terms);
  s.each_head([&](int64_t head, int64_t of_keys) { products.write(out, head, of_keys, sight.seen, s.scale(), kHidden); });
  // The power of such a score is 0, and so are its share and its gradient, which change no sum.
  if (sight.hidden.defined()) out.masked_fill_(sight.hidden, kHidden);
}

at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const Sight& sight, fixed::Terms& terms) {
  at::Tensor result = at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options());
  write_scores(q, k, sight, result, terms);
  return result;
}

at::Tensor largest(const at::Tensor& scores) {
  if (scores.size(-1) > 0) return scores.amax({-1});
  return at::full(scores.sizes().slice(0, 3), kHidden, scores.options());
}

// A query that sees no key has no largest score either, and its powers are 0, too.
void raise(at::Tensor scores, const at::Tensor& most, const Sight& sight, const at::Tensor& divisor) {
  double* data = scores.mutable_data_ptr<double>();
  model_math(device_math(scores))
      .row_powers(data, most.const_data_ptr<double>(), divisor.defined() ? divisor.const_data_ptr<double>() : nullptr,
                  sight.of_rows(), most.numel(), scores.size(-1), data);
}

Mixture::Mixture(const at::Tensor& q)
    : mixed_(at::zeros(q.sizes(), q.options().dtype(at::kLong))),
      total_(at::zeros({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kLong))) {}

Mixture Mixture::part(const Cut& cut) const {
  Mixture result = *this;
  for (at::Tensor* x : {&result.mixed_, &result.total_}) *x = cut(*x);
  return result;
}

void Mixture::add(const at::Tensor& powers, const at::Tensor& mask, const at::Tensor& v, const Sight& sight,
                  fixed::Terms& terms) {
  const Sizes s(mixed_, v);
  fixed::add_row_sums(total_, powers, 1);
  HeadProducts products(operand_within_one(powers, mask), operand(v), terms);
  s.each_head([&](int64_t head, int64_t of_keys) { products.add(mixed_, head, head, of_keys, {}, sight.seen); });
}

at::Tensor Mixture::divisor() const {
  return fixed::from_units(total_);
}

at::Tensor Mixture::output() const {
  return fixed::grid(fixed::from_units(mixed_) / divisor());
}

Gradients::Gradients(const at::Tensor& q, const at::Tensor& dy, const at::Tensor& output)
    : q_(q),
      dy_(dy),
      along_(at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options())),
      of_queries_(at::zeros(q.sizes(), q.options().dtype(at::kLong))) {
  model_math(device_math(q))
      .row_dots(dy.const_data_ptr<double>(), output.const_data_ptr<double>(), along_.numel(), q.size(-1),
                along_.mutable_data_ptr<double>());
}

Gradients Gradients::part(const Cut& cut) const {
  Gradients result = *this;
  for (at::Tensor* x : {&result.q_, &result.dy_, &result.along_, &result.of_queries_}) *x = cut(*x);
  return result;
}

void Gradients::add(const at::Tensor& k, const at::Tensor& v, const at::Tensor& shares, const at::Tensor& mask,
                    const Sight& sight, at::Tensor of_keys, at::Tensor of_values, fixed::Terms& terms, at::Tensor room) {
  const Sizes s(q_, k);
  // First the gradient of what scores() gave, before its scale; then that of the softmax.
  const at::Tensor gradient = room.defined() ? room : at::empty(shares.sizes(), shares.options());
  const fixed::Operand dy = operand(dy_);
  HeadProducts above(dy, operand(swapped(v)), terms);
  s.each_head(
      [&](int64_t head, int64_t key_head) { above.write(gradient, head, key_head, sight.seen, /*scale=*/1, /*unseen=*/0); });
  double* data = gradient.mutable_data_ptr<double>();
  model_math(device_math(gradient))
      .row_slopes(data, mask.defined() ? mask.const_data_ptr<double>() : nullptr, along_.const_data_ptr<double>(),
                  shares.const_data_ptr<double>(), s.scale(), sight.of_rows(), along_.numel(), s.keys, data);
  const fixed::Operand slopes = operand(gradient), kept_shares = operand_within_one(shares, mask);
  HeadProducts for_queries(slopes, operand(k), terms), for_keys(slopes.turned(), operand(q_), terms),
      for_values(kept_shares.turned(), dy, terms);
  s.each_head([&](int64_t head, int64_t key_head) {
    for_queries.add(of_queries_, head, head, key_head, {}, sight.seen);
    for_keys.add(of_keys, key_head, head, head, sight.first, {});
    for_values.add(of_values, key_head, head, head, sight.first, {});
  });
}

}  // namespace shardproof::canonical_blocks
