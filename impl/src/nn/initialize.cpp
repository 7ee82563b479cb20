#include "shardproof/nn/initialize.h"

#include <ATen/ATen.h>

#include <cmath>
#include <set>

#include "internal/base/counter_random.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

uint64_t key_of(uint64_t seed, const std::string& name) {
  uint64_t key = counter_mix(seed);
  for (const char c : name) key = counter_mix(key ^ static_cast<unsigned char>(c));
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

Initializer normal_initializer(uint64_t seed, double standard_deviation) {
  return [=](const std::string& name, const Shape& shape, Interval run, at::Tensor values) {
    if (shape.size() < 2) {
      values.fill_(name.ends_with("weight") ? 1.0 : 0.0);
      return;
    }
    const auto scale = static_cast<float>(standard_deviation);
    const uint64_t key = key_of(seed, name);
    const at::Tensor floats = at::empty({run.size()}, at::kFloat);
    float* data = floats.mutable_data_ptr<float>();
    for (int64_t i = 0; i < run.size(); ++i) data[i] = normal(counter_mix(key ^ static_cast<uint64_t>(run.begin + i))) * scale;
    values.copy_(floats);
  };
}

// 24 bits of each number, so that they are exact in float32.
Initializer uniform_initializer(uint64_t seed, double bound) {
  return [=](const std::string& name, const Shape&, Interval run, at::Tensor values) {
    const uint64_t key = key_of(seed, name);
    const at::Tensor floats = at::empty({run.size()}, at::kFloat);
    float* data = floats.mutable_data_ptr<float>();
    for (int64_t i = 0; i < run.size(); ++i) {
      const auto bits = static_cast<float>(counter_mix(key ^ static_cast<uint64_t>(run.begin + i)) >> 40);
      data[i] = (bits * 0x1p-23F - 1) * static_cast<float>(bound);
    }
    values.copy_(floats);
  };
}

void initialize_parameters(torch::nn::Module& module, const Initializer& initialize) {
  at::NoGradGuard no_grad;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    SHARD_REQUIRE(parameter.is_floating_point() && parameter.is_contiguous() && !parameter.is_meta(), "initialize_parameters",
                  "parameter {} must be floating, contiguous and have memory", item.key());
    initialize(item.key(), parameter.sizes().vec(), {0, parameter.numel()}, parameter.detach().view({-1}));
  }
}

}  // namespace shardproof
