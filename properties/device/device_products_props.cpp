// Exact products on flat memory, against plain loops over integers, bit for bit.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <limits>
#include <optional>

#include "properties/kit/device_subject.h"
#include "properties/kit/harness_env.h"
#include "shardproof/device/model_math.h"
#include "internal/device/product_variants.h"

using namespace shardproof;
using namespace device_testing;

namespace {

constexpr double kUnknown = std::numeric_limits<double>::infinity();  // so each term is looked at

void check(const std::string& what, const std::function<void()>& property) {
  EXPECT_TRUE(rc::check(what, property));
}

// The term x y in multiples of 2^-40: the exact product of x and of y with its last bit set, an integer times a power of two,
// rounded to nearest. Nothing when it is not in [-128, 128). No term that is there is a tie.
std::optional<int64_t> term(double x, double y) {
  constexpr double kLimit = 0x1p20;  // far beyond
  if (!(std::abs(x) < kLimit && std::abs(y) < kLimit)) return std::nullopt;
  if (x == 0 || y == 0) return 0;
  int of_x = 0, of_y = 0;
  const auto left = static_cast<int64_t>(std::frexp(x, &of_x) * 0x1p53);
  auto right = static_cast<int64_t>(std::frexp(y, &of_y) * 0x1p53);
  right += right % 2 != 0 ? 0 : right > 0 ? 1 : -1;
  const __int128 product = static_cast<__int128>(left) * right;  // times 2^(of_x + of_y - 106)
  const int down = 106 - 40 - of_x - of_y;
  __int128 units = 0;
  bool tie = false;
  if (down <= 0) {
    units = product << -down;
  } else if (down < 120) {
    units = product >> down;  // downwards
    const __int128 rest = product - (units << down), half = static_cast<__int128>(1) << (down - 1);
    if (rest > half) ++units;
    tie = rest == half;
  }
  const __int128 limit = static_cast<__int128>(1) << 47;
  if (units < -limit || units >= limit) return std::nullopt;
  RC_ASSERT(!tie);
  return static_cast<int64_t>(units);
}

// Mostly of a magnitude at which terms need more digits than there are, some of few digits, whose terms would be ties if no
// last bit was set, some 0.
double number(std::mt19937_64& random) {
  const auto bits = static_cast<int64_t>(random());
  switch (random() % 8) {
    case 0:
      return std::ldexp(static_cast<double>(bits >> 58), -21);
    case 1:
      return random() % 2 ? 0.0 : -0.0;
    default:
      return std::ldexp(static_cast<double>(bits), -62);
  }
}

struct Drawn {
  int64_t rows, inner, columns;
  bool a_transposed, b_transposed, sees_all, has_all_terms;
  double scale, unseen;
  at::Tensor a, b, added;                        // as the memory is
  at::Tensor of_rows;                            // [3, rows]: what is seen, the first term, the end of terms
  double largest_term = 0;                       // of those that are seen, where none is out of range
  std::vector<std::optional<int64_t>> expected;  // sums in units; of columns that are not seen 0

