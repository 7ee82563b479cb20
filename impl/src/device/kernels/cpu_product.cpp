#include "device/kernels/cpu_product.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>
#include <vector>

#include "base/fixed_terms.h"
#include "device/kernels/product_tiles.h"
#include "testing/device/product_variants.h"

namespace shardproof::cpu_product {
namespace {

template <class Tiles, size_t... Rows>
constexpr std::array<AddTile*, sizeof...(Rows)> tiles_of(std::index_sequence<Rows...>) {
  return {Tiles::template add<static_cast<int>(Rows) + 1>...};
}

// Columns [column, column + count) of the right side, beside each other. What is missing to a whole panel is 0.
template <int64_t kColumns>
[[gnu::always_inline]] inline void copy_panel(const ExactProduct& p, int64_t column, int64_t count, double* panel) {
  if (count < kColumns) std::fill_n(panel, p.inner * kColumns, 0.0);
  if (!p.b_transposed) {
    for (int64_t k = 0; k < p.inner; ++k)
      for (int64_t j = 0; j < count; ++j) panel[k * kColumns + j] = p.b[k * p.columns + column + j];
    return;
  }
  constexpr int64_t kTerms = 16;  // whose part of the panel stays in the nearest cache
  for (int64_t begin = 0; begin < p.inner; begin += kTerms)
    for (int64_t j = 0; j < count; ++j)
      for (int64_t k = begin; k < std::min(begin + kTerms, p.inner); ++k)
        panel[k * kColumns + j] = p.b[(column + j) * p.inner + k];
}

// The left side in blocks of kRows. One that is transposed is copied, so that the rows of a block lie beside each other.
template <int64_t kRows>
class LeftBlocks {
 public:
  [[gnu::always_inline]] LeftBlocks(const ExactProduct& p, int64_t begin, int64_t end) : p_(p), begin_(begin) {
    if (!p.a_transposed) return;
    copy_.resize(static_cast<size_t>((end - begin + kRows - 1) / kRows * kRows * p.inner));
    double* to = copy_.data();
    for (int64_t row = begin; row < end; row += kRows)
      for (int64_t k = 0; k < p.inner; ++k, to += kRows) std::copy_n(p.a + k * p.rows + row, std::min(kRows, end - row), to);
  }
  [[gnu::always_inline]] const double* at(int64_t row) const {
    return p_.a_transposed ? copy_.data() + (row - begin_) * p_.inner : p_.a + row * p_.inner;
  }
  [[gnu::always_inline]] int64_t row_step() const { return p_.a_transposed ? 1 : p_.inner; }
  [[gnu::always_inline]] int64_t step() const { return p_.a_transposed ? kRows : 1; }

