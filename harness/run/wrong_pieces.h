// What ranks hold that differs from the golden run, and simple relations between the two.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/compare/step_exchange.h"
#include "harness/run/suspects.h"
#include "shardproof/algebra/mesh.h"

namespace harness {

// What a rank holds of a tensor, where that is wrong.
struct WrongPiece {
  int64_t rank = 0;
  size_t tensor = 0;  // in the golden order
  shardproof::Interval run;
  at::Tensor values;  // float64
};

// One kind of tensor of a step: what the golden run has, and where ranks have something else.
struct WrongPieces {
  std::string kind;  // "gradients", "parameters", "tensors of exp_avg"
  golden::Named golden;
  Values wanted;
  std::vector<WrongPiece> pieces;
  double tolerance = 0;  // relative, in the Frobenius norm

  at::Tensor of(const Values& values, const WrongPiece& piece) const {
    return values[piece.tensor].narrow(0, piece.run.begin, piece.run.size());
  }
};

using PiecesOf = std::function<const std::vector<shardproof::Piece>&(const RankStep&)>;
WrongPieces wrong_pieces(std::string kind, const golden::Named& golden, const std::vector<RankStep>& ranks,
                         const PiecesOf& pieces, double tolerance);

double norm_of(const at::Tensor& values);

// How far the pieces are from values, relative to the values; 2 where either is not finite.
double distance(const WrongPieces& wrong, const std::function<const Values&(int64_t rank)>& values);
double distance(const WrongPieces& wrong, const Values& values);

// "2 of 4 gradients are wrong, layers.1.weight the first of them, on ranks 1, 3 of 4"
std::string in_words(const WrongPieces& wrong, int64_t world);

// "on ranks 1, 3 of 4", "on all 4 ranks"; "" of a world of one.
std::string on_ranks(const std::set<int64_t>& ranks, int64_t world);
// The one factor between what is held and `values`, unless it is 1; nothing when there is none.
std::optional<double> factor_between(const WrongPieces& wrong, const Values& values);
// In words, where what ranks along one axis hold adds up to what each of them should have; else "".
std::string parts_of_a_sum(const WrongPieces& wrong, const shardproof::Mesh& mesh);
// In words, where each rank has a factor of its own between what it holds and what it should; else "".
std::string factors_by_rank(const WrongPieces& wrong);
}  // namespace harness
