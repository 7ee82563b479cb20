#include <ATen/Context.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <mutex>

#include "device/kernels/gpu_math.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/device/kernels/cuda.h"

namespace shardproof {
namespace {

// Half a gigabyte of code that a CPU run need not load. What it registers stays, so the handle is kept.
std::string why_no_torch_cuda() {
  static const std::string reason = [] {
    return dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) ? std::string() : std::string(dlerror());
  }();
  return reason;
}

}  // namespace

bool cuda_built() {
  return true;
}

std::string why_no_cuda() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  int driver = 0;  // stays 0 where there is none, which is "insufficient" as well
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "no driver";
  if (status == cudaErrorNoDevice) return "no GPU";
  if (status != cudaSuccess) return fmt::format("no usable GPU: {}", cudaGetErrorString(status));
  if (devices == 0) return "no GPU";
  return {};
}

void use_cuda() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (has_device_math(c10::Device(c10::DeviceType::CUDA, 0))) return;
  std::string reason = why_no_cuda();
  if (reason.empty()) reason = why_no_torch_cuda();
  SHARD_REQUIRE(reason.empty(), "cuda", "CUDA cannot be used here: {}. Use the CPU, or look at nvidia-smi", reason);
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  // LibTorch's current stream of the calling thread on the device of the tensors, whichever is current; -1 is for that one.
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  for (c10::DeviceIndex index = -1; index < guard.deviceCount(); ++index) {
    const c10::Device device(c10::DeviceType::CUDA, index);
    use_device_math(device, kernels::make_gpu_math([=] { return guard.getStream(device).native_handle(); }, index));
  }
  dlopen("libshardproof_cuda_graph.so", RTLD_NOW | RTLD_GLOBAL);  // it registers itself; without it captures are refused
}

std::shared_ptr<const DeviceMath> kernels_on(void* stream) {
  return kernels::make_gpu_math([stream] { return stream; });
}

}  // namespace shardproof
