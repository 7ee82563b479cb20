// Memory of another process on this host, which this process reads where it lies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "testing/device/shared_memory.h"

namespace shardproof::process {

// All of the file is mapped from the start on, so that nothing can fail later. For one thread at a time.
class PeerMemory {
 public:
  // `process`: its number for the system. Throws Error where the file cannot be opened or mapped, and where it is another one
  // than `file` says: processes in other containers may have the same numbers.
  PeerMemory(int64_t process, const MemoryFile& file);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Where this process finds these bytes of the file. They hold what the other process writes there, may be read as long as
  // this object lives, and stay when the other process ends. Throws Error when they do not lie in the file.
  const std::byte* at(int64_t offset, int64_t bytes) const;

 private:
  const int64_t process_;
  int64_t bytes_ = 0;
  const std::byte* data_ = nullptr;
};

}  // namespace shardproof::process