  Drawn(std::mt19937_64& random, int64_t most_rows, int64_t most_inner, int64_t most_columns, bool large, bool one_row = false)
      : rows(one_row ? 1 : *rc::gen::inRange<int64_t>(0, most_rows)),
        inner(*rc::gen::inRange<int64_t>(0, most_inner)),
        columns(*rc::gen::inRange<int64_t>(0, most_columns)),
        a_transposed(*rc::gen::arbitrary<bool>()),
        b_transposed(*rc::gen::arbitrary<bool>()),
        sees_all(*rc::gen::arbitrary<bool>()),
        has_all_terms(*rc::gen::arbitrary<bool>()),
        scale(*rc::gen::element(1.0, 0.3)),
        unseen(*rc::gen::element(0.0, -std::numeric_limits<double>::infinity())),
        a(at::empty({rows * inner}, at::kDouble)),
        b(at::empty({inner * columns}, at::kDouble)),
        added(at::empty({rows * columns}, at::kLong)),
        of_rows(at::empty({3 * rows}, at::kLong)) {
    for (const at::Tensor& x : {a, b})
      for (int64_t i = 0; i < x.numel(); ++i) x.mutable_data_ptr<double>()[i] = number(random);
    if (*rc::gen::arbitrary<bool>()) make_nearly_too_large(random);
    if (large && a.numel() > 0)
      a.mutable_data_ptr<double>()[random() % static_cast<uint64_t>(a.numel())] = random() % 2 ? 1e4 : double{NAN};
    const int64_t seen_of_any = sees_all ? columns : *rc::gen::inRange<int64_t>(0, columns + 1);
    for (int64_t i = 0; i < rows; ++i)
      row_number(0, i) = sees_all ? columns : static_cast<int64_t>(random() % static_cast<uint64_t>(seen_of_any + 1));
    if (!has_all_terms) leave_terms_out(random);
    // Columns that nobody sees have terms out of range, which nobody looks at.
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t j = seen_of_any; j < columns; ++j) b.mutable_data_ptr<double>()[b_place(k, j)] = 1e9;
    for (int64_t i = 0; i < rows * columns; ++i) added.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(random() >> 20);
    for (int64_t i = 0; i < rows * columns; ++i) expected.push_back(sum(i / columns, i % columns));
  }
  // Every term is about 120 in magnitude, and all of a column have one sign, so that 17 of them leave the doubles whose last
  // bit is the unit, at either end.
  void make_nearly_too_large(std::mt19937_64& random) {
    a.abs_().div_(8).add_(62);
    b.abs_().div_(32).add_(1.9);
    for (int64_t j = 0; j < columns; ++j) {
      const double sign = random() % 2 ? 1 : -1;
      for (int64_t k = 0; k < inner; ++k) b.mutable_data_ptr<double>()[b_place(k, j)] *= sign;
    }
  }
  // Of rows, and 0 in their place.
  void leave_terms_out(std::mt19937_64& random) {
    for (int64_t i = 0; i < rows; ++i) {
      const auto first = static_cast<int64_t>(random() % static_cast<uint64_t>(inner + 1));
      row_number(1, i) = first;
      row_number(2, i) = first + static_cast<int64_t>(random() % static_cast<uint64_t>(inner - first + 1));
      for (int64_t k = 0; k < inner; ++k)
        if (k < first || k >= row_number(2, i)) a.mutable_data_ptr<double>()[a_place(i, k)] = 0;
    }
  }
  int64_t& row_number(int64_t what, int64_t row) const { return of_rows.mutable_data_ptr<int64_t>()[what * rows + row]; }
  int64_t a_place(int64_t row, int64_t k) const { return a_transposed ? k * rows + row : row * inner + k; }
  int64_t b_place(int64_t k, int64_t column) const { return b_transposed ? column * inner + k : k * columns + column; }

  bool fits() const {
    return std::all_of(expected.begin(), expected.end(), [](const auto& one) { return one.has_value(); });
  }
  at::Tensor values() const {
    at::Tensor result = at::empty({rows * columns}, at::kDouble);
    for (int64_t i = 0; i < rows * columns; ++i) {
      const bool sees = i % columns < row_number(0, i / columns);
      result.mutable_data_ptr<double>()[i] =
          sees ? static_cast<double>(*expected[static_cast<size_t>(i)]) * 0x1p-40 * scale : unseen;
    }
    return result;
  }
  at::Tensor units() const {
    at::Tensor result = added.clone();
    for (size_t i = 0; i < expected.size(); ++i) result.mutable_data_ptr<int64_t>()[i] += *expected[i];
    return result;
  }
  // To `out`, or added to `units`, with what is multiplied at these places.
  ExactProduct product(const at::Tensor& a_there, const at::Tensor& b_there, const at::Tensor& of_rows_there,
                       const at::Tensor& out, const at::Tensor& units, double term_max) const {
    const int64_t* const numbers = of_rows_there.const_data_ptr<int64_t>();
    return {.a = a_there.const_data_ptr<double>(),
            .b = b_there.const_data_ptr<double>(),
            .out = out.defined() ? out.mutable_data_ptr<double>() : nullptr,
            .rows = rows,
            .inner = inner,
            .columns = columns,
            .units = units.defined() ? units.mutable_data_ptr<int64_t>() : nullptr,
            .seen = sees_all ? nullptr : numbers,
            .unseen = unseen,
            .scale = scale,
            .largest_term = term_max,
            .first_term = has_all_terms ? nullptr : numbers + rows,
            .end_term = has_all_terms ? nullptr : numbers + 2 * rows,
            .a_transposed = a_transposed,
            .b_transposed = b_transposed};
  }

