// The bytes of one collective whose calls are all known: carries out the plans of all parties in one memory. Knows nothing of
// threads; `run_task` may be called by several at once.
#pragma once

#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shardproof/comm/comm.h"
#include "shardproof/device/device_math.h"
#include "internal/comm/collective_plan.h"

namespace shardproof::threads {

// One party of the exchange. Of a send and its receive, party 0 is the sender, party 1 the receiver.
struct Side {
  CollectivePlan plan;  // of a send and its receive: that of a broadcast from party 0
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  int64_t output_numel = 0;
  bool in_place = false;  // all_gather: the party's own piece is in its output already
  bool asks_whether_finite = false;  // of a sum (Finish::all_finite)
};

class Exchange {
 public:
  // `call` is any party's; `ring`: each party's sum begins with the next party's term, and all-reduces are planned in slices.
  // `math` adds and moves bytes; on a device other than the CPU only produce_all may be called.
  Exchange(const Call& call, std::vector<Side> sides, bool ring, const DeviceMath& math);

  // Writes elements [begin, end) of a party's output to `target`.
  void produce(int64_t party, int64_t begin, int64_t end, std::byte* target) const;
  // All of a party's output, in place.
  void produce(int64_t party) const;

  // Everybody's output, in place, as one party: queues the work on a device.
  void produce_all() const;

  // When all has been produced, and some party asks: whether no sum has a NaN or an infinity.
  bool all_finite() const { return all_finite_.load(std::memory_order_relaxed); }

  // Bytes that all parties receive together.
  int64_t bytes() const { return bytes_; }

  // The whole, cut into tasks that any thread may take. Takes tasks, the party's own first, until none is left; returns
  // true to the one thread whose task was the last to end.
  bool run_tasks(int64_t party);

 private:
  struct Lane {
    std::atomic<int64_t> next{0};
    int64_t begin = 0, end = 0;
  };

  int64_t parties() const { return static_cast<int64_t>(sides_.size()); }
  void gather(int64_t party, int64_t begin, int64_t end, std::byte* target) const;
  void reduce(int64_t party, int64_t begin, int64_t end, std::byte* target) const;
  void run_task(int64_t lane, int64_t begin, int64_t end) const;
  void all_reduce(int64_t begin, int64_t end) const;
  void all_gather(int64_t begin, int64_t end) const;
  bool cut_by_elements() const { return op_ == Op::all_reduce || op_ == Op::all_gather; }
  void cut_into_tasks();
  void move(void* target, const void* source, int64_t bytes) const;

  Op op_;
  Reduce reduce_;
  at::ScalarType dtype_;
  int64_t element_bytes_;
  bool ring_;
  double finish_factor_;
  bool asks_whether_finite_ = false;
  mutable std::atomic<bool> all_finite_ = true;
  const DeviceMath& math_;
  std::vector<Side> sides_;
  int64_t bytes_ = 0;
  int64_t task_numel_ = 1;
  std::unique_ptr<Lane[]> lanes_;
  std::atomic<int64_t> tasks_left_{0};
};

}  // namespace shardproof::threads
