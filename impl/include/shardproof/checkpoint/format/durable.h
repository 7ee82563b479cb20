// Folders that are there whole or not at all. No Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

// A save in progress: files go to a fresh folder beside the target, which `commit` renames.
class StagedFolder {
 public:
  // Throws Error when the target exists and `overwrite` is not set, or the folder beside it cannot be made. The parent is made
  // when it is absent.
  StagedFolder(FileSystem& files, std::string target, bool overwrite = false);
  // Removes what was not committed, as far as it can.
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  // Where to write. Other processes may write there too; each file must be flushed (OutputFile::finish) before commit.
  const std::string& path() const { return path_; }

  // Flushes the folder, renames it to the target (exchanges the two when overwriting) and flushes the parent. When it throws,
  // the target is what it was or, if only the last flush failed, whole and new.
  void commit();

 private:
  FileSystem& files_;
  std::string target_, parent_, path_;
  bool overwrite_;
  bool renamed_ = false;
};

// One file, whole or not at all: `write` makes it at the path that it is given, flushed; it is then renamed. Refuses a target
// that exists.
void write_staged_file(FileSystem& files, const std::string& target, const std::function<void(const std::string& path)>& write);

// Removes a folder so that nobody ever sees a part of it: it is renamed first. Subfolders too.
void remove_folder(FileSystem& files, const std::string& path);

// What dead saves and removals of `parent` left behind. Call it when no save is under way there.
int64_t remove_leftovers(FileSystem& files, const std::string& parent);

// History: checkpoints `parent`/step_N, all committed. Ascending; empty when there is no such folder.
std::vector<int64_t> committed_steps(const std::string& parent);
std::optional<int64_t> latest_step(const std::string& parent);
std::string step_folder(const std::string& parent, int64_t step);
// Keeps the last `keep` (at least 1), removes the others, oldest first.
void retain_steps(FileSystem& files, const std::string& parent, int64_t keep);

}  // namespace shardproof::checkpoint
