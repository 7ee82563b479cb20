#include "harness/case.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cmath>

#include "shardproof/check.h"
#include "shardproof/strategy.h"
#include "shardproof/threads.h"

namespace harness {
namespace {

// "name(a=1,b)" of those arguments that are not at their defaults.
class Group {
 public:
  explicit Group(std::string name) : name_(std::move(name)) {}
  template <class T>
  Group& add(const char* key, const T& value) {
    arguments_.push_back(fmt::format("{}={}", key, value));
    return *this;
  }
  template <class T>
  Group& add(const char* key, const T& value, const T& standard) {
    return value == standard ? *this : add(key, value);
  }
  Group& flag(const char* key, bool value, bool standard) {
    if (value != standard) arguments_.push_back(value ? key : fmt::format("{}=0", key));
    return *this;
  }
  std::string str() const {
    return arguments_.empty() ? name_ : fmt::format("{}({})", name_, fmt::join(arguments_, ","));
  }

 private:
  std::string name_;
  std::vector<std::string> arguments_;
};

const char* to_string(golden::Activation activation) {
  switch (activation) {
    case golden::Activation::identity: return "identity";
    case golden::Activation::relu: return "relu";
    case golden::Activation::tanh: return "tanh";
    case golden::Activation::gelu: return "gelu";
  }
  return "?";
}

std::string str(const golden::Model& model) {
  if (model.kind == golden::Model::Kind::mlp)
    return Group("mlp")
        .add("widths", fmt::format("{}", fmt::join(model.mlp.widths, "-")))
        .add("act", std::string(to_string(model.mlp.activation)), std::string("tanh"))
        .flag("bias", model.mlp.bias, true)
        .str();
  const golden::Gpt& g = model.gpt;
  return Group("gpt")
      .add("layers", g.layers)
      .add("hidden", g.hidden)
      .add("heads", g.heads)
      .add("vocab", g.vocab)
      .add("positions", g.positions)
      .flag("tied", g.tied, false)
      .str();
}

std::string strategy_str(const Case& c) {
  const Case standard;
  return Group(c.strategy)
      .add("units", std::string(to_string(c.units)), std::string(to_string(standard.units)))
      .add("bucket", c.bucket_bytes_max, standard.bucket_bytes_max)
      .flag("reshard", c.reshard_after_forward, standard.reshard_after_forward)
      .add("align", c.alignment_bytes, standard.alignment_bytes)
      .add("loss", std::string(c.mean_over_ranks ? "mean" : "sum"), std::string("mean"))
      .str();
}

std::string optimizer_str(const Case& c) {
  const golden::Optimizer& o = c.optimizer;
  const golden::Optimizer standard;
  if (o.kind == golden::Optimizer::Kind::sgd)
    return Group("sgd")
        .add("lr", o.lr)
        .add("momentum", o.momentum, standard.momentum)
        .add("decay", o.weight_decay, standard.weight_decay)
        .add("clip", c.clip_norm, 0.0)
        .str();
  return Group("adamw")
      .add("lr", o.lr)
      .add("beta1", o.beta1, standard.beta1)
      .add("beta2", o.beta2, standard.beta2)
      .add("eps", o.eps, standard.eps)
      .add("decay", o.weight_decay, standard.weight_decay)
      .add("clip", c.clip_norm, 0.0)
      .str();
}

std::string history_str(const std::vector<int64_t>& rounds) {
  std::string text;
  int64_t current = 1;
  for (size_t i = 0; i < rounds.size();) {
    size_t end = i;
    while (end < rounds.size() && rounds[end] == rounds[i]) ++end;
    if (rounds[i] != current) text += fmt::format(" accumulate({})", rounds[i]);
    current = rounds[i];
    text += end - i == 1 ? " step" : fmt::format(" step*{}", end - i);
    i = end;
  }
  return text;
}

}  // namespace

const char* to_string(Mode mode) {
  switch (mode) {
    case Mode::exact: return "exact";
    case Mode::ordered: return "ordered";
    case Mode::fast: return "fast";
  }
  return "?";
}

const char* to_string(Units units) {
  switch (units) {
    case Units::root: return "root";
    case Units::block: return "block";
    case Units::leaf: return "leaf";
    case Units::some: return "some";
  }
  return "?";
}

std::string Case::str() const {
  return fmt::format("{} mesh({}) {} {} {} seed={} :{}", harness::str(model), mesh.str(), strategy_str(*this),
                     optimizer_str(*this), to_string(mode), seed, history_str(rounds));
}

namespace {

void validate(const golden::Optimizer& o) {
  SHARD_REQUIRE(o.lr >= 0 && o.weight_decay >= 0 && o.momentum >= 0 && o.eps >= 0, "case",
                "lr, decay, momentum and eps must not be negative, got lr={} decay={} momentum={} eps={}", o.lr, o.weight_decay,
                o.momentum, o.eps);
  SHARD_REQUIRE(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "case",
                "beta1 and beta2 must be at least 0 and below 1, got beta1={} beta2={}", o.beta1, o.beta2);
}

}  // namespace

void validate(const golden::Model& model) {
  if (model.kind == golden::Model::Kind::mlp) {
    const auto& widths = model.mlp.widths;
    SHARD_REQUIRE(widths.size() >= 2, "case", "mlp needs at least two widths, e.g. widths=5-7-3, got {}", widths.size());
    for (const int64_t width : widths) SHARD_REQUIRE(width >= 1, "case", "mlp: widths must be at least 1, got {}", width);
    return;
  }
  const golden::Gpt& g = model.gpt;
  for (const auto& [name, value] : {std::pair{"layers", g.layers}, {"hidden", g.hidden}, {"heads", g.heads},
                                    {"vocab", g.vocab}, {"positions", g.positions}})
    SHARD_REQUIRE(value >= 1, "case", "gpt: {} must be at least 1, got {}", name, value);
  SHARD_REQUIRE(g.hidden % g.heads == 0, "case", "gpt: hidden={} is not divisible by heads={}. Choose hidden={} or heads={}",
                g.hidden, g.heads, (g.hidden / g.heads + 1) * g.heads, 1);
}

void validate(const Case& c) {
  validate(c.model);
  shardproof::strategy(c.strategy);  // throws for unknown ones
  for (const shardproof::Axis& axis : c.mesh.axes())
    SHARD_REQUIRE(axis.name == "dp_shard", "case", "mesh axis '{}' is not used by strategy {}; it shards over dp_shard",
                  axis.name, c.strategy);
  SHARD_REQUIRE(c.mesh.has("dp_shard"), "case", "mesh '{}' lacks the axis dp_shard that strategy {} shards over; write "
                "mesh(dp_shard=N)", c.mesh.str(), c.strategy);
  SHARD_REQUIRE(c.mesh.size() <= shardproof::kThreadsWorldMax, "case",
                "mesh {} has {} ranks; the threads backend runs at most {}", c.mesh.str(), c.mesh.size(),
                shardproof::kThreadsWorldMax);
  SHARD_REQUIRE(c.alignment_bytes >= 64 && std::has_single_bit(static_cast<uint64_t>(c.alignment_bytes)), "case",
                "align={} must be a power of two and at least 64", c.alignment_bytes);
  SHARD_REQUIRE(c.bucket_bytes_max >= 0 && c.clip_norm >= 0, "case", "bucket and clip must not be negative");
  validate(c.optimizer);
  SHARD_REQUIRE(!c.rounds.empty(), "case", "the history has no step; write ': step'");
  for (const int64_t rounds : c.rounds)
    SHARD_REQUIRE(rounds >= 1, "case", "accumulate({}) must be at least 1", rounds);
  if (c.mode != Mode::exact) return;
  using golden::Activation;
  const bool linear = c.model.kind == golden::Model::Kind::mlp && (c.model.mlp.activation == Activation::identity ||
                                                                    c.model.mlp.activation == Activation::relu);
  SHARD_REQUIRE(linear && c.rounds.size() == 1, "case",
                "exact needs sums that are exact in any order: an mlp with act=identity or act=relu and one step");
}

}  // namespace harness
