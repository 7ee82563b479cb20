// This process' part in the job: what is on its way, and who drives it. MPI is only called under one lock; whoever waits drives
// all that is pending, and while nobody does a thread looks now and then, so that calls move while the rank computes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/mpi/mpi_group.h"
#include "comm/mpi/mpi_operation.h"
#include "comm/process/engine.h"
#include "comm/process/process_watch.h"
#include "shardproof/comm/mpi/mpi.h"

namespace shardproof::mpi {

class Engine {
 public:
  explicit Engine(const MpiOptions& options);
  // `cleanly`: every process gets here, with nothing on its way.
  void shut_down(bool cleanly);

  const std::shared_ptr<Group>& world() const { return world_; }
  const MpiOptions& options() const { return options_; }

  std::shared_ptr<Operation> start(const std::shared_ptr<Group>& group, Call call);
  void wait(Operation& operation);

  // Makes the group of the ranks with this color; null for a negative color. Collective over the parent, right after another
  // collective of it.
  std::shared_ptr<Group> split(Group& parent, int64_t color, int64_t key, const std::string& name, uint64_t id,
                               std::vector<int64_t> world_ranks);
  // Memory of the group's first rank that all ranks see; null when they are on several hosts. Collective, right after another
  // collective of the group.
  std::byte* share(Group& group, int64_t bytes);

  const process::Calls& calls() const { return *calls_; }
  // The body of this rank threw: sends that to the other ranks of its groups.
  void abandon(const std::string& why);
  // Called after all ranks have abandoned their calls. Returns when nothing is on its way any more.
  void drain();
  // Frees the groups. Collective, with nothing on its way.
  void close_groups();

  // "" as long as the world goes on.
  std::string lost() const;
  void write_record(const std::string& why);

 private:
  void progress();
  void advance_pending();
  void break_world(const std::exception& error);
  void pause(std::chrono::steady_clock::time_point since, int64_t& looks) const;
  void finish_wait(Operation& operation);
  void publish_wait(const Operation& operation, double waited_s);
  void run_in_background();
  WatchStatus status() const;
  void on_lost(const std::string& why);
  void require_alive(const std::string& doing);

  const MpiOptions options_;
  std::mutex mutex_;  // MPI and what follows
  std::shared_ptr<Group> world_;
  std::vector<std::shared_ptr<Group>> groups_;  // but the world
  std::list<std::shared_ptr<Operation>> pending_;
  bool abandoned_ = false;
  bool is_broken_ = false;

  std::atomic<int64_t> pending_count_{0}, waiters_{0};
  std::atomic<bool> stop_{false}, lost_{false};
  std::condition_variable_any wake_;
  bool crowded_ = false;  // more ranks on this host than processors

  mutable std::mutex status_mutex_;
  WatchStatus waiting_;
  std::chrono::steady_clock::time_point waiting_since_;

  std::unique_ptr<process::Calls> calls_;
  std::unique_ptr<ProcessWatch> watch_;
  std::thread background_;
};

}  // namespace shardproof::mpi
