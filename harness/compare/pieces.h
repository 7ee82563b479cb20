// The ranks' pieces of one step, sorted into the golden run's tensors: what both comparisons, of bits and within a
// tolerance, begin with.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/compare/difference.h"
#include "harness/compare/step_exchange.h"

namespace harness {

// How many ranks hold each element under one strategy.
struct Holders {
  int64_t state = 1;  // of gradients, as the optimizer reads them, and of its state
  int64_t parameter = 1;          // of parameters as they are compared: main ones, if there are
  int64_t compute_parameter = 1;  // of those to compute with
};

// How many ranks hold each element of a case.
struct Copies {
  // Of the case's strategy and, where some units have another one, of that. Each parameter is held as one of them says; the
  // comparison does not know which.
  std::vector<Holders> holders = {Holders{}};
  // The same of parameters of at most `keep_whole` elements, which stay whole between steps.
  std::vector<Holders> holders_of_small = {};
  // Both, of what ranks that share experts hold; empty: none do.
  std::vector<Holders> holders_of_experts = {}, holders_of_small_experts = {};
  int64_t keep_whole = 0;
  at::ScalarType compute = at::kFloat;
  bool compute_parameters = true;  // whether ranks say which parameters they compute with, where these are others
  bool buffers = true;             // whether ranks say what their buffers are, and what they evaluate
  std::vector<int64_t> data_ranks = {};  // the data-parallel rank of each rank; empty: each is one
  // Ranks along tp, and the parameters of which they hold different pieces, each held by so many of them.
  int64_t tensor_ranks = 1;
  std::map<std::string, int64_t> cut = {};

  // Whose microbatches the rank trains on.
  size_t data_rank(size_t rank) const { return data_ranks.empty() ? rank : static_cast<size_t>(data_ranks.at(rank)); }

  // How many ranks may hold each of a parameter's elements, of the kind `held`.
  std::vector<int64_t> of(const std::string& parameter, int64_t numel, int64_t Holders::* held) const;
};
Copies copies_of(const Case& c);

// One kind of tensor of a step: gradients, a slot of the optimizer's state, parameters.
struct TensorKind {
  std::string name;  // "gradient", "exp_avg", "parameter"
  golden::Named golden;
  std::vector<const std::vector<shardproof::Piece>*> pieces;  // [rank]
  std::vector<std::vector<int64_t>> copies = {};  // of each golden tensor, by strategy
};

// A piece and the rank that holds it.
struct HeldPiece {
  size_t rank = 0;
  const shardproof::Piece* piece = nullptr;
};

// In the order in which a step makes them: gradients, state, parameters. Instead what one side has and the other lacks.
FoundDifference tensor_kinds(const golden::StepTrace& golden, const std::vector<RankStep>& ranks, Copies copies,
                             std::vector<TensorKind>& kinds);

// The pieces of each tensor, in the golden order. Instead what is wrong with them: a rank holds a piece that
// does not fit, or an element is held by more or fewer ranks than it should be.
FoundDifference sort_pieces(const TensorKind& kind, std::vector<std::vector<HeldPiece>>& sorted);

// A rank that has losses of another number of rounds.
Difference other_rounds(size_t rank, size_t rounds, size_t golden_rounds);

// Of elements [0, length) that should lie in `copies` of the runs each, the first that does not, and in how many it lies.
struct Miscount {
  int64_t element = 0;
  int64_t copies = 0;
  bool operator==(const Miscount&) const = default;
};
std::optional<Miscount> miscounted(const std::vector<shardproof::Interval>& runs, int64_t length, int64_t copies);

// "[3, 5]": where a row-major position is in a tensor.
std::string index_of(int64_t position, const at::Tensor& tensor);

}  // namespace harness
