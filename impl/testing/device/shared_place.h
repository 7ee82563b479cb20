// Where the tensors of the host pool (device/host_pool.h) lie for other processes. No Torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace shardproof {

// A place in a file that has no name. Other processes of this user find it as /proc/PID/fd/FILE.
struct SharedPlace {
  int32_t file = -1;   // a descriptor of the process whose tensor it is, which stays open as long as the process lives
  int64_t offset = 0;  // bytes from the start of the file
};

// A file in memory, whose pages exist once they are touched; -1 where the system refuses it.
int32_t make_memory_file(size_t bytes);

// From now on the pool takes memory that other processes can map, whether it is in use already or not. What it has taken before
// stays this process' own. Where the system refuses such memory, all of it stays so.
void share_host_pool();

// Where other processes find the byte; nothing where they cannot. Any thread.
std::optional<SharedPlace> shared_place(const void* data);

}  // namespace shardproof
