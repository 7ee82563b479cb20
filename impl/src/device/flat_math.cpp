#include "internal/device/flat_math.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"

namespace shardproof {
namespace {

const std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

// As elements of the dtype can be compared with it: rounded to their type, or in units of fixed-point numbers.
double limit_of(at::ScalarType dtype, double magnitude_max) {
  if (dtype == at::kLong) return std::min(magnitude_max, kFixedPointMax) / kFixedPointUnit;
  if (dtype != at::kFloat) return magnitude_max;
  if (magnitude_max >= std::numeric_limits<float>::max()) return std::numeric_limits<float>::max();
  return static_cast<float>(magnitude_max);
}

// What the CPU wrote is looked at while it is in the cache. For a device's answer somebody would have to wait, so it is not
// asked for.
bool store_floats(const at::Tensor& target, const at::Tensor& source, double magnitude_max, bool add) {
  const DeviceMath& math = device_math(target);
  float* to = target.mutable_data_ptr<float>();
  const Element type = element_type(source.scalar_type());
  if (!target.is_cpu()) {
    math.store(to, type, bytes_of(source), target.numel(), add);
    return false;
  }
  constexpr int64_t kBlock = 4096;
  const double limit = limit_of(at::kFloat, magnitude_max);
  bool fine = true;
  for (int64_t begin = 0; begin < target.numel(); begin += kBlock) {
    const int64_t count = std::min(kBlock, target.numel() - begin);
    math.store(to + begin, type, bytes_of(source) + begin * source.element_size(), count, add);
    fine &= math.first_beyond(Element::f32, reinterpret_cast<const std::byte*>(to + begin), count, limit) == count;
  }
  return fine;
}

bool combine(const at::Tensor& target, const at::Tensor& source, double magnitude_max, bool add) {
  if (target.numel() == 0) return true;
  const double fixed_max = std::min(magnitude_max, kFixedPointMax);
  if (target.scalar_type() == at::kLong)
    return device_math(target).store_fixed(target.mutable_data_ptr<int64_t>(), element_type(source.scalar_type()),
                                           bytes_of(source), target.numel(), add, kFixedPointUnit, fixed_max, fixed_max);
  if (target.scalar_type() == at::kFloat && at::isFloatingType(source.scalar_type()))
    return store_floats(target, source, magnitude_max, add);
  if (add) target.add_(source.to(target.scalar_type()));
  else target.copy_(source);
  return target.is_cpu() && first_beyond(target, magnitude_max) == target.numel();
}

}  // namespace

bool copy_to(const at::Tensor& target, const at::Tensor& source, double magnitude_max) {
  return combine(target, source, magnitude_max, /*add=*/false);
}

bool add_to(const at::Tensor& target, const at::Tensor& source, double magnitude_max) {
  return combine(target, source, magnitude_max, /*add=*/true);
}

// By powers of two quotients and products are the same bits, and products take less time.
void divide_by(const at::Tensor& values, double divisor) {
  int exponent = 0;
  if (values.scalar_type() == at::kFloat && std::frexp(divisor, &exponent) == 0.5 && std::abs(exponent) < 64)
    device_math(values).scale(values.mutable_data_ptr<float>(), values.numel(), static_cast<float>(1 / divisor));
  else if (values.scalar_type() == at::kFloat)
    device_math(values).divide(values.mutable_data_ptr<float>(), values.numel(), static_cast<float>(divisor));
  else
    values.div_(at::scalar_tensor(divisor, at::kDouble).to(values.scalar_type()));
}

void scale_by(const at::Tensor& values, double factor) {
  if (values.scalar_type() == at::kFloat)
    device_math(values).scale(values.mutable_data_ptr<float>(), values.numel(), static_cast<float>(factor));
  else
    values.mul_(at::scalar_tensor(factor, at::kDouble).to(values.scalar_type()));
}

int64_t first_beyond(const at::Tensor& values, double magnitude_max) {
  const at::ScalarType dtype = values.scalar_type();
  return device_math(values).first_beyond(element_type(dtype), bytes_of(values), values.numel(),
                                          limit_of(dtype, magnitude_max));
}

void note_beyond(const at::Tensor& values, double magnitude_max, int64_t offset, const at::Tensor& least) {
  const at::ScalarType dtype = values.scalar_type();
  device_math(values).note_beyond(element_type(dtype), bytes_of(values), values.numel(), limit_of(dtype, magnitude_max), offset,
                                  least.mutable_data_ptr<int64_t>());
}

bool all_zero(const at::Tensor& values) {
  return first_beyond(values, 0) == values.numel();
}

std::string element_of(const at::Tensor& values, int64_t index) {
  return fmt::format("{}", values[index].to(at::kDouble).item<double>());
}

void fixed_to_float(const at::Tensor& target, const at::Tensor& fixed) {
  if (target.scalar_type() == at::kFloat)
    device_math(target).fixed_to_float(target.mutable_data_ptr<float>(), fixed.const_data_ptr<int64_t>(), fixed.numel(),
                                       static_cast<float>(kFixedPointUnit));
  else
    target.copy_(fixed.to(at::kDouble).mul_(kFixedPointUnit));
}

}  // namespace shardproof
