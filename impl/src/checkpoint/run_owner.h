// Whose the folder of a run is: one run saves there, and any number of others may read.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "shardproof/checkpoint/format/file_system.h"
#include "shardproof/comm/comm.h"

namespace shardproof::checkpoint {

// On rank 0. The mark is the folder `.step_owner` in the run's. It is committed as a checkpoint is, so it has what it says from
// the first moment on, and of two runs only one commits it, on any disk: a folder is not renamed to one that has files.
class RunOwner {
 public:
  // Takes the folder for this process, and removes what dead runs left there. Each rank writes a file for the mark, so that
  // what the disk cannot do is known before there is anything to save. A mark is taken over where its process is known to be
  // gone, and shared within a process. Throws Error, which names the owner, where somebody else may have the folder. Null on
  // ranks other than 0. Collective.
  static std::shared_ptr<RunOwner> take(Comm& world, FileSystem& files, const std::string& run);
  // Gives it back. A mark that stays after that is one of a process that is gone.
  ~RunOwner();
  RunOwner(const RunOwner&) = delete;
  RunOwner& operator=(const RunOwner&) = delete;

  // Throws Error when somebody has taken the folder since.
  void require() const;

 private:
  RunOwner(FileSystem& files, std::string run, std::string id);
  static std::shared_ptr<RunOwner> held_or_free(FileSystem& files, const std::string& run);

  FileSystem& files_;
  const std::string run_, id_;
  const pid_t process_;
};

}  // namespace shardproof::checkpoint
