// What the operating system says of a failed call. No Torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace shardproof::checkpoint {

// `error`: a negative errno, as FileSystem's calls return it.
inline std::string cause(int64_t error) { return std::strerror(static_cast<int>(-error)); }

}  // namespace shardproof::checkpoint
