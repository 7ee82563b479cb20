// Memory of the CPU's tensors that is kept when they are freed, for the tensors of the next step.
//
// glibc gives a large block back to the system when it is freed, and the system has to clear its pages when it is asked for
// again. A training step frees and allocates the same tensors every time. With the pool their memory stays with the process,
// and free blocks that lie beside each other become one. So a step takes less time, and the process less memory, than with
// glibc's allocator (docs/performance.md has both). This is what c10's CUDACachingAllocator is for a GPU.
#pragma once

#include <cstdint>

namespace shardproof {

// Tensors on the CPU of at least so many bytes lie in the pool, unless use_host_pool is told another size. Smaller ones, and
// page-locked memory, lie elsewhere as before.
constexpr int64_t kHostPoolBlockBytesMin = int64_t{64} << 10;

// From now on new tensors of this process lie in the pool, whoever makes them; older ones keep their memory. Call it when the
// program begins: no other thread may make a tensor meanwhile. A second call has no effect. Throws Error where another
// allocator has been set with a priority above 100 (c10::SetCPUAllocator). Where the system gives the pool no more memory,
// tensors lie where they did before. All threads share the pool. Memory is not cleared, so what at::empty returns holds old
// values, as it may with any allocator. With AddressSanitizer freed blocks are poisoned. LibTorch's profiler does not see
// blocks of the pool.
//
// A child of fork() has a copy of the pool, with one exception: where this process has made an MpiWorld, whose ranks read each
// other's memory, the child may see what its parent writes later, also where a tensor of the parent was freed. What the child
// writes is always its own.
//
// `block_bytes_min`: tensors of at least so many bytes lie in the pool. Tests, whose tensors are small, ask for less.
void use_host_pool(int64_t block_bytes_min = kHostPoolBlockBytesMin);

struct HostPoolBytes {
  int64_t used = 0;      // of the tensors that lie in the pool now, each rounded up to whole pages
  int64_t used_max = 0;  // the most that they were at one time
  int64_t kept = 0;      // free, for the next tensors; the memory that was free at a trim counts, too
};
HostPoolBytes host_pool_bytes();

// Gives the memory that is kept back to the system, as after a phase that needed much more than what follows. The next tensors
// fetch it again.
void trim_host_pool();

}  // namespace shardproof
