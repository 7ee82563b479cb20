#include "golden/canonical_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "golden/curves.h"

namespace golden::exact {
namespace {

// One head of queries, and the one of keys that serves it.
struct Head {
  const Attention& a;
  int64_t index, width, first, key_first;  // columns
  Head(const Attention& attention, int64_t head)
      : a(attention),
        index(head),
        width(a.q.columns / a.heads),
        first(head * width),
        key_first(head / (a.heads / a.kv_heads) * width) {}
  double scale() const { return 1 / std::sqrt(static_cast<double>(width)); }
  double mask(int64_t i, int64_t j) const {
    return a.mask.empty() ? 1 : a.mask[static_cast<size_t>((index * a.q.rows + i) * a.q.rows + j)];
  }

  bool sees(int64_t i, int64_t j) const { return a.hidden.empty() || !a.hidden[static_cast<size_t>(i * a.q.rows + j)]; }

  // The powers of the keys up to query i, over the largest one that it sees; 0 of those that it does not see. These have to be
  // in range as well, since whether a run goes on must not depend on which pairs a rank multiplies.
  std::vector<double> powers(int64_t i) const {
    std::vector<double> scores;
    double most = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j <= i; ++j) {
      Sum dot;
      for (int64_t d = 0; d < width; ++d) dot.add_product(a.q.at(i, first + d), a.k.at(j, key_first + d));
      scores.push_back(dot.value() * scale());
      if (sees(i, j)) most = std::max(most, scores.back());
    }
    for (int64_t j = 0; j <= i; ++j) {
      double& score = scores[static_cast<size_t>(j)];
      score = sees(i, j) || std::isnan(score) ? exp(score - most) : 0;
    }
    return scores;
  }
};

double total(const std::vector<double>& terms) {
  Sum sum;
  for (const double term : terms) sum.add(term);
  return sum.value();
}

void attend(const Head& head, Matrix& output) {
  for (int64_t i = 0; i < output.rows; ++i) {
    const std::vector<double> powers = head.powers(i);
    const double divisor = total(powers);
    for (int64_t d = 0; d < head.width; ++d) {
      Sum mixed;
      for (int64_t j = 0; j <= i; ++j)
        mixed.add_product(head.mask(i, j) * powers[static_cast<size_t>(j)], head.a.v.at(j, head.key_first + d));
      output.at(i, head.first + d) = rounded(mixed.value() / divisor);
    }
  }
}

// Of a matrix of gradients.
class Sums {
 public:
  explicit Sums(const Matrix& like) : rows_(like.rows), columns_(like.columns), sums_(like.values.size()) {}
  Sum& at(int64_t i, int64_t j) { return sums_[static_cast<size_t>(i * columns_ + j)]; }
  Matrix values() const {
    Matrix result(rows_, columns_);
    for (size_t i = 0; i < sums_.size(); ++i) result.values[i] = sums_[i].value();
    return result;
  }

 private:
  int64_t rows_, columns_;
  std::vector<Sum> sums_;
};

void attend_backward(const Head& head, const Matrix& output, const Matrix& dy, Sums& q, Sums& k, Sums& v) {
  for (int64_t i = 0; i < output.rows; ++i) {
    const std::vector<double> powers = head.powers(i);
    const double divisor = total(powers);
    double along = 0;
    for (int64_t d = 0; d < head.width; ++d) along += dy.at(i, head.first + d) * output.at(i, head.first + d);
    for (int64_t j = 0; j <= i; ++j) {
      const double share = powers[static_cast<size_t>(j)] / divisor, mask = head.mask(i, j);
      Sum dot;
      for (int64_t d = 0; d < head.width; ++d) dot.add_product(dy.at(i, head.first + d), head.a.v.at(j, head.key_first + d));
      const double score = share * (mask * dot.value() - along) * head.scale();
      for (int64_t d = 0; d < head.width; ++d) {
        q.at(i, head.first + d).add_product(score, head.a.k.at(j, head.key_first + d));
        k.at(j, head.key_first + d).add_product(score, head.a.q.at(i, head.first + d));
        v.at(j, head.key_first + d).add_product(share * mask, dy.at(i, head.first + d));
      }
    }
  }
}

}  // namespace

Matrix attention(const Attention& a) {
  Matrix output(a.q.rows, a.q.columns);
  for (int64_t h = 0; h < a.heads; ++h) attend(Head(a, h), output);
  return output;
}

AttentionGradients attention_backward(const Attention& a, const Matrix& dy) {
  const Matrix output = attention(a);
  Sums q(a.q), k(a.k), v(a.v);
  for (int64_t h = 0; h < a.heads; ++h) attend_backward(Head(a, h), output, dy, q, k, v);
  return {q.values(), k.values(), v.values()};
}

}  // namespace golden::exact
