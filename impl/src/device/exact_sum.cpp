#include "internal/device/exact_sum.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "shardproof/device/device.h"

namespace shardproof {
namespace {

// A sum of squares of floats is an integer multiple of 2^-298, below 2^(256 + 39): 11 limbs of 64 bits hold it.
class BigSum {
 public:
  void add(int64_t value, int64_t bit) {
    size_t limb = static_cast<size_t>(bit / 64);
    unsigned __int128 carry = static_cast<unsigned __int128>(static_cast<uint64_t>(value)) << (bit % 64);
    for (; carry != 0; ++limb) {
      carry += limbs_.at(limb);
      limbs_[limb] = static_cast<uint64_t>(carry);
      carry >>= 64;
    }
  }

  // The value times 2^exponent, rounded to nearest, ties to even.
  double round(int exponent) const {
    int64_t top = static_cast<int64_t>(limbs_.size()) * 64 - 1;
    while (top >= 0 && !bit(top)) --top;
    if (top < 53) return std::ldexp(static_cast<double>(limbs_[0]), exponent);
    uint64_t significand = 0;
    for (int64_t i = top; i > top - 53; --i) significand = significand * 2 + bit(i);
    const bool half = bit(top - 53);
    bool rest = false;
    for (int64_t i = 0; i < top - 53; ++i) rest |= bit(i);
    if (half && (rest || significand % 2 == 1)) ++significand;
    return std::ldexp(static_cast<double>(significand), exponent + static_cast<int>(top) - 52);
  }

 private:
  bool bit(int64_t i) const { return limbs_[static_cast<size_t>(i / 64)] >> (i % 64) & 1; }
  std::array<uint64_t, 11> limbs_{};
};

}  // namespace

ExactSum::ExactSum(Term term, c10::Device device)
    : ExactSum(term, at::zeros({kCounters}, at::TensorOptions(device).dtype(at::kLong))) {}

void ExactSum::add(std::span<const FlatSpan> spans) {
  device_math(counters_).exact_sum(spans, term_ == Term::square, counters_.mutable_data_ptr<int64_t>());
}

double ExactSum::total() const {
  const at::Tensor here = counters_.to(at::kCPU);
  const int64_t* counters = here.const_data_ptr<int64_t>();
  if (counters[2 * 255] != 0 || counters[2 * 255 + 1] != 0) return std::numeric_limits<double>::quiet_NaN();
  // A float is significand * 2^(exponent - 150), where the exponent field 0 means 1; so it is a multiple of 2^-149, its square
  // of 2^-298.
  const int64_t power = term_ == Term::square ? 2 : 1;
  BigSum sum;
  for (int64_t field = 0; field < 255; ++field) {
    const int64_t bit = power * (std::max<int64_t>(field, 1) - 1);
    sum.add(counters[2 * field], bit);
    sum.add(counters[2 * field + 1], bit + 24);
  }
  return sum.round(static_cast<int>(-149 * power));
}

}  // namespace shardproof
