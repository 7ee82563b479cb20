#include "comm/threads/threads_exchange.h"

#include <algorithm>
#include <cstring>

#include "comm/finished_sum.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"
#include "internal/base/stream_copy.h"

namespace shardproof::threads {
namespace {

// Large enough that taking a task costs nothing, small enough that two threads end together.
constexpr int64_t kTaskBytes = 256 << 10;
// A block of an all-reduce or an all-gather is made or read once, and copied to every party while it is in the cache.
constexpr int64_t kBlockBytes = 32 << 10;
// Outputs that are so large together leave the caches of cores before somebody reads them, so they are written past the caches.
constexpr int64_t kStreamedBytesMin = 16 << 20;

}  // namespace

Exchange::Exchange(const Call& call, std::vector<Side> sides, bool ring, const DeviceMath& math)
    : op_(call.op),
      reduce_(call.reduce),
      dtype_(dtype(call)),
      element_bytes_(static_cast<int64_t>(c10::elementSize(dtype_))),
      ring_(ring),
      finish_factor_(call.finish.factor),
      math_(math),
      sides_(std::move(sides)) {
  for (const Side& side : sides_) {
    bytes_ += side.output_numel * element_bytes_;
    asks_whether_finite_ |= side.asks_whether_finite;
  }
  cut_into_tasks();
}

void Exchange::cut_into_tasks() {
  task_numel_ = std::max<int64_t>(1, kTaskBytes / element_bytes_);
  lanes_ = std::make_unique<Lane[]>(sides_.size());
  int64_t tasks = 0;
  for (int64_t p = 0; p < parties(); ++p) {
    Lane& lane = lanes_[p];
    // Where all parties receive the same it is cut by elements, everything else by receiving party.
    const ElementRange part =
        cut_by_elements() ? equal_range(sides_[0].output_numel, p, parties()) : ElementRange{0, sides_[p].output_numel};
    lane.begin = part.begin;
    lane.end = part.end();
    lane.next = lane.begin;
    tasks += (lane.end - lane.begin + task_numel_ - 1) / task_numel_;
  }
  tasks_left_ = std::max<int64_t>(1, tasks);
  // A call without elements has one empty task, so that it ends like any other.
  if (tasks == 0) lanes_[0].end = lanes_[0].begin + 1;
}

bool Exchange::run_tasks(int64_t party) {
  bool ended = false;
  for (int64_t k = 0; k < parties(); ++k) {
    Lane& lane = lanes_[(party + k) % parties()];
    while (true) {
      const int64_t begin = lane.next.fetch_add(task_numel_, std::memory_order_relaxed);
      if (begin >= lane.end) break;
      run_task((party + k) % parties(), begin, std::min(begin + task_numel_, lane.end));
      ended = tasks_left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    }
  }
  return ended;
}

void Exchange::run_task(int64_t lane, int64_t begin, int64_t end) const {
  if (bytes_ == 0) return;
  if (op_ == Op::all_reduce) return all_reduce(begin, end);
  if (op_ == Op::all_gather) return all_gather(begin, end);
  produce(lane, begin, end, sides_[lane].output + begin * element_bytes_);
}

void Exchange::all_reduce(int64_t begin, int64_t end) const {
  alignas(64) std::byte block[kBlockBytes];
  const int64_t block_numel = kBlockBytes / element_bytes_;
  for (int64_t at = begin; at < end; at += block_numel) {
    const int64_t length = std::min(block_numel, end - at);
    produce(0, at, at + length, block);
    for (const Side& side : sides_) std::memcpy(side.output + at * element_bytes_, block, length * element_bytes_);
  }
}

void Exchange::all_gather(int64_t begin, int64_t end) const {
  const auto copy = bytes_ >= kStreamedBytesMin ? stream_copy : [](void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
  };
  const int64_t block_numel = kBlockBytes / element_bytes_;
  for (int64_t source = 0; source < parties(); ++source) {
    const ElementRange piece = sides_[0].plan.recv_range(source);
    const int64_t piece_end = std::min(end, piece.end());
    for (int64_t at = std::max(begin, piece.begin); at < piece_end; at += block_numel) {
      const auto bytes = static_cast<size_t>(std::min(block_numel, piece_end - at) * element_bytes_);
      const std::byte* block = sides_[source].input + (at - piece.begin) * element_bytes_;
      for (int64_t party = 0; party < parties(); ++party)
        if (party != source || !sides_[party].in_place) copy(sides_[party].output + at * element_bytes_, block, bytes);
    }
  }
}

void Exchange::move(void* target, const void* source, int64_t bytes) const {
  math_.copy(target, source, bytes);
}

// All outputs of an all-reduce are inputs, so the sum goes to the first party, whose terms it may overwrite, and from there.
void Exchange::produce_all() const {
  if (op_ != Op::all_reduce) {
    for (int64_t party = 0; party < parties(); ++party) produce(party);
    return;
  }
  produce(0);
  for (int64_t party = 1; party < parties(); ++party)
    move(sides_[party].output, sides_[0].output, sides_[0].output_numel * element_bytes_);
}

void Exchange::produce(int64_t party) const {
  if (sides_[party].output_numel > 0) produce(party, 0, sides_[party].output_numel, sides_[party].output);
}

void Exchange::produce(int64_t party, int64_t begin, int64_t end, std::byte* target) const {
  const CollectivePlan& plan = sides_[party].plan;
  if (!plan.sums()) return gather(party, begin, end, target);
  const int64_t offset = plan.summed().begin - plan.result().begin;
  if (op_ == Op::reduce_scatter || !ring_) return reduce(party, offset + begin, offset + end, target);
  for (int64_t p = 0; p < parties(); ++p) {
    const ElementRange slice = sides_[p].plan.summed();
    const int64_t from = std::max(begin, slice.begin), to = std::min(end, slice.end());
    if (from < to) reduce(p, from, to, target + (from - begin) * element_bytes_);
  }
}

// Elements [begin, end) of the inputs, which the party adds up.
void Exchange::reduce(int64_t party, int64_t begin, int64_t end, std::byte* target) const {
  std::vector<const std::byte*> terms;
  terms.reserve(sides_.size());
  for (const int64_t source : order_of_terms(parties(), ring_ ? party + 1 : 0))
    terms.push_back(sides_[source].input + begin * element_bytes_);
  const SumFinish finish{finish_factor_, asks_whether_finite_ && all_finite()};
  if (!add_and_finish(math_, element_type(dtype_), reduce_, std::move(terms), end - begin, target, finish))
    all_finite_.store(false, std::memory_order_relaxed);
}

// An output that is made of pieces of inputs, one from each source in order.
void Exchange::gather(int64_t party, int64_t begin, int64_t end, std::byte* target) const {
  for (int64_t source = 0; source < parties(); ++source) {
    const ElementRange piece = sides_[party].plan.recv_range(source), given = sides_[source].plan.send_range(party);
    const int64_t from = std::max(begin, piece.begin), to = std::min(end, piece.end());
    const bool already_there = source == party && sides_[party].in_place;
    if (from < to && !already_there)
      move(target + (from - begin) * element_bytes_, sides_[source].input + (given.begin + from - piece.begin) * element_bytes_,
           (to - from) * element_bytes_);
  }
}

}  // namespace shardproof::threads
