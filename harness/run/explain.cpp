#include "harness/run/explain.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "harness/case/problem.h"
#include "harness/run/module_difference.h"
#include "harness/run/suspects.h"
#include "harness/run/wrong_pieces.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Piece;

std::string rounding_of(double apart) {
  return fmt::format("a relative {:.1e} apart: another rounding, precision or order of sums", apart);
}

// What needs no golden run of its own.
std::string plain_guess(const WrongPieces& wrong, const Case& c, const golden::Step& step) {
  const auto all = [&](const auto& is) { return std::ranges::all_of(wrong.pieces, is); };
  if (all([](const WrongPiece& piece) { return !at::isfinite(piece.values).all().item<bool>(); }))
    return "they hold NaN or infinity";
  if (all([](const WrongPiece& piece) { return norm_of(piece.values) == 0; }))
    return "they are zero: nothing has arrived there";
  if (all([&](const WrongPiece& piece) { return norm_of(wrong.of(wrong.wanted, piece)) == 0; }))
    return "they should be zero: nothing in the unsharded run reaches them";
  if (const auto factor = factor_between(wrong, wrong.wanted)) {
    const std::string words = factor_in_words(c, step, *factor);
    if (!words.empty()) return fmt::format("they are {:.6g} times what they should be: {}", *factor, words);
  }
  return "";
}

// What remains when nothing else fits.
std::string rest_of_guess(const WrongPieces& wrong) {
  if (const auto shift = shift_of(wrong))
    return fmt::format("they are shifted by {} element{}", *shift, *shift == 1 ? "" : "s");
  if (std::string elsewhere = belongs_elsewhere(wrong); !elsewhere.empty()) return elsewhere;
  if (const auto factor = factor_between(wrong, wrong.wanted))
    return fmt::format("they are {:.6g} times what they should be", *factor);
  const double apart = distance(wrong, wrong.wanted);
  return apart < 1e-2 ? "they are " + rounding_of(apart) : "";
}

struct Failing {
  const Case& whole;
  const Case& c;  // as it is in this step
  const golden::Run& run;
  const golden::Trace& trace;
  const std::vector<RankStep>& ranks;
  size_t step;

  const golden::StepTrace& golden() const { return trace[step]; }
  const golden::StepTrace* earlier() const {
    const int64_t last = run.steps[step].after.value_or(static_cast<int64_t>(step) - 1);
    return last < 0 ? nullptr : &trace[static_cast<size_t>(last)];
  }
  const golden::Named& begin() const { return earlier() ? earlier()->parameters : run.parameters; }
};

std::string with(const Failing& failing, const WrongPieces& wrong, const std::vector<Suspect>& suspects) {
  const double usual = distance(wrong, wrong.wanted);
  double best = std::min(wrong.tolerance, usual / 10);
  std::string text;
  for (const Suspect& suspect : suspects) {
    std::map<int64_t, Values> by_rank;
    for (int64_t rank = 0; rank < std::ssize(failing.ranks); ++rank) by_rank[rank] = suspect.values(rank);
    const double apart = distance(wrong, [&](int64_t rank) -> const Values& { return by_rank.at(rank); });
    if (apart < best * 0.999) best = apart, text = suspect.text;
  }
  return text;
}

// The failing step by itself, in plain float64 and without what comes after the sum.
golden::Run alone(const Failing& failing) {
  golden::Run run = failing.run;
  run.parameters = failing.begin();
  golden::Step step = run.steps[failing.step];
  step.after = {};
  step.clip_norm = 0;
  const int64_t ranks = std::ssize(step.microbatches.front()), replicas = failing.c.replicas();
  run.order = {.shards = ranks / replicas, .replicas = replicas};
  step.order = run.order;
  run.steps = {std::move(step)};
  run.model.canonical = false;
  run.precision = {};
  run.scaling = {};
  run.optimizer = {.kind = golden::Optimizer::Kind::sgd, .lr = 0};
  run.jitter = 0;
  return run;
}

// Whether both are of the same parameters: steps may freeze others.
bool same_names(const golden::Named& a, const golden::Named& b) {
  return std::ranges::equal(a, b, {}, &golden::Named::value_type::first, &golden::Named::value_type::first);
}

// Where losses are summed by token: each rank divides by its own tokens, as often as there are ranks.
std::optional<Suspect> own_tokens(const Failing& failing, const Values& wanted) {
  if (failing.c.options.loss != loss_tokens) return {};
  std::vector<double> tokens(failing.run.steps[failing.step].microbatches.front().size());
  for (const auto& round : failing.run.steps[failing.step].microbatches)
    for (size_t rank = 0; rank < round.size(); ++rank) tokens[rank] += static_cast<double>(round[rank].target.numel());
  double all = 0;
  for (const double own : tokens) all += own;
  const int64_t neighbours = failing.c.microbatch_ranks();
  return Suspect{"each rank divides by its own number of tokens", [=](int64_t rank) {
                   const double own = tokens[static_cast<size_t>(rank / neighbours)];
                   Values values;
                   for (const at::Tensor& value : wanted)
                     values.push_back(value * (all / (own * static_cast<double>(tokens.size()))));
                   return values;
                 }};
}

