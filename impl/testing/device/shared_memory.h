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

// Reserves addresses for `bytes`, rounded up to whole pages. The tensors that the pool gets from now on lie there, in this file,
// until it is full; those before and after lie in memory that is this process' own. Memory is only paid for where tensors have
// used it. A second call returns the same file. There is none where files may not be so large (RLIMIT_FSIZE), where the process
// may have few addresses (RLIMIT_AS), and where memory is paid for when it is reserved (vm.overcommit_memory is 2).
MemoryFile share_host_pool(size_t bytes);

// Where the data lie in that file, in bytes from its start; -1 when they lie elsewhere. Any thread.
int64_t offset_in_shared_pool(const void* data);

// The addresses that are for tensors: from `begin` to `end`, both null when there is no file.
struct SharedAddresses {
  char *begin = nullptr, *end = nullptr;
};
SharedAddresses shared_pool_addresses();

}  // namespace shardproof
