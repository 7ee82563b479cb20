// What the operating system says of a path and of a failed call. No Torch.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

inline std::string host_name() {
  char name[256] = "an unknown host";
  ::gethostname(name, sizeof name - 1);
  return name;
}

// `error`: a negative errno, as FileSystem's calls return it. Hosts differ in what they see of a disk.
inline std::string cause(int64_t error) {
  return std::string(std::strerror(static_cast<int>(-error))) + " on " + host_name();
}

// A signal interrupts calls on network disks (mounted `intr`) and of user-space file systems.
template <class Call>
auto again(const Call& call) {
  for (;;)
    if (const auto done = call(); done != -EINTR) return done;
}

// A link to a folder is one to look into, and never one to remove the contents of.
enum class Links { followed, not_followed };
// What is at the path; nothing where nothing is. That it cannot be found out is another matter, and an Error.
std::optional<struct stat> look_at(FileSystem& files, const std::string& path, Links links = Links::followed);
inline bool exists(FileSystem& files, const std::string& path) {
  return look_at(files, path, Links::not_followed).has_value();
}
inline bool is_folder(FileSystem& files, const std::string& path, Links links = Links::followed) {
  const auto found = look_at(files, path, links);
  return found && S_ISDIR(found->st_mode);
}
// The length of a file. Throws Error unless it is there, and a regular one.
uint64_t file_bytes(FileSystem& files, const std::string& path);
// Throws Error unless the file that another rank wrote is there with so many bytes: hosts may have disks of their own.
void require_written(FileSystem& files, const std::string& path, uint64_t bytes);

}  // namespace shardproof::checkpoint
