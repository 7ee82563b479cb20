// Memory of another process on this host, which this process reads where it lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "testing/device/shared_place.h"

namespace shardproof::process {

class PeerMemory {
 public:
  // `process`: its number for the system.
  explicit PeerMemory(int64_t process) : process_(process) {}
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Where this process finds these bytes of the other one. They may be read until this object is destroyed, and hold what the
  // other process writes there, also after it has ended. Throws Error when the file cannot be mapped, or ends before the bytes.
  const std::byte* at(const SharedPlace& place, int64_t bytes);

 private:
  struct Mapping {
    const std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  Mapping map(int32_t file) const;

  const int64_t process_;
  std::map<int32_t, Mapping> files_;
};

}  // namespace shardproof::process
