#include "properties/doubles/gpu_libraries.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <iterator>

namespace gpu_libraries {
namespace {

std::vector<EntryCall> noted;
Answers given;

int answer(EntryCall call) {
  const auto found = given.results.find(call.function);
  noted.push_back(std::move(call));
  return found == given.results.end() ? 0 : found->second;
}

template <typename... Arguments>
ncclResult_t nccl(const char* function, Arguments... arguments) {
  return static_cast<ncclResult_t>(answer(entry_call(function, arguments...)));
}

template <typename... Arguments>
cudaError_t cuda(const char* function, Arguments... arguments) {
  return static_cast<cudaError_t>(answer(entry_call(function, arguments...)));
}

// Another address each time; nobody reads what is there.
template <typename T>
T* thing() {
  static int64_t last = 0x1000;
  return reinterpret_cast<T*>(last += 0x10);
}

}  // namespace

std::vector<EntryCall>& calls() {
  return noted;
}
Answers& answers() {
  return given;
}
void forget() {
  noted.clear();
  given = {};
}

}  // namespace gpu_libraries

using namespace gpu_libraries;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = given.devices;
  return cuda("cudaGetDeviceCount");
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = given.driver;
  return cuda("cudaDriverGetVersion");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = given.compute_capability;
  return cuda("cudaDeviceGetAttribute", attribute, device);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::fill(std::begin(properties->uuid.bytes), std::end(properties->uuid.bytes), static_cast<char>(0xa0 + device));
  return cuda("cudaGetDeviceProperties", device);
}
cudaError_t cudaSetDevice(int device) {
  return cuda("cudaSetDevice", device);
}
cudaError_t cudaDeviceSynchronize() {
  return cuda("cudaDeviceSynchronize");
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = thing<std::remove_pointer_t<cudaStream_t>>();
  return cuda("cudaStreamCreateWithFlags", flags);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return cuda("cudaStreamSynchronize", stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return cuda("cudaStreamDestroy", stream);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = thing<std::remove_pointer_t<cudaEvent_t>>();
  return cuda("cudaEventCreateWithFlags", flags);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return cuda("cudaEventDestroy", event);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cuda("cudaEventRecord", event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return cuda("cudaStreamWaitEvent", stream, event, flags);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return cuda("cudaEventQuery", event);
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return cuda("cudaMemcpyAsync", target, source, bytes, kind, stream);
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = thing<void>();
  return cuda("cudaMalloc", bytes);
}
cudaError_t cudaFree(void* memory) {
  return cuda("cudaFree", memory);
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  *memory = thing<void>();
  return cuda("cudaMallocHost", bytes);
}
cudaError_t cudaFreeHost(void* memory) {
  return cuda("cudaFreeHost", memory);
}

ncclResult_t ncclGetVersion(int* version) {
  *version = given.version;
  return nccl("ncclGetVersion");
}
const char* ncclGetErrorString(ncclResult_t result) {
  static const std::string texts[] = {"result 0", "result 1", "result 2", "result 3",
                                      "result 4", "result 5", "result 6", "result 7"};
  return texts[std::clamp(static_cast<int>(result), 0, 7)].c_str();
}
const char* ncclGetLastError(ncclComm_t comm) {
  nccl("ncclGetLastError", comm);
  return given.last_error.c_str();
}
ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  *memory = thing<void>();
  return nccl("ncclMemAlloc", bytes);
}
ncclResult_t ncclMemFree(void* memory) {
  return nccl("ncclMemFree", memory);
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::generate(std::begin(id->internal), std::end(id->internal), [n = 0]() mutable { return static_cast<char>(n++); });
  return nccl("ncclGetUniqueId");
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  *comm = thing<std::remove_pointer_t<ncclComm_t>>();
  EntryCall made = entry_call("ncclCommInitRankConfig", size, rank, config->blocking);
  made.content.assign(std::begin(id.internal), std::end(id.internal));
  return static_cast<ncclResult_t>(answer(std::move(made)));
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  if (color != NCCL_SPLIT_NOCOLOR) *child = thing<std::remove_pointer_t<ncclComm_t>>();
  return nccl("ncclCommSplit", comm, color, key, config->blocking);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = ncclSuccess;
  if (!given.async_errors.empty()) {
    *error = static_cast<ncclResult_t>(given.async_errors.front());
    given.async_errors.erase(given.async_errors.begin());
  }
  return nccl("ncclCommGetAsyncError", comm);
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return nccl("ncclCommAbort", comm);
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return nccl("ncclCommFinalize", comm);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return nccl("ncclCommDestroy", comm);
}
ncclResult_t ncclGroupStart() {
  return nccl("ncclGroupStart");
}
ncclResult_t ncclGroupEnd() {
  return nccl("ncclGroupEnd");
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return nccl("ncclSend", data, count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return nccl("ncclRecv", data, count, type, peer, comm, stream);
}
ncclResult_t ncclAllGather(const void* input, void* output, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return nccl("ncclAllGather", input, output, count, type, comm, stream);
}
ncclResult_t ncclBroadcast(const void* input, void* output, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return nccl("ncclBroadcast", input, output, count, type, root, comm, stream);
}
ncclResult_t ncclAllReduce(const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return nccl("ncclAllReduce", input, output, count, type, op, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return nccl("ncclReduceScatter", input, output, count, type, op, comm, stream);
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                                      ncclComm_t comm) {
  *op = static_cast<ncclRedOp_t>(17);
  EntryCall made = entry_call("ncclRedOpCreatePreMulSum", type, residence, comm);
  made.content.assign(static_cast<const char*>(scalar), 8);
  return static_cast<ncclResult_t>(answer(std::move(made)));
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return nccl("ncclRedOpDestroy", op, comm);
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* memory, size_t bytes, void** handle) {
  *handle = thing<void>();
  return nccl("ncclCommRegister", comm, memory, bytes);
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return nccl("ncclCommDeregister", comm, handle);
}
#ifndef NCCL_BEFORE_WINDOWS
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* window, int flags) {
  *window = thing<std::remove_pointer_t<ncclWindow_t>>();
  return nccl("ncclCommWindowRegister", comm, memory, bytes, flags);
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return nccl("ncclCommWindowDeregister", comm, window);
}
#endif

}  // extern "C"
