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
#include <optional>
#include <string_view>
#include <unordered_map>

#include "shardproof/base/check.h"
#include "testing/device/free_ranges.h"
#include "testing/device/shared_place.h"

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

// Addresses that are the pool's. Those from `begin` to `top` have been used; the others are reserved, and cost no memory. Where
// they are those of a file, other processes can map it.
struct Region {
  char *begin, *top, *end;
  int32_t file;  // -1: the memory is this process' own
};

// As many addresses as the machine has memory. Where the process may have few addresses, others need them as well: then the
// next 64 MiB, or an eighth of what the pool has. At least `bytes`.
size_t wanted_addresses(size_t bytes, size_t reserved) {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return std::max({bytes, size_t{64} << 20, whole_pages(reserved / 8)});
  return std::max(bytes, static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes());
}

// A page behind the region is never used. So the free ranges of two regions do not touch, and no tensor lies in both.
Region reserve_mapped(size_t size, int32_t file) {
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const data = mmap(nullptr, size + page_bytes(), PROT_NONE, flags | MAP_NORESERVE, file, 0);
  if (data == MAP_FAILED) return {};
  auto* const begin = static_cast<char*>(data);
  return {begin, begin, begin + size, file};
}

// Nothing where the system refuses even as many as are needed.
Region reserve(size_t bytes, size_t reserved, bool shared) {
  for (const size_t size : {wanted_addresses(bytes, reserved), bytes}) {
    const int32_t file = shared ? make_memory_file(size) : -1;
    if (shared && file < 0) continue;
    if (const Region region = reserve_mapped(size, file); region.begin) return region;
    if (file >= 0) close(file);
  }
  return {};
}

// Whether the pool takes memory that other processes can map.
std::atomic<bool> is_shared = false;

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
    free_.each([this](char* begin, size_t bytes) { madvise(begin, bytes, place(begin) ? MADV_REMOVE : MADV_DONTNEED); });
  }

  std::optional<SharedPlace> place(const void* data) const {
    const Region* const region = region_of(data);
    if (!region || region->file < 0) return std::nullopt;
    return SharedPlace{region->file, static_cast<const char*>(data) - region->begin};
  }

  // A child of fork() has this thread only, and no other would unlock the mutex.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }
  // What the child writes must not be the parent's, which would otherwise give the same free blocks to tensors of its own.
  void leave_to_parent() {
    is_shared = false;
    for (size_t i = 0; i < region_count_; ++i) {
      Region& region = regions_[i];
      if (region.file < 0) continue;
      const auto used = static_cast<size_t>(region.top - region.begin);
      const int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
      if (used > 0 && mmap(region.begin, used, protection, flags, region.file, 0) == MAP_FAILED) {
        constexpr std::string_view kWhy = "shardproof: [host pool] no addresses for the memory of a child of fork()\n";
        [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kWhy.data(), kWhy.size());
        _exit(1);
      }
      region.end = region.top;
      region.file = -1;
    }
  }

 private:
  static void release(void* data);

  // Any thread, without the lock: regions are only added.
  const Region* region_of(const void* data) const {
    const auto end = regions_.begin() + region_count_.load(std::memory_order_acquire);
    const auto found =
        std::find_if(regions_.begin(), end, [&](const Region& region) { return region.begin <= data && data < region.end; });
    return found == end ? nullptr : &*found;
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

  // Makes a free range of at least so many bytes. The one at the end of what has been used is extended.
  bool grow(size_t bytes) {
    size_t count = region_count_.load(std::memory_order_relaxed);
    size_t missing = count ? bytes - free_.bytes_before(regions_[count - 1].top) : bytes;
    if (!can_extend(missing)) {
      if (count == regions_.size()) return false;
      const Region region = make_region(bytes);
      if (!region.begin) return false;
      reserved_ += static_cast<size_t>(region.end - region.begin);
      regions_[count] = region;
      region_count_.store(++count, std::memory_order_release);
      missing = bytes;
    }
    char*& top = regions_[count - 1].top;
    if (mprotect(top, missing, PROT_READ | PROT_WRITE) != 0) return false;
    free_.give(top, missing);
    top += missing;
    return true;
  }

  bool can_extend(size_t bytes) const {
    const size_t count = region_count_.load(std::memory_order_relaxed);
    if (!count) return false;
    const Region& last = regions_[count - 1];
    return static_cast<size_t>(last.end - last.top) >= bytes && (!is_shared || last.file >= 0);
  }

  Region make_region(size_t bytes) const {
    if (is_shared)
      if (const Region region = reserve(bytes, reserved_, true); region.begin) return region;
    is_shared = false;
    return reserve(bytes, reserved_, false);
  }

  c10::Allocator* const small_;
  const size_t block_bytes_min_;
  mutable std::mutex mutex_;
  FreeRanges free_;
  std::unordered_map<char*, size_t> sizes_;  // of the blocks in use
  int64_t used_ = 0, used_max_ = 0;
  std::array<Region, 64> regions_ = {};  // the last one grows
  std::atomic<size_t> region_count_ = 0;
  size_t reserved_ = 0;  // bytes of all regions
};

// Lives as long as the process, since tensors are freed until its end.
std::atomic<HostPool*> the_pool = nullptr;

void HostPool::release(void* data) {
  if (!data) return;
  HostPool& pool = *the_pool;
  if (pool.region_of(data))
    pool.give(static_cast<char*>(data));
  else
    pool.small_->raw_deallocate(data);
}

}  // namespace

int32_t make_memory_file(size_t bytes) {
  rlimit limit{};
  // Beyond this limit a signal would end the process.
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur < bytes) return -1;
  const int file = memfd_create("shardproof", MFD_CLOEXEC);
  if (file < 0) return -1;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0) return file;
  close(file);
  return -1;
}

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
                 [] {
                   the_pool.load()->leave_to_parent();
                   the_pool.load()->unlock_after_fork();
                 });
}

void share_host_pool() {
  is_shared = true;
}

std::optional<SharedPlace> shared_place(const void* data) {
  const HostPool* const pool = the_pool;
  return pool ? pool->place(data) : std::nullopt;
}

HostPoolBytes host_pool_bytes() {
  const HostPool* const pool = the_pool;
  return pool ? pool->bytes() : HostPoolBytes();
}

void trim_host_pool() {
  if (HostPool* const pool = the_pool) pool->trim();
}

}  // namespace shardproof
