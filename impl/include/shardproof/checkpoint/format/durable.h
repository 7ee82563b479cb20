// Writes folders that are there whole or not at all. This header does not include Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

// A save in progress. Files go to a new folder beside the target, and `commit` renames that folder to the target.
class StagedFolder {
 public:
  // Makes the new folder, and the parent when it does not exist. A parent that exists is flushed to the disk, because a process
  // that died may have made it. Throws Error when the target exists and `overwrite` is not set, or when the new folder cannot
  // be made.
  StagedFolder(FileSystem& files, std::string target, bool overwrite = false);
  // Removes the new folder if it was not committed, or the old one that it replaced, as far as that is possible. When the last
  // flush of `commit` failed, the old one stays as a leftover, because a power failure may give it back its name.
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  // The new folder. Other processes may write there too. Every file must be flushed (OutputFile::finish) before `commit`.
  const std::string& path() const { return path_; }

  // Flushes the folder, renames it to the target (or exchanges the two when overwriting) and flushes the parent. When it
  // throws, the target is as it was before; if only the last flush failed, it is the new one and whole.
  void commit();

 private:
  FileSystem& files_;
  std::string target_, parent_, path_;
  bool overwrite_;
  bool renamed_ = false;
  bool may_remove_ = true;  // whether the folder at path_ is ours to remove
};

// Writes one file that is there whole or not at all. `write` makes the file at the path that it is given and flushes it; then
// the file is renamed to the target. Throws Error when the target exists.
void write_staged_file(FileSystem& files, const std::string& target, const std::function<void(const std::string& path)>& write);

// Removes a folder with its subfolders. It renames the folder first, so nobody ever sees a part of it.
void remove_folder(FileSystem& files, const std::string& path);

// Calls what cleans up. An Error is told on standard error, and no more: what is left harms nobody.
void clean_if_possible(const std::function<void()>& clean);

// Removes what saves and removals of `parent`/step_N that died left behind, and returns how many folders that were. They get
// another name first, and `parent` is flushed, so that whoever does write there fails and saves no part. What cannot be removed
// is told on standard error and stays. Call it only when no save is under way there: readers never do.
int64_t remove_leftovers(FileSystem& files, const std::string& parent);

// The steps N of the checkpoints `parent`/step_N, ascending. All of them are committed. Empty when there is no such folder.
// Throws Error when the disk does not tell.
std::vector<int64_t> committed_steps(const std::string& parent, FileSystem& files = system_files());
std::optional<int64_t> latest_step(const std::string& parent, FileSystem& files = system_files());
std::string step_folder(const std::string& parent, int64_t step);
// For an error in the checkpoint `parent`/step_N: a sentence that names the one before it; "" where none is known.
std::string before_it(const std::string& folder, FileSystem& files = system_files());
// Keeps the last `keep` checkpoints (at least 1) and removes the others, the oldest first. What cannot be removed is told on
// standard error and stays.
void retain_steps(FileSystem& files, const std::string& parent, int64_t keep);

}  // namespace shardproof::checkpoint
