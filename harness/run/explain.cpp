#include "harness/run/explain.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "harness/case/problem.h"
#include "harness/run/awaited_ranks.h"
#include "harness/run/guesses.h"
#include "harness/run/module_difference.h"
#include "harness/run/replicas.h"
#include "harness/run/suspects.h"
#include "harness/run/wrong_pieces.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Piece;

double tolerance_of(const Case& c) {
  const CaseOptions& o = c.options;
  return o.compute != fp32 || o.gradient != fp32 || o.reduce != fp32 ? 2e-2 : 1e-4;
}

// With canonical arithmetic modules give the same bits on every mesh, so a rounding is a mistake that they may show.
bool has_exact_modules(const Case& c) {
  return c.options.arithmetic != 0;
}

struct Told {
  Explanation text;
  bool in_modules = false;  // whether modules may have gone wrong: a loss or gradients are, by more than a rounding
  bool stays = false;       // whether the guess says more than what modules say
};
using Found = std::optional<Told>;

Told found(const Failing& failing, const WrongPieces& wrong, std::string guess) {
  return {{.where = fmt::format("step {}: {}", failing.step + 1, in_words(wrong, std::ssize(failing.ranks))),
           .guess = std::move(guess)}};
}

// What differs by more than roundings do. Where nothing does, what differs at all, if the mode promises bits, or by more than
// those of float32.
WrongPieces differing(const Failing& failing, std::string kind, const golden::Named& golden, const PiecesOf& pieces,
                      double tolerance) {
  WrongPieces wrong = wrong_pieces(kind, golden, failing.ranks, pieces, tolerance);
  constexpr double kSingle = 1e-5;
  if (!wrong.pieces.empty() || (failing.c.mode == Mode::fast && !failing.closely)) return wrong;
  wrong = wrong_pieces(std::move(kind), golden, failing.ranks, pieces, failing.c.mode == Mode::fast ? kSingle : 0);
  wrong.tolerance = tolerance;
  return wrong;
}

// The guess where that is a rounding; else "".
std::string guess_of_rounding(const WrongPieces& wrong) {
  const double apart = distance(wrong, wrong.wanted);
  return apart <= wrong.tolerance ? "they are " + rounding_of(apart) : "";
}

// A loss that is far from the golden one tells more than one that is not, so those come first.
Found in_losses(const Failing& failing) {
  const auto& wanted = failing.golden().losses;
  const std::vector<int64_t> data_ranks = failing.c.data_rank_of_each();
  for (const bool far : {true, false})
    for (size_t rank = 0; rank < failing.ranks.size(); ++rank)
      for (size_t round = 0; round < std::min(wanted.size(), failing.ranks[rank].losses.size()); ++round) {
        const double held = failing.ranks[rank].losses[round], golden = wanted[round][static_cast<size_t>(data_ranks[rank])];
        const bool differs = far ? !near(held, golden) : failing.c.mode != Mode::fast && held != golden;
        if (differs)
          return Told{
              {.where = fmt::format("step {}: the loss of rank {} in microbatch {} is wrong", failing.step + 1, rank, round),
               .guess = far ? guess_of_loss(failing, rank, round)
                            : "it is " + rounding_of(std::abs(held - golden) / std::abs(golden))},
              far || has_exact_modules(failing.c)};
      }
  return {};
}

Found in_scale(const Failing& failing) {
  const golden::StepTrace& golden = failing.golden();
  for (size_t rank = 0; rank < failing.ranks.size(); ++rank) {
    const RankStep& held = failing.ranks[rank];
    if (held.skipped == golden.skipped && held.loss_scale == golden.loss_scale) continue;
    const std::string what =
        held.loss_scale != golden.loss_scale
            ? fmt::format("rank {} uses the loss scale {:.6g}, and should use {:.6g}", rank, held.loss_scale, golden.loss_scale)
        : golden.skipped ? fmt::format("rank {} does not skip the step, and should", rank)
                         : fmt::format("rank {} skips the step, and should not", rank);
    return Told{{.where = fmt::format("step {}: {}", failing.step + 1, what), .guess = guess_of_scale(failing, rank)}};
  }
  return {};
}

