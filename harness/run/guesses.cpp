#include "harness/run/guesses.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "harness/case/problem.h"
#include "harness/run/ranks.h"
#include "harness/run/suspects.h"

namespace harness {
namespace {

// What needs no golden run of its own.
std::string plain_guess(const WrongPieces& wrong, const Case& c, const golden::Step& step) {
  const auto all = [&](const auto& is) { return std::ranges::all_of(wrong.pieces, is); };
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
  const double apart = distance(wrong, wrong.wanted);
  return apart < 1e-2 ? "they are " + rounding_of(apart) : "";
}

bool is_on_one_rank(const WrongPieces& wrong) {
  return std::ranges::all_of(wrong.pieces, [&](const WrongPiece& piece) { return piece.rank == wrong.pieces.front().rank; });
}

std::string with(const Failing& failing, const WrongPieces& wrong, const std::vector<Suspect>& suspects) {
  const double usual = distance(wrong, wrong.wanted);
  double best = std::min(wrong.tolerance, usual / 10);
  std::string text;
  for (const Suspect& suspect : suspects) {
    if (suspect.apart && !failing.lists_replicas && is_on_one_rank(wrong)) continue;  // the others hold the same
    std::map<int64_t, Values> by_rank;
    for (int64_t rank = 0; rank < std::ssize(failing.ranks); ++rank) by_rank[rank] = suspect.values(rank);
    const double apart = distance(wrong, [&](int64_t rank) -> const Values& { return by_rank.at(rank); });
    if (apart < best * 0.999) best = apart, text = suspect.text;
  }
  return text;
}

// The failing step by itself, added up as its ranks add.
golden::Run alone(const Failing& failing) {
  golden::Run run = plain_step(failing.run, failing.step, failing.begin());
  golden::Step& step = run.steps.front();
  const int64_t ranks = std::ssize(step.microbatches.front()), replicas = failing.c.replicas();
  run.order = {.shards = ranks / replicas, .replicas = replicas};
  step.order = run.order;
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
  return Suspect{"each rank divides by its own number of tokens",
                 [=, data_ranks = failing.c.data_rank_of_each()](int64_t rank) {
                   const double own = tokens[static_cast<size_t>(data_ranks[static_cast<size_t>(rank)])];
                   Values values;
                   for (const at::Tensor& value : wanted)
                     values.push_back(value * (all / (own * static_cast<double>(tokens.size()))));
                   return values;
                 },
                 true};
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
  const std::optional<Values> parameters = in_order(failing.begin(), wrong.golden);
  // Two numbers often have one factor.
  return parameters && elements >= 3 ? factor_between(excess, *parameters) : std::nullopt;
}

// Ranks but 0 begin with a parameter of equal elements (ranks.h), which hardly an update makes.
bool holds_own_beginning(const WrongPiece& piece) {
  const double first = piece.values.numel() == 0 ? 0 : piece.values[0].item<double>();
  return piece.rank > 0 && piece.values.numel() > 0 && at::all(piece.values == first).item<bool>() &&
         std::abs(first - beginning_of(piece.rank)) < 0.1;
}

// Of the gradients that a forward and backward before the step left, and that should have been forgotten.
std::optional<Suspect> discarded(const Failing& failing, const Values& wanted) {
  if (!failing.whole.steps[failing.step].discard) return {};
  Values both = wanted;
  const auto terms = gradient_terms(alone(failing));
  for (const Values& term : terms.front())
    for (size_t i = 0; i < both.size(); ++i) both[i] = both[i] + term[i];
  return Suspect{"gradients that were computed and discarded before the step are in them", [both](int64_t) { return both; }};
}

// What of the optimizer has the size of a factor between two updates; else "".
std::string factor_of_optimizer(const Failing& failing, double factor) {
  const golden::Optimizer& o = failing.run.optimizer;
  const double lr = failing.run.steps[failing.step].lr_factor;
  if (lr != 1 && lr > 0 && (near(factor, lr) || near(factor, 1 / lr)))
    return fmt::format("the factor {} of the step's learning rate", lr);
  const bool is_adam = o.kind == golden::Optimizer::Kind::adam || o.kind == golden::Optimizer::Kind::adamw;
  if (!is_adam) return "";
  const auto correction = [&o](double t) { return std::sqrt(1 - std::pow(o.beta2, t)) / (1 - std::pow(o.beta1, t)); };
  for (double t = 1; t <= static_cast<double>(failing.step) + 1; ++t)
    for (const double other : {t - 1, t + 1})
      // eps and decay move it a little.
      if (other > 0 && std::abs(factor - correction(other) / correction(t)) < 5e-3 * factor)
        return fmt::format("the bias correction of step {} instead of step {}", other, t);
  return "";
}

// Averages of parameters that a step leaves as they were. `before` are those before the step.
std::optional<Suspect> averaged_again(const Failing& failing, const WrongPieces& wrong, const golden::Named* before) {
  if (failing.run.ema == 0 || wrong.kind != "tensors of ema" || !before || !same_names(*before, wrong.golden) ||
      !same_names(failing.golden().parameters, wrong.golden))
    return {};
  Values values = in_double(*before);
  const Values updated = in_double(failing.golden().parameters);
  for (size_t i = 0; i < values.size(); ++i) values[i] = values[i] * failing.run.ema + updated[i] * (1 - failing.run.ema);
  return Suspect{"parameters that are frozen were averaged again", [values](int64_t) { return values; }};
}

// A buffer that is a sum of gradients instead of their mean, or the other way round.
std::string guess_of_momentum(const Failing& failing, const WrongPieces& wrong) {
  const double momentum = failing.run.optimizer.momentum;
  if (momentum == 0 || wrong.kind != "tensors of momentum_buffer") return "";
  const auto factor = factor_between(wrong, wrong.wanted);
  if (!factor || (!near(*factor, 1 / (1 - momentum)) && !near(*factor, 1 - momentum))) return "";
  const std::string words = factor_in_words(failing.c, failing.run.steps[failing.step], *factor);
  return fmt::format("they are {:.6g} times what they should be: {}, the momentum being {:.6g}{}", *factor,
                     *factor > 1 ? "1 / (1 - momentum)" : "1 - momentum", momentum, words.empty() ? "" : ", or " + words);
}

// What one factor between the update that was made and the right one says. `old`: the values before the step.
std::string guess_of_change(const Failing& failing, const WrongPieces& wrong, const Values& old) {
  WrongPieces updates = wrong;
  for (size_t i = 0; i < old.size(); ++i) updates.wanted[i] = wrong.wanted[i] - old[i];
  for (WrongPiece& piece : updates.pieces) piece.values = piece.values - wrong.of(old, piece);
  updates.tolerance = 1e-3;
  const auto factor = factor_between(updates, updates.wanted);
  if (!factor) return "";
  std::string words = factor_of_optimizer(failing, *factor);
  if (words.empty()) words = factor_in_words(failing.c, failing.run.steps[failing.step], *factor);
  return fmt::format("their change in this step is {:.4g} times what it should be{}", *factor,
                     words.empty() ? "" : ": " + words);
}

// Averages that a load left as the new run made them, of what its model was built with (ranks.h).
bool ema_missed_load(const Failing& failing, const WrongPieces& wrong) {
  const golden::Run& run = failing.run;
  if (!failing.whole.steps[failing.step].loads() || run.ema == 0 || wrong.kind != "tensors of ema") return false;
  Values left = in_double(failing.golden().parameters);
  if (left.size() != wrong.wanted.size()) return false;
  for (at::Tensor& value : left) value = value * (1 - run.ema) + kResumedBeginning * run.ema;
  return distance(wrong, left) < distance(wrong, wrong.wanted) / 10;
}

}  // namespace

std::string rounding_of(double apart) {
  return fmt::format("a relative {:.1e} apart: another rounding, precision or order of sums", apart);
}

std::string guess_of_gradients(const Failing& failing, const WrongPieces& wrong) {
  const golden::Step& step = failing.run.steps[failing.step];
  const double clipped = step.clip_norm / (failing.golden().gradient_norm + 1e-6);
  if (step.clip_norm > failing.golden().gradient_norm)
    if (const auto factor = factor_between(wrong, wrong.wanted);
        factor && near(*factor * failing.golden().gradient_norm, step.clip_norm))
      return "they were scaled up to the norm at which clipping begins";
  if (auto suspect = discarded(failing, wrong.wanted))
    if (std::string text = with(failing, wrong, {*suspect}); !text.empty()) return text;
  if (std::string plain = plain_guess(wrong, failing.c, step); !plain.empty()) return plain;
  std::vector<Suspect> suspects;
  if (step.clip_norm == 0 || clipped >= 1) suspects = gradient_suspects(failing.c, alone(failing));
  if (auto suspect = own_tokens(failing, wrong.wanted)) suspects.push_back(std::move(*suspect));
  if (std::string text = with(failing, wrong, suspects); !text.empty()) return text;
  if (std::string text = parts_of_a_sum(wrong, failing.c.mesh); !text.empty()) return text;
  if (std::string text = factors_by_rank(wrong); !text.empty()) return text;
  return rest_of_guess(wrong);
}

// Parameters, and the optimizer's state.
std::string guess_of_results(const Failing& failing, const WrongPieces& wrong, const golden::Named* before,
                             const TensorsOf& tensors) {
  if (failing.step == 0 && std::ranges::all_of(wrong.pieces, holds_own_beginning))
    return "they are those that the rank's own model was built with: rank 0's did not arrive";
  const bool has_before = before && same_names(*before, wrong.golden);
  if (has_before && distance(wrong, in_double(*before)) <= wrong.tolerance / 100)
    return fmt::format("they are those from before the step: nothing has updated them{}",
                       failing.c.options.schedule != 0 ? ", or the learning rate is zero" : "");
  std::vector<Suspect> suspects = update_suspects(failing.run, failing.step, tensors, wrong.golden);
  if (auto suspect = averaged_again(failing, wrong, before)) suspects.push_back(std::move(*suspect));
  if (std::string text = with(failing, wrong, suspects); !text.empty()) return text;
  if (has_before)
    if (std::string text = guess_of_change(failing, wrong, in_double(*before)); !text.empty()) return text;
  if (ema_missed_load(failing, wrong)) return "the load did not bring them back: they go on from what the new run began with";
  if (std::string text = guess_of_momentum(failing, wrong); !text.empty()) return text;
  if (const auto factor = parameters_in(failing, wrong))
    return fmt::format("they have {:.4g} times the parameters too much, as if by weight decay", *factor);
  if (std::string plain = plain_guess(wrong, failing.c, failing.run.steps[failing.step]); !plain.empty()) return plain;
  return rest_of_guess(wrong);
}

std::string guess_of_scale(const Failing& failing, size_t rank) {
  const double held = failing.ranks[rank].loss_scale;
  if (held == failing.golden().loss_scale) return "";
  if (held < failing.run.scaling.minimum) return "it fell below its least value";
  return failing.whole.steps[failing.step].loads() ? "the load did not bring it back" : "";
}

std::string guess_of_loss(const Failing& failing, size_t rank, size_t round) {
  const double held = failing.ranks[rank].losses[round];
  if (failing.step == 0) return "";
  golden::Run stale = alone(failing);
  stale.parameters = failing.step >= 2 ? failing.trace[failing.step - 2].parameters : failing.run.parameters;
  const auto data_rank = static_cast<size_t>(failing.c.data_rank_of_each()[rank]);
  const bool is_stale = near(held, golden::train(stale, at::kDouble).front().losses[round][data_rank]);
  return is_stale ? "the forward computed on the parameters of the step before" : "";
}

}  // namespace harness
