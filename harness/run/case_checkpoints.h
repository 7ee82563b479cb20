// The checkpoints of a case's history: where they are, and saves that die.
#pragma once

#include <fmt/format.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "harness/case/case.h"
#include "harness/run/lossy_disk.h"
#include "shardproof/checkpoint/manager.h"

namespace harness {

// A folder of its own, gone with this object; shared by all ranks. Without a save in the case there is none.
class CaseCheckpoints {
 public:
  // `ranks_are_threads`: one object can see what all ranks do, so that some saves can lose power.
  explicit CaseCheckpoints(const Case& c, bool ranks_are_threads = true);
  // In a folder that another process made and removes.
  CaseCheckpoints(const Case& c, std::string directory);
  ~CaseCheckpoints();
  CaseCheckpoints(const CaseCheckpoints&) = delete;
  CaseCheckpoints& operator=(const CaseCheckpoints&) = delete;

  // What a rank's run saves and loads with. By the case's seed in the background, and over a disk as clusters have.
  shardproof::checkpoint::ManagerOptions options();
  const std::string& directory() const { return directory_; }
  // Where the adapters alone are saved before a step.
  std::string adapters(size_t step) const { return fmt::format("{}.adapters_{}", directory_, step); }
  // The numbers of the checkpoints before a step.
  static int64_t number(size_t step) { return 2 * static_cast<int64_t>(step); }

  // Collective: a save before that step, during which every rank dies at some call, or the first does, or the disk refuses a
  // call of one, or during or after which power fails. Throws Error unless one that died was refused on this rank. One that
  // died after its rename is whole, and so is one that returned before power failed: it is loaded, and removed. That
  // changes no value but the buffers of other ranks, which get rank 0's.
  void crash(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer, shardproof::Comm& world);

 private:
  // Whether there is anything to save.
  bool draw(const Case& c);
  bool after_rename(size_t step) const;
  void refuse(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer, shardproof::Comm& world);
  void lose_power(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer, shardproof::Comm& world);

  uint64_t seed_;
  bool owns_ = true, ranks_are_threads_ = false;
  std::string directory_;
  size_t steps_;
  std::map<size_t, FilesAround> crashes_;  // by step, saves that die
  std::optional<FilesAround> disk_of_cluster_;
  std::unique_ptr<LossyDisk> disk_;  // during a save that loses power
};

}  // namespace harness
