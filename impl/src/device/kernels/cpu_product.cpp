#include "device/kernels/cpu_product.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "internal/base/fixed_terms.h"
#include "device/kernels/product_tiles.h"
#include "internal/device/product_variants.h"

namespace shardproof::cpu_product {
namespace {

template <class Tiles, int R, size_t... Vectors>
constexpr std::array<AddTile*, sizeof...(Vectors)> tiles_of_row(std::index_sequence<Vectors...>) {
  return {Tiles::template add<R, static_cast<int>(Vectors) + 1>...};
}
// By the number of rows and of vectors, from 1 on.
template <class Tiles, size_t... Rows>
constexpr std::array<std::array<AddTile*, Tiles::kVectors>, sizeof...(Rows)> tiles_of(std::index_sequence<Rows...>) {
  return {tiles_of_row<Tiles, static_cast<int>(Rows) + 1>(std::make_index_sequence<Tiles::kVectors>())...};
}

constexpr int64_t kTerms = 16;  // are transposed at a time, so that both sides of them stay in the nearest cache

// Some columns of the right side: `count` from `column` on, in so many vectors.
struct Columns {
  int64_t column, count, vectors;
};

// Panels of about the same width, so that few of the last one's columns are empty.
template <class Tiles>
[[gnu::always_inline]] inline int64_t vectors_of_panel(int64_t columns) {
  constexpr int64_t kMost = Tiles::kVectors * Tiles::kWidth;
  const int64_t panels = (columns + kMost - 1) / kMost, width = (columns + panels - 1) / panels;
  return (width + Tiles::kWidth - 1) / Tiles::kWidth;
}

// Their factors, beside each other. What is missing to whole vectors is 0.
template <class Tiles>
[[gnu::always_inline]] inline void copy_panel(const ExactProduct& p, const Columns& c, double* panel) {
  constexpr int64_t kLine = 8, kAhead = 8;  // doubles of a cache line; so many rows are asked for ahead
  constexpr int64_t kWidth = Tiles::kWidth;
  const int64_t width = c.vectors * kWidth;
  if (c.count < width) std::fill_n(panel, p.inner * width, 0.0);
  if (!p.b_transposed) {
    for (int64_t k = 0; k < p.inner; ++k, panel += width) {
      const double* from = p.b + k * p.columns + c.column;
      for (int64_t j = 0; j < c.count && k + kAhead < p.inner; j += kLine) __builtin_prefetch(from + kAhead * p.columns + j);
      int64_t j = 0;
      for (; j + kWidth <= c.count; j += kWidth)
        for (int64_t lane = 0; lane < kWidth; ++lane) panel[j + lane] = fixed::right_factor(from[j + lane]);
      for (; j < c.count; ++j) panel[j] = fixed::right_factor(from[j]);
    }
    return;
  }
  for (int64_t begin = 0; begin < p.inner; begin += kTerms) {
    const int64_t terms = std::min(kTerms, p.inner - begin);
    for (int64_t j = 0; j < c.count; j += kWidth) {
      const double* from = p.b + (c.column + j) * p.inner + begin;
      double* to = panel + begin * width + j;
      const int64_t count = std::min(kWidth, c.count - j), whole = count == kWidth ? terms / kWidth * kWidth : 0;
      for (int64_t k = 0; k < whole; k += kWidth) Tiles::turn_factors(from + k, p.inner, to + k * width, width);
      for (int64_t lane = 0; lane < count; ++lane)
        for (int64_t k = whole; k < terms; ++k) to[k * width + lane] = fixed::right_factor(from[lane * p.inner + k]);
    }
  }
}

// The terms of the rows [begin, end), one or more, that may be other than 0.
struct Terms {
  int64_t first, end;
};
[[gnu::always_inline]] inline Terms terms_of(const ExactProduct& p, int64_t begin, int64_t end) {
  Terms terms{0, p.inner};
  if (p.first_term) terms.first = *std::min_element(p.first_term + begin, p.first_term + end);
  if (p.end_term) terms.end = *std::max_element(p.end_term + begin, p.end_term + end);
  return terms;
}

// Memory for `count` doubles from a cache line on, which hold anything. It stays with the thread, since new pages are slow. It
// holds a panel, or a strip of the left side: some MiB where a sum has as many terms as it may have.
class Scratch {
 public:
  double* of(int64_t count) {
    if (count > count_) {
      data_.reset();
      count_ = 0;
      data_.reset(static_cast<double*>(::operator new[](static_cast<size_t>(count) * sizeof(double), kLine)));
      count_ = count;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(double* data) const { ::operator delete[](data, kLine); }
  };
  std::unique_ptr<double[], Free> data_;
  int64_t count_ = 0;
};
thread_local Scratch panel_scratch, left_scratch;

// The left side in blocks of kRows. One that is transposed is copied, so that the rows of a block lie beside each other.
template <int64_t kRows>
class LeftBlocks {
 public:
  [[gnu::always_inline]] LeftBlocks(const ExactProduct& p, int64_t begin, int64_t end) : p_(p), begin_(begin) {
    if (!p.a_transposed) return;
    const int64_t blocks = (end - begin + kRows - 1) / kRows;
    copy_ = left_scratch.of(blocks * kRows * p.inner);
    for (int64_t first = 0; first < p.inner; first += kTerms)
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = begin + block * kRows, rows = std::min(kRows, end - row);
        const Terms terms = terms_of(p, row, row + rows);
        for (int64_t k = std::max(first, terms.first); k < std::min(first + kTerms, terms.end); ++k)
          copy_rows(p.a + k * p.rows + row, rows, copy_ + (block * p.inner + k) * kRows);
      }
  }
  [[gnu::always_inline]] const double* at(int64_t row) const {
    return p_.a_transposed ? copy_ + (row - begin_) * p_.inner : p_.a + row * p_.inner;
  }
  [[gnu::always_inline]] int64_t row_step() const { return p_.a_transposed ? 1 : p_.inner; }
  [[gnu::always_inline]] int64_t step() const { return p_.a_transposed ? kRows : 1; }

