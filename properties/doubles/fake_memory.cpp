#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "properties/doubles/fake_device.h"
#include "properties/doubles/fake_parts.h"

namespace fake_device {
namespace {

constexpr size_t kBytes = size_t{8} << 30, kAlignment = 512, kBytesOfDevice = kBytes / kDevices;
constexpr uintptr_t kAddressesMin = 65536;  // mmap_min_addr

// Twice the addresses: the first half is what tensors have and nobody can touch, the second half is the memory.
struct Addresses {
  Addresses() {
    void* all = ::mmap(nullptr, 2 * kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(all != MAP_FAILED, "no addresses for the fake device");
    begin = static_cast<std::byte*>(all);
    TORCH_CHECK(::mprotect(begin + kBytes, kBytes, PROT_READ | PROT_WRITE) == 0, "no memory for the fake device");
  }
  bool has(const void* address) const { return begin <= address && address < begin + kBytes; }
  size_t device_of(const void* address) const {
    return static_cast<size_t>(static_cast<const std::byte*>(address) - begin) / kBytesOfDevice;
  }
  std::byte* begin = nullptr;
};
const Addresses& addresses() {
  static const Addresses one;
  return one;
}

void explain(int signal, siginfo_t* info, void*) {
  constexpr char kMessage[] = "fake device: the host touched memory of the device; copy it to the CPU, or queue the work\n";
  if (addresses().has(info->si_addr)) (void)!::write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
  std::signal(signal, SIG_DFL);  // and now again
}

class Memory final : public c10::Allocator {
 public:
  Memory() {
    struct sigaction action {};
    action.sa_sigaction = &explain;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &action, nullptr);
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device where(device().type(), current_device());
    if (bytes == 0) return {nullptr, where};
    reuse_what_is_over();
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto* block = new Block{nullptr, rounded, current_stream(), 0, {}};
    {
      const std::lock_guard lock(mutex_);
      block->pool = pool_;
      auto& free = free_[{block->pool, block->stream, rounded}];
      if (free.empty()) {
        size_t& used = used_[static_cast<size_t>(where.index())];
        TORCH_CHECK(used + rounded <= kBytesOfDevice, "the fake device has no memory left");
        block->data = begin_of(static_cast<size_t>(where.index())) + used;
        used += rounded;
      } else {
        block->data = free.back();
        free.pop_back();
      }
      in_use_ += static_cast<int64_t>(rounded);
      most_in_use_ = std::max(most_in_use_, in_use_);
    }
    queue([data = on_host(block->data), rounded] { std::memset(data, 0xff, rounded); });
    return {block->data, block, &release, where};
  }
  int64_t most_in_use(bool forget) {
    const std::lock_guard lock(mutex_);
    return forget ? std::exchange(most_in_use_, in_use_) : most_in_use_;
  }
  void set_pool(int64_t pool) {
    const std::lock_guard lock(mutex_);
    pool_ = pool;
    pool_begin_ = used_;
  }
  Contents contents() {
    const std::lock_guard lock(mutex_);
    Contents all;
    for (size_t d = 0; d < kDevices; ++d) all[d].assign(begin_of(d) + kBytes, begin_of(d) + kBytes + used_[d]);
    return all;
  }
  void restore(const Contents& contents) {
    const std::lock_guard lock(mutex_);
    for (size_t d = 0; d < kDevices; ++d) {
      std::byte* memory = begin_of(d) + kBytes;
      std::memcpy(memory, contents[d].data(), contents[d].size());
      std::memset(memory + contents[d].size(), 0xff, used_[d] - contents[d].size());
    }
  }
  std::string address_text(const void* device_memory) {
    const std::lock_guard lock(mutex_);
    const size_t d = addresses().device_of(device_memory);
    const auto at = static_cast<size_t>(static_cast<const std::byte*>(device_memory) - begin_of(d));
    return pool_ > 0 && at >= pool_begin_[d] ? "own " + std::to_string(at - pool_begin_[d]) : std::to_string(at);
  }
  void used_on(const c10::DataPtr& memory, c10::StreamId stream) {
    if (memory.get_deleter() != &release) return;
    const std::lock_guard lock(mutex_);
    auto& block = *static_cast<Block*>(memory.get_context());
    if (stream != block.stream) block.used_on.insert(stream);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    queue([=] { std::memcpy(on_host(to), on_host(from), bytes); });
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
    c10::StreamId stream;
    int64_t pool;
    std::set<c10::StreamId> used_on;  // besides
  };
  // What other streams may still use.
  struct Used {
    Block block;
    std::vector<Moment> until;
  };
  static std::byte* begin_of(size_t device) { return addresses().begin + device * kBytesOfDevice; }
  static void release(void* context);
  void give_back(const Block& block);
  void reuse_what_is_over();

