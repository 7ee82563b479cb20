#include "harness/run/wrong_pieces.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace harness {

using shardproof::Piece;

double norm_of(const at::Tensor& values) {
  return at::sqrt(values.square().sum()).item<double>();
}

// How far pieces are from values, relative to the values; 2 where either is not finite.
double distance(const WrongPieces& wrong, const std::function<const Values&(int64_t rank)>& values) {
  double error = 0, size = 0;
  for (const WrongPiece& piece : wrong.pieces) {
    const at::Tensor wanted = wrong.of(values(piece.rank), piece);
    error += std::pow(norm_of(piece.values - wanted), 2);
    size += std::pow(norm_of(wanted), 2);
  }
  const double relative = std::sqrt(error) / std::max(std::sqrt(size), 1e-30);
  return std::isfinite(relative) ? relative : 2;
}
double distance(const WrongPieces& wrong, const Values& values) {
  return distance(wrong, [&](int64_t) -> const Values& { return values; });
}

WrongPieces wrong_pieces(std::string kind, const golden::Named& golden, const std::vector<RankStep>& ranks,
                         const PiecesOf& pieces, double tolerance) {
  WrongPieces wrong{std::move(kind), golden, in_double(golden), {}, tolerance};
  std::map<std::string, size_t> index;
  for (size_t i = 0; i < golden.size(); ++i) index[golden[i].first] = i;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (const Piece& piece : pieces(ranks[rank])) {
      const auto found = index.find(piece.name);
      if (found == index.end()) continue;
      const at::Tensor& whole = wrong.wanted[found->second];
      const bool fits = 0 <= piece.run.begin && piece.run.begin <= piece.run.end && piece.run.end <= whole.numel() &&
                        piece.data.numel() == piece.run.size();
      if (!fits) continue;  // the failure itself says so
      WrongPiece held{static_cast<int64_t>(rank), found->second, piece.run, piece.data.to(at::kDouble).contiguous().view({-1})};
      const at::Tensor wanted = wrong.of(wrong.wanted, held);
      if (!(norm_of(held.values - wanted) <= tolerance * norm_of(wanted))) wrong.pieces.push_back(std::move(held));
    }
  return wrong;
}

namespace {

std::set<int64_t> ranks_of(const WrongPieces& wrong) {
  std::set<int64_t> ranks;
  for (const WrongPiece& piece : wrong.pieces) ranks.insert(piece.rank);
  return ranks;
}

}  // namespace

std::string on_ranks(const std::set<int64_t>& ranks, int64_t world) {
  if (world == 1) return "";
  if (std::ssize(ranks) == world) return fmt::format("on all {} ranks", world);
  return fmt::format("on rank{} {} of {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "), world);
}

std::string in_words(const WrongPieces& wrong, int64_t world) {
  std::set<size_t> tensors;
  for (const WrongPiece& piece : wrong.pieces) tensors.insert(piece.tensor);
  const std::string where = on_ranks(ranks_of(wrong), world);
  return fmt::format("{} of {} {} are wrong, {} the first of them{}", tensors.size(), wrong.golden.size(), wrong.kind,
                     wrong.golden[*tensors.begin()].first, where.empty() ? "" : ", " + where);
}

// One factor between what is held and `values`; nothing when there is none.
std::optional<double> factor_between(const WrongPieces& wrong, const Values& values) {
  double product = 0, square = 0;
  for (const WrongPiece& piece : wrong.pieces) {
    const at::Tensor wanted = wrong.of(values, piece);
    product += at::dot(piece.values, wanted).item<double>();
    square += at::dot(wanted, wanted).item<double>();
  }
  if (!(square > 0)) return {};
  const double factor = product / square;
  Values scaled;
  for (const at::Tensor& value : values) scaled.push_back(value * factor);
  const bool fits = std::abs(factor) > 1e-12 && distance(wrong, scaled) <= wrong.tolerance;
  return fits && std::abs(factor - 1) > wrong.tolerance ? std::optional(factor) : std::nullopt;
}

namespace {

// What a rank holds of the same run of a tensor; null where that is right, or it holds none.
const WrongPiece* like(const WrongPieces& wrong, const WrongPiece& piece, int64_t rank) {
  for (const WrongPiece& other : wrong.pieces)
    if (other.rank == rank && other.tensor == piece.tensor && other.run == piece.run) return &other;
  return nullptr;
}

bool add_up(const WrongPieces& wrong, const shardproof::Mesh& mesh, const std::string& axis) {
  return std::ranges::all_of(wrong.pieces, [&](const WrongPiece& piece) {
    at::Tensor sum = at::zeros_like(piece.values);
    for (const int64_t peer : mesh.peers(piece.rank, {axis})) {
      const WrongPiece* const part = like(wrong, piece, peer);
      if (!part) return false;
      sum += part->values;
    }
    const at::Tensor wanted = wrong.of(wrong.wanted, piece);
    return norm_of(sum - wanted) <= wrong.tolerance * norm_of(wanted);
  });
}

}  // namespace

std::string parts_of_a_sum(const WrongPieces& wrong, const shardproof::Mesh& mesh) {
  for (const shardproof::Axis& axis : mesh.axes())
    if (axis.size > 1 && !wrong.pieces.empty() && add_up(wrong, mesh, axis.name))
      return fmt::format("each rank along {} has a part of the sum: they were not summed over {}", axis.name, axis.name);
  return "";
}

std::string factors_by_rank(const WrongPieces& wrong) {
  const std::set<int64_t> ranks = ranks_of(wrong);
  if (ranks.empty()) return "";
  std::vector<std::string> texts;
  std::vector<double> factors;
  int64_t elements = 0;
  for (const int64_t rank : ranks) {
    WrongPieces own = wrong;
    std::erase_if(own.pieces, [rank](const WrongPiece& piece) { return piece.rank != rank; });
    int64_t of_rank = 0;
    for (const WrongPiece& piece : own.pieces) of_rank += piece.run.size();
    if (of_rank < 2) continue;  // any number is a factor of one
    const auto factor = factor_between(own, own.wanted);
    if (!factor) return "";
    elements += of_rank;
    factors.push_back(*factor);
    texts.push_back(fmt::format("{:.4g} on rank {}", *factor, rank));
  }
  if (factors.size() < 2) return "";
  const auto [least, most] = std::ranges::minmax(factors);
  if (elements < 2 * std::ssize(factors) + 2 || near(least, most)) return "";
  return fmt::format("each rank has them another number of times: {}. The ranks multiply or divide by numbers of their own",
                     fmt::join(texts, ", "));
}

}  // namespace harness
