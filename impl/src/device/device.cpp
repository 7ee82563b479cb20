#include "shardproof/device/device.h"

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "device/cpu_math.h"
#include "shardproof/base/check.h"
#include "shardproof/device/model_math.h"

namespace shardproof {
namespace {

constexpr size_t kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);
constexpr size_t kPlaces = 65;  // of a type: for devices without an index, then for those with one

// Read at every call, without a lock; what was registered once lives on, since a thread may still be using it.
struct Registry {
  using Place = std::atomic<const DeviceMath*>;
  Registry() { use(at::kCPU, cpu_math()); }
  void use(c10::Device device, std::shared_ptr<const DeviceMath> math) {
    current.at(static_cast<size_t>(device.type())).at(index_of(device)).store(math.get(), std::memory_order_release);
    kept.push_back(std::move(math));
  }
  const DeviceMath* of(c10::Device device) const {
    const std::array<Place, kPlaces>& places = current[static_cast<size_t>(device.type())];
    const DeviceMath* own = places[index_of(device)].load(std::memory_order_acquire);
    return own ? own : places[0].load(std::memory_order_acquire);
  }
  static size_t index_of(c10::Device device) {
    const auto index = static_cast<size_t>(device.index() + 1);
    return index < kPlaces ? index : 0;
  }

  std::array<std::array<Place, kPlaces>, kTypes> current{};
  std::mutex mutex;
  std::vector<std::shared_ptr<const DeviceMath>> kept;
};

Registry& registry() {
  static Registry one;
  return one;
}

}  // namespace

void use_device_math(c10::Device device, std::shared_ptr<const DeviceMath> math) {
  SHARD_REQUIRE(math != nullptr, "device", "use_device_math: expected arithmetic for {}, got null", device.str());
  const std::lock_guard lock(registry().mutex);
  registry().use(device, std::move(math));
}

bool has_device_math(c10::Device device) {
  return registry().of(device) != nullptr;
}

const DeviceMath& device_math(c10::Device device) {
  const DeviceMath* math = registry().of(device);
  SHARD_REQUIRE(math != nullptr, "device",
                "a tensor is on {}, and this process has no arithmetic for such memory. Call shardproof::use_cuda() first, or "
                "move it to the CPU",
                device.str());
  return *math;
}

const ModelMath& model_math(const DeviceMath& math) {
  const auto* found = dynamic_cast<const ModelMath*>(&math);
  SHARD_REQUIRE(found, "device",
                "the arithmetic that use_device_math was given has no masks of dropout and no exact products. Derive it from "
                "ModelMath, or move the module to the CPU");
  return *found;
}

}  // namespace shardproof
