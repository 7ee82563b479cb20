// Memory for the host pool (device/host_pool.h) that other processes on this host can read. No Torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardproof {

// A file without a name. Other processes of this user find it as /proc/PID/fd/FILE.
struct MemoryFile {
  int32_t file = -1;  // a descriptor of the process that made it, open until that process ends; -1: there is none
  int64_t bytes = 0;
  uint64_t number = 0;  // drawn when the file was made; it lies in the last eight bytes
};

// Reserves addresses for `bytes`, rounded up to whole pages, and a file that has them. Memory is only paid for where tensors
// have used it. There is no file where files may not be so large (RLIMIT_FSIZE), where the process may have few addresses
// (RLIMIT_AS), and where memory is paid for when it is reserved (vm.overcommit_memory is 2). Once in a process.
MemoryFile reserve_shared_memory(size_t bytes);

// From now on the pool takes its further memory from that file, as long as it has room. What the pool has used before stays
// this process' own. Has no effect when there is no file.
void share_host_pool();

// Gives the file back, instead of sharing it.
void drop_shared_memory();

// Where the data lie in the file that is shared, in bytes from its start; -1 when they lie elsewhere. Any thread.
int64_t offset_in_shared_pool(const void* data);

// The addresses that are for tensors: from `begin` to `end`, both null when no file is shared.
struct SharedAddresses {
  char *begin = nullptr, *end = nullptr;
};
SharedAddresses shared_pool_addresses();

}  // namespace shardproof
