#include "device/reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "shardproof/base/check.h"
#include "shardproof/device/device.h"

namespace shardproof {
namespace {

// Signed overflow is undefined; unsigned arithmetic wraps and has the same bits.
template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  } else {
    // float16 and bfloat16 add in float32 and round once more, which equals rounding once (24 >= 2 * 11 + 2 bits).
    return static_cast<T>(a + b);
  }
}

template <typename T>
bool is_nan(T value) {
  return value != value;
}

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    return add(a, b);
  }
};

struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return is_nan(a) || a >= b ? a : b;
  }
};

struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return is_nan(a) || a <= b ? a : b;
  }
};

// Elements a pass: the running result of a block stays in the first-level cache.
constexpr int64_t kBlock = 1024;

template <typename T, typename Operation>
void combine(const T* a, const T* b, T* target, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) target[i] = Operation::apply(a[i], b[i]);
}

template <typename T, typename Operation>
void reduce_typed(const std::vector<const std::byte*>& terms, int64_t count, std::byte* target_bytes) {
  const auto term = [&](size_t k) { return reinterpret_cast<const T*>(terms[k]); };
  T* target = reinterpret_cast<T*>(target_bytes);
  const size_t last = terms.size() - 1;
  alignas(64) T running[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t length = std::min(kBlock, count - begin);
    // The target is written last, once every term of the block was read: it may be one of them.
    const T* left = term(0) + begin;
    for (size_t k = 1; k <= last; ++k) {
      T* into = k == last ? target + begin : running;
      combine<T, Operation>(left, term(k) + begin, into, length);
      left = running;
    }
  }
}

template <typename T>
void reduce_dtype(Reduce op, const std::vector<const std::byte*>& terms, int64_t count, std::byte* target) {
  switch (op) {
    case Reduce::sum: return reduce_typed<T, Sum>(terms, count, target);
    case Reduce::max: return reduce_typed<T, Max>(terms, count, target);
    case Reduce::min: return reduce_typed<T, Min>(terms, count, target);
  }
}

}  // namespace

bool can_reduce(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
    case at::kInt:
    case at::kLong:
    case at::kByte: return true;
    default: return false;
  }
}

void reduce_terms(at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms, int64_t count,
                  std::byte* target) {
  SHARD_CHECK(!terms.empty(), "comm", "a reduction needs at least one term");
  if (count == 0) return;
  if (terms.size() == 1) {
    std::memmove(target, terms[0], count * c10::elementSize(dtype));
    return;
  }
  switch (dtype) {
    case at::kFloat: return reduce_dtype<float>(op, terms, count, target);
    case at::kDouble: return reduce_dtype<double>(op, terms, count, target);
    case at::kBFloat16: return reduce_dtype<c10::BFloat16>(op, terms, count, target);
    case at::kHalf: return reduce_dtype<c10::Half>(op, terms, count, target);
    case at::kInt: return reduce_dtype<int32_t>(op, terms, count, target);
    case at::kLong: return reduce_dtype<int64_t>(op, terms, count, target);
    case at::kByte: return reduce_dtype<uint8_t>(op, terms, count, target);
    default: SHARD_CHECK(false, "comm", "no reduction of {}", c10::toString(dtype));
  }
}

void reduce_terms(const DeviceMath* math, at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms,
                  int64_t count, std::byte* target) {
  if (!math) return reduce_terms(dtype, op, terms, count, target);
  SHARD_REQUIRE(std::ssize(terms) <= DeviceMath::kTermsMax, "comm", "a sum of {} terms on a device; it adds at most {}",
                terms.size(), DeviceMath::kTermsMax);
  if (count > 0) math->reduce(element_type(dtype), op, terms, count, target);
}

}  // namespace shardproof
