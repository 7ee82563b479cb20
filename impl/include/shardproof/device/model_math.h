// The arithmetic of models on flat memory that LibTorch does not have: masks of dropout, and canonical arithmetic. One source,
// device/kernels, implements it together with the arithmetic of device_math.h, whose first comment holds here, too. This header
// does not include Torch.
#pragma once

#include <limits>

#include "shardproof/device/device_math.h"

namespace shardproof {

// A mask of dropout (nn/random.h). An element lies in a matrix with `length` columns, and its index there is
// i = rows[r] * length + columns[c]. The mask is 0 where the upper 32 bits of counter_mix(key ^ i) are below `dropped_below`,
// else `kept`, rounded once to the type.
struct MaskScalars {
  uint64_t key = 0, dropped_below = 0;
  int64_t length = 0;
  float kept = 1;
};

// A product of canonical arithmetic (nn/canonical/canonical.h): out [rows, columns] = a [rows, inner] times b [inner, columns].
// All three are float64 and row-major. A term is a number of a times one of b whose last bit is set. It is rounded once to the
// nearest multiple of 2^-40, and the sums of these are exact.
struct ExactProduct {
  const double *a = nullptr, *b = nullptr;
  double* out = nullptr;
  int64_t rows = 0, inner = 0, columns = 0;
  // [rows, columns] in multiples of 2^-40, to which the sums are added modulo 2^64. Then `out` is not used.
  int64_t* units = nullptr;
  // [rows]: only so many columns of each row are computed, the first ones. The others are `unseen` in `out`. Null: all are.
  const int64_t* seen = nullptr;
  double unseen = 0;
  double scale = 1;  // In `out` a sum is multiplied by this.
  // No product of numbers that are seen is above this in magnitude. Where it is 127 or more, or NaN, each term is looked at.
  double largest_term = std::numeric_limits<double>::quiet_NaN();
  // [rows], from 0 to `inner`: a row of a is 0 before the one and from the other on, so that those terms can be left out. Where
  // each term is looked at, these are as well, as 0 times infinity is out of range. Null: no such place.
  const int64_t *first_term = nullptr, *end_term = nullptr;
  // Where the transpose of a or b is row-major instead: a is [inner, rows] in memory, b is [columns, inner].
  bool a_transposed = false, b_transposed = false;
};

// Activations of canonical arithmetic. Gelu is the exact one, not that by tanh.
enum class Activation : uint8_t { tanh, gelu, silu };

// A norm of canonical arithmetic, over the rows of x [rows, width], float64. One that is not centred takes a mean of 0.
struct RowNorm {
  const double *x = nullptr, *weight = nullptr;
  int64_t rows = 0, width = 0;
  double eps = 0;
  bool centred = true;
};

// How many elements of a row are computed, the first ones: of row r it is count[r % rows]. Null: all.
struct SeenOfRows {
  const int64_t* count = nullptr;
  int64_t rows = 1;
};

class ModelMath : public DeviceMath {
 public:
  // Writes the first `count` elements of the mask, row by row. There are `column_count` columns.
  virtual void dropout_mask(Element type, const MaskScalars& scalars, const int64_t* rows, const int64_t* columns,
                            int64_t column_count, int64_t count, std::byte* target) const = 0;

  // NaN where there is one, and 0 of no elements. The host waits for it.
  virtual double largest_magnitude(const double* x, int64_t count) const = 0;
  // Whether every term was in [-128, 128), or needed no look.
  virtual bool exact_product(const ExactProduct& product) const = 0;
  // y [rows, width]. `bias` is null when the norm is not centred.
  virtual void row_norm(const RowNorm& norm, const double* bias, double* y) const = 0;
  // dx [rows, width], and in `of_weight` [rows, width] the terms of the gradient of the weight.
  virtual void row_norm_backward(const RowNorm& norm, const double* dy, double* dx, double* of_weight) const = 0;

  // y [rows, width]: exp(x - most) over `divisor`, numbers of each row. Null divisors are 1, and a `most` of -infinity counts
  // as 0. What is not seen is 0. y may be x.
  virtual void row_powers(const double* x, const double* most, const double* divisor, SeenOfRows seen, int64_t rows,
                          int64_t width, double* y) const = 0;
  // y [rows, width]: the gradient dx of a softmax with these shares: (dy * mask - along) * shares * scale, one operation after
  // the other. `along` is of each row. A null mask is 1. What is not seen is 0. y may be dy.
  virtual void row_slopes(const double* dy, const double* mask, const double* along, const double* shares, double scale,
                          SeenOfRows seen, int64_t rows, int64_t width, double* y) const = 0;

  // Curves of canonical arithmetic, element by element (device/kernels/curves.h). y may be x.
  virtual void log(const double* x, int64_t count, double* y) const = 0;
  // The nearest multiple of 2^-40, ties to even; never -0.
  virtual void grid(const double* x, int64_t count, double* y) const = 0;
  // Rounded to such multiples; as is the gradient dx of the input.
  virtual void activate(Activation activation, const double* x, int64_t count, double* y) const = 0;
  virtual void activate_backward(Activation activation, const double* x, const double* dy, int64_t count, double* dx) const = 0;
  // out [rows]: the sum of a times b, [rows, width], in the order of indices. Nothing is rounded to multiples.
  virtual void row_dots(const double* a, const double* b, int64_t rows, int64_t width, double* out) const = 0;
};

// What a device's arithmetic (device.h) has for models. Throws Error when it was registered without.
const ModelMath& model_math(const DeviceMath& math);

}  // namespace shardproof
