// Numbers of the zip format that its reader and its writer share.
#pragma once

#include <cstdint>

namespace shardproof::checkpoint::zip {

inline constexpr uint64_t kLocalMagic = 0x04034b50, kDescriptorMagic = 0x08074b50, kCentralMagic = 0x02014b50,
                          kEndMagic = 0x06054b50, kLocatorMagic = 0x07064b50, kEnd64Magic = 0x06064b50;
inline constexpr uint64_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56;
inline constexpr uint64_t kNoBytes = 0xFFFFFFFF;  // the number is in the zip64 field instead
inline constexpr uint64_t kWideId = 1, kPaddingId = 0x4246;
inline constexpr uint64_t kAlignment = 64;  // of payloads

}  // namespace shardproof::checkpoint::zip
