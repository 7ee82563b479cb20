// The disk of a cluster: what NFS, Lustre, FUSE, overlayfs and quotas do besides what they are asked for.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "harness/case/random.h"
#include "harness/run/files_around.h"

namespace shardproof::checkpoint {

using harness::CallKind;
using harness::FileCall;
using harness::FilesAround;

// Errors are positive numbers of errno.
struct ClusterHabits {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  harness::DiskHabits harmless = {};
  // Calls of these kinds are refused where the path has `part`. Half of a list comes all the same, and what is closed is
  // closed.
  std::map<CallKind, int> refuses = {};
  std::string part = "";
  int64_t list_age = 0;  // a list is that of so many lists before, as a cache has it
  // The call of this number, from 0, fails: of those that change or flush something, or of those that look. Half of a write
  // comes through. `stays`: the process is gone, so all from there on fail, and nothing is done.
  int64_t fails = kNever;
  int error = EIO;
  bool of_looks = false, stays = false;

  // Something is refused, fails once, late or not, or is listed late; and there is the rest.
  static ClusterHabits harmful(uint64_t seed) {
    harness::Chooser draw(harness::Draws(seed, "harm"));
    ClusterHabits habits{.harmless = harness::DiskHabits::drawn(seed)};
    const int64_t kind = draw.integer(0, 3);
    if (kind == 0) habits.list_age = draw.integer(1, 3);
    if (kind == 1) {
      habits.refuses.insert(draw.one_of<std::pair<const CallKind, int>>({{CallKind::rename, EXDEV},
                                                                         {CallKind::rmdir, ENOTEMPTY},
                                                                         {CallKind::unlink, EACCES},
                                                                         {CallKind::close, EDQUOT},
                                                                         {CallKind::flush, EIO},
                                                                         {CallKind::list, EIO}}));
      habits.part = draw.one_of<std::string>({"", "/step_", ".step_", "_0.distcp", ".step_owner"});
    }
    if (kind >= 2) {
      habits.fails = draw.integer(0, 60);
      habits.of_looks = draw.chance(0.3);
      habits.error = habits.of_looks ? draw.one_of<int>({ESTALE, EIO}) : draw.one_of<int>({ESTALE, EIO, ENOSPC, EDQUOT});
    }
    return habits;
  }
  std::string str() const {
    std::string text = fmt::format("flush of folders {}, interrupts {}, cuts {}, forgets {}, lists {} old",
                                   harmless.folders_flush, harmless.interrupts, harmless.cuts, harmless.forgets, list_age);
    for (const auto& [kind, number] : refuses)
      text += fmt::format(", kind {} of '{}': {}", static_cast<int>(kind), part, number);
    return fails == kNever ? text : text + fmt::format(", {} {} fails: {}", of_looks ? "look" : "change", fails, error);
  }
};

class ClusterDisk : public FilesAround {
 public:
  explicit ClusterDisk(ClusterHabits habits, uint64_t seed = 1, FileSystem& inner = system_files())
      : FilesAround([this](FileCall& call, const Make& make) { return answer(call, make); }, inner),
        habits_(std::move(habits)),
        harmless_(harness::with(habits_.harmless, seed)) {}
  int64_t changes() const { return changes_; }  // calls that change or flush something
  int64_t partial() const { return partial_; }  // calls that were interrupted or cut

 private:
  ssize_t answer(FileCall& call, const Make& make) {
    const int64_t number = call.looks() ? looks_++ : changes_++;
    if (call.looks() == habits_.of_looks && (number == habits_.fails || (habits_.stays && number > habits_.fails))) {
      call.bytes /= 2;
      if (call.kind == CallKind::close || (call.kind == CallKind::write && call.bytes > 0 && !habits_.stays)) make();
      return -habits_.error;
    }
    const auto refused = habits_.refuses.find(call.kind);
    if (refused == habits_.refuses.end() || call.path.find(habits_.part) == std::string::npos) {
      const size_t bytes = call.bytes;
      const ssize_t done = harmless_(call, make);
      partial_ += done == -EINTR || call.bytes < bytes;
      if (call.kind == CallKind::list && done >= 0) age(call);
      return done;
    }
    if (call.kind == CallKind::close || call.kind == CallKind::list) make();
    if (call.kind == CallKind::list) call.names->resize(call.names->size() / 2);
    return -refused->second;
  }
  void age(FileCall& call) {
    const std::lock_guard lock(mutex_);
    std::vector<std::vector<std::string>>& seen = lists_[call.path];
    seen.push_back(*call.names);
    *call.names = seen[static_cast<size_t>(std::max<int64_t>(0, std::ssize(seen) - 1 - habits_.list_age))];
  }

  const ClusterHabits habits_;
  const Around harmless_;
  std::atomic<int64_t> changes_ = 0, looks_ = 0, partial_ = 0;
  std::mutex mutex_;
  std::map<std::string, std::vector<std::vector<std::string>>> lists_;  // by folder, as they were
};

}  // namespace shardproof::checkpoint
