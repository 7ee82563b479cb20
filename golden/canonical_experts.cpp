#include "golden/canonical_experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "golden/curves.h"
#include "golden/experts.h"

namespace golden::exact {
namespace {

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

std::vector<double> softmax(const std::vector<double>& x) {
  const double most = *std::ranges::max_element(x);
  std::vector<double> raised;
  for (const double value : x) raised.push_back(exp(value - most));
  const double divisor = sum(raised);
  for (double& value : raised) value /= divisor;
  return raised;
}

double along(const std::vector<double>& dy, const std::vector<double>& shares) {
  return std::inner_product(dy.begin(), dy.end(), shares.begin(), 0.0);
}

std::vector<double> softmax_backward(const std::vector<double>& shares, std::vector<double> dy) {
  const double mean = along(dy, shares);
  for (size_t i = 0; i < dy.size(); ++i) dy[i] = (dy[i] - mean) * shares[i];
  return dy;
}

double sigmoid(double x) {
  return softmax({x, 0})[0];
}

double sigmoid_backward(double x, double dy) {
  return softmax_backward(softmax({x, 0}), {dy, 0})[0];
}

double log_of_sum(const std::vector<double>& x) {
  const double most = *std::ranges::max_element(x);
  double divisor = 0;
  for (const double value : x) divisor += exp(value - most);
  return log(divisor) + most;
}

// Each over their sum.
struct Shares {
  double divisor;
  std::vector<double> values;
  explicit Shares(const std::vector<double>& x) : divisor(sum(x) + 1e-20), values(x) {
    for (double& value : values) value /= divisor;
  }
};

std::vector<double> sigmoids(std::vector<double> x) {
  std::ranges::transform(x, x.begin(), sigmoid);
  return x;
}

// Places by falling score; of equal ones the first place comes first.
std::vector<int64_t> by_score(const std::vector<double>& scores) {
  std::vector<int64_t> places(scores.size());
  std::iota(places.begin(), places.end(), 0);
  std::ranges::stable_sort(places, [&](int64_t a, int64_t b) { return scores[size_t(a)] > scores[size_t(b)]; });
  return places;
}

std::vector<double> at_places(const std::vector<double>& values, const std::vector<int64_t>& places) {
  std::vector<double> result;
  for (const int64_t place : places) result.push_back(values[size_t(place)]);
  return result;
}

Matrix rows_of(const Matrix& x, int64_t begin, int64_t count) {
  Matrix rows(count, x.columns);
  std::copy_n(x.values.begin() + begin * x.columns, rows.values.size(), rows.values.begin());
  return rows;
}

void put_rows(Matrix& into, int64_t begin, const Matrix& rows) {
  std::ranges::copy(rows.values, into.values.begin() + begin * into.columns);
}

Matrix columns_of(const Matrix& x, int64_t begin, int64_t count) {
  Matrix result(x.rows, count);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < count; ++j) result.at(i, j) = x.at(i, begin + j);
  return result;
}

Matrix beside(const Matrix& a, const Matrix& b) {
  Matrix result(a.rows, a.columns + b.columns);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.columns; ++j) result.at(i, j) = a.at(i, j);
    for (int64_t j = 0; j < b.columns; ++j) result.at(i, a.columns + j) = b.at(i, j);
  }
  return result;
}

}  // namespace

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix result = a;
  for (size_t i = 0; i < result.values.size(); ++i) result.values[i] *= b.values[i];
  return result;
}

Matrix GatedMlp::forward(const Matrix& x) {
  x_ = x;
  gate_ = store_.linear(name_ + "gate_proj", x);
  up_ = store_.linear(name_ + "up_proj", x);
  return store_.linear(name_ + "down_proj", product(curve(gate_, Curve::silu), up_));
}

