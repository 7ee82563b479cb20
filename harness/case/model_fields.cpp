#include "harness/case/model_fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "shardproof/base/check.h"

namespace harness {
namespace {

using golden::Model;
using Kind = Model::Kind;
using Fields = std::vector<ModelField>;

// A number of units, where the unit is another size times a factor, or 1: a hidden size is a multiple of the heads.
template <class M>
struct Size {
  const char* key;
  int64_t M::*member;
  int64_t M::*unit = nullptr;
  int64_t factor = 1;
  bool may_be_left_out = false;

  int64_t unit_in(const M& m) const { return factor * (unit ? m.*unit : 1); }
  int64_t units_in(const M& m) const { return m.*member / unit_in(m); }
};

// The model with another number of units of one size. Sizes that are multiples of it keep their numbers.
template <class M>
M with_units(const M& m, const std::vector<Size<M>>& sizes, const Size<M>& changed, int64_t units) {
  M result = m;
  result.*changed.member = units * changed.unit_in(m);
  for (const Size<M>& size : sizes)
    if (size.unit == changed.member) result = with_units(result, sizes, size, size.units_in(m));
  return result;
}

// Fields of one part of golden::Model.
template <class M>
class Table {
 public:
  explicit Table(M Model::*part) : part_(part) {}

  Table& sizes(const std::vector<Size<M>>& all) {
    for (const Size<M>& size : all)
      add(
          size.key,
          [size](const M& m) {
            return size.may_be_left_out && m.*size.member == M{}.*size.member ? ""
                                                                              : fmt::format("{}={}", size.key, m.*size.member);
          },
          [size](M& m, const Scanner& scanner, const Scanner::Argument& a) { m.*size.member = scanner.integer(a); },
          [size, all](const M& m) {
            std::vector<M> simpler;
            for (const int64_t units : smaller(size.units_in(m), 1)) simpler.push_back(with_units(m, all, size, units));
            return simpler;
          });
    return *this;
  }

  // Left out at its default. `with`: the model with another number, and what follows from it.
  Table& count(const char* key, int64_t M::*member, int64_t least, M (*with)(M, int64_t)) {
    return add(
        key, [=](const M& m) { return m.*member == M{}.*member ? "" : fmt::format("{}={}", key, m.*member); },
        [=](M& m, const Scanner& scanner, const Scanner::Argument& a) { m.*member = scanner.integer(a); },
        [=](const M& m) {
          std::vector<M> simpler;
          for (const int64_t value : smaller(m.*member, least)) simpler.push_back(with(m, value));
          return simpler;
        });
  }

  Table& list(const char* key, std::vector<int64_t> M::*member) {
    return add(
        key, [=](const M& m) { return fmt::format("{}={}", key, fmt::join(m.*member, "-")); },
        [=](M& m, const Scanner& scanner, const Scanner::Argument& a) { m.*member = scanner.integers(a); },
        [=](const M& m) {
          std::vector<M> simpler;
          const size_t count = (m.*member).size();
          for (size_t i = 0; count > 2 && i < count; ++i) {
            simpler.push_back(m);
            (simpler.back().*member).erase((simpler.back().*member).begin() + static_cast<int64_t>(i));
          }
          for (size_t i = 0; i < count; ++i)
            for (const int64_t value : smaller((m.*member)[i], 1)) {
              simpler.push_back(m);
              (simpler.back().*member)[i] = value;
            }
          return simpler;
        });
  }

  Table& flag(const char* key, bool M::*member) {
    return add(
        key,
        [=](const M& m) { return m.*member == M{}.*member ? ""
                                 : m.*member              ? std::string(key)
                                                          : fmt::format("{}=0", key); },
        [=](M& m, const Scanner& scanner, const Scanner::Argument& a) { m.*member = scanner.flag(a); }, reset(member, false));
  }

  Table& number(const char* key, double M::*member) {
    return add(
        key, [=](const M& m) { return m.*member == M{}.*member ? "" : fmt::format("{}={}", key, m.*member); },
        [=](M& m, const Scanner& scanner, const Scanner::Argument& a) { m.*member = scanner.number(a); },
        reset(member, M{}.*member));
  }

  // The enum's values have these names, in their order; the first is the simplest.
  template <class Enum>
  Table& choice(const char* key, Enum M::*member, const std::vector<std::string>& names) {
    return add(
        key,
        [=](const M& m) {
          return m.*member == M{}.*member ? "" : fmt::format("{}={}", key, names[static_cast<size_t>(m.*member)]);
        },
        [=](M& m, const Scanner& scanner, const Scanner::Argument& a) {
          m.*member = static_cast<Enum>(scanner.choice(a, names));
        },
        reset(member, Enum{}));
  }

