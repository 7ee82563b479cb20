#include "bench/kernels.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "bench/stopwatch.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"

namespace bench {
namespace {

using namespace shardproof;

struct Kernel {
  std::string name;
  int64_t bytes;  // read and written by a call
  std::function<void()> call;
};

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

// Arrays of `count` elements, and every kernel on them.
class Kernels {
 public:
  Kernels(const DeviceMath& math, c10::Device device, int64_t count) : math_(math), count_(count) {
    for (int64_t i = 0; i < kTerms; ++i) {
      wide_.push_back(at::full({count}, 0.5 + static_cast<double>(i), at::TensorOptions(device).dtype(at::kFloat)));
      narrow_.push_back(wide_.back().to(at::kBFloat16));
    }
    for (const at::Tensor& t : wide_) wide_terms_.push_back(bytes_of(t));
    for (const at::Tensor& t : narrow_) narrow_terms_.push_back(bytes_of(t));
    sum_ = at::zeros_like(wide_[0]), low_ = at::zeros_like(narrow_[0]);
    first_ = at::zeros_like(sum_), second_ = at::zeros_like(sum_);
    fixed_ = at::zeros({count}, at::TensorOptions(device).dtype(at::kLong));
    counters_ = at::zeros({2 * 256}, fixed_.options());  // two an exponent
  }

  std::vector<Kernel> all() {
    const auto floats = [](const at::Tensor& t) { return t.mutable_data_ptr<float>(); };
    const UpdateArrays arrays{.parameter = floats(sum_),
                              .gradient = floats(wide_[0]),
                              .first = floats(first_),
                              .second = floats(second_),
                              .count = count_};
    UpdateArrays rounded = arrays;
    rounded.low = low_.mutable_data_ptr();
    const AdamScalars adam{
        .keep = 0.999, .beta1 = 0.9, .beta1_rest = 0.1, .beta2 = 0.999, .beta2_rest = 0.001, .eps = 1e-8, .rate = 1e-3};
    const int64_t n = count_;
    return {
        {"copy", 8 * n, [=, this] { math_.copy(bytes_of(sum_), bytes_of(wide_[0]), 4 * n); }},
        {"zero", 4 * n, [=, this] { math_.zero(bytes_of(sum_), 4 * n); }},
        {"sum of 4, float32", 4 * (kTerms + 1) * n,
         [=, this] { math_.reduce(Element::f32, Reduce::sum, wide_terms_, n, bytes_of(sum_)); }},
        {"sum of 4, bfloat16", 2 * (kTerms + 1) * n,
         [=, this] { math_.reduce(Element::bf16, Reduce::sum, narrow_terms_, n, bytes_of(low_)); }},
        {"sum of 4 in float32", 2 * (kTerms + 1) * n,
         [=, this] { math_.sum_wide(Element::bf16, narrow_terms_, n, Element::bf16, bytes_of(low_)); }},
        {"add a microbatch", 10 * n, [=, this] { math_.store(floats(sum_), Element::bf16, narrow_terms_[0], n, true); }},
        {"add in fixed point", 20 * n,
         [=, this] {
           math_.store_fixed(fixed_.mutable_data_ptr<int64_t>(), Element::f32, wide_terms_[0], n, true, 0x1p-44, 0x1p18,
                             0x1p18);
         }},
        {"fixed to float32", 12 * n,
         [=, this] { math_.fixed_to_float(floats(first_), fixed_.const_data_ptr<int64_t>(), n, 0x1p-44f); }},
        {"divide", 8 * n, [=, this] { math_.divide(floats(first_), n, 1.5f); }},
        {"AdamW", 28 * n, [=, this] { math_.adam(adam, arrays); }},
        {"AdamW, bfloat16 copy", 30 * n, [=, this] { math_.adam(adam, rounded); }},
        {"Lion", 20 * n,
         [=, this] {
           math_.lion({.keep = 0.999, .lr = 1e-3, .beta1 = 0.9, .beta1_rest = 0.1, .beta2 = 0.99, .beta2_rest = 0.01},
                      arrays);
         }},
        {"SGD, momentum", 20 * n, [=, this] { math_.sgd({.lr = 1e-3, .momentum = 0.9}, arrays); }},
        {"look for NaN", 4 * n, [=, this] { math_.first_beyond(Element::f32, wide_terms_[0], n, 1e30); }},
        {"exact norm", 4 * n, [=, this] { exact_norm(); }},
    };
  }

 private:
  static constexpr int64_t kTerms = 4;

  void exact_norm() {
    counters_.zero_();
    const FlatSpan span{wide_[0].const_data_ptr<float>(), count_};
    math_.exact_sum({&span, 1}, /*squares=*/true, counters_.mutable_data_ptr<int64_t>());
  }

  const DeviceMath& math_;
  int64_t count_;
  std::vector<at::Tensor> wide_, narrow_;
  std::vector<const std::byte*> wide_terms_, narrow_terms_;
  at::Tensor sum_, low_, first_, second_, fixed_, counters_;
};

double seconds_of(const Kernel& kernel, const KernelsTask& task) {
  kernel.call();
  finish(task.device);
  const auto start = Clock::now();
  for (int64_t i = 0; i < task.repeats; ++i) kernel.call();
  finish(task.device);
  return milliseconds_since(start) / 1000 / static_cast<double>(task.repeats);
}

}  // namespace

std::vector<KernelTimes> time_kernels(const KernelsTask& task) {
  SHARD_REQUIRE(task.mib >= 1 && task.repeats >= 1 && task.rounds >= 1, "bench",
                "--mib, --repeats and --rounds must be at least 1, got {}, {}, {}", task.mib, task.repeats, task.rounds);
  Kernels kernels(device_math(task.device), task.device, task.mib * 1048576 / 8);
  const std::vector<Kernel> all = kernels.all();
  std::vector<KernelTimes> times;
  for (const Kernel& kernel : all) times.push_back({.name = kernel.name, .gb_per_s = {}, .share_of_copy = {}});
  for (int64_t round = 0; round < task.rounds; ++round)
    for (size_t k = 0; k < all.size(); ++k) {
      times[k].gb_per_s.push_back(static_cast<double>(all[k].bytes) / seconds_of(all[k], task) / 1e9);
      times[k].share_of_copy.push_back(times[k].gb_per_s.back() / times[0].gb_per_s.back());
    }
  return times;
}

}  // namespace bench