Matrix GatedMlp::backward(const Matrix& dy) {
  const Matrix gated = curve(gate_, Curve::silu);
  const Matrix d_product = store_.linear_backward(name_ + "down_proj", product(gated, up_), dy);
  const Matrix d_gate = curve_backward(gate_, product(d_product, up_), Curve::silu);
  return store_.linear_backward(name_ + "gate_proj", x_, d_gate) +
         store_.linear_backward(name_ + "up_proj", x_, product(d_product, gated));
}

Mixture::Mixture(const Llama& llama, Store& store, const std::string& prefix)
    : llama_(llama), store_(store), name_(prefix), shared_(store, prefix + "shared_experts.") {}

std::vector<int64_t> Mixture::chosen(std::vector<double> scores) const {
  const int64_t groups = llama_.expert_groups, each = llama_.experts / groups;
  if (llama_.has_bias())
    for (size_t e = 0; e < scores.size(); ++e) scores[e] += store_[name_ + "gate.e_score_correction_bias"].values[e];
  if (groups > 1) {
    std::vector<double> strength;
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<double> own(scores.begin() + g * each, scores.begin() + (g + 1) * each);
      std::ranges::sort(own, std::greater());
      strength.push_back(own[0] + (each > 1 ? own[1] : 0));
    }
    const std::vector<int64_t> order = by_score(strength);
    for (size_t g = size_t(llama_.groups_per_token); g < order.size(); ++g)
      std::fill_n(scores.begin() + order[g] * each, each, -INFINITY);
  }
  std::vector<int64_t> places = by_score(scores);
  places.resize(size_t(llama_.experts_per_token));
  return places;
}

Mixture::Route Mixture::route(std::vector<double> logits) const {
  for (double& value : logits) value = rounded(value);
  using enum Llama::Score;
  Route route;
  std::vector<double> scores = logits;
  if (llama_.score == softmax) scores = exact::softmax(logits);
  if (llama_.score == sigmoid) std::ranges::transform(logits, scores.begin(), exact::sigmoid);
  route.experts = chosen(scores);
  route.logits = logits;
  route.scores = scores;
  route.weights = at_places(scores, route.experts);
  if (llama_.score == chosen_softmax) {
    route.weights = exact::softmax(route.weights);
  } else if (llama_.normalized) {
    route.divisor = sum(route.weights) + (llama_.score == sigmoid ? 1e-20 : 0);
    for (double& weight : route.weights) weight /= route.divisor;
  }
  route.unscaled = route.weights;
  if (llama_.expert_scale != 1)
    for (double& weight : route.weights) weight *= llama_.expert_scale;
  return route;
}

// The gradient of the logits, rounded.
std::vector<double> Mixture::route_backward(const Route& route, std::vector<double> d) const {
  using enum Llama::Score;
  if (llama_.expert_scale != 1)
    for (double& value : d) value *= llama_.expert_scale;
  if (llama_.score == chosen_softmax) {
    d = softmax_backward(route.unscaled, d);
  } else if (llama_.normalized) {
    const double mean = along(d, route.unscaled);
    for (double& value : d) value = (value - mean) / route.divisor;
  }
  std::vector<double> whole(route.logits.size(), 0);
  for (size_t j = 0; j < d.size(); ++j) whole[size_t(route.experts[j])] = d[j];
  if (llama_.score == softmax) whole = softmax_backward(route.scores, whole);
  if (llama_.score == sigmoid)
    for (size_t e = 0; e < whole.size(); ++e) whole[e] = sigmoid_backward(route.logits[e], whole[e]);
  for (double& value : whole) value = rounded(value);
  return whole;
}