Found in_gradients(const Failing& failing) {
  if (failing.golden().skipped) return {};
  const auto pieces = [](const RankStep& step) -> const std::vector<Piece>& { return step.gradients; };
  const WrongPieces wrong =
      differing(failing, "gradients", failing.golden().gradients, pieces, tolerance_of(failing.c));
  if (wrong.pieces.empty()) return {};
  const std::string rounding = guess_of_rounding(wrong);
  Told told = found(failing, wrong, rounding.empty() ? guess_of_gradients(failing, wrong) : rounding);
  told.in_modules = rounding.empty() || has_exact_modules(failing.c);
  const std::string unsummed = parts_of_a_sum(wrong, failing.c.mesh);
  told.stays = !unsummed.empty() && told.text.guess == unsummed;
  return told;
}

// Of the optimizer, or averages of parameters: those follow from the parameters, which so come first.
Found in_state(const Failing& failing, bool averages) {
  static const std::vector<Piece> none;
  const golden::StepTrace* earlier = failing.earlier();
  for (size_t slot = 0; slot < failing.golden().state.size(); ++slot) {
    const auto& [name, values] = failing.golden().state[slot];
    if ((name == "ema") != averages) continue;
    const auto pieces = [&name = name](const RankStep& step) -> const std::vector<Piece>& {
      const auto at = std::ranges::find_if(step.state, [&](const auto& item) { return item.first == name; });
      return at == step.state.end() ? none : at->second;
    };
    const WrongPieces wrong = differing(failing, "tensors of " + name, values, pieces, tolerance_of(failing.c));
    if (wrong.pieces.empty()) continue;
    const auto tensors = [slot](const golden::StepTrace& trace) {
      return slot < trace.state.size() ? &trace.state[slot].second : nullptr;
    };
    const golden::Named* before = earlier ? tensors(*earlier) : nullptr;
    const std::string rounding = guess_of_rounding(wrong);
    return found(failing, wrong, rounding.empty() ? guess_of_results(failing, wrong, before, tensors) : rounding);
  }
  return {};
}

Found in_parameters(const Failing& failing) {
  for (const auto& [kind, member] :
       {std::pair{"parameters", &RankStep::parameters}, {"parameters to compute with", &RankStep::compute_parameters}}) {
    const auto pieces = [member = member](const RankStep& step) -> const std::vector<Piece>& { return step.*member; };
    // Those to compute with are rounded, so that they differ in any case, and in fast mode by one rounding more.
    const bool twice = failing.c.mode == Mode::fast && member == &RankStep::compute_parameters;
    const double tolerance = tolerance_of(failing.c) / (twice ? 2 : 10);
    const WrongPieces wrong = member == &RankStep::parameters
                                  ? differing(failing, kind, failing.golden().parameters, pieces, tolerance)
                                  : wrong_pieces(kind, failing.golden().parameters, failing.ranks, pieces, tolerance);
    if (wrong.pieces.empty()) continue;
    const std::string rounding = guess_of_rounding(wrong);
    const auto tensors = [](const golden::StepTrace& trace) { return &trace.parameters; };
    return found(failing, wrong, rounding.empty() ? guess_of_results(failing, wrong, &failing.begin(), tensors) : rounding);
  }
  return {};
}

Found in_optimizer(const Failing& failing) {
  return in_state(failing, false);
}

Found in_averages(const Failing& failing) {
  return in_state(failing, true);
}

