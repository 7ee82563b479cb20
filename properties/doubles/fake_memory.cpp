#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "properties/doubles/fake_device.h"
#include "properties/doubles/fake_parts.h"

namespace fake_device {
namespace {

constexpr size_t kBytes = size_t{8} << 30, kAlignment = 512;

// Twice the addresses: the first half is what tensors have and nobody can touch, the second half is the memory.
struct Addresses {
  Addresses() {
    void* all = ::mmap(nullptr, 2 * kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(all != MAP_FAILED, "no addresses for the fake device");
    begin = static_cast<std::byte*>(all);
    TORCH_CHECK(::mprotect(begin + kBytes, kBytes, PROT_READ | PROT_WRITE) == 0, "no memory for the fake device");
  }
  bool has(const void* address) const { return begin <= address && address < begin + kBytes; }
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
    if (bytes == 0) return {nullptr, device()};
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto* block = new Block{nullptr, rounded, current_stream(), 0};
    {
      const std::lock_guard lock(mutex_);
      block->pool = pool_;
      auto& free = free_[{block->pool, block->stream, rounded}];
      if (free.empty()) {
        TORCH_CHECK(used_ + rounded <= kBytes, "the fake device has no memory left");
        block->data = addresses().begin + used_;
        used_ += rounded;
      } else {
        block->data = free.back();
        free.pop_back();
      }
      in_use_ += static_cast<int64_t>(rounded);
      most_in_use_ = std::max(most_in_use_, in_use_);
    }
    queue([data = on_host(block->data), rounded] { std::memset(data, 0xff, rounded); });
    return {block->data, block, &release, device()};
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
  std::vector<std::byte> contents() {
    const std::lock_guard lock(mutex_);
    const std::byte* memory = addresses().begin + kBytes;
    return {memory, memory + used_};
  }
  void restore(const std::vector<std::byte>& contents) {
    const std::lock_guard lock(mutex_);
    std::byte* memory = addresses().begin + kBytes;
    std::memcpy(memory, contents.data(), contents.size());
    std::memset(memory + contents.size(), 0xff, used_ - contents.size());
  }
  std::string address_text(const void* device_memory) {
    const std::lock_guard lock(mutex_);
    const auto at = static_cast<size_t>(static_cast<const std::byte*>(device_memory) - addresses().begin);
    return pool_ > 0 && at >= pool_begin_ ? "own " + std::to_string(at - pool_begin_) : std::to_string(at);
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
  };
  static void release(void* context);

  std::mutex mutex_;
  size_t used_ = 0;
  int64_t in_use_ = 0, most_in_use_ = 0;
  int64_t pool_ = 0;
  size_t pool_begin_ = 0;
  std::map<std::tuple<int64_t, c10::StreamId, size_t>, std::vector<void*>> free_;
};

Memory& all_memory() {
  static auto* one = new Memory();  // tensors may outlive statics
  return *one;
}

void Memory::release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  Memory& memory = all_memory();
  // As if the stream that it belongs to used it again at once.
  if (!captures()) {
    const c10::impl::VirtualGuardImpl guard(device().type());
    const c10::Stream before = guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, device(), block->stream));
    queue([data = on_host(block->data), bytes = block->bytes] { std::memset(data, 0xff, bytes); });
    guard.exchangeStream(before);
  }
  const std::lock_guard lock(memory.mutex_);
  memory.free_[{block->pool, block->stream, block->bytes}].push_back(block->data);
  memory.in_use_ -= static_cast<int64_t>(block->bytes);
}

}  // namespace

void* on_host(const void* device_memory) {
  if (!device_memory) return nullptr;
  TORCH_CHECK(addresses().has(device_memory), "fake device: work was given an address that is not the device's");
  return const_cast<std::byte*>(static_cast<const std::byte*>(device_memory)) + kBytes;
}

int64_t most_bytes_in_use(bool forget) { return all_memory().most_in_use(forget); }

c10::Allocator& memory() { return all_memory(); }

void set_pool(int64_t pool) { all_memory().set_pool(pool); }
std::vector<std::byte> contents() { return all_memory().contents(); }
void restore(const std::vector<std::byte>& contents) { all_memory().restore(contents); }
std::string address_text(const void* device_memory) { return all_memory().address_text(device_memory); }

}  // namespace fake_device
