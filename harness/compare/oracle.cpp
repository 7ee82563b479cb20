#include "harness/compare/oracle.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <set>

#include "harness/case/problem.h"

namespace harness {
namespace {

using Disagreement = std::optional<std::string>;

// float64 and float32 of the golden run, and Python's.
struct Step {
  const golden::StepTrace &ours, &single, &python;
};

constexpr double kPrecisions = 0x1p-29;   // float64's rounding over float32's
constexpr double kSingleFloor = 0x1p-22;  // a float32 run may be right by luck

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b.to(at::kDouble).reshape_as(a)).norm().item<double>();
}

// `single_floor`: how far a float32 run counts as being away at least, relative.
Disagreement compare(const std::string& what, const at::Tensor& ours, const at::Tensor& single, const at::Tensor& python,
                     double single_floor = kSingleFloor) {
  const double size = ours.norm().item<double>();
  const double rounding = std::max(distance(ours, single), single_floor * size) * kPrecisions;
  const double found = distance(ours, python);
  if (found <= kOracleFactor * rounding) return {};  // false for NaN
  return fmt::format("{}: the golden run and PyTorch in Python are {:.3g} apart (relative, float64), allowed {:.3g}", what,
                     found / size, kOracleFactor * rounding / size);
}

Disagreement compare(const std::string& what, const golden::Named& ours, const golden::Named& single,
                     const golden::Named& python) {
  if (ours.size() != python.size()) return fmt::format("{}: {} tensors, {} in Python", what, ours.size(), python.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    if (ours[i].first != python[i].first) return fmt::format("{}: {} is {} in Python", what, ours[i].first, python[i].first);
    if (auto difference =
            compare(fmt::format("{} of {}", what, ours[i].first), ours[i].second, single[i].second, python[i].second))
      return difference;
  }
  return {};
}

Disagreement compare_step(const Step& step) {
  // One number is often right by luck in float32, so all of a step say how far it is away.
  struct Number {
    std::string what;
    at::Tensor ours, single, python;
  };
  std::vector<Number> numbers;
  double floor = kSingleFloor;
  const auto add = [&](const std::string& what, const auto& value_of) {
    const auto tensor = [&](const golden::StepTrace& trace) { return at::full({1}, value_of(trace), at::kDouble); };
    const Number& number = numbers.emplace_back(what, tensor(step.ours), tensor(step.single), tensor(step.python));
    floor = std::max(floor, distance(number.ours, number.single) / number.ours.norm().item<double>());  // not a NaN
  };
  for (size_t round = 0; round < step.ours.losses.size(); ++round)
    for (size_t rank = 0; rank < step.ours.losses[round].size(); ++rank)
      add(fmt::format("loss of round {}, rank {}", round, rank),
          [&](const auto& trace) { return trace.losses.at(round).at(rank); });
  add("gradient norm", [](const auto& trace) { return trace.gradient_norm; });
  for (const Number& number : numbers)
    if (auto difference = compare(number.what, number.ours, number.single, number.python, floor)) return difference;
  const auto named = [&](const std::string& what, const auto& tensors_of) {
    return compare(what, tensors_of(step.ours), tensors_of(step.single), tensors_of(step.python));
  };
  if (auto difference = named(
          "gradient", [](const auto& trace) -> auto& { return trace.gradients; }))
    return difference;
  for (size_t slot = 0; slot < step.ours.state.size(); ++slot)
    if (auto difference = named(
            step.ours.state[slot].first, [slot](const auto& trace) -> auto& { return trace.state.at(slot).second; }))
      return difference;
  return named(
      "parameter", [](const auto& trace) -> auto& { return trace.parameters; });
}

// Averages follow from parameters, which are compared.
golden::Run run_without_averages(const Case& c) {
  golden::Run run = make_run(c);
  run.ema = 0;
  return run;
}

}  // namespace

bool suits_oracle(const Case& c) {
  const bool judged = c.model.kind != golden::Model::Kind::gpt || c.model.gpt.hidden >= 3;
  // Of tokens that weigh the same roundings say who stays, and equal ones may begin a sequence. Where documents or a window
  // leave a query itself alone, the gradient of its score is roundings.
  const golden::Llama& m = c.model.llama;
  const bool by_roundings =
      c.model.kind == golden::Model::Kind::llama && (m.expert_capacity != 0 || m.document_end >= 0 || m.window == 1);
  return judged && !by_roundings && c.mode != Mode::canonical && golden::oracle_supports(run_without_averages(c));
}

Disagreement oracle_difference(const Case& c) {
  const golden::Run run = run_without_averages(c);
  const golden::Trace ours = golden::train(run, at::kDouble), single = golden::train(run),
                      python = golden::train_in_python(run);
  for (size_t step = 0; step < ours.size(); ++step)
    if (auto difference = compare_step({ours[step], single[step], python.at(step)}))
      return fmt::format("step {}: {}", step + 1, *difference);
  return {};
}

// Python brings LibTorch an engine of its own, from which a recomputation under way would not hear what a forward saved. So it
// is there before any case runs.
Oracle::Oracle(std::vector<Case> cases)
    : cases_(std::move(cases)), thread_([this] {
        at::set_num_threads(1);
        try {
          for (const Case& c : cases_) {
            if (stop_) break;
            if (auto difference = oracle_difference(c)) outcome_.differences.emplace_back(c, *difference);
            ++outcome_.compared;
            tell_that_python_is_there();
          }
        } catch (...) {
          error_ = std::current_exception();
          failed_ = true;
        }
        tell_that_python_is_there();
      }) {
  python_is_there_.wait(false);
}

void Oracle::tell_that_python_is_there() {
  python_is_there_ = true;
  python_is_there_.notify_all();
}

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
    const std::string kind =
        fmt::format("{} {} {} {} {} {}", to_string(c.model.kind),
                    c.model.kind == golden::Model::Kind::llama
                        ? static_cast<int>(c.model.llama.tied) + 2 * static_cast<int>(c.model.llama.experts > 0)
                    : gpt ? static_cast<int>(c.model.gpt.tied)
                          : static_cast<int>(c.model.mlp.activation),
                    to_string(c.optimizer.kind), c.optimizer.momentum != 0, c.optimizer.weight_decay != 0, c.clip_norm > 0);
    if (!seen.contains(kind) && suits_oracle(c)) seen.insert(kind), chosen.push_back(c);
  }
  return chosen;
}

}  // namespace harness
