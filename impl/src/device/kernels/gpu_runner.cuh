// Runs rules on the GPU, one thread a pack, on a stream that is asked for at every call.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <utility>

#include "device/kernels/element_rules.h"

namespace shardproof::kernels {

inline void require_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("[cuda] ") + what + " failed: " + cudaGetErrorString(status) +
                             ". The process cannot use this GPU any more; CUDA_LAUNCH_BLOCKING=1 tells which kernel it was");
}

constexpr int kThreads = 256;

template <int W, class Rule>
__global__ void __launch_bounds__(kThreads) each_pack(int64_t packs, int64_t begin, __grid_constant__ const Rule rule) {
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pack < packs) rule.template pack<W>(begin + pack * W);
}

// The least place found goes to `found`, which holds `count` at first.
template <int W, class Rule>
__global__ void __launch_bounds__(kThreads)
    first_pack(int64_t packs, int64_t begin, __grid_constant__ const Rule rule, unsigned long long* found) {
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pack >= packs) return;
  const int64_t i = begin + pack * W;
  const int at = rule.template pack<W>(i);
  if (at < W) atomicMin(found, static_cast<unsigned long long>(i + at));
}

constexpr int kExactThreads = 1024, kLanes = 32;
constexpr int64_t kExactChunk = int64_t{1} << 18;  // below kTermsInCounters for each lane
constexpr int kChunksMax = 240;                    // in one launch's arguments
constexpr size_t kExactBytes = sizeof(uint32_t) * 256 * kLimbs * kLanes;
static_assert(kExactChunk / kLanes + 1 <= kTermsInCounters);

struct Chunks {
  FlatSpan at[kChunksMax];
};

// One block a chunk. Each lane has counters of its own, so that no two threads of a warp meet in one bank.
__global__ void __launch_bounds__(kExactThreads)
    exact_chunks(__grid_constant__ const Chunks chunks, bool squares, unsigned long long* counters) {
  extern __shared__ uint32_t limbs[];  // [exponent][limb][lane]
  constexpr int kSlots = 256 * kLimbs * kLanes;
  for (int k = threadIdx.x; k < kSlots; k += kExactThreads) limbs[k] = 0;
  __syncthreads();
  const FlatSpan span = chunks.at[blockIdx.x];
  const int lane = threadIdx.x % kLanes;
  const auto add = [&](float value) {
    const ExactTerm term = exact_term(value, squares);
    for (int k = 0; k < kLimbs; ++k)
      if (term.limb[k] != 0) atomicAdd(&limbs[(term.exponent * kLimbs + k) * kLanes + lane], term.limb[k]);
  };
  const bool packed = reinterpret_cast<uintptr_t>(span.data) % kWordBytes == 0;
  const int64_t whole = packed ? span.count / 4 : 0;
  for (int64_t i = threadIdx.x; i < whole; i += kExactThreads) {
    const Pack<float, 4> pack = load<4>(span.data + 4 * i);
    for (int w = 0; w < 4; ++w) add(pack.at[w]);
  }
  for (int64_t i = 4 * whole + threadIdx.x; i < span.count; i += kExactThreads) add(span.data[i]);
  __syncthreads();
  for (int exponent = threadIdx.x; exponent < 256; exponent += kExactThreads) {
    uint64_t sum[kLimbs] = {};
    for (int k = 0; k < kLimbs; ++k)
      for (int step = 0; step < kLanes; ++step)
        sum[k] += limbs[(exponent * kLimbs + k) * kLanes + (exponent + step) % kLanes];
    if ((sum[0] | sum[1] | sum[2]) == 0) continue;
    atomicAdd(&counters[2 * exponent], static_cast<unsigned long long>(low_part(sum[0], sum[1], sum[2])));
    atomicAdd(&counters[2 * exponent + 1], static_cast<unsigned long long>(high_part(sum[0], sum[1], sum[2])));
  }
}

