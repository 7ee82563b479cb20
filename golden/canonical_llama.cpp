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

// Of each head the columns from `begin` on.
Matrix part(const Matrix& x, int64_t heads, int64_t begin, int64_t count) {
  Matrix y(x.rows, heads * count);
  for (int64_t row = 0; row < x.rows; ++row)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < count; ++i) y.at(row, h * count + i) = x.at(row, h * (x.columns / heads) + begin + i);
  return y;
}

// In each head the columns of b behind those of a.
Matrix joined(const Matrix& a, const Matrix& b, int64_t heads) {
  Matrix y(a.rows, a.columns + b.columns);
  const int64_t first = a.columns / heads, second = b.columns / heads;
  for (int64_t row = 0; row < y.rows; ++row)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < first + second; ++i)
        y.at(row, h * (first + second) + i) = i < first ? a.at(row, h * first + i) : b.at(row, h * second + i - first);
  return y;
}

Matrix scaled(Matrix m, double factor) {
  for (double& value : m.values) value *= factor;
  return m;
}

// Heads of turning features. Element i turns with element i + width / 2, forwards or back; interleaved these were 2i and 2i
// + 1.
Matrix turned(const Matrix& x, const Llama& llama, int64_t length, bool back) {
  Matrix y(x.rows, x.columns);
  const int64_t width = llama.turning(), half = width / 2;
  for (int64_t row = 0; row < x.rows; ++row)
    for (int64_t first = 0; first < x.columns; first += width)
      for (int64_t i = 0; i < half; ++i) {
        const int64_t pair[] = {first + (llama.interleaved ? 2 * i : i), first + (llama.interleaved ? 2 * i + 1 : half + i)};
        const int64_t plain[] = {first + i, first + half + i};
        const auto &from = back ? plain : pair, &to = back ? pair : plain;
        const double power = std::pow(llama.theta, static_cast<double>(2 * i) / static_cast<double>(width));
        const auto position = static_cast<double>(row % length);
        const double angle = llama.rope_factor == 1 ? position / power : position * slowed(1 / power, i, llama);
        const double cosine = std::cos(angle), sine = back ? -std::sin(angle) : std::sin(angle);
        const double a = x.at(row, from[0]), b = x.at(row, from[1]);
        y.at(row, to[0]) = a * cosine - b * sine;
        y.at(row, to[1]) = b * cosine + a * sine;
      }
  return y;
}

// Of heads of which the first features turn.
Matrix first_turned(const Matrix& x, const Llama& llama, int64_t heads, int64_t length, bool back) {
  const int64_t turning = llama.turning(), still = llama.head() - turning;
  return joined(turned(part(x, heads, 0, turning), llama, length, back), part(x, heads, turning, still), heads);
}

// The same values, in rows of `columns`.
Matrix in_rows_of(Matrix x, int64_t columns) {
  x.rows = x.rows * x.columns / columns;
  x.columns = columns;
  return x;
}

// Queries, keys and values of latent attention, all `head` wide, out of a layer's x.
class Latents {
 public:
  Latents(const Llama& llama, Store& store, std::string name) : llama_(llama), store_(store), name_(std::move(name)) {}

  AttentionGradients forward(const Matrix& x, int64_t length) {
    x_ = x;
    length_ = length;
    if (llama_.query_rank > 0) {
      query_ = store_.linear(name_ + "q_a_proj", x);
      normed_query_ = store_.rms_norm(name_ + "q_a_layernorm", query_, kLatentEps);
    }
    const Matrix q =
        llama_.query_rank > 0 ? store_.linear(name_ + "q_b_proj", normed_query_) : store_.linear(name_ + "q_proj", x);
    const Matrix compressed = store_.linear(name_ + "kv_a_proj_with_mqa", x);
    latent_ = part(compressed, 1, 0, llama_.kv_rank);
    normed_latent_ = store_.rms_norm(name_ + "kv_a_layernorm", latent_, kLatentEps);
    const Matrix kv = store_.linear(name_ + "kv_b_proj", normed_latent_);
    Matrix shared(x.rows, heads_ * turning_);
    for (int64_t row = 0; row < x.rows; ++row)
      for (int64_t i = 0; i < shared.columns; ++i)
        shared.at(row, i) = rounded(compressed.at(row, llama_.kv_rank + i % turning_));
    const Matrix turned_q = turned(part(q, heads_, still_, turning_), llama_, length, /*back=*/false);
    return {scaled(joined(part(q, heads_, 0, still_), turned_q, heads_), score_factor(llama_)),
            joined(part(kv, heads_, 0, still_), turned(shared, llama_, length, /*back=*/false), heads_),
            joined(part(kv, heads_, still_, value_), Matrix(x.rows, heads_ * (llama_.head() - value_)), heads_)};
  }

