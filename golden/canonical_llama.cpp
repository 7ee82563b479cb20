#include <fmt/format.h>

#include <cmath>

#include "golden/canonical_experts.h"
#include "golden/canonical_models.h"
#include "golden/canonical_store.h"
#include "golden/experts.h"
#include "golden/rope.h"
#include "golden/sight.h"

namespace golden {
namespace {

using namespace exact;

// Element i of a head turns with element i + width / 2, forwards or back.
Matrix turned(const Matrix& x, const Llama& llama, int64_t length, bool back) {
  Matrix y(x.rows, x.columns);
  const int64_t width = llama.head(), half = width / 2;
  for (int64_t row = 0; row < x.rows; ++row)
    for (int64_t first = 0; first < x.columns; first += width)
      for (int64_t i = 0; i < half; ++i) {
        const double power = std::pow(llama.theta, static_cast<double>(2 * i) / static_cast<double>(width));
        const auto position = static_cast<double>(row % length);
        const double angle = llama.rope_factor == 1 ? position / power : position * slowed(1 / power, llama);
        const double cosine = std::cos(angle), sine = back ? -std::sin(angle) : std::sin(angle);
        const double a = x.at(row, first + i), b = x.at(row, first + half + i);
        y.at(row, first + i) = a * cosine - b * sine;
        y.at(row, first + half + i) = b * cosine + a * sine;
      }
  return y;
}

// The same values, in rows of `columns`.
Matrix in_rows_of(Matrix x, int64_t columns) {
  x.rows = x.rows * x.columns / columns;
  x.columns = columns;
  return x;
}

class Layer {
 public:
  Layer(const Llama& llama, Store& store, int64_t index)
      : llama_(llama),
        store_(store),
        name_(fmt::format("model.layers.{}.", index)),
        index_(index),
        width_(llama.head()),
        has_experts_(has_experts(llama, index)),
        mlp_(store, name_ + "mlp."),
        mixture_(llama, store, name_ + "mlp.") {}

  Matrix forward(const Matrix& x, const Tokens& tokens, Dropout& dropout) {
    x_ = x;
    length_ = tokens.length;
    normed_ = store_.rms_norm(name_ + "input_layernorm", x);
    q_ = attention_linear("q_proj", normed_);
    k_ = attention_linear("k_proj", normed_);
    const Matrix q = turned(norm_of_heads("q_norm", q_), llama_, length_, /*back=*/false);
    const Matrix k = turned(norm_of_heads("k_norm", k_), llama_, length_, /*back=*/false);
    attention_ = BatchAttention(tokens, {q, k, attention_linear("v_proj", normed_), llama_.heads, llama_.kv_heads,
                                         dropout.mask(tokens.samples * llama_.heads * length_ * length_), hidden_keys(tokens)});
    mixed_ = attention_.forward();
    middle_ = x + attention_linear("o_proj", mixed_);
    const Matrix normed = store_.rms_norm(name_ + "post_attention_layernorm", middle_);
    return middle_ + (has_experts_ ? mixture_.forward(normed, length_) : mlp_.forward(normed));
  }

  Matrix backward(const Matrix& dy) {
    const Matrix d_normed = has_experts_ ? mixture_.backward(dy) : mlp_.backward(dy);
    const Matrix d_middle = dy + store_.rms_norm_backward(name_ + "post_attention_layernorm", middle_, d_normed);
    const AttentionGradients g = attention_.backward(attention_backward("o_proj", mixed_, d_middle));
    const Matrix d_q = norm_of_heads_backward("q_norm", q_, turned(g.q, llama_, length_, /*back=*/true));
    const Matrix d_k = norm_of_heads_backward("k_norm", k_, turned(g.k, llama_, length_, /*back=*/true));
    const Matrix of_q = attention_backward("q_proj", normed_, d_q);
    const Matrix of_k = attention_backward("k_proj", normed_, d_k);
    const Matrix of_v = attention_backward("v_proj", normed_, g.v);
    return d_middle + store_.rms_norm_backward(name_ + "input_layernorm", x_, of_q + (of_k + of_v));
  }

 private:
  // Of each sample; empty where a query sees all keys before it.
  std::vector<char> hidden_keys(const Tokens& tokens) const {
    std::vector<char> hidden;
    if (sees_all_before(llama_, index_, length_)) return hidden;
    for (int64_t s = 0; s < tokens.samples; ++s)
      for (int64_t i = 0; i < length_; ++i)
        for (int64_t j = 0; j < length_; ++j) hidden.push_back(!sees(llama_, index_, tokens.words.data() + s * length_, i, j));
    return hidden;
  }

  Matrix attention_linear(const char* name, const Matrix& x) { return store_.linear(name_ + "self_attn." + name, x); }
  Matrix attention_backward(const char* name, const Matrix& x, const Matrix& dy) {
    return store_.linear_backward(name_ + "self_attn." + name, x, dy);
  }
  Matrix norm_of_heads(const char* name, const Matrix& x) const {
    if (!llama_.qk_norm) return x;
    return in_rows_of(store_.rms_norm(name_ + "self_attn." + name, in_rows_of(x, width_)), x.columns);
  }
  Matrix norm_of_heads_backward(const char* name, const Matrix& x, const Matrix& dy) {
    if (!llama_.qk_norm) return dy;
    const Matrix dx = store_.rms_norm_backward(name_ + "self_attn." + name, in_rows_of(x, width_), in_rows_of(dy, width_));
    return in_rows_of(dx, x.columns);
  }

  const Llama& llama_;
  Store& store_;
  std::string name_;
  int64_t index_, width_, length_ = 0;
  bool has_experts_;
  GatedMlp mlp_;
  Mixture mixture_;
  Matrix x_, normed_, q_, k_, mixed_, middle_;
  BatchAttention attention_;
};

}  // namespace

double canonical_llama_pass(const Llama& llama, Store& store, const Microbatch& data) {
  const Tokens tokens(data);
  Dropout& dropout = store.dropout;
  const std::string embedding = "model.embed_tokens.weight";
  Matrix x(std::ssize(tokens.words), llama.hidden);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < llama.hidden; ++j)
      x.at(i, j) = rounded(store[embedding].at(tokens.words[static_cast<size_t>(i)], j));
  std::vector<Layer> layers;
  for (int64_t l = 0; l < llama.layers; ++l) x = layers.emplace_back(llama, store, l).forward(x, tokens, dropout);
  const Matrix normed = store.rms_norm("model.norm", x);
  double loss = 0;
  Matrix d = store.rms_norm_backward("model.norm", x,
                                     head_pass(llama.tied ? embedding : "", store, normed, tokens, data.weight, loss));
  for (int64_t l = llama.layers; l-- > 0;) d = layers[static_cast<size_t>(l)].backward(d);
  store.embedding_backward(embedding, tokens.words, d);
  return loss;
}

}  // namespace golden