// Memory of the device for as long as a call needs it.
class Scratch {
 public:
  Scratch(size_t bytes, cudaStream_t stream) : bytes_(bytes), stream_(stream) {
    require_cuda(cudaMallocAsync(&data_, bytes, stream), "cudaMallocAsync");
  }
  ~Scratch() { cudaFreeAsync(data_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  void fill_from(const void* host) const {
    require_cuda(cudaMemcpyAsync(data_, host, bytes_, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  }
  // Waits for what was queued.
  void read_to(void* host) const {
    require_cuda(cudaMemcpyAsync(host, data_, bytes_, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    require_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
  cudaStream_t stream_;
};

// Arrays to sum, by value: they travel in a kernel's arguments, of which there are 4 KiB.
template <class T>
struct GpuTerms {
  static constexpr int kMax = 480;
  const T* at[kMax];
  int count;

  explicit GpuTerms(std::span<const std::byte* const> given) : count(static_cast<int>(given.size())) {
    if (count > kMax)
      throw std::runtime_error("[cuda] a sum of " + std::to_string(count) + " terms; a kernel adds at most " +
                               std::to_string(kMax) + ". Use a mesh with fewer ranks along one axis");
    for (int k = 0; k < count; ++k) at[k] = reinterpret_cast<const T*>(given[static_cast<size_t>(k)]);
  }
  SHARD_HD const T* operator[](int k) const { return at[k]; }
};

class GpuRunner {
 public:
  template <class T>
  using Terms = GpuTerms<T>;

  explicit GpuRunner(std::function<void*()> stream) : stream_(std::move(stream)) {}

  template <class Rule>
  void each(int64_t count, const Rule& rule) const {
    const int64_t packs = rule.fits() ? count / Rule::kWidth : 0;
    launch(each_pack<Rule::kWidth, Rule>, packs, 0, rule);
    launch(each_pack<1, Rule>, count - packs * Rule::kWidth, packs * Rule::kWidth, rule);
  }

  template <class Rule>
  int64_t first(int64_t count, const Rule& rule) const {
    if (count == 0) return 0;
    const Scratch found(sizeof(unsigned long long), stream());
    auto least = static_cast<unsigned long long>(count);
    found.fill_from(&least);
    const int64_t packs = rule.fits() ? count / Rule::kWidth : 0;
    auto* place = found.as<unsigned long long>();
    launch(first_pack<Rule::kWidth, Rule>, packs, 0, rule, place);
    launch(first_pack<1, Rule>, count - packs * Rule::kWidth, packs * Rule::kWidth, rule, place);
    found.read_to(&least);
    return static_cast<int64_t>(least);
  }

  void zero(void* target, int64_t bytes) const {
    if (bytes > 0) require_cuda(cudaMemsetAsync(target, 0, static_cast<size_t>(bytes), stream()), "cudaMemsetAsync");
  }

  void copy(void* target, const void* source, int64_t bytes) const {
    if (bytes == 0) return;
    require_cuda(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()),
                 "cudaMemcpyAsync");
  }

  void exact(std::span<const FlatSpan> spans, bool squares, std::span<int64_t> counters) const {
    require_cuda(cudaFuncSetAttribute(exact_chunks, cudaFuncAttributeMaxDynamicSharedMemorySize, kExactBytes),
                 "cudaFuncSetAttribute");
    const Scratch sums(counters.size_bytes(), stream());
    sums.fill_from(counters.data());
    Chunks chunks;
    int filled = 0;
    const auto flush = [&] {
      if (filled == 0) return;
      exact_chunks<<<filled, kExactThreads, kExactBytes, stream()>>>(chunks, squares, sums.as<unsigned long long>());
      require_cuda(cudaGetLastError(), "a kernel's launch");
      filled = 0;
    };
    for (const FlatSpan& span : spans)
      for (int64_t begin = 0; begin < span.count; begin += kExactChunk) {
        chunks.at[filled++] = {span.data + begin, std::min(kExactChunk, span.count - begin)};
        if (filled == kChunksMax) flush();
      }
    flush();
    sums.read_to(counters.data());
  }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_()); }

  template <class Kernel, class... Arguments>
  void launch(Kernel* kernel, int64_t packs, Arguments... arguments) const {
    if (packs == 0) return;
    kernel<<<static_cast<unsigned>((packs + kThreads - 1) / kThreads), kThreads, 0, stream()>>>(packs, arguments...);
    require_cuda(cudaGetLastError(), "a kernel's launch");
  }

  std::function<void*()> stream_;
};

}  // namespace shardproof::kernels