  // The gradient of x. That of the features that keys share is rounded in each head before heads are summed.
  Matrix backward(const AttentionGradients& g) {
    const Matrix d_q = scaled(g.q, score_factor(llama_));
    const Matrix d_turned = turned(part(d_q, heads_, still_, turning_), llama_, length_, /*back=*/true);
    const Matrix of_heads = turned(part(g.k, heads_, still_, turning_), llama_, length_, /*back=*/true);
    Matrix d_shared(x_.rows, turning_);
    for (int64_t row = 0; row < x_.rows; ++row)
      for (int64_t i = 0; i < of_heads.columns; ++i) d_shared.at(row, i % turning_) += rounded(of_heads.at(row, i));
    const Matrix d_kv = joined(part(g.k, heads_, 0, still_), part(g.v, heads_, 0, value_), heads_);
    const Matrix d_normed = store_.linear_backward(name_ + "kv_b_proj", normed_latent_, d_kv);
    const Matrix d_latent = store_.rms_norm_backward(name_ + "kv_a_layernorm", latent_, d_normed, kLatentEps);
    const Matrix of_kv = store_.linear_backward(name_ + "kv_a_proj_with_mqa", x_, joined(d_latent, d_shared, 1));
    const Matrix d_queries = joined(part(d_q, heads_, 0, still_), d_turned, heads_);
    if (llama_.query_rank == 0) return store_.linear_backward(name_ + "q_proj", x_, d_queries) + of_kv;
    const Matrix d_normed_query = store_.linear_backward(name_ + "q_b_proj", normed_query_, d_queries);
    const Matrix d_query = store_.rms_norm_backward(name_ + "q_a_layernorm", query_, d_normed_query, kLatentEps);
    return store_.linear_backward(name_ + "q_a_proj", x_, d_query) + of_kv;
  }

 private:
  const Llama& llama_;
  Store& store_;
  std::string name_;
  int64_t heads_ = llama_.heads, turning_ = llama_.turning(), still_ = llama_.head() - turning_, value_ = llama_.values();
  int64_t length_ = 0;
  Matrix x_, query_, normed_query_, latent_, normed_latent_;
};

class Layer {
 public:
  Layer(const Llama& llama, Store& store, int64_t index)
      : llama_(llama),
        store_(store),
        name_(fmt::format("model.layers.{}.", index)),
        index_(index),
        width_(llama.head()),
        has_experts_(has_experts(llama, index)),
        latents_(llama, store, name_ + "self_attn."),
        mlp_(store, name_ + "mlp."),
        mixture_(llama, store, name_ + "mlp.") {}

  Matrix forward(const Matrix& x, const Tokens& tokens, Dropout& dropout) {
    x_ = x;
    length_ = tokens.length;
    normed_ = store_.rms_norm(name_ + "input_layernorm", x);
    const AttentionGradients own = llama_.kv_rank > 0 ? latents_.forward(normed_, length_) : projected();
    attention_ = BatchAttention(tokens, {own.q, own.k, own.v, llama_.heads, llama_.kv_heads,
                                         dropout.mask(tokens.samples * llama_.heads * length_ * length_), hidden_keys(tokens)});
    mixed_ = part(attention_.forward(), llama_.heads, 0, llama_.values());
    middle_ = x + attention_linear("o_proj", mixed_);
    const Matrix normed = store_.rms_norm(name_ + "post_attention_layernorm", middle_);
    return middle_ + (has_experts_ ? mixture_.forward(normed, length_) : mlp_.forward(normed));
  }

  Matrix backward(const Matrix& dy) {
    const Matrix d_normed = has_experts_ ? mixture_.backward(dy) : mlp_.backward(dy);
    const Matrix d_middle = dy + store_.rms_norm_backward(name_ + "post_attention_layernorm", middle_, d_normed);
    const Matrix d_mixed = attention_backward("o_proj", mixed_, d_middle);
    const Matrix unused(d_mixed.rows, llama_.heads * (width_ - llama_.values()));
    const AttentionGradients g = attention_.backward(joined(d_mixed, unused, llama_.heads));
    const Matrix d_own = llama_.kv_rank > 0 ? latents_.backward(g) : projected_backward(g);
    return d_middle + store_.rms_norm_backward(name_ + "input_layernorm", x_, d_own);
  }

 private:
  // Queries, keys and values of plain attention.
  AttentionGradients projected() {
    q_ = attention_linear("q_proj", normed_);
    k_ = attention_linear("k_proj", normed_);
    return {first_turned(norm_of_heads("q_norm", q_), llama_, llama_.heads, length_, /*back=*/false),
            first_turned(norm_of_heads("k_norm", k_), llama_, llama_.kv_heads, length_, /*back=*/false),
            attention_linear("v_proj", normed_)};
  }

  Matrix projected_backward(const AttentionGradients& g) {
    const Matrix d_q = first_turned(g.q, llama_, llama_.heads, length_, /*back=*/true);
    const Matrix d_k = first_turned(g.k, llama_, llama_.kv_heads, length_, /*back=*/true);
    const Matrix of_q = attention_backward("q_proj", normed_, norm_of_heads_backward("q_norm", q_, d_q));
    const Matrix of_k = attention_backward("k_proj", normed_, norm_of_heads_backward("k_norm", k_, d_k));
    return of_q + (of_k + attention_backward("v_proj", normed_, g.v));
  }

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
  Latents latents_;
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
