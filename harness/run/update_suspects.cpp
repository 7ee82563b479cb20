#include "harness/run/update_suspects.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace harness {
namespace {

using Kind = golden::Optimizer::Kind;

// The run as the mistake makes it.
struct Mistake {
  std::string text;
  golden::Run run;
};

class Mistakes {
 public:
  explicit Mistakes(const golden::Run& run) : run_(run) {}

  template <class Make>
  void add(const char* text, Make make) {
    all_.push_back({text, run_});
    make(all_.back().run);
  }

  std::vector<Mistake> take() { return std::move(all_); }

 private:
  const golden::Run& run_;
  std::vector<Mistake> all_;
};

void add_groups(Mistakes& mistakes, const golden::Optimizer& o) {
  if (o.groups.empty()) return;
  mistakes.add("the last group that takes a parameter decides its learning rate and decay, and not the first",
               [](golden::Run& run) { std::ranges::reverse(run.optimizer.groups); });
  mistakes.add("all parameters have the factors of the first group, for their learning rate and decay", [](golden::Run& run) {
    run.optimizer.groups.resize(1);
    run.optimizer.groups[0].pattern.clear();
  });
  mistakes.add("the factors of groups for the learning rate were left out", [](golden::Run& run) {
    for (golden::Optimizer::Group& group : run.optimizer.groups) group.lr_factor = 1;
  });
  mistakes.add("the factors of groups for the decay were left out", [](golden::Run& run) {
    for (golden::Optimizer::Group& group : run.optimizer.groups) group.decay_factor = 1;
  });
  mistakes.add("parameters have no group: the factors of its learning rate and decay were left out",
               [](golden::Run& run) { run.optimizer.groups.clear(); });
}

void add_rates(Mistakes& mistakes, const std::vector<golden::Step>& steps) {
  const auto is_usual = [](const golden::Step& step) { return step.lr_factor == 1; };
  if (std::ranges::all_of(steps, is_usual)) return;
  mistakes.add("the learning rate is that of the step before", [](golden::Run& late) {
    for (size_t s = late.steps.size(); s-- > 1;) late.steps[s].lr_factor = late.steps[s - 1].lr_factor;
  });
  mistakes.add("the learning rate is that of the next step", [&steps](golden::Run& early) {
    for (size_t s = 0; s < early.steps.size() && s + 1 < steps.size(); ++s) early.steps[s].lr_factor = steps[s + 1].lr_factor;
  });
  mistakes.add("the factors of steps for the learning rate were left out", [](golden::Run& constant) {
    for (golden::Step& step : constant.steps) step.lr_factor = 1;
  });
}

}  // namespace

std::vector<Suspect> update_suspects(const golden::Run& run, size_t step, const TensorsOf& tensors,
                                     const golden::Named& names) {
  golden::Run until = run;
  until.steps.resize(step + 1);
  Mistakes mistakes(until);
  if (run.optimizer.kind == Kind::adamw && run.optimizer.weight_decay > 0)
    mistakes.add("weight decay was added to the gradient, as Adam does, and not to the parameter",
                 [](golden::Run& adam) { adam.optimizer.kind = Kind::adam; });
  add_groups(mistakes, run.optimizer);
  add_rates(mistakes, run.steps);
  std::vector<Suspect> suspects;
  for (Mistake& mistake : mistakes.take()) {
    const golden::Trace trace = golden::train(mistake.run);
    if (trace.size() <= step) continue;
    const golden::Named* const left = tensors(trace[step]);
    if (std::optional<Values> values = left ? in_order(*left, names) : std::nullopt)
      suspects.push_back({std::move(mistake.text), [held = std::move(*values)](int64_t) { return held; }});
  }
  return suspects;
}

}  // namespace harness
