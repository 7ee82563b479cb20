#include "harness/run/run_case.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "harness/case/problem.h"
#include "harness/case/random.h"
#include "harness/compare/step_difference.h"
#include "harness/compare/tolerance.h"
#include "harness/run/message.h"
#include "harness/run/planted_change.h"
#include "harness/run/property.h"
#include "harness/run/schedules.h"
#include "harness/run/sharded_run.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/process/process_world.h"

namespace harness {
namespace {

constexpr int64_t kJitteredRuns = 3;
// One number of an unsharded run is near the truth by luck, and of few runs all may be. Where the sharded run is too far off,
// and by no more than luck may be, so many runs more are asked before it is called wrong.
constexpr int64_t kMoreRuns = 12;
constexpr double kLuckMax = 8 * kToleranceFactor;

// The same run with its rounds added up in another order. None where no step has several rounds: that run has the same bits.
std::optional<golden::Run> with_other_reductions(golden::Run run) {
  const auto has_rounds = [](const golden::Step& step) { return step.microbatches.size() > 1; };
  if (std::ranges::none_of(run.steps, has_rounds)) return {};
  for (golden::Step& step : run.steps)
    step.reduce_after = step.reduce_after.empty() ? std::vector<bool>(step.microbatches.size(), true) : std::vector<bool>{};
  return run;
}

// By how many data-parallel ranks later sums over ranks begin, `third` being 1 or 2. Two ranks have one sum. Three have three,
// one for each pair that may be added first: these two and the golden run's.
int64_t later(const golden::Step& step, int64_t third) {
  const int64_t ranks = std::ssize(step.microbatches.front());
  return ranks < 3 ? 0 : (third * ranks + 2) / 3;
}

// The same run, but for where sums over ranks begin. Losses stay in their places.
golden::Trace with_later_sums(golden::Run run, int64_t third) {
  for (golden::Step& step : run.steps)
    for (auto& round : step.microbatches) std::ranges::rotate(round, round.begin() + later(step, third));
  golden::Trace trace = golden::train(run);
  for (size_t s = 0; s < trace.size(); ++s)
    for (auto& round : trace[s].losses) std::ranges::rotate(round, round.end() - later(run.steps[s], third));
  for (size_t s = 0; s < trace.size(); ++s)
    if (auto& values = trace[s].evaluated; !values.empty())
      std::ranges::rotate(values, values.end() - later(run.steps[s], third));
  return trace;
}

// What the sharded run is held against.
class Reference {
 public:
  Reference(const Case& c, const golden::Run& run, const Ranks& ranks) : run_(run), seed_(c.seed), trace_(golden::train(run)) {
    for (size_t s = 0; s < c.steps.size(); ++s) copies_.push_back(ranks.copies(c.at(s)));
    if (c.mode != Mode::fast) return;
    truth_ = golden::train(run, at::kDouble);
    if (const auto other = with_other_reductions(run)) others_.push_back(golden::train(*other));
    if (std::ranges::any_of(run.steps, [](const golden::Step& step) { return later(step, 1) > 0; }))
      for (const int64_t third : {1, 2}) others_.push_back(with_later_sums(run, third));
    add_jittered(kJitteredRuns);
  }

  // With `may_doubt` more unsharded runs are asked before a difference that may be luck is told.
  FoundDifference difference(size_t step, const std::vector<RankStep>& ranks, Verdict& verdict, bool may_doubt = false) const {
    if (truth_.empty()) return first_difference(trace_[step], ranks, copies_[step], &verdict.values_compared);
    Compared compared = within_tolerance(step, ranks);
    const bool is_doubt = compared.ratio > kToleranceFactor && compared.ratio <= kLuckMax;
    if (may_doubt && compared.difference && is_doubt && jittered_ == kJitteredRuns) {
      add_jittered(kMoreRuns);
      compared = within_tolerance(step, ranks);
    }
    verdict.values_compared += compared.values;
    if (!(compared.ratio <= verdict.ratio_max)) verdict.ratio_max = compared.ratio;
    return compared.difference;
  }

  const golden::Trace& trace() const { return trace_; }

  // Where the smallest change has to be noticed.
  const std::string& best_known_parameter(size_t step) const {
    size_t index = 0;
    while (trace_[step].parameters[index].second.numel() == 0) ++index;
    if (!truth_.empty())
      index = harness::best_known_parameter({truth_[step], before(step), references(step)}, copies_[step].compute);
    return trace_[step].parameters[index].first;
  }

