#include "shardproof/checkpoint/format/durable.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <random>
#include <utility>

#include "checkpoint/format/cause.h"
#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

// Hidden names of what is not, or no longer, a checkpoint: ".NAME.saving-N-ID". The id is random: processes of other hosts and
// containers, of the same number, may see the folder too.
constexpr const char* kSaving = ".saving-";
constexpr const char* kRemoving = ".removing-";
constexpr const char* kStep = "step_";
constexpr int64_t kLooksMax = 10;  // at a list that says what is no longer there

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Calls `make` with hidden names until one is not taken, and returns that one and what `make` returned. Names are random: a
// disk that says of several that they are taken says it of any.
std::pair<std::string, int> make_hidden(const std::string& path, const char* kind,
                                        const std::function<int(const std::string&)>& make) {
  static std::atomic<int64_t> count{0};
  std::random_device random;
  const std::string name = path.substr(path.rfind('/') + 1);
  for (int names_left = 8;;) {
    const std::string hidden = fmt::format("{}/{}{}{}{}-{:08x}{:08x}", parent_of(path), name.starts_with('.') ? "" : ".", name,
                                           kind, count++, random(), random());
    const int made = again([&] { return make(hidden); });
    if ((made != -EEXIST && made != -ENOTEMPTY) || --names_left == 0) return {hidden, made};
  }
}

// The answer of a server may be lost. When it is asked again, what was renamed is no longer there, but at the target. What
// another process has put there has another number, for that of what is open is not given again.
int rename(FileSystem& files, const std::string& from, const std::string& to) {
  struct stat before {}, after {};
  const int held = again([&] { return files.open(from, O_RDONLY | O_CLOEXEC, 0); });
  const bool known = held >= 0 && again([&] { return files.status(from, before, true); }) >= 0;
  int done = again([&] { return files.rename(from, to); });
  if (done == -ENOENT && known && again([&] { return files.status(to, after, true); }) >= 0 && after.st_ino == before.st_ino &&
      after.st_dev == before.st_dev)
    done = 0;
  if (held >= 0) files.close(held);
  return done;
}

