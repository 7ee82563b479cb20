// What a wrong gradient norm may come from, where the gradients are right.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "harness/run/guesses.h"
#include "harness/run/suspects.h"
#include "harness/run/wrong_pieces.h"

namespace harness {
namespace {

using shardproof::Piece;

double square_of(const at::Tensor& values) {
  return std::pow(norm_of(values.to(at::kDouble)), 2);
}

double norm_of_all(const std::vector<at::Tensor>& tensors, double order) {
  double norm = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const at::Tensor sizes = tensor.to(at::kDouble).abs();
    if (std::isinf(order))
      norm = std::max(norm, sizes.max().item<double>());
    else
      norm += order == 1 ? sizes.sum().item<double>() : square_of(sizes);
  }
  return order == 2 ? std::sqrt(norm) : norm;
}

std::vector<at::Tensor> gradients_of(const RankStep& rank) {
  std::vector<at::Tensor> gradients;
  for (const Piece& piece : rank.gradients) gradients.push_back(piece.data);
  return gradients;
}

std::vector<at::Tensor> gradients_of(const golden::StepTrace& golden) {
  std::vector<at::Tensor> gradients;
  for (const auto& [name, gradient] : golden.gradients) gradients.push_back(gradient);
  return gradients;
}

// Gradients are told after clipping, and norms from before it.
double unclipped(const Failing& failing, double order) {
  const double clip = failing.run.steps[failing.step].clip_norm, wanted = failing.golden().gradient_norm;
  return clip > 0 && wanted > clip ? wanted / norm_of_all(gradients_of(failing.golden()), order) : 1;
}

// Each rank tells the norm of what it holds, which for one of them at least is not the whole.
bool is_own_part(const Failing& failing, double order) {
  const double scale = unclipped(failing, order);
  bool is_a_part = false;
  for (const RankStep& rank : failing.ranks) {
    const double own = norm_of_all(gradients_of(rank), order) * scale;
    if (!near(rank.gradient_norm, own)) return false;
    is_a_part |= !near(own, failing.golden().gradient_norm);
  }
  return is_a_part;
}

// A norm of order 2 that some mistake gives.
struct Candidate {
  double square = 0;
  std::string text;
};

// Elements of some parameters that are counted once for each of the ranks that hold them, or of one rank alone.
void add_by_holders(const Failing& failing, size_t rank, std::vector<Candidate>& candidates) {
  struct Group {
    std::string first;
    double square = 0, own = 0;
  };
  std::map<int64_t, Group> groups;  // by how many ranks hold each element
  const double wanted = failing.golden().gradient_norm, scale = std::pow(unclipped(failing, 2), 2);
  for (const auto& [name, gradient] : failing.golden().gradients) {
    int64_t held = 0;
    double own = 0;
    for (size_t r = 0; r < failing.ranks.size(); ++r)
      for (const Piece& piece : failing.ranks[r].gradients) {
        if (piece.name != name) continue;
        held += piece.run.size();
        if (r == rank) own += square_of(piece.data);
      }
    if (held == 0) continue;
    Group& group = groups[held / gradient.numel()];
    if (group.first.empty()) group.first = name;
    group.square += square_of(gradient) * scale;
    group.own += own * scale;
  }
  double every = 0;
  for (const auto& [copies, group] : groups) {
    every += static_cast<double>(copies) * group.square;
    candidates.push_back(
        {wanted * wanted + static_cast<double>(copies - 1) * group.square,
         fmt::format("elements count once for each rank that holds them, as those of {} on {} ranks", group.first, copies)});
    candidates.push_back({wanted * wanted - group.square + group.own,
                          fmt::format("it is the norm of each rank's own part of some parameters, as of {}", group.first)});
  }
  candidates.push_back({every, "elements count once for each rank that holds them"});
}

std::string guess_of_squares(const Failing& failing, size_t rank) {
  const double wanted = failing.golden().gradient_norm, held = failing.ranks[rank].gradient_norm;
  const double scale = std::pow(unclipped(failing, 2), 2);
  std::vector<Candidate> candidates;
  for (const auto& [name, gradient] : failing.golden().gradients)
    candidates.push_back({wanted * wanted + square_of(gradient) * scale, fmt::format("{} counts twice in it", name)});
  add_by_holders(failing, rank, candidates);
  const double excess = std::abs(held * held - wanted * wanted);
  const double slack = 1e-3 * excess + (excess > 1e-3 * wanted * wanted ? 2e-5 * wanted * wanted : 0);
  for (const Candidate& candidate : candidates)
    if (std::abs(candidate.square - held * held) <= slack && std::abs(candidate.square - wanted * wanted) > slack)
      return candidate.text;
  return "";
}

}  // namespace

std::string guess_of_norm(const Failing& failing, size_t rank) {
  const double wanted = failing.golden().gradient_norm, held = failing.ranks[rank].gradient_norm;
  if (!std::isfinite(held)) return "";
  const double order = failing.run.steps[failing.step].norm_order;
  const double ratio = order == 2 ? std::pow(held / wanted, 2) : held / wanted;
  const std::string words = factor_in_words(failing.c, failing.run.steps[failing.step], ratio);
  if (!words.empty()) return fmt::format("the sum within the norm is {:.6g} times what it should be: {}", ratio, words);
  if (!near(held, wanted) && is_own_part(failing, order)) return "it is the norm of each rank's own part";
  if (order == 2)
    if (std::string text = guess_of_squares(failing, rank); !text.empty()) return text;
  return near(held, wanted) ? "it is " + rounding_of(std::abs(held - wanted) / wanted) : "";
}

}  // namespace harness