 private:
  const ExactProduct& p_;
  int64_t begin_;
  std::vector<double> copy_;
};

// Stores the sums of `count` columns of a row, which sees the first `seen` of them. `shifts` is in each sum.
[[gnu::always_inline]] inline void store(const ExactProduct& p, int64_t row, int64_t column, const uint64_t* sums,
                                         int64_t count, int64_t seen, uint64_t shifts) {
  const int64_t at = row * p.columns + column;
  if (p.units) {
    int64_t* units = p.units + at;
    for (int64_t j = 0; j < seen; ++j) units[j] = static_cast<int64_t>(static_cast<uint64_t>(units[j]) + (sums[j] - shifts));
    return;
  }
  double* out = p.out + at;
  for (int64_t j = 0; j < seen; ++j) out[j] = fixed::value(sums[j] - shifts);
  for (int64_t j = seen; j < count; ++j) out[j] = 0.0;
}

// Tile after tile. Ranges are not looked at.
template <class Tiles>
[[gnu::always_inline]] inline void add_tiles(const ExactProduct& p, int64_t begin, int64_t end) {
  constexpr int64_t kRows = Tiles::kRows, kColumns = Tiles::kColumns;
  static constexpr auto kTiles = tiles_of<Tiles>(std::make_index_sequence<Tiles::kRows>());
  const uint64_t shifts = static_cast<uint64_t>(p.inner) * fixed::kShiftBits;
  const LeftBlocks<kRows> left(p, begin, end);
  std::vector<double> panel(static_cast<size_t>(p.inner * kColumns));
  std::array<uint64_t, static_cast<size_t>(kRows * kColumns)> sums;
  for (int64_t column = 0; column < p.columns; column += kColumns) {
    const int64_t count = std::min(kColumns, p.columns - column);
    copy_panel<kColumns>(p, column, count, panel.data());
    for (int64_t first = begin; first < end; first += kRows) {
      const int64_t rows = std::min(kRows, end - first);
      std::array<int64_t, static_cast<size_t>(kRows)> seen;
      int64_t most = 0;
      for (int64_t r = 0; r < rows; ++r) {
        seen[r] = p.seen ? std::clamp<int64_t>(p.seen[first + r] - column, 0, count) : count;
        most = std::max(most, seen[r]);
      }
      if (most > 0)
        kTiles[static_cast<size_t>(rows - 1)](sums.data(), left.at(first), left.row_step(), left.step(), p.inner, panel.data());
      for (int64_t r = 0; r < rows; ++r) store(p, first + r, column, sums.data() + r * kColumns, count, seen[r], shifts);
    }
  }
}

// Row after row, with a look at each term. Not zero when one is out of range.
[[gnu::always_inline]] inline uint64_t add_checked_rows(const ExactProduct& p, int64_t begin, int64_t end) {
  const int64_t row_step = p.a_transposed ? 1 : p.inner, left_step = p.a_transposed ? p.rows : 1;
  const int64_t column_step = p.b_transposed ? p.inner : 1, right_step = p.b_transposed ? 1 : p.columns;
  std::vector<uint64_t> sums(static_cast<size_t>(p.columns));
  uint64_t beyond = 0;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t seen = p.seen ? std::min(p.seen[row], p.columns) : p.columns;
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t k = 0; k < p.inner; ++k)
      for (int64_t j = 0; j < seen; ++j) {
        const uint64_t term =
            fixed::units_of_product(p.a[row * row_step + k * left_step], p.b[k * right_step + j * column_step]);
        beyond |= fixed::beyond(term);
        sums[static_cast<size_t>(j)] += term;
      }
    store(p, row, 0, sums.data(), p.columns, seen, 0);
  }
  return beyond;
}

template <class Tiles>
[[gnu::always_inline]] inline bool run_rows(const ExactProduct& p, bool check, int64_t begin, int64_t end) {
  if (check) return add_checked_rows(p, begin, end) == 0;
  add_tiles<Tiles>(p, begin, end);
  return true;
}

bool rows_anywhere(const ExactProduct& p, bool check, int64_t begin, int64_t end) {
  return run_rows<TilesAnywhere>(p, check, begin, end);
}
#ifdef SHARD_X86
[[SHARD_AVX2]] bool rows_avx2(const ExactProduct& p, bool check, int64_t begin, int64_t end) {
  return run_rows<TilesAvx2>(p, check, begin, end);
}
[[SHARD_AVX512]] bool rows_avx512(const ExactProduct& p, bool check, int64_t begin, int64_t end) {
  return run_rows<TilesAvx512>(p, check, begin, end);
}
#endif

}  // namespace

std::vector<Variant> variants() {
  std::vector<Variant> found;
#ifdef SHARD_X86
  if (richest_instructions() >= Instructions::avx512) found.push_back({"AVX-512", rows_avx512});
  if (richest_instructions() >= Instructions::avx2) found.push_back({"AVX2", rows_avx2});
#endif
  found.push_back({"anywhere", rows_anywhere});
  return found;
}

// Each element is computed by one thread, so their number changes no bit.
bool run(const ExactProduct& p, bool check) {
  static const Variant fastest = variants().front();
  constexpr int64_t kTermsOfThread = int64_t{1} << 19;  // ten microseconds or more, so that waking a thread pays
  const int64_t of_row = std::max<int64_t>(1, p.inner * p.columns);
  std::atomic<bool> fit = true;
  at::parallel_for(0, p.rows, kTermsOfThread / of_row + 1, [&](int64_t begin, int64_t end) {
    if (!fastest.rows(p, check, begin, end)) fit = false;
  });
  return fit;
}

}  // namespace shardproof::cpu_product
