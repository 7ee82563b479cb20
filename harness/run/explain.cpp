#include "harness/run/explain.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "harness/case/problem.h"
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

struct Told {
  Explanation text;
  bool in_modules = false;  // whether modules may have gone wrong: a loss or gradients are, by more than a rounding
};
using Found = std::optional<Told>;

Told found(const Failing& failing, const WrongPieces& wrong, std::string guess, bool in_modules = false) {
  return {{.where = fmt::format("step {}: {}", failing.step + 1, in_words(wrong, std::ssize(failing.ranks))),
           .guess = std::move(guess)},
          in_modules};
}

// What differs by more than roundings do. Where nothing does and the mode promises bits, what differs at all.
WrongPieces differing(const Failing& failing, std::string kind, const golden::Named& golden, const PiecesOf& pieces,
                      double tolerance) {
  WrongPieces wrong = wrong_pieces(kind, golden, failing.ranks, pieces, tolerance);
  if (!wrong.pieces.empty() || failing.c.mode == Mode::fast) return wrong;
  wrong = wrong_pieces(std::move(kind), golden, failing.ranks, pieces, 0);
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
              far};
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
  return rounding.empty() ? found(failing, wrong, guess_of_gradients(failing, wrong), true) : found(failing, wrong, rounding);
}

Found in_state(const Failing& failing) {
  static const std::vector<Piece> none;
  const golden::StepTrace* earlier = failing.earlier();
  for (size_t slot = 0; slot < failing.golden().state.size(); ++slot) {
    const auto& [name, values] = failing.golden().state[slot];
    const auto pieces = [&name = name](const RankStep& step) -> const std::vector<Piece>& {
      const auto at = std::ranges::find_if(step.state, [&](const auto& item) { return item.first == name; });
      return at == step.state.end() ? none : at->second;
    };
    const WrongPieces wrong = differing(failing, "tensors of " + name, values, pieces, tolerance_of(failing.c));
    if (wrong.pieces.empty()) continue;
    const golden::Named* before = earlier && slot < earlier->state.size() ? &earlier->state[slot].second : nullptr;
    const std::string rounding = guess_of_rounding(wrong);
    return found(failing, wrong, rounding.empty() ? guess_of_results(failing, wrong, before) : rounding);
  }
  return {};
}

Found in_parameters(const Failing& failing) {
  for (const auto& [kind, member] :
       {std::pair{"parameters", &RankStep::parameters}, {"parameters to compute with", &RankStep::compute_parameters}}) {
    const auto pieces = [member = member](const RankStep& step) -> const std::vector<Piece>& { return step.*member; };
    // Those to compute with are rounded, so that they differ in any case.
    const double tolerance = tolerance_of(failing.c) / 10;
    const WrongPieces wrong = member == &RankStep::parameters
                                  ? differing(failing, kind, failing.golden().parameters, pieces, tolerance)
                                  : wrong_pieces(kind, failing.golden().parameters, failing.ranks, pieces, tolerance);
    if (wrong.pieces.empty()) continue;
    const std::string rounding = guess_of_rounding(wrong);
    return found(failing, wrong, rounding.empty() ? guess_of_results(failing, wrong, &failing.begin()) : rounding);
  }
  return {};
}

Found in_norm(const Failing& failing) {
  const double wanted = failing.golden().gradient_norm, held = failing.ranks.front().gradient_norm;
  if (failing.c.mode == Mode::fast ? near(held, wanted) : held == wanted) return {};
  return Told{{.where = fmt::format("step {}: the gradient norm is wrong, and the gradients are right", failing.step + 1),
               .guess = guess_of_norm(failing)}};
}

// What the modules say. A module that differs is nearer to the mistake than what its gradients became.
void add_modules(const Failing& failing, Explanation& text) {
  const golden::Named* before = nullptr;
  if (failing.step > 0) before = failing.step >= 2 ? &failing.trace[failing.step - 2].parameters : &failing.run.parameters;
  try {
    const TracedStep traced = trace_step(failing.whole, failing.run, failing.step, failing.begin());
    const ModuleDifference found = module_difference(failing.c, failing.run.steps[failing.step], traced, before);
    text.first = found.where;
    if (!found.guess.empty()) text.guess = found.guess;
  } catch (const std::exception&) {
    // The ranks ended another way than before, so there is nothing to compare.
  }
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

Explanation explain(const Case& c, Ranks& ranks) {
  golden::Run run = make_run(c);
  run.device = ranks.device();
  std::vector<std::vector<RankStep>> steps;
  try {
    steps = ranks.train(c, run);
  } catch (const std::exception&) {
    return {};  // the failure is that error, which has been told already
  }
  const golden::Trace trace = golden::train(run);
  for (size_t step = 0; step < steps.size(); ++step) {
    const Case here = c.at(step);
    const Failing failing{c, here, run, trace, steps[step], step, ranks.is_library()};
    for (const auto& look : {in_losses, in_gradients, in_norm, in_state, in_parameters}) {
      Found told = look(failing);
      if (!told) continue;
      if (told->in_modules && &ranks == &thread_ranks()) add_modules(failing, told->text);
      add_replicas(c, steps, ranks, told->text);
      return told->text;
    }
  }
  return {};
}

}  // namespace harness