 private:
  [[gnu::always_inline]] static void copy_rows(const double* from, int64_t count, double* to) {
    if (count == kRows)
      memcpy(to, from, sizeof(double) * kRows);
    else
      std::copy_n(from, count, to);
  }

  const ExactProduct& p_;
  int64_t begin_;
  double* copy_ = nullptr;
};

// Stores the sums of `count` columns of a row, which sees the first `seen` of them.
[[gnu::always_inline]] inline void store(const ExactProduct& p, int64_t row, int64_t column, const uint64_t* sums,
                                         int64_t count, int64_t seen) {
  const int64_t at = row * p.columns + column;
  if (p.units) {
    int64_t* units = p.units + at;
    for (int64_t j = 0; j < seen; ++j) units[j] = static_cast<int64_t>(static_cast<uint64_t>(units[j]) + sums[j]);
    return;
  }
  double* out = p.out + at;
  for (int64_t j = 0; j < seen; ++j) out[j] = fixed::value(sums[j]) * p.scale;
  for (int64_t j = seen; j < count; ++j) out[j] = p.unseen;
}

// Tile after tile. Ranges are not looked at.
template <class Tiles>
[[gnu::always_inline]] inline void add_tiles(const ExactProduct& p, int64_t begin, int64_t end) {
  constexpr int64_t kRows = Tiles::kRows, kWidth = Tiles::kWidth, kColumns = Tiles::kVectors * kWidth;
  static constexpr auto kTiles = tiles_of<Tiles>(std::make_index_sequence<Tiles::kRows>());
  const LeftBlocks<kRows> left(p, begin, end);
  double* const panel = panel_scratch.of(p.inner * kColumns);
  std::array<uint64_t, static_cast<size_t>(kRows * kColumns)> sums;
  const int64_t terms_of_sum = fixed::terms_of_shifted(p.largest_term);
  const int64_t vectors = p.columns > 0 ? vectors_of_panel<Tiles>(p.columns) : 0;
  for (int64_t column = 0; column < p.columns; column += vectors * kWidth) {
    const int64_t count = std::min(vectors * kWidth, p.columns - column);
    const Columns columns{column, count, (count + kWidth - 1) / kWidth};
    const int64_t width = columns.vectors * kWidth;
    copy_panel<Tiles>(p, columns, panel);
    for (int64_t first = begin; first < end; first += kRows) {
      const int64_t rows = std::min(kRows, end - first);
      std::array<int64_t, static_cast<size_t>(kRows)> seen;
      int64_t most = 0;
      for (int64_t r = 0; r < rows; ++r) {
        seen[r] = p.seen ? std::clamp<int64_t>(p.seen[first + r] - column, 0, count) : count;
        for (int64_t j = 0; p.out && j < count; j += 8) __builtin_prefetch(p.out + (first + r) * p.columns + column + j, 1);
        most = std::max(most, seen[r]);
      }
      AddTile* const add = kTiles[static_cast<size_t>(rows - 1)][static_cast<size_t>(columns.vectors - 1)];
      const Terms terms = terms_of(p, first, first + rows);
      if (terms.first >= terms.end) std::fill_n(sums.data(), rows * width, 0);
      for (int64_t k = terms.first; most > 0 && k < terms.end; k += terms_of_sum)
        add(sums.data(), /*fresh=*/k == terms.first, left.at(first) + k * left.step(), left.row_step(), left.step(),
            std::min(terms_of_sum, terms.end - k), panel + k * width);
      for (int64_t r = 0; r < rows; ++r) store(p, first + r, column, sums.data() + r * width, count, seen[r]);
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
    store(p, row, 0, sums.data(), p.columns, seen);
  }
  return beyond;
}

// A row by a column, both in one piece. Lanes of vectors take neighbouring terms.
[[gnu::always_inline]] inline uint64_t sum_of_terms(const double* left, const double* right, int64_t inner,
                                                    int64_t terms_of_sum) {
  constexpr int64_t kLanes = 32;
  uint64_t sum = 0;
  for (int64_t begin = 0; begin < inner; begin += terms_of_sum * kLanes) {
    const int64_t end = std::min(inner, begin + terms_of_sum * kLanes), whole = begin + (end - begin) / kLanes * kLanes;
    double lanes[kLanes];
    for (double& lane : lanes) lane = fixed::kShift;
    for (int64_t k = begin; k < whole; k += kLanes)
      for (int64_t j = 0; j < kLanes; ++j) lanes[j] = fma(left[k + j], fixed::right_factor(right[k + j]), lanes[j]);
    for (int64_t k = whole; k < end; ++k) lanes[k - whole] = fma(left[k], fixed::right_factor(right[k]), lanes[k - whole]);
    for (const double lane : lanes) sum += fixed::units_of_shifted(lane);
  }
  return sum;
}
// The only row by columns that lie as rows do: nothing is worth copying.
[[gnu::always_inline]] inline void add_row(const ExactProduct& p) {
  constexpr int64_t kColumns = 64;  // at a time
  const int64_t terms_of_sum = fixed::terms_of_shifted(p.largest_term);
  for (int64_t column = 0; column < p.columns; column += kColumns) {
    const int64_t count = std::min(kColumns, p.columns - column);
    const int64_t seen = p.seen ? std::clamp<int64_t>(*p.seen - column, 0, count) : count;
    std::array<uint64_t, static_cast<size_t>(kColumns)> sums;
    for (int64_t j = 0; j < seen; ++j)
      sums[static_cast<size_t>(j)] = sum_of_terms(p.a, p.b + (column + j) * p.inner, p.inner, terms_of_sum);
    store(p, 0, column, sums.data(), count, seen);
  }
}

template <class Tiles>
[[gnu::always_inline]] inline bool run_rows(const ExactProduct& p, int64_t begin, int64_t end) {
  if (!fixed::all_fit(p.largest_term)) return add_checked_rows(p, begin, end) == 0;
  if (p.rows == 1 && begin < end && p.b_transposed && p.inner > 1) {
    add_row(p);
    return true;
  }
  constexpr int64_t kCopyMax = 1 << 17;  // doubles of a transposed left side at a time, which stay in a core's cache
  const int64_t fit = std::max<int64_t>(1, kCopyMax / Tiles::kRows / std::max<int64_t>(1, p.inner)) * Tiles::kRows;
  const int64_t strip = p.a_transposed ? fit : std::max<int64_t>(1, end - begin);
  for (int64_t first = begin; first < end; first += strip) add_tiles<Tiles>(p, first, std::min(first + strip, end));
  return true;
}

bool rows_anywhere(const ExactProduct& p, int64_t begin, int64_t end) {
  return run_rows<TilesAnywhere>(p, begin, end);
}
#ifdef SHARD_X86
[[SHARD_AVX2]] bool rows_avx2(const ExactProduct& p, int64_t begin, int64_t end) {
  return run_rows<TilesAvx2>(p, begin, end);
}
[[SHARD_AVX512]] bool rows_avx512(const ExactProduct& p, int64_t begin, int64_t end) {
  return run_rows<TilesAvx512>(p, begin, end);
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

namespace {

const Variant& fastest() {
  static const Variant one = variants().front();
  return one;
}

// Threads share the columns of one row, as sums of rows have it.
bool run_columns(const ExactProduct& p, int64_t terms_of_thread) {
  std::atomic<bool> fit = true;
  at::parallel_for(0, p.columns, terms_of_thread / std::max<int64_t>(1, p.inner) + 1, [&](int64_t begin, int64_t end) {
    ExactProduct part = p;
    part.b += begin * p.inner;
    if (p.units)
      part.units += begin;
    else
      part.out += begin;
    part.columns = end - begin;
    if (!fastest().rows(part, 0, 1)) fit = false;
  });
  return fit;
}

}  // namespace

// Each element is computed by one thread, so their number changes no bit.
bool run(const ExactProduct& p) {
  constexpr int64_t kTermsOfThread = int64_t{1} << 19;  // ten microseconds or more, so that waking a thread pays
  if (p.rows == 1 && p.b_transposed && !p.seen) return run_columns(p, kTermsOfThread);
  const int64_t of_row = std::max<int64_t>(1, p.inner * p.columns);
  std::atomic<bool> fit = true;
  at::parallel_for(0, p.rows, kTermsOfThread / of_row + 1, [&](int64_t begin, int64_t end) {
    if (!fastest().rows(p, begin, end)) fit = false;
  });
  return fit;
}

}  // namespace shardproof::cpu_product