 private:
  struct Compared {
    FoundDifference difference;
    double ratio = 0;
    int64_t values = 0;
  };

  Compared within_tolerance(size_t step, const std::vector<RankStep>& ranks) const {
    Compared compared;
    compared.difference = first_beyond_tolerance({truth_[step], before(step), references(step)}, ranks, copies_[step],
                                                 &compared.ratio, &compared.values);
    return compared;
  }

  // Roundings may come anywhere, and tensor parallelism has them inside of the model: how far they carry is seen from runs that
  // begin with others of their size.
  void add_jittered(int64_t more) const {
    for (const int64_t end = jittered_ + more; jittered_ < end; ++jittered_) {
      golden::Run jittered = run_;
      jittered.jitter = Draws(seed_, "jitter").bits(jittered_) | 1;
      others_.push_back(golden::train(jittered));
    }
  }

  // Of the truth, as that step found them.
  const golden::Named& before(size_t step) const {
    const int64_t last = run_.steps[step].after.value_or(static_cast<int64_t>(step) - 1);
    return last < 0 ? run_.parameters : truth_[static_cast<size_t>(last)].parameters;
  }

  std::vector<const golden::StepTrace*> references(size_t step) const {
    std::vector<const golden::StepTrace*> steps = {&trace_[step]};
    for (const golden::Trace& other : others_) steps.push_back(&other[step]);
    return steps;
  }

