// This rank's part in the world: its communicators, what is on its way on them, and the thread that watches both.
//
// Two locks: `mutex_` for NCCL and the lanes, which is never held while the host waits for other ranks for longer than they
// take to answer NCCL, but by who aborts: NCCL may then wait for a graph that the caller holds. `state_mutex_` for lists that
// the watching thread reads at every look.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/nccl_operation.h"
#include "comm/nccl/nccl_watch.h"
#include "comm/process/engine.h"
#include "shardproof/comm/nccl/nccl.h"

namespace shardproof::nccl {

class Engine {
 public:
  Engine(int64_t rank, int64_t size, std::shared_ptr<NcclStore> store, std::shared_ptr<NcclApi> api, NcclOptions options);
  ~Engine();

  // Collective: communicators for body number `body`, where there are none. Throws WorldLostError when they do not come about.
  void begin(int64_t body);
  // Until nothing is on its way.
  void drain();
  // The body of this rank ended badly: tells all, which abort what they wait for.
  void abandon(const std::string& why);
  // Aborts and forgets all communicators; the next body makes new ones.
  void abort_groups();
  // Collective, with nothing on its way.
  void close_groups();

  const std::shared_ptr<Group>& world() const { return world_; }
  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  NcclStore& store() { return *store_; }

  std::shared_ptr<Operation> start(std::shared_ptr<Group> group, std::shared_ptr<const FlightGroup> flight, Call call);
  void wait(Operation& operation);
  // As Comm::allocate.
  c10::DataPtr allocate(Group& group, Op op, int64_t bytes, c10::Device device);
  // NCCL's symmetric kernels take plain sums only.
  bool premultiplies() const {
    return options_.sum == NcclOptions::Sum::native && options_.buffers != NcclApi::Memory::symmetric;
  }
  // Collective over the parent, whose ranks have just told each other their colors and keys, two a rank.
  std::shared_ptr<Group> split(Group& parent, const std::vector<int64_t>& colors_and_keys);

  const process::Calls& calls() const { return calls_; }
  // Buffers of `allocate` that are not given back.
  int64_t lent_buffers();
  // Throws what ended the world or this body.
  void require_alive(const std::string& doing);
  // Throws WorldLostError when the rank has given no sign of life for the time-out.
  void require_sign_of_life(int64_t rank, Pulse& pulse, const std::string& doing);
  // Throws WorldLostError where it is lost, and nothing where only the body has ended.
  void require_world(const std::string& doing);

 private:
  // mutex_, or what ended the world or this body while somebody else has it.
  std::unique_lock<std::timed_mutex> hold(const std::string& doing);
  // Of the calling thread, under mutex_.
  void connect();
  void open_lanes(Group& group, NcclApi::Communicator parent, int64_t color, int64_t key, size_t first_lane);
  void finish(NcclApi::Communicator communicator, NcclResult result, const std::string& doing);
  void launch(const std::vector<std::shared_ptr<Operation>>& operations);
  void launch_messages(Group& group);
  void forget_groups();

  void block_until(NcclApi::Event event, const std::string& doing);
  void copy_back(Operation& operation);
  void collect_complete();

  // nccl_engine_watch.cpp: the watching thread's, but `end` and `unheard` anybody's.
  void run_watch();
  void look();
  std::shared_ptr<Operation> first_overdue();
  std::string overdue_text(const Operation& operation);
  void find_async_errors(int64_t body);
  void end(int64_t body, const WorldEnd& end);
  void abort_lanes();
  RankState state();
  // Of these ranks those that give no sign of life, in words; takes a few looks.
  std::string unheard(const std::vector<int64_t>& ranks);

  const int64_t rank_, size_;
  const std::shared_ptr<NcclStore> store_;
  const std::shared_ptr<NcclApi> api_;
  const NcclOptions options_;
  process::Calls calls_;
  Watch watch_;

  std::timed_mutex mutex_;
  std::shared_ptr<Group> world_;
  std::vector<std::shared_ptr<Group>> groups_;  // with the world, and those that ranks of no color are in
  bool connected_ = false;

  mutable std::mutex state_mutex_;
  std::list<std::shared_ptr<Operation>> flying_;
  std::map<uint64_t, int64_t> collectives_;  // so many were called in each group
  int64_t body_ = 0;
  WorldEnd end_;
  std::atomic<bool> ended_{false};

  std::condition_variable wake_;
  std::mutex wake_mutex_;
  bool stop_ = false;
  std::thread watching_;
};

}  // namespace shardproof::nccl
