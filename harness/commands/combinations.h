// Which values of facets() met in one case: every pair, and every triple.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness/case/facets.h"
#include "harness/case/limits.h"

namespace harness {

// A pair that no case had, and a valid case that has it.
struct MissingPair {
  std::string first, second;
  Case example;
};

// A pair that some case had, and the values that no case had beside it. Each makes a triple of which every two values are a
// valid pair; the three together need not be valid. A triple is listed once, under its first two values.
struct MissingTriples {
  std::string first, second;
  std::vector<std::string> thirds;
};

struct CombinationFigures {
  int64_t pairs_drawn = 0, pairs_valid = 0;
  int64_t triples_drawn = 0, triples_valid = 0;
  std::vector<MissingPair> missing;  // the valid pairs that were not drawn
  // Those with the most third values first; and how many triples are not among them, because their pair was not drawn or has
  // fewer.
  std::vector<MissingTriples> missing_triples;
  int64_t triples_left_out = 0;
};

class Combinations {
 public:
  Combinations();
  void add(const Case& c);

  // Cases with the two values. They are of different facets.
  int64_t cases_with(size_t facet, size_t value, size_t other_facet, size_t other_value) const;

  // A pair is valid if a case had it, or if a case that had one of its values is valid with the other as well. Some cases with
  // each value are tried. A triple counts as valid if its three pairs are, so its share is a lower bound.
  CombinationFigures figures(const Limits& limits) const;

 private:
  size_t id(size_t facet, size_t value) const { return first_ids_[facet] + value; }
  size_t word_of(size_t a, size_t b) const { return (a * values_ + b) * words_; }
  bool met(size_t a, size_t b) const { return pairs_[a * values_ + b] > 0; }
  std::vector<uint64_t> valid_pairs(const Limits& limits, CombinationFigures& figures) const;
  void count_triples(const std::vector<uint64_t>& valid, CombinationFigures& figures) const;
  const std::string& text_of(size_t value) const {
    return facets()[facet_of_[value]].values[value - first_ids_[facet_of_[value]]];
  }
  // The values of the bits.
  std::vector<std::string> texts_of(const std::vector<uint64_t>& bits) const;

  size_t values_ = 0, words_ = 0;             // of all facets; words of 64 bits for one bit each
  std::vector<size_t> first_ids_;             // of each facet
  std::vector<size_t> facet_of_;              // of each value
  std::vector<int64_t> pairs_;                // [value][value of a later facet]: cases
  std::vector<uint64_t> triples_;             // [value][value][bit of a value], of three facets in ascending order
  std::vector<std::vector<Case>> some_with_;  // a few cases with each value
};

std::string describe(const CombinationFigures& figures);
nlohmann::json to_json(const CombinationFigures& figures);

}  // namespace harness
