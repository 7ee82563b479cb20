// One world of rank-threads: matches calls, completes them, ends every rank when one fails, and finds deadlocks.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads/threads_rendezvous.h"
#include "comm/threads/threads_scheduler.h"
#include "shardproof/comm/threads/threads_options.h"

namespace shardproof::threads {

// Thrown in every other rank once one has failed. Derived from std::exception because LibTorch's backward catches, and
// passes on, nothing else.
class WorldEnded : public std::exception {
 public:
  const char* what() const noexcept override { return "another rank has failed and ended this world"; }
};

class World : public std::enable_shared_from_this<World> {
 public:
  World(std::vector<Parker*> parkers, const ThreadsOptions& options);

  const std::shared_ptr<Group>& everyone() const { return everyone_; }
  void start();
  bool finishes_sums() const;

  struct Arrival {
    std::shared_ptr<Rendezvous> rendezvous;
    int64_t part;
  };
  // Adds the call of a rank of the group to its rendezvous; the last to arrive may complete it.
  Arrival arrive(Group& group, int64_t group_rank, Call call);
  // Returns when the part's output is final and its input may be reused.
  void wait(Rendezvous& rendezvous, int64_t part);

  // The group that a split made of `ranks`: the first to ask makes it. Only its ranks know `id`.
  std::shared_ptr<Group> join_group(uint64_t id, const std::string& name, const std::vector<int64_t>& ranks);

  // The calling thread becomes `rank` and runs the body; an exception ends the world.
  void run(int64_t rank, const std::function<void()>& body);
  // Caller's thread: waits until all ranks have ended; throws the first error.
  void join();

 private:
  using Lock = Scheduler::Lock;

  Part make_part(const Group& group, int64_t rank, Call call) const;
  bool draw_late(const Group& group, int64_t sequence, int64_t rank) const;
  void complete(Lock& lock, Rendezvous& rendezvous, int64_t part);
  void queue_on_device(Lock& lock, Rendezvous& rendezvous, int64_t part);
  void complete_parts_not_late(Lock& lock, Rendezvous& rendezvous);
  void leave_to_policy(Rendezvous& rendezvous);
  void take_effect(Rendezvous& rendezvous, int64_t part);
  void help(Lock& lock, Rendezvous& rendezvous, int64_t part);
  void receive_late(Lock& lock, Rendezvous& rendezvous, int64_t part);
  void wake_waiting(Rendezvous& rendezvous);
  void close_call(const Rendezvous& rendezvous, int64_t part);
  void require_no_open_calls(int64_t rank);
  void end(int64_t rank, std::exception_ptr error);
  std::string deadlock_message() const;

  const ThreadsOptions options_;
  const int64_t size_;
  std::shared_ptr<Group> everyone_;
  Parker caller_;
  std::optional<c10::Event> given_;  // on a device: what the caller had queued before the ranks began
  Scheduler scheduler_;
  std::map<uint64_t, std::weak_ptr<Group>> groups_;
  // By rank: its calls that were not waited for yet, and the one it is blocked in.
  std::vector<std::vector<Arrival>> open_calls_;
  std::vector<int64_t> calls_made_;
  struct Pending {
    const Rendezvous* rendezvous = nullptr;
    int64_t part = 0;
  };
  std::vector<Pending> blocked_in_;
  bool ended_ = false;
  std::exception_ptr error_;
  int64_t error_rank_ = -1;
};

}  // namespace shardproof::threads
