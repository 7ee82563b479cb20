// The machine's NCCL and CUDA runtime, as the backend asks for them.
#include "shardproof/comm/nccl/nccl_api.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/device/kernels/cuda.h"
#include "shardproof/base/dtypes.h"

// An older NCCL may be loaded than the one that this was compiled with. These are null then.
#pragma weak ncclCommWindowRegister
#pragma weak ncclCommWindowDeregister

namespace shardproof {
namespace {

static_assert(static_cast<int>(NcclResult::remote_error) == ncclRemoteError);
static_assert(static_cast<int>(NcclResult::in_progress) == ncclInProgress);
static_assert(NcclApi::operator_of(Reduce::sum) == ncclSum && NcclApi::operator_of(Reduce::max) == ncclMax &&
              NcclApi::operator_of(Reduce::min) == ncclMin);
static_assert(sizeof(NcclApi::UniqueId) == sizeof(ncclUniqueId));

void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  throw Error(fmt::format("[cuda] {}: {} ({})", what, cudaGetErrorString(result), cudaGetErrorName(result)));
}

NcclResult as_result(ncclResult_t result) {
  return static_cast<NcclResult>(result);
}
ncclComm_t comm_of(NcclApi::Communicator communicator) {
  return static_cast<ncclComm_t>(communicator);
}
cudaStream_t stream_of(NcclApi::Stream stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t event_of(NcclApi::Event event) {
  return static_cast<cudaEvent_t>(event);
}

ncclDataType_t type_of(at::ScalarType dtype) {
  constexpr std::array kTypes = {std::pair(Element::f32, ncclFloat32),  std::pair(Element::f64, ncclFloat64),
                                 std::pair(Element::bf16, ncclBfloat16), std::pair(Element::f16, ncclFloat16),
                                 std::pair(Element::i32, ncclInt32),    std::pair(Element::i64, ncclInt64),
                                 std::pair(Element::u8, ncclUint8)};
  const Element wanted = element_type(dtype);
  return std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& type) { return type.first == wanted; })->second;
}

// A one-element array of the dtype, for NCCL to read a scalar from.
std::array<std::byte, 8> scalar_of(double value, at::ScalarType dtype) {
  std::array<std::byte, 8> bytes{};
  const auto put = [&](auto typed) { std::memcpy(bytes.data(), &typed, sizeof typed); };
  if (dtype == at::kDouble) put(value);
  if (dtype == at::kFloat) put(static_cast<float>(value));
  if (dtype == at::kHalf) put(c10::Half(static_cast<float>(value)));
  if (dtype == at::kBFloat16) put(c10::BFloat16(static_cast<float>(value)));
  return bytes;
}

class MachineApi final : public NcclApi {
 public:
  explicit MachineApi(int64_t device) : device_(static_cast<int>(device)) {}

