#include "comm/threads/threads_parker.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace shardproof::threads {

namespace {

// Tells the processor that the thread only waits.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// std::atomic::wait always spins and yields before it sleeps, which on few cores takes time from the very rank it waits for.
void Parker::park(int64_t looks) {
  for (; looks > 0 && state_.load(std::memory_order_relaxed) == empty; --looks) relax();
  uint32_t expected = empty;
  if (state_.compare_exchange_strong(expected, parked, std::memory_order_acq_rel)) {
    // Returns at once when the word is no longer `parked`; may also return for no reason.
    while (state_.load(std::memory_order_acquire) == parked)
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&state_), FUTEX_WAIT_PRIVATE, parked, nullptr, nullptr, 0);
  }
  state_.exchange(empty, std::memory_order_acq_rel);
}

void Parker::unpark() {
  if (state_.exchange(permit, std::memory_order_acq_rel) == parked)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&state_), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace shardproof::threads
