#include "comm/mpi/mpi_read.h"

#include <algorithm>
#include <cstring>

#include "testing/base/stream_copy.h"

namespace shardproof::mpi {
namespace {
// Copies of at least this size bypass the caches: the data would be evicted before anybody reads them.
constexpr int64_t kStreamedBytesMin = 4 << 20;
}  // namespace

bool Read::advance(int64_t& budget) {
  const int64_t bytes = std::min(budget, bytes_ - through_);
  if (bytes > 0) {
    const auto copy =
        bytes_ < kStreamedBytesMin ? [](void* to, const void* from, size_t n) { std::memcpy(to, from, n); } : stream_copy;
    copy(to_ + through_, from_ + through_, static_cast<size_t>(bytes));
    through_ += bytes;
    budget -= bytes;
  }
  return done();
}

}  // namespace shardproof::mpi
