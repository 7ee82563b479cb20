#include "testing/comm/peer_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "shardproof/base/check.h"

namespace shardproof::process {

PeerMemory::~PeerMemory() {
  for (const auto& [file, mapping] : files_) munmap(const_cast<std::byte*>(mapping.data), static_cast<size_t>(mapping.bytes));
}

PeerMemory::Mapping PeerMemory::map(int32_t file) const {
  const std::string path = fmt::format("/proc/{}/fd/{}", process_, file);
  const int opened = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  SHARD_REQUIRE(opened >= 0, "peer memory", "{} cannot be opened: {}", path, std::strerror(errno));
  struct stat found {};
  const bool known = fstat(opened, &found) == 0;
  const auto size = known ? static_cast<size_t>(found.st_size) : 0;
  void* const data = size > 0 ? mmap(nullptr, size, PROT_READ, MAP_SHARED | MAP_NORESERVE, opened, 0) : MAP_FAILED;
  const int problem = errno;
  close(opened);
  SHARD_REQUIRE(data != MAP_FAILED, "peer memory", "{} of {} bytes cannot be mapped: {}", path, size, std::strerror(problem));
  return {static_cast<const std::byte*>(data), static_cast<int64_t>(size)};
}

const std::byte* PeerMemory::at(const SharedPlace& place, int64_t bytes) {
  auto found = files_.find(place.file);
  if (found == files_.end()) found = files_.emplace(place.file, map(place.file)).first;
  const Mapping& mapping = found->second;
  SHARD_REQUIRE(place.offset >= 0 && bytes >= 0 && bytes <= mapping.bytes && place.offset <= mapping.bytes - bytes,
                "peer memory", "{} bytes from byte {} on do not lie in file {} of process {}, which has {}", bytes,
                place.offset, place.file, process_, mapping.bytes);
  return mapping.data + place.offset;
}

}  // namespace shardproof::process