  const golden::Run& run_;
  uint64_t seed_;
  std::vector<Copies> copies_;  // by step
  golden::Trace trace_, truth_;
  mutable std::vector<golden::Trace> others_;  // unsharded float32 runs but the first; more of them when there is a doubt
  mutable int64_t jittered_ = 0;               // of these
};

// The smallest error, as a power of two, that `finds` says yes to; 2 when it is larger than 1.
double smallest_found(const std::function<bool(double)>& finds) {
  double below = -26, found = 1;
  for (int i = 0; i < 7; ++i) {
    const double middle = (below + found) / 2;
    (finds(std::exp2(middle)) ? found : below) = middle;
  }
  return std::exp2(found);
}

// `ranks` with all that they hold of the named tensor multiplied.
std::vector<RankStep> scaled(std::vector<RankStep> ranks, std::vector<shardproof::Piece> RankStep::* kind,
                             const std::string& name, double factor) {
  for (RankStep& rank : ranks)
    for (shardproof::Piece& piece : rank.*kind)
      if (piece.name == name) piece.data = piece.data * factor;
  return ranks;
}

void measure(const Case& c, const golden::Run& run, const Reference& reference, const std::vector<RankStep>& ranks,
             Verdict& verdict) {
  const size_t last = c.steps.size() - 1;
  const golden::Named& gradients = reference.trace()[last].gradients;
  const auto planted = [&](std::vector<shardproof::Piece> RankStep::* kind, const std::string& name) {
    return smallest_found([&](double error) {
      Verdict ignored;
      return reference.difference(last, scaled(ranks, kind, name, 1 + error), ignored).has_value();
    });
  };
  const std::string& gradient = gradients[Draws(c.seed, "planted").bits(0) % gradients.size()].first;
  const auto key = [&](const char* what) {
    return fmt::format("{} in {}", what, c.options.compute == fp32 ? "float32" : "low precision");
  };
  verdict.smallest_found[key("gradient")] = planted(&RankStep::gradients, gradient);
  verdict.smallest_found[key("parameter")] = planted(&RankStep::parameters, reference.best_known_parameter(last));
  verdict.smallest_found[key("activation")] = smallest_found([&](double error) {
    const auto steps = run_sharded({.c = c, .run = run, .output_scale = 1 + error});
    Verdict ignored;
    for (size_t step = 0; step < steps.size(); ++step)
      if (reference.difference(step, steps[step], ignored)) return true;
    return false;
  });
}

bool has_complaint(const FinishedRun& run, Verdict& verdict) {
  verdict.properties = asked_about(run.c);
  const std::optional<PropertyComplaint> complaint = first_complaint(run);
  if (!complaint) return false;
  verdict.outcome = Verdict::Outcome::property;
  verdict.origin = complaint->property;
  verdict.says = complaint->what;
  return true;
}

// A tolerance would let a schedule change bits.
bool has_other_bits_without_its_schedule(const Case& c, const golden::Run& run, const Steps& sharded, Ranks& ranks,
                                         Verdict& verdict) {
  if (!c.interleaving) return false;
  Case without = c;
  without.interleaving.reset();
  const auto change = first_change(ranks.train(without, run), sharded);
  if (!change) return false;
  verdict.outcome = Verdict::Outcome::schedule;
  verdict.says = fmt::format("without {} other bits in {}", c.interleaving->str(), *change);
  return true;
}

void compare(const Case& c, const golden::Run& run, const Reference& reference, Ranks& ranks, Verdict& verdict) {
  std::vector<std::vector<RankStep>> sharded = ranks.train(c, run);
  for (size_t step = 0; step < sharded.size(); ++step) {
    verdict.steps_skipped += reference.trace()[step].skipped;
    if (c.clip_norm > 0)
      ++(reference.trace()[step].gradient_norm > c.clip_norm ? verdict.steps_clipped : verdict.steps_not_clipped);
    if (auto difference = reference.difference(step, sharded[step], verdict, /*may_doubt=*/true)) {
      verdict.outcome = Verdict::Outcome::values;
      verdict.difference = *difference;
      verdict.step = static_cast<int64_t>(step);
      return;
    }
  }
  if (has_complaint({c, run, reference.trace(), sharded}, verdict)) return;
  if (has_other_bits_without_its_schedule(c, run, sharded, ranks, verdict)) return;
  const size_t last = sharded.size() - 1;
  if (c.mode == Mode::fast && c.seed % kMeasuredEvery == 0 && run.device.is_cpu() && ranks.is_library())
    measure(c, run, reference, sharded.back(), verdict);
  plant_change(c, reference.best_known_parameter(last), sharded.back());
  Verdict control;
  if (reference.difference(last, sharded.back(), control)) {
    verdict.outcome = Verdict::Outcome::held;
  } else {
    verdict.outcome = Verdict::Outcome::control;
    verdict.says = "a planted change of a parameter after the last step was not noticed";
  }
}

bool is_finite(const golden::StepTrace& step) {
  for (const std::vector<double>& round : step.losses)
    for (const double loss : round)
      if (!std::isfinite(loss)) return false;
  for (const double loss : step.evaluated)
    if (!std::isfinite(loss)) return false;
  return std::isfinite(step.gradient_norm);
}

// Some runs diverge, unsharded as well. That is no proof of anything, so the case does not hold; but the sharded run has to say
// so, and what came before is compared as always.
void compare_until_divergence(Case c, golden::Run run, size_t steps, Ranks& ranks, Verdict& verdict) {
  std::string refusal;
  try {
    ranks.train(c, run);
    verdict.outcome = Verdict::Outcome::error;
    verdict.origin = "not noticed";
    verdict.says = fmt::format("the unsharded run is not finite in step {}, and the sharded run did not notice", steps + 1);
    return;
  } catch (const shardproof::NonFiniteError& error) {
    refusal = message_of(error);
  }
  if (steps > 0) {
    c.steps.resize(steps);
    run.steps.resize(steps);
    compare(c, run, Reference(c, run, ranks), ranks, verdict);
    if (!verdict.held()) return;
  }
  verdict.outcome = Verdict::Outcome::diverged;
  verdict.says = fmt::format("as the unsharded run does: {}", refusal);
}

}  // namespace

Verdict run_case(const Case& c, Ranks& ranks) {
  validate(c);
  Verdict verdict;
  golden::Run run = make_run(c);
  run.device = ranks.device();
  if (c.options.has("offload", "none")) run.optimizer.device = ranks.device();
  const Reference reference(c, run, ranks);
  const golden::Trace& trace = reference.trace();
  const size_t finite = std::find_if_not(trace.begin(), trace.end(), is_finite) - trace.begin();
  try {
    if (finite < trace.size())
      compare_until_divergence(c, run, finite, ranks, verdict);
    else
      compare(c, run, reference, ranks, verdict);
  } catch (const shardproof::WorldLostError&) {
    throw;  // the next case would find nobody either
  } catch (const std::exception& error) {
    const Verdict thrown = verdict_on(error);
    verdict.outcome = thrown.outcome, verdict.origin = thrown.origin, verdict.says = thrown.says;
  }
  return verdict;
}

}  // namespace harness
