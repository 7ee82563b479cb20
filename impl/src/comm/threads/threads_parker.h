// Puts one thread to sleep until another lets it go on; a switch costs one futex call on each side.
#pragma once

#include <atomic>
#include <cstdint>

namespace shardproof::threads {

// `unpark` leaves a permit (at most one) that the next `park` takes. What happened before the unpark is visible after the
// park. One thread parks, any may unpark.
class Parker {
 public:
  // `looks`: how many times it looks for a permit before it goes to sleep, some ten nanoseconds each.
  void park(int64_t looks = 0);
  void unpark();

 private:
  enum : uint32_t { empty, permit, parked };
  std::atomic<uint32_t> state_{empty};
};

}  // namespace shardproof::threads
