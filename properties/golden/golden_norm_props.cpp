// The exact norm against integers of unlimited size.
#include <array>
#include <bit>
#include <random>

#include "golden/norm.h"
#include "properties/kit/golden_runs.h"

namespace {

using namespace golden_runs;

// Sum of squares of floats in units of 2^-298, the smallest square, as one integer of 704 bits.
class BigInteger {
 public:
  void add_square(float f) {
    int exponent = 0;
    const double half_open = std::frexp(f, &exponent);  // f = m * 2^(exponent - 24), |m| < 2^24 an integer
    const auto m = static_cast<uint64_t>(std::abs(std::ldexp(half_open, 24)));
    int shift = 2 * (exponent - 24) + 298;
    unsigned __int128 square = static_cast<unsigned __int128>(m) * m;
    while (shift < 0) square >>= 1, ++shift;  // exact: subnormals end in zeros
    add(square << (shift % 64), static_cast<size_t>(shift) / 64);
  }

  // Rounded half to even, found bit by bit.
  double rounded() const {
    int top = kBits - 1;
    while (top >= 0 && !bit(top)) --top;
    if (top < 53) return std::ldexp(static_cast<double>(words_[0]), -298);
    uint64_t mantissa = 0;
    for (int b = top; b > top - 53; --b) mantissa = 2 * mantissa + bit(b);
    bool below = false;
    for (int b = top - 54; b >= 0; --b) below |= bit(b);
    if (bit(top - 53) && (below || mantissa % 2 == 1)) ++mantissa;
    return std::ldexp(static_cast<double>(mantissa), top - 52 - 298);
  }

 private:
  static constexpr int kBits = 704;
  bool bit(int b) const { return words_[static_cast<size_t>(b) / 64] >> (b % 64) & 1; }
  void add(unsigned __int128 value, size_t word) {
    for (; value != 0; ++word) {
      value += words_[word];
      words_[word] = static_cast<uint64_t>(value);
      value >>= 64;
    }
  }
  std::array<uint64_t, kBits / 64> words_{};
};

// Any finite float, each exponent as likely as the next; or all within a few powers of two, where sums round
// and tie.
std::vector<float> random_floats() {
  const bool wide = pick({true, false});
  const auto any = rc::gen::map(rc::gen::arbitrary<uint32_t>(), [wide](uint32_t bits) {
    if (!wide) bits = (bits & 0x807fffff) | (120 + (bits >> 23) % 14) << 23;
    const float f = std::bit_cast<float>(bits);
    return std::isfinite(f) ? f : 1.0f;
  });
  return *rc::gen::container<std::vector<float>>(static_cast<size_t>(draw(0, 300)), rc::gen::noShrink(any));
}

double by_integers(const std::vector<float>& values) {
  BigInteger sum;
  for (const float f : values) sum.add_square(f);
  return sum.rounded();
}

double by_golden(const std::vector<float>& values) {
  return golden::sum_of_squares({at::tensor(values)});
}

RC_GTEST_PROP(GoldenNorm, is_the_exact_sum_rounded_once, ()) {
  const std::vector<float> values = random_floats();
  RC_ASSERT(by_golden(values) == by_integers(values));
}

RC_GTEST_PROP(GoldenNorm, does_not_depend_on_order_or_cuts, ()) {
  std::vector<float> values = random_floats();
  const double expected = by_golden(values);
  std::shuffle(values.begin(), values.end(), std::mt19937_64(*rc::gen::arbitrary<uint64_t>()));
  const at::Tensor all = at::tensor(values);
  const int64_t cut = draw(0, all.numel());
  RC_ASSERT(golden::sum_of_squares({all.narrow(0, 0, cut), all.narrow(0, cut, all.numel() - cut)}) == expected);
}

TEST(GoldenNorm, ties_go_to_even_and_the_smallest_rest_breaks_them) {
  const float big = 0x1p27f, half = 0x1p0f,
              rest = 0x1p-149f;  // squares 2^54, 1 and 2^-298; one unit of 2^54 is 4
  EXPECT_EQ(by_golden({big, half, half}), 0x1p54);
  EXPECT_EQ(by_golden({big, half, half, rest}), 0x1p54 + 4);
  EXPECT_EQ(by_golden({rest, half, big, half}), 0x1p54 + 4);
  EXPECT_EQ(by_golden({big, 2 * half, half, half}), 0x1p54 + 8);  // 2^54 + 6, the even one is above
  EXPECT_EQ(by_golden({big, 2 * half, half, 0.5f}), 0x1p54 + 4);
  for (const std::vector<float>& values :
       {std::vector<float>{big, half, half}, {big, half, half, rest}, {big, 2 * half, half, half}, {big, 2 * half, half, 0.5f}})
    EXPECT_EQ(by_golden(values), by_integers(values));
}

TEST(GoldenNorm, exact_sums_of_either_sign_round_once) {
  golden::ExactSum sum;
  EXPECT_EQ(sum.rounded(), 0);
  for (const double term : {1.0, 0x1p-53, 0x1p-300, -1.0}) sum.add(term);
  EXPECT_EQ(sum.rounded(), 0x1p-53);
  for (const double term : {-0x1p-53, -0x1p-300}) sum.add(term);
  EXPECT_EQ(sum.rounded(), 0);
  for (const double term : {1.0, -0x1p-54, -0x1p-300}) sum.add(term);  // just below the tie between 1 and 1 - 2^-53
  EXPECT_EQ(sum.rounded(), 1 - 0x1p-53);
}

TEST(GoldenNorm, extremes_and_what_is_not_finite) {
  const float largest = std::numeric_limits<float>::max(), smallest = std::numeric_limits<float>::denorm_min();
  const std::vector<float> both{largest, smallest, largest};
  EXPECT_EQ(by_golden(both), by_integers(both));
  EXPECT_EQ(by_golden({smallest}), 0x1p-298);
  EXPECT_EQ(by_golden({}), 0);
  EXPECT_EQ(by_golden({0.0f, -0.0f}), 0);
  EXPECT_EQ(by_golden({1, -INFINITY}), INFINITY);
  EXPECT_TRUE(std::isnan(by_golden({INFINITY, NAN, 1})));
  EXPECT_TRUE(std::isnan(by_golden({NAN, INFINITY, 1})));
}

}  // namespace
