// The kernels' source on the CPU as a GPU has it: blocks and threads of its launches, words that have to be aligned. The
// library's own arithmetic goes element by element.
#pragma once

#include <cstdint>
#include <memory>

#include "shardproof/device/device_math.h"

namespace shardproof {

// On the CPU's memory. What a GPU runs but for its compiler's code and the order of threads. Memory that is not aligned for a
// word is a std::logic_error where a GPU would end the process.
std::shared_ptr<const DeviceMath> pack_math();

// How many packs of `width` elements and blocks of threads the launches over `count` elements have, and the elements left over.
struct TwinLaunches {
  int64_t packs, blocks_of_packs, rest_begin, rest, blocks_of_rest;
};
TwinLaunches twin_launches(int64_t count, int width, bool fits);
// Which pack a thread has.
int64_t twin_pack(uint32_t block, uint32_t thread);

}  // namespace shardproof