 private:
  std::optional<int64_t> sum(int64_t row, int64_t column) {
    int64_t sum = 0;
    if (column >= row_number(0, row)) return sum;
    for (int64_t k = 0; k < inner; ++k) {
      const double left = a.const_data_ptr<double>()[a_place(row, k)], right = b.const_data_ptr<double>()[b_place(k, column)];
      largest_term = std::max(largest_term, std::abs(left * right));
      const auto one = term(left, right);
      if (!one) return std::nullopt;
      sum += *one;
    }
    return sum;
  }
};

}  // namespace

TEST_F(Kernels, multiply_exactly_and_round_each_term_once_wherever_it_comes_from) {
  check("exact_product", [] {
    std::mt19937_64 random(*rc::gen::arbitrary<uint64_t>());
    const Drawn drawn(random, 6, 100, 20, /*large=*/*rc::gen::inRange(0, 4) == 0);
    const Subject subject(drawn_walk());
    const at::Tensor a = moved(drawn.a, subject), b = moved(drawn.b, subject), of_rows = moved(drawn.of_rows, subject);
    const at::Tensor out = at::full({drawn.rows * drawn.columns}, -1.0, a.options()), units = moved(drawn.added, subject);
    const ModelMath& math = model_math(subject.math());
    RC_ASSERT(math.exact_product(drawn.product(a, b, of_rows, out, {}, kUnknown)) == drawn.fits());
    if (!drawn.fits()) return;
    RC_ASSERT(same_but_for_nans(drawn.values(), out));
    out.fill_(-1);
    RC_ASSERT(math.exact_product(drawn.product(a, b, of_rows, out, {}, drawn.largest_term)));
    RC_ASSERT(same_but_for_nans(drawn.values(), out));
    const double largest_term = *rc::gen::arbitrary<bool>() ? kUnknown : drawn.largest_term;
    RC_ASSERT(math.exact_product(drawn.product(a, b, of_rows, {}, units, largest_term)));
    RC_ASSERT(units.to(at::kCPU).equal(drawn.units()));
  });
}

// Blocks of rows and columns have tails of every length, and begin at every row, as with several threads. One row has a way of
// its own.
TEST(ExactProducts, have_the_same_bits_by_all_instructions_that_the_processor_has) {
  check("variants of exact_product", [] {
    std::mt19937_64 random(*rc::gen::arbitrary<uint64_t>());
    const bool one_row = *rc::gen::inRange(0, 4) == 0;
    const Drawn drawn =
        one_row ? Drawn(random, 2, 100, 140, /*large=*/false, one_row) : Drawn(random, 30, 100, 60, /*large=*/false);
    const int64_t cut = *rc::gen::inRange<int64_t>(0, drawn.rows + 1);
    const double largest_term = *rc::gen::arbitrary<bool>() ? kUnknown : drawn.largest_term;
    for (const cpu_product::Variant& variant : cpu_product::variants()) {
      RC_TAG(variant.name);
      const at::Tensor out = at::full({drawn.rows * drawn.columns}, -1.0, at::kDouble), units = drawn.added.clone();
      const ExactProduct to_out = drawn.product(drawn.a, drawn.b, drawn.of_rows, out, {}, largest_term);
      const ExactProduct to_units = drawn.product(drawn.a, drawn.b, drawn.of_rows, {}, units, largest_term);
      for (const ExactProduct& product : {to_out, to_units}) {
        RC_ASSERT(variant.rows(product, 0, cut));
        RC_ASSERT(variant.rows(product, cut, drawn.rows));
      }
      RC_ASSERT(same_but_for_nans(drawn.values(), out));
      RC_ASSERT(units.equal(drawn.units()));
    }
  });
}

