#include "shardproof/device/host_pool.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "shardproof/base/check.h"
#include "testing/device/free_ranges.h"
#include "testing/device/shared_memory.h"

#if defined(__has_feature)
#  if __has_feature(address_sanitizer)
#    define SHARDPROOF_ASAN
#  endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(SHARDPROOF_ASAN)
#  include <sanitizer/asan_interface.h>
#else
#  define ASAN_POISON_MEMORY_REGION(begin, bytes) (static_cast<void>(begin), static_cast<void>(bytes))
#  define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) (static_cast<void>(begin), static_cast<void>(bytes))
#endif

namespace shardproof {
namespace {

// Above the allocators that LibTorch sets itself, and below those that count what others allocate.
constexpr uint8_t kPriority = 100;

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
size_t whole_pages(size_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

// Addresses that are the pool's. Those from `begin` to `top` have been used; the others are reserved, and cost no memory.
struct Region {
  char *begin, *top, *end;
};

// As many addresses as the machine has memory. Where the process may have few addresses, others need them as well: then the
// next 64 MiB, or an eighth of what the pool has. At least `bytes`.
size_t wanted_addresses(size_t bytes, size_t reserved) {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return std::max({bytes, size_t{64} << 20, whole_pages(reserved / 8)});
  return std::max(bytes, static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes());
}

// Nothing where the system refuses even as many as are needed.
Region reserve(size_t bytes, size_t reserved) {
  for (const size_t size : {wanted_addresses(bytes, reserved), bytes}) {
    void* const begin = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin != MAP_FAILED) return {static_cast<char*>(begin), static_cast<char*>(begin), static_cast<char*>(begin) + size};
  }
  return {};
}

class HostPool final : public c10::Allocator {
 public:
  HostPool(c10::Allocator* small, size_t block_bytes_min) : small_(small), block_bytes_min_(block_bytes_min) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < block_bytes_min_) return small_->allocate(bytes);
    void* const data = take(whole_pages(bytes));
    if (!data) return small_->allocate(bytes);  // which says what is missing
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { small_->copy_data(to, from, bytes); }

  HostPoolBytes bytes() const {
    const std::lock_guard lock(mutex_);
    return {used_, used_max_, static_cast<int64_t>(free_.bytes())};
  }

  void trim() {
    const std::lock_guard lock(mutex_);
    free_.each([](char* begin, size_t bytes) {
      const bool is_shared = offset_in_shared_pool(begin) >= 0;  // then the pages are the file's
      madvise(begin, bytes, is_shared ? MADV_REMOVE : MADV_DONTNEED);
    });
  }

  // A child of fork() has this thread only, and no other would unlock the mutex.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  static void release(void* data);

  // Any thread, without the lock: regions are only added.
  bool owns(const void* data) const {
    const size_t count = region_count_.load(std::memory_order_acquire);
    return std::any_of(regions_.begin(), regions_.begin() + count,
                       [&](const Region& region) { return region.begin <= data && data < region.end; });
  }

  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    char* begin = free_.take(bytes);
    if (!begin && grow(bytes)) begin = free_.take(bytes);
    if (!begin) return nullptr;
    sizes_[begin] = bytes;
    used_ += static_cast<int64_t>(bytes);
    used_max_ = std::max(used_max_, used_);
    ASAN_UNPOISON_MEMORY_REGION(begin, bytes);
    return begin;
  }

  void give(char* begin) {
    const std::lock_guard lock(mutex_);
    const auto block = sizes_.find(begin);
    SHARD_CHECK(block != sizes_.end(), "host pool", "an address is freed that no tensor has");
    const size_t bytes = block->second;
    sizes_.erase(block);
    used_ -= static_cast<int64_t>(bytes);
    free_.give(begin, bytes);
    ASAN_POISON_MEMORY_REGION(begin, bytes);
  }

  // Makes a free range of at least so many bytes, in memory that other processes can read as long as that has room.
  bool grow(size_t bytes) {
    if (!shared_ && shared_pool_addresses().begin) {
      const auto [begin, end] = shared_pool_addresses();
      shared_ = add({begin, begin, end});
    }
    for (Region* const region : {shared_, last_own_})
      if (region && extend(*region, bytes)) return true;
    if (region_count_.load(std::memory_order_relaxed) == regions_.size()) return false;
    Region made = reserve(bytes, reserved_);
    if (!extend(made, bytes)) {  // smaller requests may still fit into the last one
      if (made.begin) munmap(made.begin, static_cast<size_t>(made.end - made.begin));
      return false;
    }
    last_own_ = add(made);
    return true;
  }

  // Null where there are too many regions, or no addresses.
  Region* add(const Region& region) {
    const size_t count = region_count_.load(std::memory_order_relaxed);
    if (count == regions_.size() || !region.begin) return nullptr;
    reserved_ += static_cast<size_t>(region.end - region.begin);
    regions_[count] = region;
    region_count_.store(count + 1, std::memory_order_release);
    return &regions_[count];
  }

  // Uses more of the region, so that the free range at the end of what has been used has so many bytes.
  bool extend(Region& region, size_t bytes) {
    const size_t missing = bytes - free_.bytes_before(region.top);
    if (static_cast<size_t>(region.end - region.top) < missing) return false;
    if (mprotect(region.top, missing, PROT_READ | PROT_WRITE) != 0) return false;
    if (&region == shared_) madvise(region.top, missing, MADV_DODUMP);
    free_.give(region.top, missing);
    region.top += missing;
    return true;
  }

  c10::Allocator* const small_;
  const size_t block_bytes_min_;
  mutable std::mutex mutex_;
  FreeRanges free_;
  std::unordered_map<char*, size_t> sizes_;  // of the blocks in use
  int64_t used_ = 0, used_max_ = 0;
  std::array<Region, 64> regions_ = {};
  Region *shared_ = nullptr, *last_own_ = nullptr;  // those that grow
  std::atomic<size_t> region_count_ = 0;
  size_t reserved_ = 0;  // bytes of all regions
};

// Lives as long as the process, since tensors are freed until its end.
std::atomic<HostPool*> the_pool = nullptr;

void HostPool::release(void* data) {
  if (!data) return;
  HostPool& pool = *the_pool;
  if (pool.owns(data))
    pool.give(static_cast<char*>(data));
  else
    pool.small_->raw_deallocate(data);
}

}  // namespace

void use_host_pool(int64_t block_bytes_min) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (the_pool) return;
  auto* const pool = new HostPool(c10::GetCPUAllocator(), static_cast<size_t>(std::max<int64_t>(1, block_bytes_min)));
  the_pool = pool;
  c10::SetCPUAllocator(pool, kPriority);
  if (c10::GetCPUAllocator() != pool) {
    the_pool = nullptr;
    delete pool;
    throw Error("[host pool] another allocator was set for the CPU, with a priority above " + std::to_string(kPriority) +
                ", so tensors cannot lie in the pool; call use_host_pool() before it is set");
  }
  pthread_atfork([] { the_pool.load()->lock_for_fork(); }, [] { the_pool.load()->unlock_after_fork(); },
                 [] { the_pool.load()->unlock_after_fork(); });
}

HostPoolBytes host_pool_bytes() {
  const HostPool* const pool = the_pool;
  return pool ? pool->bytes() : HostPoolBytes();
}

void trim_host_pool() {
  if (HostPool* const pool = the_pool) pool->trim();
}

}  // namespace shardproof
