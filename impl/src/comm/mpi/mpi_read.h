// A copy of what lies in the memory of another process, a chunk at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardproof::mpi {

// From this size on copies go past the caches, which what is copied would leave before somebody reads it.
constexpr int64_t kStreamedBytesMin = 4 << 20;

class Read {
 public:
  Read() = default;  // nothing, and through with it
  Read(std::byte* to, const std::byte* from, int64_t bytes) : to_(to), from_(from), bytes_(bytes) {}

  // Copies one chunk. True when the last one is through.
  bool advance();
  bool done() const { return through_ == bytes_; }

 private:
  std::byte* to_ = nullptr;
  const std::byte* from_ = nullptr;
  int64_t bytes_ = 0, through_ = 0;
};

}  // namespace shardproof::mpi
