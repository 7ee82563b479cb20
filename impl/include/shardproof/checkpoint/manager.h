// The checkpoints of one run: DIRECTORY/step_N, saved now and then, in the background if asked, the last few kept.
//
//   Manager manager("run", {.keep = 3, .async = true});
//   if (auto resumed = manager.load_latest(sharded, &optimizer)) first = resumed->trainer.step;
//   for (...) { ...; manager.poll(); if (step % 100 == 0) manager.save(sharded, &optimizer, {.step = step}); }
//   manager.wait();
//
// One manager a rank; nothing else may save in the directory meanwhile. Calls that are collective are so over the mesh of the
// model, and what fails on one rank is an Error on every rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/checkpoint/saved_state.h"

namespace shardproof::checkpoint {

enum class WhenBusy { wait, refuse };

// To standard error.
void print_lost(const std::string& message);

struct ManagerOptions {
  int64_t keep = 0;                     // checkpoints, besides one that is being saved; 0: all
  bool async = false;                   // save returns when the values are copied, and a thread writes them
  WhenBusy when_busy = WhenBusy::wait;  // what becomes of a save while the one before is being written
  bool overwrite = false;               // a step that is there already
  // Told when the manager goes before a save of this rank is committed. Must not throw or communicate.
  std::function<void(const std::string&)> lost = print_lost;
  FileSystem* files = &system_files();
};

class Manager {
 public:
  // Touches no file. Throws Error when options are out of range.
  explicit Manager(std::string directory, ManagerOptions options = {});
  // Does not communicate, so it cannot commit: what is not committed then is lost, and ManagerOptions::lost is told.
  ~Manager();
  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;

  // Collective. Saves step_N, N being trainer.step, which must be above all that are there (or equal the last, to overwrite
  // it), then removes those that are not to be kept. Asynchronous: the values are those of this call; the checkpoint is there
  // after a later call of the manager has committed it. False when the save was refused because the one before is still being
  // written. Throws what went wrong with that one before as well, and then saves nothing.
  bool save(Sharded& sharded, const Optimizer* optimizer, const TrainerState& trainer);

  // Collective. Commits the save under way if all ranks have written it; true when none is under way any more.
  bool poll();
  // Collective. Commits the save under way, waiting for it. Throws what went wrong with it.
  void wait();

  // Collective. The last checkpoint that was committed; nothing when there is none, and nothing changes then.
  std::optional<Loaded> load_latest(Sharded& sharded, Optimizer* optimizer, const LoadOptions& options = {});

  // What is committed, ascending. Not collective.
  std::vector<int64_t> steps() const;
  std::optional<int64_t> latest() const;
  const std::string& directory() const { return directory_; }

 private:
  struct Pending;
  void begin(Comm& world, int64_t step);
  void commit();
  void remove_old(Comm& world);

  std::string directory_;
  ManagerOptions options_;
  bool begun_ = false;
  SaveJob::Snapshot snapshot_;
  std::unique_ptr<Pending> pending_;
};

}  // namespace shardproof::checkpoint