// So many that each lane of vectors leaves the doubles whose last bit is the unit several times, at either end.
TEST(ExactProducts, add_more_terms_of_one_row_than_a_double_holds) {
  constexpr int64_t kInner = 1500;
  std::mt19937_64 random(3);
  at::Tensor a = at::empty({kInner}, at::kDouble), b = at::empty({2, kInner}, at::kDouble);
  std::vector<int64_t> expected = {0, 0};
  for (int64_t k = 0; k < kInner; ++k) {
    const double left = 62 + std::abs(number(random)) / 8, right = 1.9 + std::abs(number(random)) / 32;
    a.mutable_data_ptr<double>()[k] = left;
    for (const int64_t column : {0, 1}) {
      const double factor = column == 0 ? right : -right;
      b.mutable_data_ptr<double>()[column * kInner + k] = factor;
      expected[static_cast<size_t>(column)] += term(left, factor).value();
    }
  }
  for (const cpu_product::Variant& variant : cpu_product::variants()) {
    std::vector<int64_t> units = {0, 0};
    EXPECT_TRUE(variant.rows({.a = a.const_data_ptr<double>(),
                              .b = b.const_data_ptr<double>(),
                              .rows = 1,
                              .inner = kInner,
                              .columns = 2,
                              .units = units.data(),
                              .largest_term = 125,
                              .b_transposed = true},
                             0, 1));
    EXPECT_EQ(units, expected) << variant.name;
  }
}

// Large enough that each of three threads has rows.
TEST(ExactProducts, have_the_same_bits_on_any_number_of_threads) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not see how OpenMP's threads wait for each other";
#endif
  std::mt19937_64 random(5);
  // Many rows, of which each leaves some terms out, and one row by columns that lie as rows do.
  struct Case {
    int64_t rows, inner, columns;
  };
  for (const auto& [rows, inner, columns] : {Case{203, 130, 131}, Case{1, 300, 6000}}) {
    at::Tensor a = at::empty({rows, inner}, at::kDouble), b = at::empty({inner, columns}, at::kDouble);
    for (const at::Tensor& x : {a, b})
      for (int64_t i = 0; i < x.numel(); ++i) x.mutable_data_ptr<double>()[i] = number(random);
    at::Tensor first = at::arange(rows, at::kLong).remainder(7), end = inner - first;
    for (int64_t i = 0; i < rows; ++i) {
      a[i].narrow(0, 0, i % 7).zero_();
      a[i].narrow(0, inner - i % 7, i % 7).zero_();
    }
    const auto product = [&](int threads) {
      const int before = at::get_num_threads();
      at::set_num_threads(threads);
      at::Tensor out = at::full({rows, columns}, -1.0, at::kDouble);
      model_math(device_math(at::kCPU))
          .exact_product({.a = a.const_data_ptr<double>(),
                          .b = b.const_data_ptr<double>(),
                          .out = out.mutable_data_ptr<double>(),
                          .rows = rows,
                          .inner = inner,
                          .columns = columns,
                          .largest_term = 4,
                          .first_term = first.const_data_ptr<int64_t>(),
                          .end_term = end.const_data_ptr<int64_t>(),
                          .b_transposed = rows == 1});
      at::set_num_threads(before);
      return out;
    };
    EXPECT_TRUE(product(1).equal(product(3))) << rows << " rows";
  }
}
