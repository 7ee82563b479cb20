#include "testing/device/shared_memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <random>
#include <string_view>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

struct Shared {
  MemoryFile file;
  SharedAddresses addresses;
};
Shared the_shared;  // not written any more once it is shared
std::atomic<bool> is_shared = false;
std::atomic<bool> is_apart = false;  // in a child of fork(), whose memory is no more that of the file

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

template <typename Resource>
rlim_t limit_of(Resource resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) == 0 ? limit.rlim_cur : 0;
}

bool is_paid_when_reserved() {
  std::ifstream setting("/proc/sys/vm/overcommit_memory");
  int value = 0;
  return setting >> value && value == 2;
}

// Beyond the limit of files a signal would end the process. Each rank maps the files of all ranks on its host, so few addresses
// would not do.
bool is_possible(size_t bytes) {
  return limit_of(RLIMIT_FSIZE) >= bytes && limit_of(RLIMIT_AS) == RLIM_INFINITY && !is_paid_when_reserved();
}

MemoryFile make_file(size_t bytes) {
  std::random_device random;
  const MemoryFile made{.file = memfd_create("shardproof", MFD_CLOEXEC),
                        .bytes = static_cast<int64_t>(bytes),
                        .number = (uint64_t{random()} << 32) | random()};
  const auto at = static_cast<off_t>(bytes - sizeof(made.number));
  if (made.file >= 0 && ftruncate(made.file, static_cast<off_t>(bytes)) == 0 &&
      pwrite(made.file, &made.number, sizeof(made.number), at) == ssize_t{sizeof(made.number)})
    return made;
  if (made.file >= 0) close(made.file);
  return {};
}

// A page in front and one at the end are never used. So free ranges of these addresses and of others do not touch, and each
// tensor lies in one of them.
Shared make_shared(size_t bytes) {
  const size_t page = page_bytes(), size = (bytes + page - 1) / page * page, all = size + 2 * page;
  if (!is_possible(all)) return {};
  const MemoryFile file = make_file(all);
  if (file.file < 0) return {};
  void* const data = mmap(nullptr, all, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file.file, 0);
  if (data == MAP_FAILED) {
    close(file.file);
    return {};
  }
  madvise(data, all, MADV_DONTDUMP);  // a record of a crash would fill all of it
  char* const begin = static_cast<char*>(data) + page;
  return {file, {begin, begin + size}};
}

// In a child of fork(). What it writes must not be its parent's, which gives the same free blocks to tensors of its own. A
// child of the child has a copy of its parent's memory as it is.
void keep_apart_from_parent() {
  if (is_apart.exchange(true)) return;
  const auto [begin, end] = the_shared.addresses;
  const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  const auto offset = static_cast<off_t>(page_bytes());
  if (mmap(begin, static_cast<size_t>(end - begin), PROT_READ | PROT_WRITE, flags, the_shared.file.file, offset) != MAP_FAILED)
    return;
  constexpr std::string_view kWhy = "shardproof: [host pool] no addresses for the memory of a child of fork()\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kWhy.data(), kWhy.size());
  _exit(1);
}

}  // namespace

MemoryFile reserve_shared_memory(size_t bytes) {
  SHARD_CHECK(the_shared.file.file < 0 && !is_shared, "host pool", "memory that processes share is reserved twice");
  the_shared = make_shared(bytes);
  return the_shared.file;
}

void share_host_pool() {
  if (the_shared.file.file < 0 || is_shared) return;
  const int refused = pthread_atfork(nullptr, nullptr, keep_apart_from_parent);
  SHARD_CHECK(refused == 0, "host pool", "the system does not take what a child of fork() has to do: {}", refused);
  is_shared.store(true, std::memory_order_release);
}

void drop_shared_memory() {
  if (the_shared.file.file < 0 || is_shared) return;
  munmap(the_shared.addresses.begin - page_bytes(), static_cast<size_t>(the_shared.file.bytes));
  close(the_shared.file.file);
  the_shared = {};
}

SharedAddresses shared_pool_addresses() {
  return is_shared.load(std::memory_order_acquire) ? the_shared.addresses : SharedAddresses();
}

int64_t offset_in_shared_pool(const void* data) {
  const auto [begin, end] = shared_pool_addresses();
  if (is_apart || data < begin || data >= end) return -1;
  return static_cast<const char*>(data) - begin + static_cast<int64_t>(page_bytes());
}

}  // namespace shardproof
