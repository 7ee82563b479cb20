// Runs rules on the GPU, one thread a pack, on a stream that is asked for at every call.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <utility>

#include "device/kernels/canonical_rules.h"
#include "device/kernels/launches.h"

namespace shardproof::kernels {

inline void require_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("[cuda] ") + what + " failed: " + cudaGetErrorString(status) +
                             ". The process cannot use this GPU any more; CUDA_LAUNCH_BLOCKING=1 tells which kernel it was");
}

template <int W, class Rule>
__global__ void __launch_bounds__(kThreads) each_pack(int64_t packs, int64_t begin, __grid_constant__ const Rule rule) {
  each_thread<W>(blockIdx.x, threadIdx.x, packs, begin, rule);
}

// The least place found, counted from `offset`, goes to `found` where that is larger.
template <int W, class Rule>
__global__ void __launch_bounds__(kThreads)
    first_pack(int64_t packs, int64_t begin, __grid_constant__ const Rule rule, int64_t offset, unsigned long long* found) {
  const uint64_t place = first_thread<W>(blockIdx.x, threadIdx.x, packs, begin, rule);
  if (place != kNowhere) atomicMin(found, static_cast<unsigned long long>(offset) + place);
}

// The bits of the largest magnitude go to `found`. A warp agrees on one first, since all write to one place.
__global__ void __launch_bounds__(kThreads) largest_of(int64_t count, const double* x, unsigned long long* found) {
  auto bits = static_cast<unsigned long long>(largest_thread(blockIdx.x, threadIdx.x, gridDim.x, count, x));
  for (int step = 16; step > 0; step /= 2) {
    const unsigned long long others = __shfl_xor_sync(0xffffffff, bits, step);
    bits = bits > others ? bits : others;
  }
  if (threadIdx.x % 32 == 0) atomicMax(found, bits);
}

constexpr size_t kExactBytes = sizeof(uint32_t) * kExactSlots;

struct Chunks {
  FlatSpan at[kChunksMax];
};

// One block a chunk.
__global__ void __launch_bounds__(kExactThreads)
    exact_chunks(__grid_constant__ const Chunks chunks, bool squares, unsigned long long* counters) {
  extern __shared__ uint32_t limbs[];
  exact_clear(threadIdx.x, limbs);
  __syncthreads();
  exact_count(threadIdx.x, chunks.at[blockIdx.x], squares, limbs);
  __syncthreads();
  exact_collect(threadIdx.x, limbs, counters);
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

// The current device, for as long as it lives; -1 stays with that of the thread.
class OnGpu {
 public:
  explicit OnGpu(int device) {
    if (device < 0) return;
    require_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    changes_ = before_ != device;
    if (changes_) require_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnGpu() {
    if (changes_) cudaSetDevice(before_);
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  int before_ = 0;
  bool changes_ = false;
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

  GpuRunner(std::function<void*()> stream, int device) : stream_(std::move(stream)), device_(device) {}

  template <class Rule>
  void each(int64_t count, const Rule& rule) const {
    const OnGpu on(device_);
    const Cover all = cover(count, Rule::kWidth, rule.fits());
    launch(each_pack<Rule::kWidth, Rule>, all.packs, rule);
    launch(each_pack<1, Rule>, all.rest, rule);
  }

  template <class Rule>
  int64_t first(int64_t count, const Rule& rule) const {
    if (count == 0) return 0;
    const OnGpu on(device_);
    const Scratch found(sizeof(count), stream());
    int64_t least = count;
    found.fill_from(&least);
    note(count, rule, 0, found.as<int64_t>());
    found.read_to(&least);
    return least;
  }

  template <class Rule>
  void note(int64_t count, const Rule& rule, int64_t offset, int64_t* least) const {
    const OnGpu on(device_);
    const Cover all = cover(count, Rule::kWidth, rule.fits());
    auto* found = reinterpret_cast<unsigned long long*>(least);
    launch(first_pack<Rule::kWidth, Rule>, all.packs, rule, offset, found);
    launch(first_pack<1, Rule>, all.rest, rule, offset, found);
  }

  void zero(void* target, int64_t bytes) const {
    const OnGpu on(device_);
    if (bytes > 0) require_cuda(cudaMemsetAsync(target, 0, static_cast<size_t>(bytes), stream()), "cudaMemsetAsync");
  }

  void copy(void* target, const void* source, int64_t bytes) const {
    if (bytes == 0) return;
    const OnGpu on(device_);
    require_cuda(cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()),
                 "cudaMemcpyAsync");
  }

  int64_t largest_magnitude_bits(const double* x, int64_t count) const {
    unsigned long long bits = 0;
    if (count == 0) return 0;
    const OnGpu on(device_);
    const Scratch found(sizeof(bits), stream());
    found.fill_from(&bits);
    largest_of<<<largest_blocks(count), kThreads, 0, stream()>>>(count, x, found.as<unsigned long long>());
    require_cuda(cudaGetLastError(), "a kernel's launch");
    found.read_to(&bits);
    return static_cast<int64_t>(bits);
  }

  bool product(const ExactProduct& product) const { return product_by_elements(*this, product); }

  void exact(std::span<const FlatSpan> spans, bool squares, int64_t* counters) const {
    const OnGpu on(device_);
    require_cuda(cudaFuncSetAttribute(exact_chunks, cudaFuncAttributeMaxDynamicSharedMemorySize, kExactBytes),
                 "cudaFuncSetAttribute");
    Chunks chunks;
    int filled = 0;
    const auto flush = [&] {
      if (filled == 0) return;
      exact_chunks<<<filled, kExactThreads, kExactBytes, stream()>>>(chunks, squares,
                                                                     reinterpret_cast<unsigned long long*>(counters));
      require_cuda(cudaGetLastError(), "a kernel's launch");
      filled = 0;
    };
    each_chunk(spans, kExactChunk, [&](const FlatSpan& chunk) {
      chunks.at[filled++] = chunk;
      if (filled == kChunksMax) flush();
    });
    flush();
  }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_()); }

  template <class Kernel, class... Arguments>
  void launch(Kernel* kernel, const Launch& covers, Arguments... arguments) const {
    if (covers.packs == 0) return;
    kernel<<<static_cast<unsigned>(covers.blocks()), kThreads, 0, stream()>>>(covers.packs, covers.begin, arguments...);
    require_cuda(cudaGetLastError(), "a kernel's launch");
  }

  std::function<void*()> stream_;
  const int device_;
};

}  // namespace shardproof::kernels
