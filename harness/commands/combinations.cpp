#include "harness/commands/combinations.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <optional>

#include "harness/case/mix.h"

namespace harness {
namespace {

constexpr size_t kBits = 64;
constexpr size_t kPairsOfTriples = 300;  // under which missing triples are listed
constexpr size_t kKept = 6;  // cases with each value, from which cases with pairs are made

// The case with that value of the facet, if it is valid.
std::optional<Case> changed(const Case& c, const Facet& facet, size_t value) {
  Case result = c;
  facet.set(result, value);
  if (facet.of(result) != value || !is_valid(result)) return std::nullopt;
  return result;
}

}  // namespace

Combinations::Combinations() {
  for (size_t f = 0; f < facets().size(); ++f) {
    first_ids_.push_back(values_);
    values_ += facets()[f].values.size();
    facet_of_.resize(values_, f);
  }
  words_ = (values_ + kBits - 1) / kBits;
  pairs_.resize(values_ * values_);
  triples_.resize(values_ * values_ * words_);
  some_with_.resize(values_);
}

void Combinations::add(const Case& c) {
  std::vector<size_t> ids;
  std::vector<uint64_t> bits(words_);
  for (size_t f = 0; f < facets().size(); ++f) {
    ids.push_back(id(f, facets()[f].of(c)));
    bits[ids.back() / kBits] |= uint64_t{1} << ids.back() % kBits;
    if (some_with_[ids.back()].size() < kKept) some_with_[ids.back()].push_back(c);
  }
  for (size_t a = 0; a < ids.size(); ++a)
    for (size_t b = a + 1; b < ids.size(); ++b) {
      ++pairs_[ids[a] * values_ + ids[b]];
      uint64_t* row = &triples_[word_of(ids[a], ids[b])];
      for (size_t word = ids[b] / kBits; word < words_; ++word) row[word] |= bits[word];
    }
}

int64_t Combinations::cases_with(size_t facet, size_t value, size_t other_facet, size_t other_value) const {
  const size_t a = id(facet, value), b = id(other_facet, other_value);
  return pairs_[a < b ? a * values_ + b : b * values_ + a];
}

// A bit for each valid pair, in rows like those of triples_; with the figures of pairs.
std::vector<uint64_t> Combinations::valid_pairs(const Limits& limits, CombinationFigures& figures) const {
  std::vector<uint64_t> valid(values_ * words_);
  // From a case with value `a`, one with value `b` as well.
  const auto made = [&](size_t a, size_t b) -> std::optional<Case> {
    const Facet &kept = facets()[facet_of_[a]], &other = facets()[facet_of_[b]];
    if (!may_set(other, limits)) return std::nullopt;
    for (const Case& c : some_with_[a]) {
      std::optional<Case> both = changed(c, other, b - first_ids_[facet_of_[b]]);
      if (both && kept.of(*both) == a - first_ids_[facet_of_[a]]) return both;
    }
    return std::nullopt;
  };
  for (size_t a = 0; a < values_; ++a)
    for (size_t b = a + 1; b < values_; ++b) {
      if (facet_of_[a] == facet_of_[b]) continue;
      std::optional<Case> example;
      if (!met(a, b) && !(example = made(a, b)) && !(example = made(b, a))) continue;
      ++figures.pairs_valid;
      figures.pairs_drawn += met(a, b);
      valid[a * words_ + b / kBits] |= uint64_t{1} << b % kBits;
      if (example) figures.missing.push_back({text_of(a), text_of(b), *example});
    }
  return valid;
}

std::vector<std::string> Combinations::texts_of(const std::vector<uint64_t>& bits) const {
  std::vector<std::string> texts;
  for (size_t value = 0; value < values_; ++value)
    if ((bits[value / kBits] >> value % kBits & 1) != 0) texts.push_back(text_of(value));
  return texts;
}

void Combinations::count_triples(const std::vector<uint64_t>& valid, CombinationFigures& figures) const {
  std::vector<uint64_t> undrawn(words_);
  for (size_t a = 0; a < values_; ++a)
    for (size_t b = a + 1; b < values_; ++b) {
      if ((valid[a * words_ + b / kBits] >> b % kBits & 1) == 0) continue;
      int64_t missing = 0;
      // A row of triples_ has the bit of b itself, and valid rows have none of b's own facet.
      for (size_t word = 0; word < words_; ++word) {
        const uint64_t both = valid[a * words_ + word] & valid[b * words_ + word];
        const uint64_t drawn = both & triples_[word_of(a, b) + word];
        undrawn[word] = both & ~drawn;
        // Valid rows have later values alone, so a triple is met once.
        figures.triples_valid += std::popcount(both);
        figures.triples_drawn += std::popcount(drawn);
        missing += std::popcount(undrawn[word]);
      }
      if (!met(a, b))
        figures.triples_left_out += missing;  // the pair itself is listed
      else if (missing > 0)
        figures.missing_triples.push_back({text_of(a), text_of(b), texts_of(undrawn)});
    }
  const auto count = [](const MissingTriples& m) { return m.thirds.size(); };
  std::ranges::stable_sort(figures.missing_triples, std::ranges::greater{}, count);
  for (; figures.missing_triples.size() > kPairsOfTriples; figures.missing_triples.pop_back())
    figures.triples_left_out += std::ssize(figures.missing_triples.back().thirds);
}

CombinationFigures Combinations::figures(const Limits& limits) const {
  CombinationFigures figures;
  count_triples(valid_pairs(limits, figures), figures);
  return figures;
}

std::string describe(const CombinationFigures& figures) {
  const auto share = [](int64_t drawn, int64_t valid) {
    return 100 * static_cast<double>(drawn) / static_cast<double>(std::max<int64_t>(1, valid));
  };
  std::string text = fmt::format("values of {} facets: {:.1f}% of {} valid pairs were drawn, {:.1f}% of {} triples\n",
                                 facets().size(), share(figures.pairs_drawn, figures.pairs_valid), figures.pairs_valid,
                                 share(figures.triples_drawn, figures.triples_valid), figures.triples_valid);
  constexpr size_t kListed = 12;
  const auto list = [&](const char* what, const auto& missing, const auto& in_words) {
    std::vector<std::string> some;
    for (const auto& one : missing)
      if (some.size() < kListed) some.push_back(in_words(one));
    if (missing.empty()) return;
    const size_t more = missing.size() - some.size();
    text += fmt::format("  {}: {}{}\n", what, fmt::join(some, ", "),
                        more > 0 ? fmt::format(", and {} more; --json lists them", more) : "");
  };
  list("never", figures.missing, [](const MissingPair& pair) { return pair.first + " with " + pair.second; });
  list("drawn, but without so many of the third values", figures.missing_triples, [](const MissingTriples& triples) {
    return fmt::format("{} with {} ({})", triples.first, triples.second, triples.thirds.size());
  });
  if (figures.triples_left_out > 0)
    text += fmt::format("  {} more triples were never drawn: those of pairs that were not, and of pairs with fewer\n",
                        figures.triples_left_out);
  return text;
}

nlohmann::json to_json(const CombinationFigures& figures) {
  nlohmann::json missing = nlohmann::json::array();
  for (const MissingPair& pair : figures.missing)
    missing.push_back({{"first", pair.first}, {"second", pair.second}, {"example", pair.example.str()}});
  nlohmann::json triples = nlohmann::json::array();
  for (const MissingTriples& one : figures.missing_triples)
    triples.push_back({{"first", one.first}, {"second", one.second}, {"thirds", one.thirds}});
  return {{"pairs_drawn", figures.pairs_drawn},
          {"pairs_valid", figures.pairs_valid},
          {"triples_drawn", figures.triples_drawn},
          {"triples_valid", figures.triples_valid},
          {"missing_pairs", std::move(missing)},
          {"missing_triples", std::move(triples)},
          {"missing_triples_left_out", figures.triples_left_out}};
}

}  // namespace harness