  std::mutex mutex_;
  std::array<size_t, kDevices> used_{};
  int64_t in_use_ = 0, most_in_use_ = 0;
  int64_t pool_ = 0;
  std::array<size_t, kDevices> pool_begin_{};
  std::list<Used> used_elsewhere_;
  std::map<std::tuple<int64_t, c10::StreamId, size_t>, std::vector<void*>> free_;
};

Memory& all_memory() {
  static auto* one = new Memory();  // tensors may outlive statics
  return *one;
}

void Memory::release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  Memory& memory = all_memory();
  {
    const std::lock_guard lock(memory.mutex_);
    memory.in_use_ -= static_cast<int64_t>(block->bytes);
  }
  std::vector<Moment> until;
  for (const c10::StreamId stream : block->used_on) until.push_back(now_on(stream));
  if (until.empty()) return memory.give_back(*block);
  const std::lock_guard lock(memory.mutex_);
  memory.used_elsewhere_.push_back({*block, until});
}

// As if the stream that it belongs to used it again at once.
void Memory::give_back(const Block& block) {
  if (!captures())
    queue_on(block.stream, [data = on_host(block.data), bytes = block.bytes] { std::memset(data, 0xff, bytes); });
  const std::lock_guard lock(mutex_);
  free_[{block.pool, block.stream, block.bytes}].push_back(block.data);
}

void Memory::reuse_what_is_over() {
  std::list<Used> looked, left;
  {
    const std::lock_guard lock(mutex_);
    looked.swap(used_elsewhere_);
  }
  for (const Used& used : looked)
    if (std::ranges::all_of(used.until, &is_over)) give_back(used.block);
    else left.push_back(used);
  const std::lock_guard lock(mutex_);
  used_elsewhere_.splice(used_elsewhere_.end(), left);
}

}  // namespace

void* on_host(const void* device_memory) {
  // An empty tensor's address is null and its offset. The system has no memory there, so nobody reads it unnoticed.
  if (reinterpret_cast<uintptr_t>(device_memory) < kAddressesMin) return const_cast<void*>(device_memory);
  TORCH_CHECK(addresses().has(device_memory), "fake device: work was given an address that is not the device's");
  return const_cast<std::byte*>(static_cast<const std::byte*>(device_memory)) + kBytes;
}

int64_t most_bytes_in_use(bool forget) { return all_memory().most_in_use(forget); }

c10::Allocator& memory() { return all_memory(); }

void set_pool(int64_t pool) { all_memory().set_pool(pool); }
Contents contents() { return all_memory().contents(); }
void restore(const Contents& contents) { all_memory().restore(contents); }
c10::Device device_of(const void* device_memory) {
  return {device().type(), static_cast<c10::DeviceIndex>(addresses().device_of(device_memory))};
}
void used_on(const c10::DataPtr& memory, c10::StreamId stream) { all_memory().used_on(memory, stream); }
std::string address_text(const void* device_memory) { return all_memory().address_text(device_memory); }

}  // namespace fake_device
