// The allocator of this process. A campaign of small cases allocates and frees small pieces of memory most of all, and
// jemalloc does that faster than the allocator of glibc (docs/performance.md).
#pragma once

#include <string>

namespace harness {

// Runs this program again, with the same arguments and jemalloc as its allocator, in place of this process, which ends here.
// Returns where there is nothing to gain or to find: jemalloc is in use or not installed, or the caller has set LD_PRELOAD, or
// a sanitizer has its own allocator. To be called before anything was printed or started. The processes that the program starts
// afterwards have glibc's allocator again. Caches of LibTorch that cases of random shapes would only fill are kept small
// there, by an environment variable that later processes inherit.
void start_again_on_jemalloc();

// "jemalloc" or "libc".
std::string allocator_name();

}  // namespace harness
