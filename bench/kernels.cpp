// Bandwidth of each kernel on the current GPU, as a share of what its memory can move. Needs a GPU; says so otherwise.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstdio>
#include <functional>

#include "shardproof/check.h"
#include "shardproof/cuda.h"
#include "shardproof/device.h"

namespace {

using namespace shardproof;

constexpr int64_t kNumel = int64_t{1} << 26;
constexpr int kRuns = 50;

void synchronize() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  guard.synchronizeStream(guard.getStream(guard.getDevice()));
}

// Bytes that a run has to read and write, over its time.
void measure(const char* name, double bytes, const std::function<void()>& run) {
  for (int i = 0; i < 5; ++i) run();
  synchronize();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) run();
  synchronize();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const double rate = bytes * kRuns / took.count();
  std::printf("%-40s %8.1f GB/s  %5.1f%%\n", name, rate / 1e9, 100 * rate / cuda_memory_bytes_per_second());
}

void measure_all() {
  use_cuda();
  const c10::Device gpu(at::kCUDA, 0);
  const DeviceMath& math = *device_math(gpu);
  const auto floats = [&] { return at::rand({kNumel}, at::TensorOptions(at::kFloat).device(gpu)); };
  const at::Tensor a = floats(), b = floats(), c = floats(), d = floats();
  const at::Tensor low = a.to(at::kBFloat16);
  const auto bytes = [](const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); };
  const auto data = [](const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); };
  const double n = kNumel;
  const std::vector<const std::byte*> four = {bytes(a), bytes(b), bytes(c), bytes(d)};
  const std::byte* half = bytes(low) + kNumel;  // two terms of half as many elements
  const std::vector<const std::byte*> two = {bytes(low), half};
  const AdamScalars adam{
      .keep = 0.999f, .beta1 = 0.9f, .beta1_rest = 0.1f, .beta2 = 0.99f, .beta2_rest = 0.01f, .eps = 1e-8f, .rate = 1e-3f};
  const UpdateArrays arrays{.parameter = data(a), .gradient = data(b), .first = data(c), .second = data(d), .count = kNumel};
  UpdateArrays with_low = arrays;
  with_low.low = bytes(low);
  measure("copy", 8 * n, [&] { math.copy(bytes(a), bytes(b), 4 * kNumel); });
  measure("sum of 4, float32", 20 * n, [&] { math.reduce(Element::f32, Fold::sum, four, kNumel, bytes(a)); });
  measure("sum of 2, bfloat16", 3 * n, [&] { math.reduce(Element::bf16, Fold::sum, two, kNumel / 2, bytes(low)); });
  measure("sum of 2 in float32, bfloat16", 3 * n,
          [&] { math.sum_wide(Element::bf16, two, kNumel / 2, Element::bf16, bytes(low)); });
  measure("add a microbatch, float32", 12 * n, [&] { math.store(data(a), Element::f32, bytes(b), kNumel, true); });
  measure("scan for NaN, float32", 4 * n, [&] { math.first_beyond(Element::f32, bytes(b), kNumel, INFINITY); });
  const FlatSpan span{data(b), kNumel};
  std::vector<int64_t> counters(512);
  measure("exact sum of squares, float32", 4 * n, [&] { math.exact_sum({&span, 1}, true, counters); });
  measure("adamw", 28 * n, [&] { math.adam(adam, arrays); });
  measure("adamw with a bfloat16 copy", 30 * n, [&] { math.adam(adam, with_low); });
}

}  // namespace

int main() {
  if (const std::string reason = shardproof::why_no_cuda(); !reason.empty()) {
    std::printf("[  SKIPPED ] %s\n", reason.c_str());
    return 0;
  }
  measure_all();
  return 0;
}
