// Which token follows, of a model's logits.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "harness/train/sample.h"

using harness::drawn_token;

namespace {

// Of probabilities 1/8, 1/2, 1/8 and 1/4.
const std::vector<double> kLogits = {0, std::log(4.0), 0, std::log(2.0)};

// How many of 800 draws, evenly over [0, 1), take each token.
std::map<int64_t, int64_t> times(double temperature, int64_t top_k) {
  std::map<int64_t, int64_t> taken;
  for (int64_t i = 0; i < 800; ++i) ++taken[drawn_token(kLogits, temperature, top_k, (static_cast<double>(i) + 0.5) / 800)];
  return taken;
}

using Times = std::map<int64_t, int64_t>;

}  // namespace

TEST(Sample, tokens_are_drawn_with_their_probabilities) {
  EXPECT_EQ(times(1, 0), (Times{{0, 100}, {1, 400}, {2, 100}, {3, 200}}));
}

TEST(Sample, only_the_likeliest_are_drawn_where_that_is_asked_for) {
  EXPECT_EQ(times(1, 1), (Times{{1, 800}}));
  EXPECT_EQ(times(1, 2).size(), 2U);
  EXPECT_NEAR(static_cast<double>(times(1, 2).at(1)), 800 * 2 / 3.0, 1);
  EXPECT_EQ(times(1, 3).count(2), 0U);  // of two that are alike the lower token comes first
  EXPECT_EQ(times(1, 9), times(1, 0));
}

TEST(Sample, the_temperature_makes_likely_tokens_likelier_or_all_alike) {
  EXPECT_EQ(times(0, 0), (Times{{1, 800}}));
  // Squares: 1, 16, 1 and 4 of 22.
  EXPECT_NEAR(static_cast<double>(times(0.5, 0).at(1)), 800 * 16 / 22.0, 1);
  for (const auto& [token, count] : times(1e9, 0)) EXPECT_NEAR(static_cast<double>(count), 200, 1) << token;
}

TEST(Sample, a_draw_at_the_end_takes_the_last_token) {
  EXPECT_EQ(drawn_token(kLogits, 1, 0, 0), 1);
  EXPECT_EQ(drawn_token(kLogits, 1, 0, std::nextafter(1.0, 0.0)), 2);
  EXPECT_EQ(drawn_token({5, 5, 5}, 0, 0, 0.9), 0);
}
