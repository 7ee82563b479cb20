#include "shardproof/device/device.h"

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

constexpr size_t kDevices = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);

// Read at every call, without a lock; what was registered once lives on, since a thread may still be using it.
struct Registry {
  std::array<std::atomic<const DeviceMath*>, kDevices> current{};
  std::mutex mutex;
  std::vector<std::shared_ptr<const DeviceMath>> kept;
};

Registry& registry() {
  static Registry one;
  return one;
}

}  // namespace

void use_device_math(c10::DeviceType device, std::shared_ptr<const DeviceMath> math) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.current[static_cast<size_t>(device)] = math.get();
  all.kept.push_back(std::move(math));
}

bool has_device_math(c10::Device device) {
  return device.is_cpu() || registry().current[static_cast<size_t>(device.type())].load(std::memory_order_acquire) != nullptr;
}

const DeviceMath* device_math(c10::Device device) {
  const DeviceMath* math = registry().current[static_cast<size_t>(device.type())].load(std::memory_order_acquire);
  SHARD_REQUIRE(math != nullptr || device.is_cpu(), "device",
                "a tensor is on {}, and this process has no arithmetic for such memory. Call shardproof::use_cuda() first, or "
                "move it to the CPU",
                device.str());
  return math;
}

Element element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Element::f32;
    case at::kDouble:
      return Element::f64;
    case at::kBFloat16:
      return Element::bf16;
    case at::kHalf:
      return Element::f16;
    case at::kInt:
      return Element::i32;
    case at::kLong:
      return Element::i64;
    case at::kByte:
      return Element::u8;
    default:
      throw Error(fmt::format("[device] no kernel works on {}", c10::toString(dtype)));
  }
}

}  // namespace shardproof