  void use_device() override { check_cuda(cudaSetDevice(device_), "cudaSetDevice"); }
  Stream make_stream() override {
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }
  // Memory that its work uses is released next, so it ends first.
  void destroy_stream(Stream stream) override {
    cudaStreamSynchronize(stream_of(stream));
    cudaStreamDestroy(stream_of(stream));
  }
  Stream current_stream() override {
    // LibTorch's; before its CUDA parts are loaded nobody can have chosen another than the default one.
    if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return nullptr;
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device_));
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  }
  Event make_event() override {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  }
  void destroy_event(Event event) override { cudaEventDestroy(event_of(event)); }
  void record(Event event, Stream stream) override {
    check_cuda(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
  }
  void wait(Stream stream, Event event) override {
    check_cuda(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
  }
  bool is_complete(Event event) override {
    const cudaError_t result = cudaEventQuery(event_of(event));
    if (result == cudaErrorNotReady) return false;
    check_cuda(result, "cudaEventQuery");
    return true;
  }
  // As it ends a world, a device that failed is no error of its own.
  void synchronize() override {
    cudaSetDevice(device_);  // any thread may give memory back
    cudaDeviceSynchronize();
  }
  void copy(void* target, const void* source, int64_t bytes, Stream stream) override {
    check_cuda(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_of(stream)),
               "cudaMemcpyAsync");
  }
  std::string why_no_sums() override {
    if (cuda_built()) return {};
    return "sums in rank order need CUDA kernels, and " + why_no_cuda() + ". Or use --sum native";
  }
  void reduce(at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms, int64_t count, std::byte* target,
              Stream stream) override {
    const auto kernels = kernels_on(stream);
    SHARD_REQUIRE(kernels != nullptr, "nccl", "{}", why_no_sums());
    if (count > 0) kernels->reduce(element_type(dtype), op, terms, count, target);
  }
  bool is_on_device(const at::Tensor& tensor) override { return tensor.is_cuda(); }
  bool is_device(c10::Device device) override { return device.is_cuda() && (!device.has_index() || device.index() == device_); }

  std::string why_no_windows() override {
    if (ncclCommWindowRegister != nullptr && ncclCommWindowDeregister != nullptr) return {};
    return fmt::format("NCCL {}.{} has no windows, which came with 2.27", nccl_version() / 10000, nccl_version() / 100 % 100);
  }
  void* allocate(int64_t bytes, Memory kind) override {
    void* memory = nullptr;
    if (kind == Memory::plain) {
      check_cuda(cudaMalloc(&memory, static_cast<size_t>(bytes)), "cudaMalloc");
    } else if (kind == Memory::pinned) {
      check_cuda(cudaMallocHost(&memory, static_cast<size_t>(bytes)), "cudaMallocHost");
    } else {
      const ncclResult_t result = ncclMemAlloc(&memory, static_cast<size_t>(bytes));
      SHARD_REQUIRE(result == ncclSuccess, "nccl", "ncclMemAlloc of {} bytes: {}", bytes, ncclGetErrorString(result));
    }
    return memory;
  }
  void release(void* memory, Memory kind) override {
    if (kind == Memory::plain)
      cudaFree(memory);
    else if (kind == Memory::pinned)
      cudaFreeHost(memory);
    else
      ncclMemFree(memory);
  }

  NcclResult get_unique_id(UniqueId& id) override {
    return as_result(ncclGetUniqueId(reinterpret_cast<ncclUniqueId*>(id.data())));
  }
  NcclResult init_rank(Communicator& communicator, int64_t size, const UniqueId& id, int64_t rank) override {
    ncclUniqueId unique;
    std::copy(id.begin(), id.end(), unique.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return as_result(ncclCommInitRankConfig(reinterpret_cast<ncclComm_t*>(&communicator), static_cast<int>(size), unique,
                                            static_cast<int>(rank), &config));
  }
  NcclResult split(Communicator parent, int64_t color, int64_t key, Communicator& child) override {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return as_result(ncclCommSplit(comm_of(parent), static_cast<int>(color), static_cast<int>(key),
                                   reinterpret_cast<ncclComm_t*>(&child), &config));
  }
  NcclResult async_error(Communicator communicator) override {
    ncclResult_t result = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_of(communicator), &result);
    return as_result(asked == ncclSuccess ? result : asked);
  }
  std::string error_text(NcclResult result, Communicator communicator) override {
    const char* last = ncclGetLastError(comm_of(communicator));
    return fmt::format("{}{}{}", ncclGetErrorString(static_cast<ncclResult_t>(result)),
                       last && *last ? "; the last warning of NCCL in this process: " : "", last ? last : "");
  }
  void abort(Communicator communicator) override { ncclCommAbort(comm_of(communicator)); }
  // Finalizing waits for this rank's own streams, which may be stuck. With an error NCCL would leave a group open.
  void destroy(Communicator communicator) override {
    ncclCommFinalize(comm_of(communicator));
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    NcclResult result = NcclResult::success;
    while ((result = async_error(communicator)) == NcclResult::in_progress && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (result != NcclResult::success) return abort(communicator);
    ncclCommDestroy(comm_of(communicator));
  }

  NcclResult group_start() override { return as_result(ncclGroupStart()); }
  NcclResult group_end() override { return as_result(ncclGroupEnd()); }
  NcclResult send(const void* data, int64_t bytes, int64_t peer, Communicator communicator, Stream stream) override {
    return as_result(ncclSend(data, static_cast<size_t>(bytes), ncclUint8, static_cast<int>(peer), comm_of(communicator),
                              stream_of(stream)));
  }
  NcclResult recv(void* data, int64_t bytes, int64_t peer, Communicator communicator, Stream stream) override {
    return as_result(ncclRecv(data, static_cast<size_t>(bytes), ncclUint8, static_cast<int>(peer), comm_of(communicator),
                              stream_of(stream)));
  }
  NcclResult all_gather(const void* input, void* output, int64_t bytes, Communicator communicator, Stream stream) override {
    return as_result(
        ncclAllGather(input, output, static_cast<size_t>(bytes), ncclUint8, comm_of(communicator), stream_of(stream)));
  }
  NcclResult broadcast(void* data, int64_t bytes, int64_t root, Communicator communicator, Stream stream) override {
    return as_result(ncclBroadcast(data, data, static_cast<size_t>(bytes), ncclUint8, static_cast<int>(root),
                                   comm_of(communicator), stream_of(stream)));
  }
  NcclResult all_reduce(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                        Communicator communicator, Stream stream) override {
    return as_result(ncclAllReduce(input, output, static_cast<size_t>(count), type_of(dtype), static_cast<ncclRedOp_t>(op),
                                   comm_of(communicator), stream_of(stream)));
  }
  NcclResult reduce_scatter(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                            Communicator communicator, Stream stream) override {
    return as_result(ncclReduceScatter(input, output, static_cast<size_t>(count), type_of(dtype), static_cast<ncclRedOp_t>(op),
                                       comm_of(communicator), stream_of(stream)));
  }
  NcclResult create_premultiplied_sum(Operator& op, double factor, at::ScalarType dtype, Communicator communicator) override {
    auto scalar = scalar_of(factor, dtype);
    ncclRedOp_t made = ncclSum;
    const ncclResult_t result =
        ncclRedOpCreatePreMulSum(&made, scalar.data(), type_of(dtype), ncclScalarHostImmediate, comm_of(communicator));
    op = static_cast<Operator>(made);
    return as_result(result);
  }
  NcclResult destroy_operator(Operator op, Communicator communicator) override {
    return as_result(ncclRedOpDestroy(static_cast<ncclRedOp_t>(op), comm_of(communicator)));
  }

  NcclResult register_memory(Communicator communicator, void* memory, int64_t bytes, Memory kind, void*& handle) override {
    const auto size = static_cast<size_t>(bytes);
    if (kind == Memory::registered) return as_result(ncclCommRegister(comm_of(communicator), memory, size, &handle));
    return as_result(ncclCommWindowRegister(comm_of(communicator), memory, size, reinterpret_cast<ncclWindow_t*>(&handle),
                                            NCCL_WIN_COLL_SYMMETRIC));
  }
  NcclResult deregister_memory(Communicator communicator, void* handle, Memory kind) override {
    if (kind == Memory::registered) return as_result(ncclCommDeregister(comm_of(communicator), handle));
    return as_result(ncclCommWindowDeregister(comm_of(communicator), static_cast<ncclWindow_t>(handle)));
  }

 private:
  const int device_;
};

}  // namespace

