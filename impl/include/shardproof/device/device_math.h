// The arithmetic of the library on flat memory, as an interface. One source, device/kernels, implements it for the CPU and for
// GPUs. This header does not include Torch, so that kernels compile in seconds.
//
// All pointers are pointers of the device unless a comment says otherwise. A call queues its work behind what the calling
// thread queued before, and a call that returns a value waits for it. On the CPU every call is over when it returns. The result
// for an element depends on the inputs of this element alone, not on its position, and has the same bits on every device. Only
// the payload of a NaN may differ between devices.
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

// The scalars of one optimizer step. The comments give the formula for an element: p is the parameter, g the gradient, m and v
// the state. Each scalar is rounded once, to the type of the arrays.

// g += coupled * p (unless coupled is 0);  m = beta1 * m + beta1_rest * g;  v = beta2 * v + beta2_rest * (g * g);
// p = p * keep - rate * (m / (sqrt(v) / root + eps))
struct AdamScalars {
  double keep = 1, coupled = 0, beta1 = 0, beta1_rest = 1, beta2 = 0, beta2_rest = 1, eps = 0, rate = 0, root = 1;
};
// g += decay * p (unless decay is 0);  m = momentum * m + g;  p -= lr * d, where d is m, or g without momentum, or
// g + momentum * m with nesterov
struct SgdScalars {
  double lr = 0, decay = 0, momentum = 0;
  bool nesterov = false;
};
// p = p * keep - lr * sign(beta1 * m + beta1_rest * g);  m = beta2 * m + beta2_rest * g
struct LionScalars {
  double keep = 1, lr = 0, beta1 = 0, beta1_rest = 1, beta2 = 0, beta2_rest = 1;
};

// The arrays of an update. Each has `count` elements of `type`, which is f32 or f64. When `low` is not null, the type must be
// f32, and `low` receives the new parameter, rounded once to `low_type`, which is bf16 or f16.
struct UpdateArrays {
  Element type = Element::f32;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* first = nullptr;   // the momentum m; null when the rule has none
  void* second = nullptr;  // the average of squares v; null when the rule has none
  int64_t count = 0;
  void* low = nullptr;
  Element low_type = Element::bf16;
};

class DeviceMath {
 public:
  virtual ~DeviceMath() = default;

  // target[i] = ((terms[0][i] + terms[1][i]) + terms[2][i]) + ..., where each addition is rounded to the type; integers wrap
  // around. `max` and `min` keep the first of equal terms, and the first NaN. `target` may be one of the terms; otherwise it
  // must not overlap them. The list of pointers lies in host memory. The kernels for GPUs take at most 480 terms.
  virtual void reduce(Element type, Reduce op, std::span<const std::byte* const> terms, int64_t count,
                      std::byte* target) const = 0;
  // Computes the same sum in float32 and rounds it once, at the end, to the type of `target`.
  virtual void sum_wide(Element type, std::span<const std::byte* const> terms, int64_t count, Element target_type,
                        std::byte* target) const = 0;

  virtual void sgd(const SgdScalars& scalars, const UpdateArrays& arrays) const = 0;
  virtual void adam(const AdamScalars& scalars, const UpdateArrays& arrays) const = 0;
  virtual void lion(const LionScalars& scalars, const UpdateArrays& arrays) const = 0;

  // target = source, or target += source when `add`. The source is converted to float32 first.
  virtual void store(float* target, Element source_type, const std::byte* source, int64_t count, bool add) const = 0;
  // Does the same in fixed point: each term is rounded to a multiple of `unit`, a power of two, and the target counts these
  // units. An integer source counts units already. Returns whether every term was below `limit` in magnitude and every result
  // below `limit_of_sums`. Terms that are not below `limit` count as 0.
  virtual bool store_fixed(int64_t* target, Element source_type, const std::byte* source, int64_t count, bool add, double unit,
                           double limit, double limit_of_sums) const = 0;
  virtual void fixed_to_float(float* target, const int64_t* source, int64_t count, float unit) const = 0;
  virtual void divide(float* values, int64_t count, float divisor) const = 0;
  virtual void scale(float* values, int64_t count, float factor) const = 0;

  // The index of the first element that is NaN, infinite or above the limit in magnitude; `count` when there is none.
  virtual int64_t first_beyond(Element type, const std::byte* values, int64_t count, double limit) const = 0;
  // The same, for whoever asks later: lowers `*least` to `offset` + the index, where there is such an element.
  virtual void note_beyond(Element type, const std::byte* values, int64_t count, double limit, int64_t offset,
                           int64_t* least) const = 0;
  virtual void zero(void* target, int64_t bytes) const = 0;
  virtual void copy(void* target, const void* source, int64_t bytes) const = 0;

  // Adds the squares of the elements, or without `squares` their magnitudes, to the counters of an ExactSum (exact_sum.h). The
  // spans are listed in host memory. Counters [2 * exponent] and [2 * exponent + 1] belong to one exponent; the second counts
  // units of 2^24. Law: the sum that the counters stand for is exact. (Neal 2015, "Fast exact summation using small and large
  // superaccumulators", keeps one integer for each exponent in this way.)
  virtual void exact_sum(std::span<const FlatSpan> spans, bool squares, int64_t* counters) const = 0;
};

}  // namespace shardproof
