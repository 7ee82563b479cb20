#include "gradient_norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "flat_math.h"
#include "sharded_state.h"
#include "shardproof/check.h"

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

// The axes along which ranks hold different parts of the state.
std::vector<std::string> split_axes(const Layout& layout) {
  std::vector<std::string> axes;
  for (const Split& split : layout.flat) axes.push_back(split.axis);
  return axes;
}

// Runs `visit` on every run of owned gradient elements; never on padding.
template <class Visit>
void visit_gradients(const Schedule& schedule, Visit&& visit) {
  for (const Bucket* bucket : schedule.buckets()) {
    if (!bucket->trainable()) continue;
    const float* data = bucket->gradient().const_data_ptr<float>();
    for (const Segment& segment : bucket->layout().state().segments)
      visit(bucket->layout().slots()[segment.slot],
            std::span<const float>(data + segment.local, static_cast<size_t>(segment.run.size())));
  }
}

double exact_sum(ShardedState& state) {
  ExactSquares squares;
  visit_gradients(state.schedule(), [&](const Slot&, std::span<const float> values) { squares.add(values); });
  const auto axes = split_axes(state.options().strategy.state);
  if (!axes.empty()) {
    at::Tensor counters = at::from_blob(squares.counters().data(), {ExactSquares::kCounters}, at::kLong);
    state.comms().along(axes).all_reduce(counters, Reduce::sum).wait();
  }
  return squares.total();
}

double plain_sum(ShardedState& state) {
  double sum = 0;
  visit_gradients(state.schedule(), [&](const Slot&, std::span<const float> values) {
    for (const float value : values) sum += static_cast<double>(value) * value;
  });
  const auto axes = split_axes(state.options().strategy.state);
  if (!axes.empty()) {
    at::Tensor total = at::from_blob(&sum, {1}, at::kDouble);
    state.comms().along(axes).all_reduce(total, Reduce::sum).wait();
  }
  return sum;
}

// All ranks agree on the first parameter whose reduced gradient is not finite, so that each of them can name it.
[[noreturn]] void throw_nonfinite(ShardedState& state, double norm) {
  std::vector<const Slot*> slots;
  for (const Bucket* bucket : state.schedule().buckets())
    for (const Slot& slot : bucket->layout().slots()) slots.push_back(&slot);
  int64_t first = static_cast<int64_t>(slots.size());
  visit_gradients(state.schedule(), [&](const Slot& slot, std::span<const float> values) {
    const int64_t count = static_cast<int64_t>(values.size());
    if (first_nonfinite(values.data(), count) == count) return;
    first = std::min<int64_t>(first, std::find(slots.begin(), slots.end(), &slot) - slots.begin());
  });
  const auto axes = split_axes(state.options().strategy.state);
  at::Tensor agreed = at::from_blob(&first, {1}, at::kLong);
  if (!axes.empty()) state.comms().along(axes).all_reduce(agreed, Reduce::min).wait();
  const std::string name = first < static_cast<int64_t>(slots.size()) ? slots[first]->name : "no single parameter";
  throw NonFiniteError(fmt::format("[gradient_norm] rank {}, step {}: the norm of the reduced gradient is {}, through {}. "
                                   "Every rank's own gradient was finite, so a sum overflowed: scale the loss down",
                                   state.comms().rank(), state.schedule().step(), norm, name));
}

}  // namespace

void ExactSquares::add(std::span<const float> values) {
  for (const float value : values) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t exponent = bits >> 23 & 0xff;
    const uint64_t significand = (bits & 0x7fffff) | (exponent != 0 ? 0x800000u : 0u);
    const uint64_t square = significand * significand;
    counters_[2 * exponent] += static_cast<int64_t>(square & 0xffffff);
    counters_[2 * exponent + 1] += static_cast<int64_t>(square >> 24);
  }
}

double ExactSquares::total() const {
  if (counters_[2 * 255] != 0 || counters_[2 * 255 + 1] != 0) return std::numeric_limits<double>::quiet_NaN();
  // significand * 2^(exponent - 150), where the exponent field 0 means 1; so squares are multiples of 2^(2 * 1 - 300).
  BigSum sum;
  for (int64_t field = 0; field < 255; ++field) {
    const int64_t bit = 2 * (std::max<int64_t>(field, 1) - 1);
    sum.add(counters_[2 * field], bit);
    sum.add(counters_[2 * field + 1], bit + 24);
  }
  return sum.round(-298);
}

double gradient_norm(ShardedState& state) {
  const double norm = std::sqrt(state.options().numerics == Numerics::ordered ? exact_sum(state) : plain_sum(state));
  if (!std::isfinite(norm)) throw_nonfinite(state, norm);
  return norm;
}

}  // namespace shardproof