bool nccl_available() {
  return true;
}

int64_t nccl_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

int64_t nccl_version() {
  int version = 0;
  return ncclGetVersion(&version) == ncclSuccess ? version : 0;
}

int64_t nccl_compute_capability(int64_t device) {
  int major = 0;
  const cudaError_t result = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, static_cast<int>(device));
  return result == cudaSuccess ? major : 0;
}

std::string nccl_device_id(int64_t device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, static_cast<int>(device)), "cudaGetDeviceProperties");
  std::string text;
  for (const char byte : properties.uuid.bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

std::shared_ptr<NcclApi> nccl_api(int64_t device) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  SHARD_REQUIRE(
      result == cudaSuccess && count > 0, "nccl",
      "this machine has no GPU that NCCL could use: CUDA finds {} ({}). Run it where a GPU and its driver are, or use "
      "--backend mpi or threads",
      count, cudaGetErrorString(result));
  SHARD_REQUIRE(device >= 0 && device < count, "nccl", "there is no GPU {}: this process sees {} (CUDA_VISIBLE_DEVICES?)",
                device, count);
  const char* blocking = std::getenv("NCCL_COMM_BLOCKING");
  SHARD_REQUIRE(!blocking || *blocking != '1', "nccl",
                "NCCL_COMM_BLOCKING=1 lets calls of NCCL block, and a rank that blocks there cannot be told that another has "
                "failed. Unset it");
  return std::make_shared<MachineApi>(device);
}

}  // namespace shardproof