void Mixture::add_losses(int64_t length) {
  const auto tokens = static_cast<int64_t>(routes_.size());
  const std::string name = name_ + "gate.e_score_correction_bias";
  Matrix counts(tokens / length, llama_.experts), all(1, llama_.experts);
  for (int64_t t = 0; t < tokens; ++t)
    for (const int64_t e : routes_[size_t(t)].experts) counts.at(t / length, e) += 1, all.at(0, e) += 1;
  store_.routers.counts[name] = at::tensor(all.values, at::kDouble);
  if (!store_.routers.training) return;
  const auto each = static_cast<double>(llama_.experts_per_token);
  const double factor = llama_.expert_balance * static_cast<double>(llama_.experts) / each;
  Sum balance, z;
  for (int64_t t = 0; t < tokens; ++t) {
    const std::vector<double>& logits = routes_[size_t(t)].logits;
    std::vector<double> busy = store_.routers.of_step ? matrix(store_.routers.of_step->at(name)).values
                                                      : rows_of(counts, t / length, 1).values;
    const double seen = sum(busy) / each;
    for (double& value : busy) value = value / seen * factor;
    const bool sigmoid = llama_.score == Llama::Score::sigmoid;
    balance.add(along(busy, sigmoid ? Shares(sigmoids(logits)).values : exact::softmax(logits)));
    z.add(log_of_sum(logits) * log_of_sum(logits) * llama_.expert_z);
    busy_.push_back(busy);
  }
  if (llama_.expert_balance != 0) store_.routers.loss += balance.value();
  if (llama_.expert_z != 0) store_.routers.loss += z.value();
}

// The gradient of the token's logits, rounded.
std::vector<double> Mixture::losses_backward(size_t token) const {
  const std::vector<double>& logits = routes_[token].logits;
  std::vector<double> d(logits.size(), 0);
  if (!store_.routers.training) return d;
  if (llama_.expert_balance != 0) {
    for (size_t e = 0; e < d.size(); ++e) d[e] = store_.routers.weight * busy_[token][e];
    if (llama_.score == Llama::Score::sigmoid) {
      const Shares shares(sigmoids(logits));
      const double mean = along(d, shares.values);
      for (size_t e = 0; e < d.size(); ++e) d[e] = sigmoid_backward(logits[e], (d[e] - mean) / shares.divisor);
    } else {
      d = softmax_backward(exact::softmax(logits), d);
    }
  }
  if (llama_.expert_z != 0) {
    const double d_log = store_.routers.weight * llama_.expert_z * (2 * log_of_sum(logits));
    const std::vector<double> shares = exact::softmax(logits);
    for (size_t e = 0; e < d.size(); ++e) d[e] += shares[e] * d_log;
  }
  for (double& value : d) value = rounded(value);
  return d;
}

std::vector<bool> Mixture::dropped(int64_t length) const {
  std::vector<int64_t> experts;
  std::vector<double> weights;
  for (const Route& route : routes_) {
    experts.insert(experts.end(), route.experts.begin(), route.experts.end());
    weights.insert(weights.end(), route.weights.begin(), route.weights.end());
  }
  return dropped_choices(llama_, length, experts, weights);
}