std::string guess_of_gradients(const Failing& failing, const WrongPieces& wrong) {
  const golden::Step& step = failing.run.steps[failing.step];
  const double clipped = step.clip_norm / (failing.golden().gradient_norm + 1e-6);
  if (step.clip_norm > 0 && clipped < 1)
    if (const auto factor = factor_between(wrong, wrong.wanted); factor && std::abs(*factor * clipped - 1) < 1e-3)
      return "they were not clipped";
  if (step.clip_norm > failing.golden().gradient_norm)
    if (const auto factor = factor_between(wrong, wrong.wanted);
        factor && near(*factor * failing.golden().gradient_norm, step.clip_norm))
      return "they were scaled up to the norm at which clipping begins";
  if (std::string plain = plain_guess(wrong, failing.c, step); !plain.empty()) return plain;
  std::vector<Suspect> suspects;
  if (step.clip_norm == 0 || clipped >= 1) suspects = gradient_suspects(failing.c, alone(failing));
  if (auto suspect = own_tokens(failing, wrong.wanted)) suspects.push_back(std::move(*suspect));
  const golden::StepTrace* earlier = failing.earlier();
  if (earlier && same_names(earlier->gradients, wrong.golden)) {
    const Values before = in_double(earlier->gradients);
    Values both = wrong.wanted;
    for (size_t i = 0; i < both.size(); ++i) both[i] = both[i] + before[i];
    suspects.push_back({"they are those of the step before", [before](int64_t) { return before; }});
    suspects.push_back({"those of the step before were added to them: they were not zeroed", [both](int64_t) { return both; }});
  }
  if (std::string text = with(failing, wrong, suspects); !text.empty()) return text;
  if (std::string text = parts_of_a_sum(wrong, failing.c.mesh); !text.empty()) return text;
  if (std::string text = factors_by_rank(wrong); !text.empty()) return text;
  if (!suspects.empty())
    if (std::string text = fitted_terms(wrong, gradient_terms(alone(failing))); !text.empty()) return text;
  return rest_of_guess(wrong);
}

// How many times the parameters before the step is what the pieces have too much.
std::optional<double> parameters_in(const Failing& failing, const WrongPieces& wrong) {
  WrongPieces excess = wrong;
  excess.tolerance = 1e-3;
  int64_t elements = 0;
  for (WrongPiece& piece : excess.pieces) {
    piece.values = piece.values - wrong.of(wrong.wanted, piece);
    elements += piece.run.size();
  }
  Values parameters;
  for (const auto& [name, tensor] : wrong.golden) {
    const auto found = std::ranges::find(failing.begin(), name, &golden::Named::value_type::first);
    if (found == failing.begin().end() || found->second.numel() != tensor.numel()) return {};
    parameters.push_back(found->second.to(at::kDouble).contiguous().view({-1}));
  }
  return elements >= 3 ? factor_between(excess, parameters) : std::nullopt;  // two numbers often have one factor
}

// Ranks but 0 begin with a parameter of equal elements (ranks.h), which hardly an update makes.
bool holds_own_beginning(const WrongPiece& piece) {
  const double first = piece.values.numel() == 0 ? 0 : piece.values[0].item<double>();
  return piece.rank > 0 && piece.values.numel() > 0 && at::all(piece.values == first).item<bool>() &&
         std::abs(first - beginning_of(piece.rank)) < 0.1;
}

// Parameters, and the optimizer's state.
std::string guess_of_results(const Failing& failing, const WrongPieces& wrong, const golden::Named* before) {
  if (failing.step == 0 && std::ranges::all_of(wrong.pieces, holds_own_beginning))
    return "they are those that the rank's own model was built with: rank 0's did not arrive";
  if (before && same_names(*before, wrong.golden)) {
    const Values old = in_double(*before);
    if (distance(wrong, old) <= wrong.tolerance / 100) return "they are those from before the step: nothing has updated them";
    WrongPieces updates = wrong;
    for (size_t i = 0; i < old.size(); ++i) updates.wanted[i] = wrong.wanted[i] - old[i];
    for (WrongPiece& piece : updates.pieces) piece.values = piece.values - wrong.of(old, piece);
    updates.tolerance = 1e-3;
    if (const auto factor = factor_between(updates, updates.wanted)) {
      const std::string words = factor_in_words(failing.c, failing.run.steps[failing.step], *factor);
      return fmt::format("their change in this step is {:.4g} times what it should be{}", *factor,
                         words.empty() ? "" : ": " + words);
    }
  }
  if (const auto factor = parameters_in(failing, wrong))
    return fmt::format("they have {:.4g} times the parameters too much, as if by weight decay", *factor);
  if (std::string plain = plain_guess(wrong, failing.c, failing.run.steps[failing.step]); !plain.empty()) return plain;
  return rest_of_guess(wrong);
}

