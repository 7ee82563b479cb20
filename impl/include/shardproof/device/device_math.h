// The arithmetic of the library on flat memory, as an interface: the CPU's and a GPU's are one source (device/kernels). Free of
// Torch, so that kernels compile in seconds.
//
// All pointers are the device's, unless it says otherwise. Work is queued behind what the calling thread queued before; a call
// that returns a value waits for it. On the CPU every call is over when it returns. An element's result depends on its own
// inputs alone, not on where it lies, and has the same bits on every device; only the payload of a NaN is the device's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "shardproof/base/element.h"
#include "shardproof/base/reduce.h"

namespace shardproof {

struct FlatSpan {
  const float* data = nullptr;
  int64_t count = 0;
};

// Scalars of updates are rounded once, to the type of the arrays.

// g += coupled * p (unless 0);  m = beta1 * m + beta1_rest * g;  v = beta2 * v + beta2_rest * (g * g);
// p = p * keep - rate * (m / (sqrt(v) / root + eps))
struct AdamScalars {
  double keep = 1, coupled = 0, beta1 = 0, beta1_rest = 1, beta2 = 0, beta2_rest = 1, eps = 0, rate = 0, root = 1;
};
// g += decay * p (unless 0);  m = momentum * m + g;  p -= lr * (m, or g without m, or g + momentum * m)
struct SgdScalars {
  double lr = 0, decay = 0, momentum = 0;
  bool nesterov = false;
};
// p = p * keep - lr * sign(beta1 * m + beta1_rest * g);  m = beta2 * m + beta2_rest * g
struct LionScalars {
  double keep = 1, lr = 0, beta1 = 0, beta1_rest = 1, beta2 = 0, beta2_rest = 1;
};

// The arrays of an update, `count` elements of `type` each: f32 or f64. `low`, if any, receives the new parameter of f32,
// rounded once to `low_type`: bf16 or f16.
struct UpdateArrays {
  Element type = Element::f32;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* first = nullptr;   // momentum; null where the rule has none
  void* second = nullptr;  // of squares
  int64_t count = 0;
  void* low = nullptr;
  Element low_type = Element::bf16;
};

class DeviceMath {
 public:
  virtual ~DeviceMath() = default;

  // target[i] = ((terms[0][i] + terms[1][i]) + terms[2][i]) + ..., each addition rounded to the type; integers wrap. Max and
  // min keep the first of equal terms and the first NaN. `target` may be one of the terms, else it must not overlap them. The
  // list of terms lies on the CPU; a GPU's kernels take at most 480.
  virtual void reduce(Element type, Reduce op, std::span<const std::byte* const> terms, int64_t count,
                      std::byte* target) const = 0;
  // The same sum in float32, rounded to the type of `target` once, at the end.
  virtual void sum_wide(Element type, std::span<const std::byte* const> terms, int64_t count, Element target_type,
                        std::byte* target) const = 0;

  virtual void sgd(const SgdScalars& scalars, const UpdateArrays& arrays) const = 0;
  virtual void adam(const AdamScalars& scalars, const UpdateArrays& arrays) const = 0;
  virtual void lion(const LionScalars& scalars, const UpdateArrays& arrays) const = 0;

  // target = source, or target += source, converted to float32 first.
  virtual void store(float* target, Element source_type, const std::byte* source, int64_t count, bool add) const = 0;
  // The same into multiples of `unit`, a power of two; integers are such multiples already. Returns whether every term is below
  // `limit` in magnitude, and every result below `limit_of_sums`; terms that are not are left out.
  virtual bool store_fixed(int64_t* target, Element source_type, const std::byte* source, int64_t count, bool add, double unit,
                           double limit, double limit_of_sums) const = 0;
  virtual void fixed_to_float(float* target, const int64_t* source, int64_t count, float unit) const = 0;
  virtual void divide(float* values, int64_t count, float divisor) const = 0;
  virtual void scale(float* values, int64_t count, float factor) const = 0;

  // Index of the first element that is NaN, infinite or of a magnitude above the limit; `count` when there is none.
  virtual int64_t first_beyond(Element type, const std::byte* values, int64_t count, double limit) const = 0;
  virtual bool all_zero(Element type, const std::byte* values, int64_t count) const = 0;
  virtual void zero(void* target, int64_t bytes) const = 0;
  virtual void copy(void* target, const void* source, int64_t bytes) const = 0;

  // Adds the terms of exact_sum.h's ExactSum to its counters, which lie on the CPU: [2 * exponent] and [2 * exponent + 1],
  // the latter in units of 2^24. `squares`: else magnitudes. Law: the sum that the counters stand for is exact.
  virtual void exact_sum(std::span<const FlatSpan> spans, bool squares, std::span<int64_t> counters) const = 0;
};

}  // namespace shardproof
