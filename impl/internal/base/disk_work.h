// Work that takes as long as a disk takes. Whoever waits for a thread in it does not wait for one that hangs.
#pragma once

#include <atomic>

namespace shardproof {

// As long as one lives, this process is busy with a disk.
class DiskWork {
 public:
  DiskWork() { ++count(); }
  ~DiskWork() { --count(); }
  DiskWork(const DiskWork&) = delete;
  DiskWork& operator=(const DiskWork&) = delete;
  static bool is_under_way() { return count() > 0; }

 private:
  static std::atomic<int>& count() {
    static std::atomic<int> count{0};
    return count;
  }
};

}  // namespace shardproof