// The norm is wrong, and the gradients are right.
std::string guess_of_norm(const Failing& failing) {
  const double wanted = failing.golden().gradient_norm, held = failing.ranks.front().gradient_norm;
  const double order = failing.run.steps[failing.step].norm_order;
  const double ratio = order == 2 ? std::pow(held / wanted, 2) : held / wanted;
  const std::string words = factor_in_words(failing.c, failing.run.steps[failing.step], ratio);
  if (!words.empty()) return fmt::format("the sum within the norm is {:.6g} times what it should be: {}", ratio, words);
  if (near(held, wanted)) return "it is " + rounding_of(std::abs(held - wanted) / wanted);
  if (order != 2) return "";
  double own = 0;
  for (const Piece& piece : failing.ranks.front().gradients) own += std::pow(norm_of(piece.data.to(at::kDouble)), 2);
  if (near(std::sqrt(own), held)) return "it is the norm of each rank's own part";
  double all = 0;
  for (const RankStep& rank : failing.ranks)
    for (const Piece& piece : rank.gradients) all += std::pow(norm_of(piece.data.to(at::kDouble)), 2);
  if (near(std::sqrt(all), held)) return "elements count once for each rank that holds them";
  const double excess = held * held - wanted * wanted;
  for (const auto& [name, gradient] : failing.golden().gradients) {
    const double part = std::pow(norm_of(gradient.to(at::kDouble)), 2);
    if (near(excess, part)) return fmt::format("{} counts twice in it", name);
    if (near(-excess, part)) return fmt::format("{} does not count in it", name);
  }
  return "";
}

std::string guess_of_loss(const Failing& failing, size_t rank, size_t round) {
  const std::vector<double>& wanted = failing.golden().losses[round];
  const double held = failing.ranks[rank].losses[round];
  for (size_t other = 0; other < wanted.size(); ++other)
    if (near(held, wanted[other])) return fmt::format("it is that of data-parallel rank {}", other);
  if (failing.step == 0) return "";
  golden::Run stale = alone(failing);
  stale.parameters = failing.step >= 2 ? failing.trace[failing.step - 2].parameters : failing.run.parameters;
  const auto neighbours = static_cast<size_t>(failing.c.microbatch_ranks());
  const bool is_stale = near(held, golden::train(stale, at::kDouble).front().losses[round][rank / neighbours]);
  return is_stale ? "the forward computed on the parameters of the step before" : "";
}

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
  return {{.where = fmt::format("step {}: {}", failing.step, in_words(wrong, std::ssize(failing.ranks))),
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
  const auto neighbours = static_cast<size_t>(failing.c.microbatch_ranks());
  for (const bool far : {true, false})
    for (size_t rank = 0; rank < failing.ranks.size(); ++rank)
      for (size_t round = 0; round < std::min(wanted.size(), failing.ranks[rank].losses.size()); ++round) {
        const double held = failing.ranks[rank].losses[round], golden = wanted[round][rank / neighbours];
        const bool differs = far ? !near(held, golden) : failing.c.mode != Mode::fast && held != golden;
        if (differs)
          return Told{
              {.where = fmt::format("step {}: the loss of rank {} in microbatch {} is wrong", failing.step, rank, round),
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
    const auto pieces = [&name](const RankStep& step) -> const std::vector<Piece>& {
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
    const auto pieces = [member](const RankStep& step) -> const std::vector<Piece>& { return step.*member; };
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
  return Told{{.where = fmt::format("step {}: the gradient norm is wrong, and the gradients are right", failing.step),
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

}  // namespace

std::string in_lines(const Explanation& explanation) {
  std::string lines;
  if (!explanation.where.empty()) lines += fmt::format("  where    {}\n", explanation.where);
  if (!explanation.first.empty()) lines += fmt::format("  first    {}\n", explanation.first);
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
    const Failing failing{c, here, run, trace, steps[step], step};
    for (const auto& look : {in_losses, in_gradients, in_norm, in_state, in_parameters}) {
      Found told = look(failing);
      if (!told) continue;
      if (told->in_modules && &ranks == &thread_ranks()) add_modules(failing, told->text);
      return told->text;
    }
  }
  return {};
}

}  // namespace harness
