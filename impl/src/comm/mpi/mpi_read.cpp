#include "comm/mpi/mpi_read.h"

#include <algorithm>
#include <cstring>

#include "testing/base/stream_copy.h"

namespace shardproof::mpi {
namespace {
constexpr int64_t kChunkBytes = 8 << 20;
}

bool Read::advance() {
  const auto bytes = static_cast<size_t>(std::min(kChunkBytes, bytes_ - through_));
  if (bytes == 0) return true;
  const auto copy =
      bytes_ < kStreamedBytesMin ? [](void* to, const void* from, size_t n) { std::memcpy(to, from, n); } : stream_copy;
  copy(to_ + through_, from_ + through_, bytes);
  through_ += static_cast<int64_t>(bytes);
  return done();
}

}  // namespace shardproof::mpi