// Disks that cannot flush a folder say so, and keep its names by themselves.
int try_to_flush(FileSystem& files, const std::string& folder) {
  const int fd = again([&] { return files.open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
  if (fd < 0) return fd;
  const int flushed = again([&] { return files.fsync(fd); });
  files.close(fd);  // nothing was written through it
  return flushed == -EINVAL || flushed == -EOPNOTSUPP || flushed == -ENOSYS ? 0 : flushed;
}

void flush_folder(FileSystem& files, const std::string& path) {
  const int flushed = try_to_flush(files, path);
  SHARD_REQUIRE(flushed >= 0, "checkpoint", "cannot flush folder {} to the disk: {}", path, cause(flushed));
}

// The entry of a folder that is there already. A process that was killed may have made the folder and not flushed its entry,
// and without the entry all that the folder holds is lost. A parent that may not be read is none in which we make folders.
void flush_entry(FileSystem& files, const std::string& path) {
  const int flushed = try_to_flush(files, parent_of(path));
  const bool cannot_be = flushed == -EACCES || flushed == -EPERM || flushed == -EROFS;
  SHARD_REQUIRE(flushed >= 0 || cannot_be, "checkpoint", "cannot flush folder {} to the disk: {}", parent_of(path),
                cause(flushed));
}

// Those that are missing, each durable in its parent.
void make_parents(FileSystem& files, const std::string& path) {
  if (exists(files, path)) {
    SHARD_REQUIRE(is_folder(files, path, Links::followed), "checkpoint", "{} is no folder", path);
    flush_entry(files, path);
    return;
  }
  make_parents(files, parent_of(path));
  const int made = again([&] { return files.mkdir(path, 0777); });
  SHARD_REQUIRE(made >= 0 || made == -EEXIST, "checkpoint", "cannot make folder {}: {}", path, cause(made));
  flush_folder(files, parent_of(path));
}

void remove_tree(FileSystem& files, const std::string& path) {
  const bool folder = is_folder(files, path, Links::not_followed);
  if (folder)
    for (const std::string& name : list_folder(path, files)) remove_tree(files, path + "/" + name);
  const int removed = again([&] { return folder ? files.rmdir(path) : files.unlink(path); });
  SHARD_REQUIRE(removed >= 0 || removed == -ENOENT, "checkpoint", "cannot remove {}: {}", path, cause(removed));
}

// Gives the folder a hidden name. Returns that.
std::string hide(FileSystem& files, const std::string& path) {
  const auto [hidden, renamed] =
      make_hidden(path, kRemoving, [&](const std::string& name) { return rename(files, path, name); });
  SHARD_REQUIRE(renamed >= 0, "checkpoint", "cannot rename {} to remove it: {}", path, cause(renamed));
  return hidden;
}

}  // namespace

StagedFolder::StagedFolder(FileSystem& files, std::string target, bool overwrite)
    : files_(files), target_(without_slashes(std::move(target))), parent_(parent_of(target_)), overwrite_(overwrite) {
  SHARD_REQUIRE(overwrite_ || !exists(files_, target_), "checkpoint",
                "{} exists already; choose another name, or ask to overwrite it", target_);
  make_parents(files_, parent_);
  const auto [path, made] =
      make_hidden(target_, kSaving, [&](const std::string& hidden) { return files_.mkdir(hidden, 0777); });
  SHARD_REQUIRE(made >= 0, "checkpoint", "cannot make folder {}: {}. Is its parent writable?", path, cause(made));
  path_ = path;
}

StagedFolder::~StagedFolder() {
  if (!may_remove_) return;
  try {
    if (exists(files_, path_)) remove_tree(files_, path_);
  } catch (const Error&) {
    // What is left has a hidden name; remove_leftovers tries again.
  }
}

void StagedFolder::commit() {
  SHARD_CHECK(!renamed_, "checkpoint", "{} is already committed", target_);
  flush_folder(files_, path_);
  if (overwrite_ && exists(files_, target_)) {
    const int done = again([&] { return files_.exchange(path_, target_); });
    SHARD_REQUIRE(done != -EINVAL && done != -ENOSYS, "checkpoint",
                  "this file system cannot exchange folders, so {} cannot be overwritten atomically; save under another name",
                  target_);
    SHARD_REQUIRE(done >= 0, "checkpoint", "cannot put {} in the place of {}: {}", path_, target_, cause(done));
  } else {
    const int done = rename(files_, path_, target_);
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
  SHARD_REQUIRE(!exists(files, target), "checkpoint", "{} exists already; choose another name", target);
  StagedFolder folder(files, target + ".folder");
  const std::string path = folder.path() + "/file";
  write(path);
  const int done = rename(files, path, target);
  SHARD_REQUIRE(done >= 0, "checkpoint", "cannot rename {} to {}: {}", path, target, cause(done));
  flush_folder(files, parent_of(target));
}

void remove_folder(FileSystem& files, const std::string& given) {
  const std::string path = without_slashes(given), hidden = hide(files, path);
  flush_folder(files, parent_of(path));
  remove_tree(files, hidden);
}

void clean_if_possible(const std::function<void()>& clean) {
  try {
    clean();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s. This is a warning: nothing is lost, and it is tried again later\n", error.what());
  }
}

int64_t remove_leftovers(FileSystem& files, const std::string& parent) {
  std::vector<std::string> left;
  int64_t removed = 0;
  const auto is_ours = [](const std::string& name, const char* kind) {
    return name.starts_with(std::string(".") + kStep) && name.find(kind) != std::string::npos;
  };
  clean_if_possible([&] {
    if (!is_folder(files, parent, Links::followed)) return;
    for (const std::string& name : list_folder(parent, files)) {
      const std::string path = parent + "/" + name;
      const bool hidden = is_ours(name, kRemoving);
      if (!(hidden || is_ours(name, kSaving)) || !is_folder(files, path, Links::followed)) continue;
      clean_if_possible([&] { left.push_back(hidden ? path : hide(files, path)); });
    }
    // What died may have hidden a checkpoint and not flushed that: a power failure would give it back its name.
    if (!left.empty()) flush_folder(files, parent);
    for (const std::string& path : left)
      clean_if_possible([&] {
        remove_tree(files, path);
        ++removed;
      });
  });
  return removed;
}

namespace {

// Of a folder of this name; nothing when the name is not one of a checkpoint in a run.
std::optional<int64_t> step_of(const std::string& folder) {
  int64_t step = 0;
  const std::string parent = parent_of(folder);
  const char *begin = folder.data() + std::min(folder.size(), parent.size() + 1 + std::strlen(kStep)),
             *end = folder.data() + folder.size();
  const auto [stop, error] = std::from_chars(begin, end, step);
  const bool is_one = error == std::errc() && stop == end && step >= 0 && step_folder(parent, step) == folder;
  return is_one ? std::optional(step) : std::nullopt;
}

}  // namespace

std::vector<int64_t> committed_steps(const std::string& parent, FileSystem& files) {
  std::vector<int64_t> steps;
  std::string gone = parent;
  // Where all that was listed is gone, the run has saved a later one meanwhile.
  for (int64_t looks = 0; looks < kLooksMax && steps.empty() && !gone.empty(); ++looks) {
    gone.clear();
    if (!is_folder(files, parent, Links::followed)) return steps;
    for (const std::string& name : list_folder(parent, files)) {
      const std::string folder = parent + "/" + name;
      const std::optional<int64_t> step = step_of(folder);
      if (step && exists(files, folder + "/.metadata"))
        steps.push_back(*step);
      else if (step && !exists(files, folder))
        gone = folder;
    }
  }
  SHARD_REQUIRE(!steps.empty() || gone.empty(), "checkpoint",
                "{} is listed on {}, and is not there, nor is another checkpoint: a cache has an old list. Try again", gone,
                host_name());
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<int64_t> latest_step(const std::string& parent, FileSystem& files) {
  const std::vector<int64_t> steps = committed_steps(parent, files);
  return steps.empty() ? std::nullopt : std::optional(steps.back());
}

std::string step_folder(const std::string& parent, int64_t step) {
  return fmt::format("{}/{}{}", parent, kStep, step);
}

std::string before_it(const std::string& folder, FileSystem& files) {
  const std::optional<int64_t> step = step_of(folder);
  if (!step) return "";
  std::vector<int64_t> steps;
  try {
    steps = committed_steps(parent_of(folder), files);
  } catch (const Error&) {
    // There is an error to tell already.
  }
  const auto found = std::lower_bound(steps.begin(), steps.end(), *step);
  return found == steps.begin() ? ""
                                : fmt::format(". The checkpoint before it is {}: to go on from that, give {} another name",
                                              step_folder(parent_of(folder), *(found - 1)), folder);
}

void retain_steps(FileSystem& files, const std::string& parent, int64_t keep) {
  SHARD_REQUIRE(keep >= 1, "checkpoint", "at least one checkpoint must be kept, got {}", keep);
  const std::vector<int64_t> steps = committed_steps(parent, files);
  for (size_t i = 0; i + static_cast<size_t>(keep) < steps.size(); ++i)
    clean_if_possible([&] { remove_folder(files, step_folder(parent, steps[i])); });
}

}  // namespace shardproof::checkpoint