  Fields fields() const { return fields_; }

 private:
  template <class Text, class Read, class Simpler>
  Table& add(const char* key, Text text, Read read, Simpler simpler) {
    const auto part = part_;
    fields_.push_back({key, [=](const Model& model) -> std::string { return text(model.*part); },
                       [=](Model& model, const Scanner& scanner, const Scanner::Argument& a) { read(model.*part, scanner, a); },
                       [=](const Model& model) {
                         std::vector<Model> models;
                         for (M& m : simpler(model.*part)) {
                           models.push_back(model);
                           models.back().*part = std::move(m);
                         }
                         return models;
                       }});
    return *this;
  }

  template <class T>
  static auto reset(T M::*member, T simplest) {
    return [=](const M& m) {
      std::vector<M> simpler;
      if (m.*member == simplest) return simpler;
      simpler.push_back(m);
      simpler.back().*member = simplest;
      return simpler;
    };
  }

  M Model::*part_;
  Fields fields_;
};

Fields mlp_fields() {
  using golden::Mlp;
  return Table(&Model::mlp)
      .list("widths", &Mlp::widths)
      .choice("act", &Mlp::activation, {"identity", "relu", "tanh", "gelu"})
      .flag("bias", &Mlp::bias)
      .fields();
}

Fields gpt_fields() {
  using golden::Gpt;
  return Table(&Model::gpt)
      .sizes({{"layers", &Gpt::layers},
              {"hidden", &Gpt::hidden, &Gpt::heads},
              {"heads", &Gpt::heads},
              {"vocab", &Gpt::vocab},
              {"positions", &Gpt::positions}})
      .flag("tied", &Gpt::tied)
      .number("dropout", &Gpt::dropout)
      .flag("tanh_gelu", &Gpt::tanh_gelu)
      .fields();
}

// With no more of the others than there are.
golden::Llama fitted(golden::Llama m) {
  if (m.experts % m.expert_groups != 0) m.expert_groups = 1;
  m.groups_per_token = std::min(m.groups_per_token, m.expert_groups);
  m.experts_per_token = std::min(m.experts_per_token, m.experts / m.expert_groups * m.groups_per_token);
  return m;
}

golden::Llama with_experts(golden::Llama m, int64_t experts) {
  m.experts = experts;
  if (experts > 0) return fitted(m);
  const golden::Llama standard;
  expert_fields(m) = expert_fields(standard);
  return m;
}

template <int64_t golden::Llama::*kMember>
golden::Llama with(golden::Llama m, int64_t value) {
  m.*kMember = value;
  return m.experts > 0 ? fitted(m) : m;
}

golden::Llama with_window(golden::Llama m, int64_t window) {
  m.window = window;
  if (window == 0) m.full_layers = 0;
  return m;
}

// Without latents nothing can be said of them.
golden::Llama with_latents(golden::Llama m, int64_t rank) {
  m.kv_rank = rank;
  if (rank > 0) return m;
  m.rotary_size = m.query_rank = m.value_size = 0;
  m.interleaved = m.rope_yarn = false;
  m.rope_mscale = 0;
  return m;
}

Fields llama_fields() {
  return Table(&Model::llama)
      .sizes({{"layers", &golden::Llama::layers},
              {"hidden", &golden::Llama::hidden, &golden::Llama::heads, 2},
              {"heads", &golden::Llama::heads, &golden::Llama::kv_heads},
              {"kv_heads", &golden::Llama::kv_heads},
              {"intermediate", &golden::Llama::intermediate},
              {"vocab", &golden::Llama::vocab},
              {"positions", &golden::Llama::positions}})
      .flag("tied", &golden::Llama::tied)
      .number("dropout", &golden::Llama::dropout)
      .flag("qk_norm", &golden::Llama::qk_norm)
      .flag("qkv_bias", &golden::Llama::qkv_bias)
      .sizes({{"head_size", &golden::Llama::head_size, nullptr, 2, /*may_be_left_out=*/true}})
      .number("theta", &golden::Llama::theta)
      .number("eps", &golden::Llama::eps)
      .number("rope_factor", &golden::Llama::rope_factor)
      .number("rope_low", &golden::Llama::rope_low)
      .number("rope_high", &golden::Llama::rope_high)
      .sizes({{"rope_positions", &golden::Llama::rope_positions, nullptr, 1, /*may_be_left_out=*/true}})
      .flag("rope_yarn", &golden::Llama::rope_yarn)
      .number("rope_mscale", &golden::Llama::rope_mscale)
      .count("rotary_size", &golden::Llama::rotary_size, 0, with<&golden::Llama::rotary_size>)
      .count("kv_rank", &golden::Llama::kv_rank, 0, with_latents)
      .count("query_rank", &golden::Llama::query_rank, 0, with<&golden::Llama::query_rank>)
      .count("value_size", &golden::Llama::value_size, 0, with<&golden::Llama::value_size>)
      .flag("interleaved", &golden::Llama::interleaved)
      .count("window", &golden::Llama::window, 0, with_window)
      .count("full_layers", &golden::Llama::full_layers, 0, with<&golden::Llama::full_layers>)
      .count("document_end", &golden::Llama::document_end, -1, with<&golden::Llama::document_end>)
      .count("experts", &golden::Llama::experts, 0, with_experts)
      .count("top_k", &golden::Llama::experts_per_token, 1, with<&golden::Llama::experts_per_token>)
      .count("expert_width", &golden::Llama::expert_width, 1, with<&golden::Llama::expert_width>)
      .count("shared_width", &golden::Llama::shared_width, 0, with<&golden::Llama::shared_width>)
      .count("dense_layers", &golden::Llama::dense_layers, 0, with<&golden::Llama::dense_layers>)
      .choice("score", &golden::Llama::score, {"softmax", "chosen_softmax", "sigmoid"})
      .flag("normalized", &golden::Llama::normalized)
      .number("expert_scale", &golden::Llama::expert_scale)
      .count("expert_groups", &golden::Llama::expert_groups, 1, with<&golden::Llama::expert_groups>)
      .count("groups_per_token", &golden::Llama::groups_per_token, 1, with<&golden::Llama::groups_per_token>)
      .number("expert_balance", &golden::Llama::expert_balance)
      .choice("expert_balance_over", &golden::Llama::balance_over, {"sequence", "step"})
      .number("expert_z", &golden::Llama::expert_z)
      .number("expert_bias", &golden::Llama::expert_bias)
      .number("expert_lean", &golden::Llama::expert_lean)
      .number("expert_capacity", &golden::Llama::expert_capacity)
      .fields();
}

Fields conv_fields() {
  using golden::Conv;
  return Table(&Model::conv)
      .list("channels", &Conv::channels)
      .sizes({{"kernel", &Conv::kernel}, {"size", &Conv::size}, {"classes", &Conv::classes}})
      .flag("norm", &Conv::norm)
      .flag("batch", &Conv::batch)
      .fields();
}

Fields odd_fields() {
  using golden::Odd;
  return Table(&Model::odd)
      .sizes({{"width", &Odd::width}, {"calls", &Odd::calls, nullptr, 1, /*may_be_left_out=*/true}})
      .flag("gain", &Odd::gain)
      .flag("cube", &Odd::cube)
      .flag("empty", &Odd::empty)
      .flag("side", &Odd::side)
      .flag("never", &Odd::never)
      .flag("tied", &Odd::tied)
      .fields();
}

}  // namespace

const std::vector<ModelField>& model_fields(Kind kind) {
  static const Fields mlp = mlp_fields(), gpt = gpt_fields(), llama = llama_fields(), conv = conv_fields(), odd = odd_fields();
  switch (kind) {
    case Kind::mlp:
      return mlp;
    case Kind::gpt:
      return gpt;
    case Kind::llama:
      return llama;
    case Kind::conv:
      return conv;
    case Kind::odd:
      return odd;
  }
  return mlp;
}

std::vector<int64_t> smaller(int64_t value, int64_t least) {
  std::vector<int64_t> values;
  for (const int64_t candidate : {least, (least + value) / 2, value - 1})
    if (least <= candidate && candidate < value) values.push_back(candidate);
  return values;
}

void require_rounds(const golden::Model& model, int64_t rounds, const char* command, const std::string& to_do) {
  if (rounds == 1 || model.llama.balance_over == golden::Llama::BalanceOver::sequence) return;
  throw shardproof::Error(
      fmt::format("[{}] expert_balance_over=step has one forward in a step, which sees all of its tokens, and a step has {} "
                  "microbatches; {}",
                  command, rounds, to_do));
}

}  // namespace harness
