#include "harness/oracle.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <set>

#include "harness/problem.h"

namespace harness {
namespace {

using Difference = std::optional<std::string>;

Difference compare(const std::string& what, const at::Tensor& ours, const at::Tensor& python) {
  const double size = ours.norm().item<double>();
  const double distance = (ours - python.to(at::kDouble).reshape_as(ours)).norm().item<double>();
  if (distance <= kOracleDistanceMax * size || (distance == 0 && size == 0)) return {};
  return fmt::format("{}: the golden run and PyTorch in Python are {:.3g} apart (relative, float64)", what, distance / size);
}

Difference compare(const std::string& what, const golden::Named& ours, const golden::Named& python) {
  if (ours.size() != python.size()) return fmt::format("{}: {} tensors, {} in Python", what, ours.size(), python.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    if (ours[i].first != python[i].first) return fmt::format("{}: {} is {} in Python", what, ours[i].first, python[i].first);
    if (auto difference = compare(fmt::format("{} of {}", what, ours[i].first), ours[i].second, python[i].second))
      return difference;
  }
  return {};
}

Difference compare_step(const golden::StepTrace& ours, const golden::StepTrace& python) {
  const auto scalar = [](double value) { return at::full({1}, value, at::kDouble); };
  for (size_t round = 0; round < ours.losses.size(); ++round)
    for (size_t rank = 0; rank < ours.losses[round].size(); ++rank)
      if (auto difference = compare(fmt::format("loss of round {}, rank {}", round, rank), scalar(ours.losses[round][rank]),
                                    scalar(python.losses[round][rank])))
        return difference;
  if (auto difference = compare("gradient norm", scalar(ours.gradient_norm), scalar(python.gradient_norm))) return difference;
  if (auto difference = compare("gradient", ours.gradients, python.gradients)) return difference;
  if (auto difference = compare("parameter", ours.parameters, python.parameters)) return difference;
  for (size_t slot = 0; slot < ours.state.size(); ++slot)
    if (auto difference = compare(ours.state[slot].first, ours.state[slot].second, python.state.at(slot).second))
      return difference;
  return {};
}

}  // namespace

bool suits_oracle(const Case& c) {
  return c.model.kind == golden::Model::Kind::mlp || c.model.gpt.hidden >= 3;
}

Difference oracle_difference(const Case& c) {
  const golden::Run run = make_run(c);
  const golden::Trace ours = golden::train(run, at::kDouble), python = golden::train_in_python(run);
  for (size_t step = 0; step < ours.size(); ++step)
    if (auto difference = compare_step(ours[step], python[step])) return fmt::format("step {}: {}", step, *difference);
  return {};
}

Oracle::Oracle(std::vector<Case> cases)
    : cases_(std::move(cases)), thread_([this] {
        at::set_num_threads(1);
        try {
          for (const Case& c : cases_) {
            if (stop_) return;
            if (auto difference = oracle_difference(c)) outcome_.differences.emplace_back(c, *difference);
            ++outcome_.compared;
          }
        } catch (...) {
          error_ = std::current_exception();
        }
      }) {}

Oracle::~Oracle() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

Oracle::Outcome Oracle::finish(bool cut_short) {
  stop_ = cut_short;
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(error_);
  return outcome_;
}

std::vector<Case> one_of_each_kind(const std::vector<Case>& cases) {
  std::set<std::string> seen;
  std::vector<Case> chosen;
  for (const Case& c : cases) {
    const bool gpt = c.model.kind == golden::Model::Kind::gpt;
    const std::string kind = fmt::format("{} {} {} {} {} {}", gpt,
                                         gpt ? static_cast<int>(c.model.gpt.tied) : static_cast<int>(c.model.mlp.activation),
                                         c.optimizer.kind == golden::Optimizer::Kind::adamw, c.optimizer.momentum != 0,
                                         c.optimizer.weight_decay != 0, c.clip_norm > 0);
    if (suits_oracle(c) && seen.insert(kind).second) chosen.push_back(c);
  }
  return chosen;
}

}  // namespace harness
