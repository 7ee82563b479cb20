#include "device/flat_math.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "shardproof/base/check.h"
#include "shardproof/device/device.h"

namespace shardproof {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffff;  // without the sign: ordered as the floats are, NaN above infinity
constexpr uint32_t kLargest = 0x7f7fffff;

uint32_t limit_bits(double magnitude_max) {
  if (magnitude_max >= std::numeric_limits<float>::max()) return kLargest;
  return std::bit_cast<uint32_t>(static_cast<float>(magnitude_max));
}

template <class Combine>
bool combine_floats(const at::Tensor& target, const at::Tensor& source, double magnitude_max, const Combine& combine) {
  float* __restrict t = target.mutable_data_ptr<float>();
  const float* __restrict s = source.const_data_ptr<float>();
  const int64_t count = target.numel();
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    t[i] = combine(t[i], s[i]);
    most = std::max(most, std::bit_cast<uint32_t>(t[i]) & kMagnitude);
  }
  return most <= limit_bits(magnitude_max);
}

template <class Combine>
bool combine_fixed(const at::Tensor& target, const at::Tensor& source, double magnitude_max, const Combine& combine) {
  int64_t* t = target.mutable_data_ptr<int64_t>();
  const at::Tensor exact = source.scalar_type() == at::kLong ? source : source.to(at::kDouble);
  const double limit = std::min(magnitude_max, kFixedPointMax);
  bool fine = true;
  for (int64_t i = 0; i < target.numel(); ++i) {
    int64_t term = 0;
    if (source.scalar_type() == at::kLong) {
      term = exact.const_data_ptr<int64_t>()[i];
    } else {
      const double value = exact.const_data_ptr<double>()[i];
      if (!(std::abs(value) < limit)) {  // NaN, too
        fine = false;
        continue;
      }
      term = std::llrint(value / kFixedPointUnit);
    }
    t[i] = combine(t[i], term);
    fine &= std::abs(static_cast<double>(t[i])) < kFixedPointMax / kFixedPointUnit;
  }
  return fine;
}

template <class Combine>
bool combine(const at::Tensor& target, const at::Tensor& source, double magnitude_max, const Combine& combine_one,
             void (*otherwise)(const at::Tensor&, const at::Tensor&)) {
  if (target.numel() == 0) return true;
  if (target.scalar_type() == at::kFloat && source.scalar_type() == at::kFloat)
    return combine_floats(target, source, magnitude_max, combine_one);
  if (target.scalar_type() == at::kLong) return combine_fixed(target, source, magnitude_max, combine_one);
  otherwise(target, source);
  return first_beyond(target, magnitude_max) == target.numel();
}

const std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

bool has_kernel(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// On a device. What is stored as float32 is not looked at here, since nobody should wait for the answer; whoever wants to know
// asks first_beyond when all of it is there. Hence false.
bool combine_on(const DeviceMath& math, const at::Tensor& target, const at::Tensor& source, double magnitude_max, bool add,
                void (*otherwise)(const at::Tensor&, const at::Tensor&)) {
  if (target.numel() == 0) return true;
  if (target.scalar_type() == at::kLong)
    return math.store_fixed(target.mutable_data_ptr<int64_t>(), element_type(source.scalar_type()), bytes_of(source),
                            target.numel(), add, kFixedPointUnit, std::min(magnitude_max, kFixedPointMax), kFixedPointMax);
  if (target.scalar_type() == at::kFloat && has_kernel(source.scalar_type()))
    math.store(target.mutable_data_ptr<float>(), element_type(source.scalar_type()), bytes_of(source), target.numel(), add);
  else
    otherwise(target, source);
  return false;
}

double rounded_limit(at::ScalarType dtype, double magnitude_max) {
  if (dtype == at::kLong) return std::min(magnitude_max, kFixedPointMax) / kFixedPointUnit;
  return dtype == at::kFloat ? std::bit_cast<float>(limit_bits(magnitude_max)) : magnitude_max;
}

void copy_any(const at::Tensor& target, const at::Tensor& source) { target.copy_(source); }
void add_any(const at::Tensor& target, const at::Tensor& source) { target.add_(source.to(target.scalar_type())); }

}  // namespace

