#include "golden/dropout.h"

#include <ATen/ATen.h>

#include <cmath>

namespace golden {
namespace {

uint64_t mixed(uint64_t bits) {
  uint64_t z = bits + 0x9e3779b97f4a7c15u;
  z ^= z >> 30;
  z *= 0xbf58476d1ce4e5b9u;
  z ^= z >> 27;
  z *= 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

at::Tensor Dropout::dropped(const at::Tensor& x, double probability) {
  if (probability == 0) return x;
  return x * at::tensor(mask(x.numel(), probability), at::kDouble).view(x.sizes()).to(x.scalar_type()).to(x.device());
}

std::vector<double> Dropout::mask(int64_t elements, double probability) {
  if (probability == 0) return {};
  const uint64_t key = mixed(seed_ ^ mixed(sites_++));
  std::vector<double> factors(static_cast<size_t>(elements));
  for (size_t i = 0; i < factors.size(); ++i) {
    const auto draw = static_cast<double>(mixed(key ^ i) >> 32);
    if (draw >= std::floor(probability * 4294967296.0)) factors[i] = static_cast<float>(1 / (1 - probability));
  }
  return factors;
}

}  // namespace golden
