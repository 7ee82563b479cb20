// CRC-32 as zip files use it. No Torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardproof::checkpoint {

// Continues `crc`, the sum of what came before (0 for nothing). Law: crc32(crc32(0, a), b) == crc32(0, a then b).
uint32_t crc32(uint32_t crc, const void* data, size_t bytes);

// Law: crc32_join(crc32(0, a), crc32(0, b), |b|) == crc32(0, a then b), in time logarithmic in |b|.
uint32_t crc32_join(uint32_t first, uint32_t second, uint64_t second_bytes);

}  // namespace shardproof::checkpoint
