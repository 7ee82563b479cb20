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
namespace {

// Null where it cannot be mapped, with errno. A record of this process' crash needs no other process' memory, and neither does
// a child of fork().
const std::byte* map_file(int file, size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_DONTDUMP);
  madvise(data, bytes, MADV_DONTFORK);
  return static_cast<const std::byte*>(data);
}

bool has_size(int file, int64_t bytes) {
  struct stat found {};
  return fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size == bytes;
}

}  // namespace

PeerMemory::PeerMemory(int64_t process, const MemoryFile& file) : process_(process), bytes_(file.bytes) {
  const std::string path = fmt::format("/proc/{}/fd/{}", process, file.file);
  SHARD_REQUIRE(bytes_ >= int64_t{sizeof(file.number)}, "peer memory", "{} is said to have {} bytes", path, bytes_);
  // What is there may be a pipe or a terminal of another process.
  const int opened = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  SHARD_REQUIRE(opened >= 0, "peer memory", "{} cannot be opened: {}", path, std::strerror(errno));
  const bool fits = has_size(opened, bytes_);
  data_ = fits ? map_file(opened, static_cast<size_t>(bytes_)) : nullptr;
  const int problem = errno;
  close(opened);
  SHARD_REQUIRE(fits, "peer memory", "{} does not have {} bytes: it is another file", path, bytes_);
  SHARD_REQUIRE(data_, "peer memory", "{} of {} bytes cannot be mapped: {}", path, bytes_, std::strerror(problem));
  if (std::memcmp(data_ + bytes_ - sizeof(file.number), &file.number, sizeof(file.number)) == 0) return;
  munmap(const_cast<std::byte*>(data_), static_cast<size_t>(bytes_));
  throw Error(fmt::format("[peer memory] {} has another number: it is another file", path));
}

PeerMemory::~PeerMemory() {
  munmap(const_cast<std::byte*>(data_), static_cast<size_t>(bytes_));
}

const std::byte* PeerMemory::at(int64_t offset, int64_t bytes) const {
  SHARD_REQUIRE(offset >= 0 && bytes >= 0 && bytes <= bytes_ && offset <= bytes_ - bytes, "peer memory",
                "{} bytes from byte {} on do not lie in the memory of process {}, which has {}", bytes, offset, process_,
                bytes_);
  return data_ + offset;
}

}  // namespace shardproof::process
