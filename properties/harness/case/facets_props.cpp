// Values of facets, and how evenly cases have pairs and triples of them.
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "harness/case/facets.h"
#include "harness/case/generate.h"
#include "harness/case/mix.h"
#include "harness/commands/combinations.h"

using namespace harness;

namespace {

size_t facet_named(const std::string& name) {
  for (size_t f = 0; f < facets().size(); ++f)
    if (facets()[f].name == name) return f;
  ADD_FAILURE() << "no facet " << name;
  return 0;
}

Combinations combinations_of(const std::vector<std::string>& texts) {
  Combinations combinations;
  for (const std::string& text : texts) combinations.add(Case::parse(text));
  return combinations;
}

constexpr const char* kPlain = "mlp(widths=5-7-3) mesh(dp_shard=4) zero3 sgd(lr=0.1) ordered seed=3 : step";

}  // namespace

TEST(Facets, no_text_is_a_value_of_two_facets) {
  std::set<std::string> texts;
  for (const Facet& facet : facets())
    for (const std::string& value : facet.values) EXPECT_TRUE(texts.insert(value).second) << value;
}

TEST(Facets, every_case_has_one_value_of_each) {
  for (int64_t i = 0; i < 500; ++i) {
    const Case c = generate(3, i, {.above_ten = true});
    for (const Facet& facet : facets()) EXPECT_LT(facet.of(c), facet.values.size()) << facet.name << " of " << c.str();
  }
}

TEST(Facets, every_row_of_the_options_is_one) {
  for (const OptionRow& row : option_rows()) {
    const Facet& facet = facets()[facet_named(row.key)];
    Case c = Case::parse(kPlain);
    for (const int64_t value : row.others) {
      row.of(c.options) = value;
      EXPECT_EQ(facet.values[facet.of(c)], std::string(row.key) + "=" + value_text(row, value));
    }
  }
}

TEST(Facets, a_value_that_can_be_set_is_had_by_some_valid_case_then) {
  std::vector<Case> cases;
  for (int64_t i = 0; i < 300; ++i) cases.push_back(generate(4, i, {}));
  const auto is_had = [&](const Facet& facet, size_t value) {
    return std::ranges::any_of(cases, [&](Case c) {
      facet.set(c, value);
      return facet.of(c) == value && is_valid(c) && Case::parse(c.str()) == c;
    });
  };
  for (const Facet& facet : facets())
    for (size_t value = 0; facet.set && value < facet.values.size(); ++value)
      EXPECT_TRUE(is_had(facet, value) || facet.values[value] == "row outside the table") << facet.values[value];
}

TEST(Combinations, two_cases_have_their_own_pairs_and_triples) {
  const Combinations combinations =
      combinations_of({kPlain, "gpt(layers=1,hidden=8,heads=2,vocab=9,positions=4) mesh(dp_shard=4) zero1 sgd(lr=0.1) ordered "
                               "seed=3 : step"});
  const size_t model = facet_named("model"), strategy = facet_named("strategy"), world = facet_named("world");
  const auto value = [](size_t facet, const std::string& text) {
    return static_cast<size_t>(std::ranges::find(facets()[facet].values, text) - facets()[facet].values.begin());
  };
  const auto cases = [&](size_t a, const std::string& first, size_t b, const std::string& second) {
    return combinations.cases_with(a, value(a, first), b, value(b, second));
  };
  EXPECT_EQ(cases(model, "mlp", strategy, "zero3"), 1);
  EXPECT_EQ(cases(strategy, "zero1", model, "gpt"), 1);
  EXPECT_EQ(cases(model, "gpt", strategy, "zero3"), 0);
  EXPECT_EQ(cases(world, "world 2 to 4", model, "gpt"), 1);
  // Only model and strategy differ, so each triple counts once but for those of the facets that agree.
  const auto n = static_cast<int64_t>(facets().size());
  const CombinationFigures figures = combinations.figures({});
  EXPECT_EQ(figures.triples_drawn, n * (n - 1) * (n - 2) / 6 + (n - 2) * (n - 3) + (n - 2));
  EXPECT_EQ(figures.pairs_drawn, n * (n - 1) / 2 + 2 * (n - 2) + 1);
}

TEST(Combinations, a_pair_that_was_not_drawn_is_valid_if_a_valid_case_has_it) {
  const CombinationFigures figures = combinations_of({kPlain}).figures({});
  EXPECT_EQ(figures.pairs_valid, figures.pairs_drawn + std::ssize(figures.missing));
  bool found = false;
  for (const MissingPair& pair : figures.missing) {
    EXPECT_TRUE(is_valid(pair.example)) << pair.example.str();
    found |= pair.first == "mlp" && pair.second == "units=leaf";
    EXPECT_FALSE(pair.first == "ordered" && pair.second == "arithmetic=canonical") << "which no case can have";
  }
  EXPECT_TRUE(found);
}

TEST(Combinations, a_triple_that_was_not_drawn_is_listed_once_under_its_first_two_values) {
  const CombinationFigures figures = combinations_of({kPlain}).figures({});
  int64_t listed = 0;
  std::set<std::string> seen;
  size_t most = std::numeric_limits<size_t>::max();
  for (const MissingTriples& triples : figures.missing_triples) {
    EXPECT_LE(triples.thirds.size(), most) << "those with the most come first";
    most = triples.thirds.size();
    listed += std::ssize(triples.thirds);
    for (const std::string& third : triples.thirds)
      EXPECT_TRUE(seen.insert(triples.first + "|" + triples.second + "|" + third).second) << third;
  }
  EXPECT_GT(listed, 0);
  EXPECT_EQ(figures.triples_valid, figures.triples_drawn + listed + figures.triples_left_out);
}

TEST(Combinations, limits_leave_out_what_they_forbid) {
  Limits limits;
  limits.strategy = "zero3";
  for (const MissingPair& pair : combinations_of({kPlain}).figures(limits).missing)
    EXPECT_TRUE(pair.first != "zero1" && pair.second != "zero1") << pair.first << " with " << pair.second;
}

// The figures that the generator is to reach, at ten times the cases of a default run.
TEST(Generate, nearly_all_valid_pairs_and_most_triples_of_values_are_drawn) {
  Combinations combinations;
  Limits limits;
  limits.above_ten = true;
  for (int64_t i = 0; i < 2000; ++i) combinations.add(generate(6, i, limits));
  const CombinationFigures figures = combinations.figures(limits);
  EXPECT_GT(figures.pairs_drawn * 100, figures.pairs_valid * 98) << describe(figures);
  EXPECT_GT(figures.triples_drawn * 100, figures.triples_valid * 80) << describe(figures);
}


TEST(Generate, a_quarter_of_the_cases_is_mixed_and_stays_valid) {
  int64_t changed = 0;
  for (int64_t i = 0; i < 400; ++i) {
    Case c = generate(7, i, {});
    const Case before = c;
    mix(Chooser(Draws(8, "another").at(i)), c, {});
    EXPECT_TRUE(is_valid(c)) << c.str();
    changed += !(c == before);
  }
  EXPECT_GT(changed, 60);
  EXPECT_LT(changed, 140);
}
