// A copy of what lies in the memory of another process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardproof::mpi {

class Read {
 public:
  Read() = default;  // nothing, and through with it
  Read(std::byte* to, const std::byte* from, int64_t bytes) : to_(to), from_(from), bytes_(bytes) {}

  // Copies no more than `budget` bytes, and takes from the budget what it has copied. True when the last byte is through.
  bool advance(int64_t& budget);
  bool done() const { return through_ == bytes_; }

 private:
  std::byte* to_ = nullptr;
  const std::byte* from_ = nullptr;
  int64_t bytes_ = 0, through_ = 0;
};

}  // namespace shardproof::mpi
