// The bytes of tensors in the host's memory, counted where they are allocated. LibTorch counts those of a GPU itself. What the
// system's allocator keeps between them is not in it.
#pragma once

#include <cstdint>

namespace bench {

// Counts tensors that are made from now on, in the whole process.
void count_tensors();

// At most, since the last reset, of the tensors that this thread made.
int64_t peak_tensor_bytes();
void reset_peak_tensor_bytes();

}  // namespace bench
