#include <ATen/ATen.h>

#include <cmath>
#include <set>

#include "shardproof/check.h"
#include "shardproof/models.h"

namespace shardproof {
namespace {

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64 (Steele, Lea, Flood 2014)
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t key_of(uint64_t seed, const std::string& name) {
  uint64_t key = mix(seed);
  for (const char c : name) key = mix(key ^ static_cast<unsigned char>(c));
  return key;
}

// Close to normal, with unit variance: a sum of four uniform 16-bit integers, exact in any order and on any machine.
float normal(uint64_t bits) {
  int64_t sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<int64_t>(bits >> (16 * i) & 0xffff);
  const double variance = 4.0 * (65536.0 * 65536.0 - 1) / 12;
  return static_cast<float>((static_cast<double>(sum) - 2 * 65535.0) / std::sqrt(variance));
}

}  // namespace

void initialize_parameters(torch::nn::Module& module, uint64_t seed, double standard_deviation) {
  at::NoGradGuard no_grad;
  const auto scale = static_cast<float>(standard_deviation);
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    SHARD_REQUIRE(parameter.scalar_type() == at::kFloat && parameter.is_contiguous(), "initialize_parameters",
                  "parameter {} must be contiguous float32", item.key());
    if (parameter.dim() >= 2) {
      const uint64_t key = key_of(seed, item.key());
      float* values = parameter.mutable_data_ptr<float>();
      for (int64_t i = 0; i < parameter.numel(); ++i) values[i] = normal(mix(key ^ static_cast<uint64_t>(i))) * scale;
    } else {
      parameter.fill_(item.key().ends_with("weight") ? 1.0 : 0.0);
    }
  }
}

}  // namespace shardproof
