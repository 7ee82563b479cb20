// What arithmetic is tested: the CPU's; the kernels' in packs, in its place; or, where SHARDPROOF_TEST_DEVICE is cuda, the
// kernels on a GPU.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "shardproof/device/device.h"
#include "shardproof/device/kernels/cuda.h"
#include "internal/device/pack_math.h"

namespace device_testing {

inline bool on_cuda() {
  const char* device = std::getenv("SHARDPROOF_TEST_DEVICE");
  return device && std::string(device) == "cuda";
}

// The GPU that CTest gave this test, if it gave one ("id:3,slots:1"), is the only one that the process sees.
inline const bool gpu_chosen = [] {
  const char* given = std::getenv("CTEST_RESOURCE_GROUP_0_GPUS");
  if (!given) return false;
  const std::string text = given;
  const size_t begin = text.find("id:") + 3;
  return setenv("CUDA_VISIBLE_DEVICES", text.substr(begin, text.find(',', begin) - begin).c_str(), 1) == 0;
}();

enum class Walk { elements, packs };  // of the CPU; a GPU takes packs

inline Walk drawn_walk() { return *rc::gen::element(Walk::elements, Walk::packs); }

// While it lives, tensors of `device()` are worked on by what is tested.
class Subject {
 public:
  explicit Subject(Walk walk) : packs_(walk == Walk::packs && !on_cuda()) {
    if (on_cuda()) shardproof::use_cuda();
    if (packs_) shardproof::use_device_math(at::kCPU, packs());
  }
  ~Subject() {
    if (packs_) shardproof::use_device_math(at::kCPU, own());
  }
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  c10::Device device() const { return on_cuda() ? c10::Device(at::kCUDA, 0) : c10::Device(at::kCPU); }
  const shardproof::DeviceMath& math() const { return shardproof::device_math(device()); }

 private:
  using Math = std::shared_ptr<const shardproof::DeviceMath>;
  static const Math& packs() {
    static const Math one = (own(), shardproof::pack_math());
    return one;
  }
  // The library's, asked for before anything took its place. Nobody has to keep it.
  static const Math& own() {
    static const Math one(Math(), &shardproof::device_math(at::kCPU));
    return one;
  }

  bool packs_;
};

class Kernels : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda()) return;
    // A GPU that cannot be used is a failure.
    const std::string reason = shardproof::why_no_cuda();
    if (reason == "no GPU" || reason == "no driver" || !shardproof::cuda_built()) GTEST_SKIP() << reason;
  }
};

// `count` elements that begin `offset` elements behind a multiple of 64 bytes. Any bits may occur, those of NaN, infinity,
// denormals and -0.0 often; or, where `tame`, ordinary numbers only.
inline at::Tensor random_values(at::ScalarType dtype, int64_t count, int64_t offset, std::mt19937_64& random,
                                bool tame = false) {
  at::Tensor all = at::empty({offset + count}, dtype);
  const bool floating = at::isFloatingType(dtype);
  std::normal_distribution<double> normal;
  constexpr double kSpecial[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e-45, -1e-40, 6e-8, 65504, 65520, 3.4e38, 1.0, -1.0};
  if (!floating || (!tame && random() % 2 == 0)) {
    auto* bytes = static_cast<unsigned char*>(all.mutable_data_ptr());
    for (size_t i = 0; i < all.nbytes(); ++i) bytes[i] = static_cast<unsigned char>(random());
  } else {
    at::Tensor values = at::empty({offset + count}, at::kDouble);
    for (int64_t i = 0; i < values.numel(); ++i)
      values.mutable_data_ptr<double>()[i] =
          !tame && random() % 4 == 0 ? kSpecial[random() % std::size(kSpecial)] : normal(random);
    all.copy_(values);
  }
  return all.narrow(0, offset, count);
}

// On the subject's device, as far behind an aligned place as it was.
inline at::Tensor moved(const at::Tensor& values, const Subject& subject) {
  const int64_t offset = values.storage_offset();
  at::Tensor all = at::empty({offset + values.numel()}, values.options().device(subject.device()));
  all.narrow(0, offset, values.numel()).copy_(values);
  return all.narrow(0, offset, values.numel());
}

inline std::byte* bytes_of(const at::Tensor& values) {
  return static_cast<std::byte*>(values.mutable_data_ptr());
}

// Bit for bit, but one NaN is as good as another: IEEE 754 leaves open which one comes out.
inline testing::AssertionResult same_but_for_nans(const at::Tensor& expected, const at::Tensor& on_device) {
  const at::Tensor a = expected.contiguous(), b = on_device.to(at::kCPU).contiguous();
  if (a.scalar_type() != b.scalar_type() || a.numel() != b.numel()) return testing::AssertionFailure() << "of another kind";
  const auto size = static_cast<size_t>(a.element_size());
  const auto *x = static_cast<const std::byte*>(a.const_data_ptr()), *y = static_cast<const std::byte*>(b.const_data_ptr());
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (memcmp(x + i * size, y + i * size, size) == 0) continue;
    if (at::isFloatingType(a.scalar_type()) && a[i].isnan().item<bool>() && b[i].isnan().item<bool>()) continue;
    return testing::AssertionFailure() << "element " << i << " of " << a.numel() << ": expected " << a[i].item<double>()
                                       << ", got " << b[i].item<double>();
  }
  return testing::AssertionSuccess();
}

}  // namespace device_testing