// What is dropped is no expert's row. Its output is zero, and therefore the gradient of its weight.
Matrix Mixture::forward(const Matrix& x, int64_t length) {
  x_ = x;
  const int64_t each = llama_.experts_per_token, width = llama_.expert_width;
  const Matrix logits = store_.linear(name_ + "gate", x);
  for (int64_t t = 0; t < x.rows; ++t) routes_.push_back(route(rows_of(logits, t, 1).values));
  add_losses(length);
  const std::vector<bool> dropped = this->dropped(length);
  outputs_ = Matrix(x.rows * each, x.columns);
  for (int64_t e = 0; e < llama_.experts; ++e) {
    Expert own;
    for (int64_t t = 0; t < x.rows; ++t)
      for (int64_t j = 0; j < each; ++j)
        if (routes_[size_t(t)].experts[size_t(j)] == e && !dropped[size_t(t * each + j)]) own.rows.push_back(t * each + j);
    own.x = Matrix(std::ssize(own.rows), x.columns);
    for (int64_t i = 0; i < own.x.rows; ++i) put_rows(own.x, i, rows_of(x, own.rows[size_t(i)] / each, 1));
    const Matrix both = linear(own.x, rows_of(store_[name_ + "experts.gate_up_proj"], e * 2 * width, 2 * width), {});
    own.gate = columns_of(both, 0, width);
    own.up = columns_of(both, width, width);
    const Matrix y = linear(product(curve(own.gate, Curve::silu), own.up),
                            rows_of(store_[name_ + "experts.down_proj"], e * x.columns, x.columns), {});
    for (int64_t i = 0; i < y.rows; ++i) put_rows(outputs_, own.rows[size_t(i)], rows_of(y, i, 1));
    experts_.push_back(std::move(own));
  }
  Matrix y(x.rows, x.columns);
  for (int64_t t = 0; t < x.rows; ++t)
    for (int64_t j = 0; j < each; ++j)
      for (int64_t h = 0; h < x.columns; ++h)
        y.at(t, h) += rounded(routes_[size_t(t)].weights[size_t(j)] * outputs_.at(t * each + j, h));
  return llama_.shared_width > 0 ? y + shared_.forward(x) : y;
}

Matrix Mixture::backward(const Matrix& dy) {
  const int64_t each = llama_.experts_per_token, width = llama_.expert_width, hidden = dy.columns;
  Matrix d_logits(dy.rows, llama_.experts), d_outputs(outputs_.rows, hidden), dx(dy.rows, hidden);
  for (int64_t t = 0; t < dy.rows; ++t) {
    std::vector<double> d_weights(static_cast<size_t>(each), 0);
    for (int64_t j = 0; j < each; ++j)
      for (int64_t h = 0; h < hidden; ++h) {
        d_outputs.at(t * each + j, h) = rounded(dy.at(t, h) * routes_[size_t(t)].weights[size_t(j)]);
        d_weights[size_t(j)] += rounded(dy.at(t, h) * outputs_.at(t * each + j, h));
      }
    const std::vector<double> of_route = route_backward(routes_[size_t(t)], d_weights), of_losses = losses_backward(size_t(t));
    std::ranges::transform(of_route, of_losses, d_logits.values.begin() + t * llama_.experts, std::plus());
  }
  const Matrix &gate_up = store_[name_ + "experts.gate_up_proj"], &down = store_[name_ + "experts.down_proj"];
  Matrix d_gate_up(gate_up.rows, gate_up.columns), d_down(down.rows, down.columns);
  for (int64_t e = 0; e < llama_.experts; ++e) {
    const Expert& own = experts_[size_t(e)];
    Matrix d_y(own.x.rows, hidden);
    for (int64_t i = 0; i < d_y.rows; ++i) put_rows(d_y, i, rows_of(d_outputs, own.rows[size_t(i)], 1));
    const Matrix gated = curve(own.gate, Curve::silu);
    const LinearGradients of_down = linear_backward(product(gated, own.up), rows_of(down, e * hidden, hidden), d_y);
    const Matrix d_both = beside(curve_backward(own.gate, product(of_down.x, own.up), Curve::silu), product(of_down.x, gated));
    const LinearGradients of_both = linear_backward(own.x, rows_of(gate_up, e * 2 * width, 2 * width), d_both);
    put_rows(d_down, e * hidden, of_down.weight);
    put_rows(d_gate_up, e * 2 * width, of_both.weight);
    for (int64_t i = 0; i < own.x.rows; ++i)
      for (int64_t h = 0; h < hidden; ++h) dx.at(own.rows[size_t(i)] / each, h) += of_both.x.at(i, h);
  }
  store_.add(name_ + "experts.gate_up_proj", d_gate_up);
  store_.add(name_ + "experts.down_proj", d_down);
  dx = dx + store_.linear_backward(name_ + "gate", x_, d_logits);
  return llama_.shared_width > 0 ? dx + shared_.backward(dy) : dx;
}

}  // namespace golden::exact
