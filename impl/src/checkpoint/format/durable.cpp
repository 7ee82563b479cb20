#include "shardproof/checkpoint/format/durable.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <utility>

#include "checkpoint/format/cause.h"
#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

// Hidden names of what is not, or no longer, a checkpoint: ".NAME.saving-PID-N".
constexpr const char* kSaving = ".saving-";
constexpr const char* kRemoving = ".removing-";
constexpr const char* kStep = "step_";

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Calls `make` with hidden names until one of them is not taken, and returns that one and what `make` returned. A process that
// died may have left the first ones: in a container every run may have the same process number.
std::pair<std::string, int> make_hidden(const std::string& path, const char* kind,
                                        const std::function<int(const std::string&)>& make) {
  static std::atomic<int64_t> count{0};
  const std::string name = path.substr(path.rfind('/') + 1);
  for (;;) {
    const std::string hidden = fmt::format("{}/.{}{}{}-{}", parent_of(path), name, kind, ::getpid(), count++);
    const int made = make(hidden);
    if (made != -EEXIST && made != -ENOTEMPTY) return {hidden, made};
  }
}

bool exists(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

// A link to a folder is one to look into, and never one to remove the contents of.
enum class Links { followed, not_followed };
bool is_folder(const std::string& path, Links links) {
  struct stat status {};
  const auto look = links == Links::followed ? ::stat : ::lstat;
  return look(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

int try_to_flush(FileSystem& files, const std::string& folder) {
  const int fd = files.open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return fd;
  const int flushed = files.fsync(fd);
  files.close(fd);  // nothing was written through it
  return flushed;
}

void flush_folder(FileSystem& files, const std::string& path) {
  const int flushed = try_to_flush(files, path);
  SHARD_REQUIRE(flushed >= 0, "checkpoint", "cannot flush folder {} to the disk: {}", path, cause(flushed));
}

// The entry of a folder that is there already. A process that was killed may have made the folder and not flushed its entry,
// and without the entry all that the folder holds is lost. A parent that may not be read, or that cannot be flushed at all, is
// none in which we make folders.
void flush_entry(FileSystem& files, const std::string& path) {
  const int flushed = try_to_flush(files, parent_of(path));
  const bool cannot_be = flushed == -EACCES || flushed == -EPERM || flushed == -EINVAL || flushed == -EROFS;
  SHARD_REQUIRE(flushed >= 0 || cannot_be, "checkpoint", "cannot flush folder {} to the disk: {}", parent_of(path),
                cause(flushed));
}

// Those that are missing, each durable in its parent.
void make_parents(FileSystem& files, const std::string& path) {
  if (exists(path)) {
    SHARD_REQUIRE(is_folder(path, Links::followed), "checkpoint", "{} is no folder", path);
    flush_entry(files, path);
    return;
  }
  make_parents(files, parent_of(path));
  const int made = files.mkdir(path, 0755);
  SHARD_REQUIRE(made >= 0 || made == -EEXIST, "checkpoint", "cannot make folder {}: {}", path, cause(made));
  flush_folder(files, parent_of(path));
}

void remove_tree(FileSystem& files, const std::string& path) {
  const bool folder = is_folder(path, Links::not_followed);
  if (folder)
    for (const std::string& name : list_folder(path)) remove_tree(files, path + "/" + name);
  const int removed = folder ? files.rmdir(path) : files.unlink(path);
  SHARD_REQUIRE(removed >= 0 || removed == -ENOENT, "checkpoint", "cannot remove {}: {}", path, cause(removed));
}

void remove_if_possible(FileSystem& files, const std::string& path) {
  try {
    if (exists(path)) remove_tree(files, path);
  } catch (const Error&) {
    // What is left has a hidden name; remove_leftovers tries again.
  }
}

}  // namespace

StagedFolder::StagedFolder(FileSystem& files, std::string target, bool overwrite)
    : files_(files), target_(without_slashes(std::move(target))), parent_(parent_of(target_)), overwrite_(overwrite) {
  SHARD_REQUIRE(overwrite_ || !exists(target_), "checkpoint", "{} exists already; choose another name, or ask to overwrite it",
                target_);
  make_parents(files_, parent_);
  const auto [path, made] =
      make_hidden(target_, kSaving, [&](const std::string& hidden) { return files_.mkdir(hidden, 0755); });
  SHARD_REQUIRE(made >= 0, "checkpoint", "cannot make folder {}: {}. Is its parent writable?", path, cause(made));
  path_ = path;
}

StagedFolder::~StagedFolder() {
  if (may_remove_) remove_if_possible(files_, path_);
}

void StagedFolder::commit() {
  SHARD_CHECK(!renamed_, "checkpoint", "{} is already committed", target_);
  flush_folder(files_, path_);
  if (overwrite_ && exists(target_)) {
    const int done = files_.exchange(path_, target_);
    SHARD_REQUIRE(done != -EINVAL && done != -ENOSYS, "checkpoint",
                  "this file system cannot exchange folders, so {} cannot be overwritten atomically; save under another name",
                  target_);
    SHARD_REQUIRE(done >= 0, "checkpoint", "cannot put {} in the place of {}: {}", path_, target_, cause(done));
  } else {
    const int done = files_.rename(path_, target_);
    SHARD_REQUIRE(done >= 0, "checkpoint", "cannot rename {} to {}: {}", path_, target_, cause(done));
    overwrite_ = false;
  }
  renamed_ = true;
  // After an exchange the hidden folder is the old checkpoint. As long as a power failure may give it back its name, it stays
  // whole.
  may_remove_ = false;
  flush_folder(files_, parent_);
  may_remove_ = overwrite_;
}

void write_staged_file(FileSystem& files, const std::string& target,
                       const std::function<void(const std::string& path)>& write) {
  SHARD_REQUIRE(!exists(target), "checkpoint", "{} exists already; choose another name", target);
  StagedFolder folder(files, target + ".folder");
  const std::string path = folder.path() + "/file";
  write(path);
  const int done = files.rename(path, target);
  SHARD_REQUIRE(done >= 0, "checkpoint", "cannot rename {} to {}: {}", path, target, cause(done));
  flush_folder(files, parent_of(target));
}

void remove_folder(FileSystem& files, const std::string& given) {
  const std::string path = without_slashes(given);
  const auto [hidden, renamed] =
      make_hidden(path, kRemoving, [&](const std::string& name) { return files.rename(path, name); });
  SHARD_REQUIRE(renamed >= 0, "checkpoint", "cannot rename {} to remove it: {}", path, cause(renamed));
  flush_folder(files, parent_of(path));
  remove_tree(files, hidden);
}

int64_t remove_leftovers(FileSystem& files, const std::string& parent) {
  int64_t removed = 0;
  if (!is_folder(parent, Links::followed)) return removed;
  for (const std::string& name : list_folder(parent)) {
    const bool leftover =
        name[0] == '.' && (name.find(kSaving) != std::string::npos || name.find(kRemoving) != std::string::npos);
    if (!leftover || !is_folder(parent + "/" + name, Links::followed)) continue;
    // What died may have hidden a checkpoint and not flushed that: a power failure would give it back its name.
    if (removed == 0) flush_folder(files, parent);
    remove_tree(files, parent + "/" + name);
    ++removed;
  }
  return removed;
}

std::vector<int64_t> committed_steps(const std::string& parent) {
  std::vector<int64_t> steps;
  if (!is_folder(parent, Links::followed)) return steps;
  for (const std::string& name : list_folder(parent)) {
    if (!name.starts_with(kStep)) continue;
    int64_t step = 0;
    const char* end = name.data() + name.size();
    const auto [stop, error] = std::from_chars(name.data() + std::strlen(kStep), end, step);
    if (error == std::errc() && stop == end && step >= 0 && step_folder(parent, step) == parent + "/" + name &&
        exists(parent + "/" + name + "/.metadata"))
      steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<int64_t> latest_step(const std::string& parent) {
  const std::vector<int64_t> steps = committed_steps(parent);
  return steps.empty() ? std::nullopt : std::optional(steps.back());
}

std::string step_folder(const std::string& parent, int64_t step) {
  return fmt::format("{}/{}{}", parent, kStep, step);
}

void retain_steps(FileSystem& files, const std::string& parent, int64_t keep) {
  SHARD_REQUIRE(keep >= 1, "checkpoint", "at least one checkpoint must be kept, got {}", keep);
  const std::vector<int64_t> steps = committed_steps(parent);
  for (size_t i = 0; i + static_cast<size_t>(keep) < steps.size(); ++i) remove_folder(files, step_folder(parent, steps[i]));
}

}  // namespace shardproof::checkpoint
