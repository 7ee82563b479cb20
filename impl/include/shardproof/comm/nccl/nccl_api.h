// The functions of NCCL and of the CUDA runtime that the NCCL backend calls, as one interface. nccl_api() below returns the
// machine's own. Where there is no GPU the tests run the backend on a double of NCCL that lives in memory.
//
// One object serves one rank on one device. An implementation throws Error when CUDA itself fails.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// NCCL's ncclResult_t.
enum class NcclResult : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7
};

class NcclApi {
 public:
  using Communicator = void*;
  using Stream = void*;
  using Event = void*;
  using UniqueId = std::array<char, 128>;
  using Operator = int;  // ncclRedOp_t: that of a Reduce, or one that was made for a communicator and a dtype

  // How memory of `allocate` is made known to NCCL: not at all (`plain`), by ncclCommRegister (`registered`), or as a window of
  // ncclCommWindowRegister (`symmetric`), which all ranks of the communicator register together. `pinned` memory is the host's,
  // and NCCL does not know it.
  enum class Memory { plain, registered, symmetric, pinned };

  // NCCL's number of the operation.
  static constexpr Operator operator_of(Reduce op) { return op == Reduce::sum ? 0 : op == Reduce::max ? 2 : 3; }

  virtual ~NcclApi() = default;

  // Functions of the CUDA runtime. `use_device` takes effect for the calling thread.
  virtual void use_device() = 0;
  virtual Stream make_stream() = 0;
  virtual void destroy_stream(Stream stream) = 0;
  // The stream on which the caller's own kernels run. Inputs of calls are ready when it is, and `Work::wait` makes it wait.
  virtual Stream current_stream() = 0;
  virtual Event make_event() = 0;
  virtual void destroy_event(Event event) = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool is_complete(Event event) = 0;
  // The host waits for all that the device has been given.
  virtual void synchronize() = 0;
  // Copies in the order of the stream. Each pointer may be the host's or the device's. The host waits for the stream where the
  // memory is its own and not `pinned`.
  virtual void copy(void* target, const void* source, int64_t bytes, Stream stream) = 0;
  // Says why `reduce` cannot be used; empty when it can.
  virtual std::string why_no_sums() { return {}; }
  // target[i] = ((terms[0][i] + terms[1][i]) + terms[2][i]) + ..., as DeviceMath::reduce computes it, in the order of the
  // stream.
  virtual void reduce(at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms, int64_t count,
                      std::byte* target, Stream stream) = 0;
  // Whether kernels can read the tensor. Where they cannot, the backend copies it to the device and back.
  virtual bool is_on_device(const at::Tensor& tensor) = 0;
  // Whether `allocate` gives memory of this device.
  virtual bool is_device(c10::Device device) = 0;

  // Says why memory cannot be `symmetric`; empty when it can.
  virtual std::string why_no_windows() { return {}; }
  // Memory on the device, or `pinned` on the host. That of `registered` and `symmetric` comes from ncclMemAlloc.
  virtual void* allocate(int64_t bytes, Memory kind) = 0;
  virtual void release(void* memory, Memory kind) = 0;

  // Functions of NCCL, under NCCL's names. Communicators do not block: after `success` as well as after `in_progress` the
  // operation may be under way, and `async_error` tells when it is over.
  virtual NcclResult get_unique_id(UniqueId& id) = 0;
  // `communicator` must stay at its address until nothing is in progress.
  virtual NcclResult init_rank(Communicator& communicator, int64_t size, const UniqueId& id, int64_t rank) = 0;
  // `color` is at least 0. The parent is in progress until all its ranks have called; `child` is written by then, or once the
  // parent is aborted, and must stay at its address until that.
  virtual NcclResult split(Communicator parent, int64_t color, int64_t key, Communicator& child) = 0;
  virtual NcclResult async_error(Communicator communicator) = 0;
  virtual std::string error_text(NcclResult result, Communicator communicator) = 0;
  // Waits for graphs that were captured with it, and for what is in progress.
  virtual void abort(Communicator communicator) = 0;
  // Must be called only when no operation of the communicator is on its way. Waits until all its ranks have called this or
  // aborted it.
  virtual void destroy(Communicator communicator) = 0;

  virtual NcclResult group_start() = 0;
  virtual NcclResult group_end() = 0;
  virtual NcclResult send(const void* data, int64_t bytes, int64_t peer, Communicator communicator, Stream stream) = 0;
  virtual NcclResult recv(void* data, int64_t bytes, int64_t peer, Communicator communicator, Stream stream) = 0;
  virtual NcclResult all_gather(const void* input, void* output, int64_t bytes, Communicator communicator, Stream stream) = 0;
  virtual NcclResult broadcast(void* data, int64_t bytes, int64_t root, Communicator communicator, Stream stream) = 0;
  // These two add in an order that NCCL chooses.
  virtual NcclResult all_reduce(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                                Communicator communicator, Stream stream) = 0;
  virtual NcclResult reduce_scatter(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                                    Communicator communicator, Stream stream) = 0;
  // ncclRedOpCreatePreMulSum with a scalar of the host: each term is multiplied by `factor` and rounded, then added.
  virtual NcclResult create_premultiplied_sum(Operator& op, double factor, at::ScalarType dtype, Communicator communicator) = 0;
  // May be called once the calls that use the operator have returned.
  virtual NcclResult destroy_operator(Operator op, Communicator communicator) = 0;

  // Writes the handle that `deregister_memory` takes. The handle is valid once nothing is in progress, and must stay at its
  // address until then. For symmetric memory all ranks of the communicator must call.
  virtual NcclResult register_memory(Communicator communicator, void* memory, int64_t bytes, Memory kind, void*& handle) = 0;
  virtual NcclResult deregister_memory(Communicator communicator, void* handle, Memory kind) = 0;
};

// Whether this library was built with NCCL.
bool nccl_available();
// The number of GPUs that this process can use; 0 without a driver. It never throws.
int64_t nccl_devices();
// NCCL's version code, e.g. 22809; 0 when the library was built without NCCL.
int64_t nccl_version();
// The first number of the GPU's compute capability: 9 for Hopper, 10 for Blackwell, 0 when there is no such GPU.
int64_t nccl_compute_capability(int64_t device);
// The UUID of a GPU, which no other one has, whichever of a host's GPUs a process sees.
std::string nccl_device_id(int64_t device);
// NCCL and CUDA of this machine, on its GPU number `device`. The current stream is the one that LibTorch has for the calling
// thread on that GPU. Throws Error, which says what is missing: NCCL in this build, a driver, or a GPU.
std::shared_ptr<NcclApi> nccl_api(int64_t device);

}  // namespace shardproof
