// The checkpoints of one run, which lie in DIRECTORY/step_N. The manager saves them, in the background if asked, and keeps the
// last few.
//
//   Manager manager("run", {.keep = 3, .async = true});
//   if (auto resumed = manager.load_latest(sharded, &optimizer)) first = resumed->trainer.step;
//   for (...) { ...; manager.poll(); if (step % 100 == 0) manager.save(sharded, &optimizer, {.step = step}); }
//   manager.wait();
//
// Each rank has one manager. One run saves in a directory, and any number of others may read it: a run that begins to save
// takes the directory, by a mark in it (`.step_owner`), and its end gives it back. Another run that begins to save there gets
// an Error, which names the owner. A mark whose process is known to be gone is taken over: on the same host, or of the same job
// of SLURM that was restarted. Collective calls are collective over the mesh of the model, and what fails on one rank throws
// Error on every rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/checkpoint/saved_state.h"

namespace shardproof::checkpoint {

// What a save does while the one before is still being written.
enum class WhenBusy { wait, refuse };

// Prints the message to standard error.
void print_lost(const std::string& message);

struct ManagerOptions {
  int64_t keep = 0;                     // how many checkpoints are kept, besides one that is being saved; 0: all
  bool async = false;                   // whether save returns as soon as the values are copied, and a thread writes them
  // Whether a thread copies the values of asynchronous saves too, while the next forward and backward run. The end of
  // the backward, the optimizer's step, a load and whatever else of the library changes them wait for it. A caller who writes
  // to them in another way calls Sharded::main_parameters_will_change first; without that call the save fails.
  bool copy_in_background = false;
  WhenBusy when_busy = WhenBusy::wait;
  bool overwrite = false;               // whether a step that is there already may be saved again
  // Called with a message when the manager is destroyed before a save of this rank is committed. It must not throw or
  // communicate.
  std::function<void(const std::string&)> lost = print_lost;
  FileSystem* files = &system_files();
};

class RunOwner;

class Manager {
 public:
  // Opens no file. Throws Error when options are out of range.
  explicit Manager(std::string directory, ManagerOptions options = {});
  // The destructor does not communicate, so it cannot commit. A save that is not committed by then is lost, and
  // ManagerOptions::lost is called.
  ~Manager();
  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;

  // Takes the directory, which the first save does otherwise, and removes what saves that died left there. Every rank writes a
  // small file on the way, so that a disk that cannot be written to is known before there is anything to save. Collective.
  void begin(Comm& world);

  // Saves step_N, where N is trainer.step, and then removes checkpoints that are not to be kept. N must be above every step
  // that is there, or equal the last one to overwrite it. An asynchronous save has the values of this call, and the checkpoint
  // is there once a later call of the manager has committed it. Returns false when the save was refused because the one before
  // is still being written. When the one before failed, the call throws that error and saves nothing. Collective.
  bool save(Sharded& sharded, const OptimizerState* optimizer, const TrainerState& trainer);

  // Commits the save that is under way if all ranks have written it. Returns true when no save is under way any more.
  // Collective.
  bool poll();
  // Waits for the save that is under way and commits it. Throws the save's error when it failed. Collective.
  void wait();

  // Loads the last checkpoint that was committed, by rank 0's sight, or a later one where another run removes it meanwhile.
  // Returns nothing, and changes nothing, when there is none. It changes nothing in the directory. Collective.
  std::optional<Loaded> load_latest(Sharded& sharded, OptimizerState* optimizer, const LoadOptions& options = {});

  // The steps that are committed, ascending, and the last of them. Not collective.
  std::vector<int64_t> steps() const;
  std::optional<int64_t> latest() const;
  const std::string& directory() const { return directory_; }
  // How often a save made a plan, which later saves of the same tensors use again. Not collective.
  int64_t plans_made() const { return plan_.made; }

 private:
  struct Pending;
  void require_next(int64_t step) const;
  void commit();

  std::string directory_;
  ManagerOptions options_;
  bool begun_ = false;
  std::shared_ptr<RunOwner> owner_;  // on rank 0, when begun
  SaveJob::Snapshot snapshot_;
  KeptPlan plan_;
  std::shared_ptr<Pending> pending_;
};

}  // namespace shardproof::checkpoint
