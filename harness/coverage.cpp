#include "harness/coverage.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace harness {

void Coverage::add(const Case& c, const Verdict& verdict) {
  const bool gpt = c.model.kind == golden::Model::Kind::gpt;
  const bool adam = c.optimizer.kind == golden::Optimizer::Kind::adamw;
  const int64_t world = c.mesh.size();
  ++cases_;
  failures_ += !verdict.held;
  values_compared_ += verdict.values_compared;
  ratio_max_ = std::max(ratio_max_, verdict.ratio_max);
  Row& row = rows_[{c.strategy, gpt ? "gpt" : "mlp", world}];
  ++row.cases;
  row.failures += !verdict.held;

  const auto count = [&](const std::string& feature, bool present) { features_[feature] += present; };
  for (const Mode mode : {Mode::exact, Mode::ordered, Mode::fast})
    count(fmt::format("mode {}", to_string(mode)), c.mode == mode);
  for (const Units units : {Units::root, Units::block, Units::leaf, Units::some})
    count(fmt::format("units {}", to_string(units)), c.units == units);
  count("optimizer adamw", adam);
  count("optimizer sgd", !adam);
  count("optimizer momentum", !adam && c.optimizer.momentum != 0);
  count("optimizer weight decay", c.optimizer.weight_decay != 0);
  count("clip above the norm", verdict.steps_not_clipped > 0);
  count("clip below the norm", verdict.steps_clipped > 0);
  count("rounds 3 or more", *std::max_element(c.rounds.begin(), c.rounds.end()) >= 3);
  count("rounds change", std::set<int64_t>(c.rounds.begin(), c.rounds.end()).size() > 1);
  count("steps 2 or more", c.rounds.size() >= 2);
  count("world 1", world == 1);
  count("world odd, above 1", world > 1 && world % 2 == 1);
  count("world even", world % 2 == 0);
  count("buckets split by bytes", c.bucket_bytes_max > 0);
  count("no reshard after forward", !c.reshard_after_forward);
  count("loss a global mean", !c.mean_over_ranks);
  count("tied embedding", gpt && c.model.gpt.tied);
  bool below_world = false;
  for (const auto& [name, shape] : golden::parameter_shapes(c.model)) {
    int64_t numel = 1;
    for (const int64_t size : shape) numel *= size;
    below_world |= numel < world;
  }
  count("parameter below the world size", below_world);
}

std::string Coverage::table() const {
  std::string text = fmt::format("{:<10} {:<6} {:>6} {:>8} {:>9}\n", "strategy", "model", "world", "cases", "failures");
  for (const auto& [key, row] : rows_) {
    const auto& [strategy, model, world] = key;
    text += fmt::format("{:<10} {:<6} {:>6} {:>8} {:>9}\n", strategy, model, world, row.cases, row.failures);
  }
  return text + fmt::format("{:<10} {:<6} {:>6} {:>8} {:>9}\n", "all", "", "", cases_, failures_);
}

std::string Coverage::summary() const {
  std::string text = "covered (cases):\n";
  std::string line;
  for (const auto& [feature, cases] : features_) {
    const std::string item = fmt::format("{} {}", feature, cases);
    if (line.size() + item.size() > 104) {
      text += "  " + line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : ", ") + item;
  }
  text += "  " + line + "\n";
  text += fmt::format("compared: {} values", values_compared_);
  if (ratio_max_ > 0) text += fmt::format("; fast mode: at most {:.2f} times the unsharded run's distance", ratio_max_);
  return text + "\n";
}

}  // namespace harness