bool copy_to(const at::Tensor& target, const at::Tensor& source, double magnitude_max) {
  if (const DeviceMath* math = device_math(target)) return combine_on(*math, target, source, magnitude_max, false, &copy_any);
  return combine(target, source, magnitude_max, [](auto, auto s) { return s; }, &copy_any);
}

bool add_to(const at::Tensor& target, const at::Tensor& source, double magnitude_max) {
  if (const DeviceMath* math = device_math(target)) return combine_on(*math, target, source, magnitude_max, true, &add_any);
  return combine(target, source, magnitude_max, [](auto t, auto s) { return t + s; }, &add_any);
}

void divide_by(const at::Tensor& values, double divisor) {
  if (values.scalar_type() != at::kFloat) {
    values.div_(at::scalar_tensor(divisor, at::kDouble).to(values.scalar_type()));
    return;
  }
  float* data = values.mutable_data_ptr<float>();
  const auto by = static_cast<float>(divisor);
  const int64_t count = values.numel();
  if (const DeviceMath* math = device_math(values)) return math->divide(data, count, by);
  for (int64_t i = 0; i < count; ++i) data[i] /= by;
}

void scale_by(const at::Tensor& values, double factor) {
  if (values.scalar_type() != at::kFloat) {
    values.mul_(at::scalar_tensor(factor, at::kDouble).to(values.scalar_type()));
    return;
  }
  float* data = values.mutable_data_ptr<float>();
  const auto by = static_cast<float>(factor);
  const int64_t count = values.numel();
  if (const DeviceMath* math = device_math(values)) return math->scale(data, count, by);
  for (int64_t i = 0; i < count; ++i) data[i] *= by;
}

int64_t first_beyond(const at::Tensor& values, double magnitude_max) {
  const int64_t count = values.numel();
  if (const DeviceMath* math = device_math(values))
    return math->first_beyond(element_type(values.scalar_type()), bytes_of(values), count,
                              rounded_limit(values.scalar_type(), magnitude_max));
  if (values.scalar_type() == at::kFloat) {
    const float* data = values.const_data_ptr<float>();
    const uint32_t limit = limit_bits(magnitude_max);
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, std::bit_cast<uint32_t>(data[i]) & kMagnitude);
    if (most <= limit) return count;
    return std::find_if(data, data + count, [&](float x) { return (std::bit_cast<uint32_t>(x) & kMagnitude) > limit; }) - data;
  }
  const bool fixed = values.scalar_type() == at::kLong;
  const double limit = fixed ? std::min(magnitude_max, kFixedPointMax) / kFixedPointUnit : magnitude_max;
  const at::Tensor doubles = values.to(at::kDouble);
  const double* data = doubles.const_data_ptr<double>();
  return std::find_if(data, data + count, [&](double x) { return !std::isfinite(x) || std::abs(x) > limit; }) - data;
}

bool all_zero(const at::Tensor& values) {
  if (const DeviceMath* math = device_math(values))
    return math->all_zero(element_type(values.scalar_type()), bytes_of(values), values.numel());
  if (values.scalar_type() == at::kFloat) {
    const float* data = values.const_data_ptr<float>();
    return std::all_of(data, data + values.numel(), [](float value) { return value == 0; });
  }
  return values.numel() == 0 || !values.ne(0).any().item<bool>();
}

std::string element_of(const at::Tensor& values, int64_t index) {
  return fmt::format("{}", values[index].to(at::kDouble).item<double>());
}

void fixed_to_float(const at::Tensor& target, const at::Tensor& fixed) {
  const int64_t* from = fixed.const_data_ptr<int64_t>();
  if (target.scalar_type() == at::kFloat) {
    float* to = target.mutable_data_ptr<float>();
    if (const DeviceMath* math = device_math(target))
      return math->fixed_to_float(to, from, fixed.numel(), static_cast<float>(kFixedPointUnit));
    for (int64_t i = 0; i < fixed.numel(); ++i) to[i] = static_cast<float>(from[i]) * static_cast<float>(kFixedPointUnit);
    return;
  }
  target.copy_(fixed.to(at::kDouble).mul_(kFixedPointUnit));
}

}  // namespace shardproof