Found in_norm(const Failing& failing) {
  const double wanted = failing.golden().gradient_norm;
  for (size_t rank = 0; rank < failing.ranks.size(); ++rank) {
    const double held = failing.ranks[rank].gradient_norm;
    if (failing.c.mode == Mode::fast ? near(held, wanted) : held == wanted) continue;
    return Told{{.where = fmt::format("step {}: the gradient norm is wrong{}, and the gradients are right", failing.step + 1,
                                      rank == 0 ? "" : fmt::format(" on rank {}", rank)),
                 .guess = guess_of_norm(failing, rank)}};
  }
  return {};
}

// What the modules say. A module that differs is nearer to the mistake than what its gradients became.
void add_modules(const Failing& failing, Told& told) {
  Explanation& text = told.text;
  const golden::Named* before = nullptr;
  if (failing.step > 0) before = failing.step >= 2 ? &failing.trace[failing.step - 2].parameters : &failing.run.parameters;
  try {
    const TracedStep traced = trace_step(failing.whole, failing.run, failing.step, failing.begin());
    const ModuleDifference found = module_difference(failing.c, failing.run.steps[failing.step], traced, before);
    text.first = found.where;
    if (!found.guess.empty() && !told.stays) text.guess = found.guess;
  } catch (const std::exception&) {
    // The ranks ended another way than before, so there is nothing to compare.
  }
}

// For an error, which leaves no values to compare, and for values that nothing explains.
std::string guess_of_waits(const Case& c, const Ranks& ranks) {
  if (&ranks != &thread_ranks() || c.largest_world() == 1 || !run_case(c, awaited_ranks()).held()) return "";
  return "the case holds when each collective is waited for at once, so something is probably used before the collective that "
         "brings it is over";
}

void add_replicas(const Case& c, const std::vector<std::vector<RankStep>>& steps, Ranks& ranks, Explanation& text) {
  const Replicas apart = first_disagreement(steps);
  if (apart.step < 0) return;
  text.replicas = ranks.is_library() ? in_words(replicas_of(c, ranks), true) : in_words(apart, false);
}

}  // namespace

std::string in_lines(const Explanation& explanation) {
  std::string lines;
  if (!explanation.where.empty()) lines += fmt::format("  where    {}\n", explanation.where);
  if (!explanation.first.empty()) lines += fmt::format("  first    {}\n", explanation.first);
  if (!explanation.replicas.empty()) lines += fmt::format("  replicas {}\n", explanation.replicas);
  if (!explanation.guess.empty()) lines += fmt::format("  guess    {}\n", explanation.guess);
  return lines;
}

Explanation explain(const Case& c, Verdict::Outcome outcome, Ranks& ranks) {
  const bool was_error = outcome == Verdict::Outcome::error;
  if (!was_error && outcome != Verdict::Outcome::values) return {};
  golden::Run run = make_run(c);
  run.device = ranks.device();
  std::vector<std::vector<RankStep>> steps;
  try {
    steps = ranks.train(c, run);
  } catch (const std::exception& error) {
    const std::string where = was_error ? "" : fmt::format("the same case, run once more: {}", verdict_on(error).str());
    return {.where = where, .guess = guess_of_waits(c, ranks)};
  }
  const golden::Trace trace = golden::train(run);
  const int passes = c.mode == Mode::fast ? 2 : 1;
  for (int pass = 0; pass < passes; ++pass)
    for (size_t step = 0; step < steps.size(); ++step) {
      const Case here = c.at(step);
      const Failing failing{c, here, run, trace, steps[step], step, pass > 0, ranks.is_library()};
      for (const auto& look : {in_losses, in_scale, in_gradients, in_norm, in_optimizer, in_parameters, in_averages}) {
        Found told = look(failing);
        if (!told) continue;
        if (told->in_modules && &ranks == &thread_ranks()) add_modules(failing, *told);
        if (told->text.guess.empty()) told->text.guess = guess_of_waits(c, ranks);
        add_replicas(c, steps, ranks, told->text);
        return told->text;
      }
    }
  return {};
}

}  // namespace harness
