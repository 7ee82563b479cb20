// All that the NCCL backend asks of NCCL and of the CUDA runtime, as one table: the machine's own (nccl_api(), below), or a
// double of it in memory, over which the tests run the backend where there is no GPU.
//
// One object is one rank on one device. CUDA's own failures are thrown as Error by whoever implements this.
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
  using Operator = int;  // ncclRedOp_t: of a Reduce, or made for one communicator and dtype

  // How memory of `allocate` is made known to NCCL: plain, by ncclCommRegister, or as a window of ncclCommWindowRegister, which
  // all ranks of the communicator register together.
  enum class Memory { plain, registered, symmetric };

  // NCCL's own numbers.
  static constexpr Operator operator_of(Reduce op) { return op == Reduce::sum ? 0 : op == Reduce::max ? 2 : 3; }

  virtual ~NcclApi() = default;

  // Of the CUDA runtime. `use_device` counts for the calling thread.
  virtual void use_device() = 0;
  virtual Stream make_stream() = 0;
  virtual void destroy_stream(Stream stream) = 0;
  // Where the caller's own kernels run: the calls' inputs come from it, and `Work::wait` makes it wait.
  virtual Stream current_stream() = 0;
  virtual Event make_event() = 0;
  virtual void destroy_event(Event event) = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool is_complete(Event event) = 0;
  // Between any two of host and device, in the stream's order.
  virtual void copy(void* target, const void* source, int64_t bytes, Stream stream) = 0;
  // Why `reduce` cannot be used; empty when it can.
  virtual std::string why_no_sums() { return {}; }
  // target[i] = ((terms[0][i] + terms[1][i]) + terms[2][i]) + ..., as DeviceMath::reduce, in the stream's order.
  virtual void reduce(at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms, int64_t count,
                      std::byte* target, Stream stream) = 0;
  // Whether kernels can read the tensor; if not it is copied there and back.
  virtual bool is_on_device(const at::Tensor& tensor) = 0;
  // Whether that is where `allocate` allocates.
  virtual bool is_device(c10::Device device) = 0;

  // Memory on the device; other than plain it is ncclMemAlloc's.
  virtual void* allocate(int64_t bytes, Memory kind) = 0;
  virtual void release(void* memory, Memory kind) = 0;

  // Of NCCL, by its own names. Communicators do not block: in_progress is no failure, and `async_error` tells when it is over.
  virtual NcclResult get_unique_id(UniqueId& id) = 0;
  // `communicator` must stay where it is until nothing is in progress.
  virtual NcclResult init_rank(Communicator& communicator, int64_t size, const UniqueId& id, int64_t rank) = 0;
  // A negative color joins none: `child` stays null. The parent is in progress until all its ranks have called.
  virtual NcclResult split(Communicator parent, int64_t color, int64_t key, Communicator& child) = 0;
  virtual NcclResult async_error(Communicator communicator) = 0;
  virtual std::string error_text(NcclResult result, Communicator communicator) = 0;
  virtual void abort(Communicator communicator) = 0;
  // With nothing on its way.
  virtual void destroy(Communicator communicator) = 0;

  virtual NcclResult group_start() = 0;
  virtual NcclResult group_end() = 0;
  virtual NcclResult send(const void* data, int64_t bytes, int64_t peer, Communicator communicator, Stream stream) = 0;
  virtual NcclResult recv(void* data, int64_t bytes, int64_t peer, Communicator communicator, Stream stream) = 0;
  virtual NcclResult all_gather(const void* input, void* output, int64_t bytes, Communicator communicator, Stream stream) = 0;
  virtual NcclResult broadcast(void* data, int64_t bytes, int64_t root, Communicator communicator, Stream stream) = 0;
  // In NCCL's own order.
  virtual NcclResult all_reduce(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                                Communicator communicator, Stream stream) = 0;
  virtual NcclResult reduce_scatter(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                                    Communicator communicator, Stream stream) = 0;
  // ncclRedOpCreatePreMulSum with an immediate scalar: each term times `factor`, rounded, then added.
  virtual NcclResult create_premultiplied_sum(Operator& op, double factor, at::ScalarType dtype, Communicator communicator) = 0;
  // Once the calls with it have returned.
  virtual NcclResult destroy_operator(Operator op, Communicator communicator) = 0;

  // The handle is what `deregister` takes; it is there once nothing is in progress, and must stay where it is until then. Of
  // symmetric memory: all ranks of the communicator call.
  virtual NcclResult register_memory(Communicator communicator, void* memory, int64_t bytes, Memory kind, void*& handle) = 0;
  virtual NcclResult deregister_memory(Communicator communicator, void* handle, Memory kind) = 0;
};

// Whether this library was built with NCCL.
bool nccl_available();
// GPUs that this process can use: 0 without a driver. Never throws.
int64_t nccl_devices();
// NCCL's version code, e.g. 22809; 0 where the build has none.
int64_t nccl_version();
// The first number of a GPU's compute capability: 9 of Hopper, 10 of Blackwell; 0 where there is no such GPU.
int64_t nccl_compute_capability(int64_t device);
// NCCL and CUDA of this machine, on its GPU number `device`; its current stream is LibTorch's of the calling thread there.
// Throws Error that says what is missing: NCCL in this build, a driver, a GPU.
std::shared_ptr<NcclApi> nccl_api(int64_t device);

}  // namespace shardproof
