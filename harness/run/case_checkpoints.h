// The checkpoints of a case's history: where they are, and saves that die.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>

#include "harness/case/case.h"
#include "harness/run/lossy_disk.h"
#include "shardproof/checkpoint/manager.h"

namespace harness {

// Every call after the first few fails, and the rename with all after it: what was written never becomes a checkpoint. Or the
// rename is the last call that is done: the checkpoint is there, and nobody was told. What a process that died did not do is
// not done afterwards either. No call reaches the disk any sooner than the system likes.
class DyingFiles : public shardproof::checkpoint::FileSystem {
 public:
  DyingFiles(int64_t calls, bool after_rename) : left_(calls), after_rename_(after_rename) {}
  int open(const std::string& path, int flags, mode_t mode) override;
  ssize_t write(int fd, const void* data, size_t bytes) override;
  int fsync(int fd) override;
  int rename(const std::string& from, const std::string& to) override;
  int exchange(const std::string& one, const std::string& two) override;
  int mkdir(const std::string& path, mode_t mode) override;
  int unlink(const std::string& path) override;
  int rmdir(const std::string& path) override;

 private:
  bool dead() { return left_-- <= 0; }
  std::atomic<int64_t> left_;
  bool after_rename_;
};

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

  // What a rank's run saves and loads with; in the background by the case's seed.
  shardproof::checkpoint::ManagerOptions options() const;
  const std::string& directory() const { return directory_; }
  // Where the adapters alone are saved before a step.
  std::string adapters(size_t step) const { return fmt::format("{}.adapters_{}", directory_, step); }
  // The numbers of the checkpoints before a step.
  static int64_t number(size_t step) { return 2 * static_cast<int64_t>(step); }

  // Collective: a save before that step, during which every rank dies at some call, or the first does, or during or after which
  // power fails. Throws Error unless one that died was refused on this rank. One that died after its rename is whole, and so is
  // one that returned before power failed: it is loaded, which changes no value, and removed.
  void crash(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer, shardproof::Comm& world);

 private:
  // Whether there is anything to save.
  bool draw(const Case& c);
  bool after_rename(size_t step) const;
  void lose_power(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer, shardproof::Comm& world);

  uint64_t seed_;
  bool owns_ = true, ranks_are_threads_ = false;
  std::string directory_;
  size_t steps_;
  std::map<size_t, DyingFiles> crashes_;  // by step
  std::unique_ptr<LossyDisk> disk_;       // during a save that loses power
};

}  // namespace harness
