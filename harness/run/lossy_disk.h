// A disk that can lose its power. It records what is done to the files under a folder. `lose_power` (power_loss.h) then says
// what a disk could hold afterwards.
#pragma once

#include <compare>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "harness/run/files_around.h"

namespace harness {

// A file or folder, whatever its name is. The folder under which everything lies is 0.
using Node = int64_t;
inline constexpr Node kNoNode = -1;

struct NodeName {
  Node folder = kNoNode;
  std::string name;
  auto operator<=>(const NodeName&) const = default;
};

struct DiskCall {
  enum class Kind { names, bytes, flush, mark };
  Kind kind = Kind::mark;
  std::vector<std::pair<NodeName, Node>> names = {};  // names: what each of them means afterwards; kNoNode: nothing
  Node node = kNoNode;                                // bytes: of which file; flush: of which file or folder
  uint64_t offset = 0;                                // bytes
  std::string bytes = {};
  int64_t mark = 0;
};

// What the names mean after such a call.
void rename_in(std::map<NodeName, Node>& names, const DiskCall& call);

struct DiskRecord {
  // At the beginning, all of which was flushed.
  std::map<NodeName, Node> names;
  std::map<Node, std::string> files;  // with their bytes
  // Later.
  std::set<Node> folders{0};    // those at the beginning too
  std::vector<DiskCall> calls;  // in their order: those that changed something, flushes, and marks
};

class LossyDisk {
 public:
  // What lies under the folder now counts as flushed. Outside of it, folders may be flushed, and that is not recorded.
  explicit LossyDisk(std::string root);
  ~LossyDisk();
  LossyDisk(const LossyDisk&) = delete;
  LossyDisk& operator=(const LossyDisk&) = delete;

  // What a rank makes its calls with. Calls are done to the machine's files and recorded. Nothing is flushed really.
  shardproof::checkpoint::FileSystem& files(int64_t rank = 0);
  // Adds a mark to the record, for example that a save is done.
  void mark(int64_t mark);

  // From now on so many ranks write their entry files (.distcp) at the same time, one call in turn, and the seed draws whose
  // turn it is. So the record of a save depends on the seed only, though ranks and writers are threads.
  void take_turns(int64_t ranks, uint64_t seed);
  // The process is killed once so many more calls are recorded: every later call of any rank fails and does nothing. What was
  // done can be seen, flushed or not, until power is lost.
  void kill_after(int64_t calls);
  // The flush of this number from now on, from 0, fails and flushes nothing.
  void fail_flush(int64_t number);
  // Another process begins, whose calls are done.
  void restart();
  bool killed() const { return killed_; }

  const DiskRecord& record() const { return record_; }

 private:
  struct Opened {
    Node node = kNoNode;
    uint64_t offset = 0;
    bool takes_turns = false;
  };
  class Turn;
  bool takes_turns(int64_t rank, const FileCall& call);
  ssize_t around(int64_t rank, FileCall& call, const FilesAround::Make& make);
  void read_folder(const std::string& path, Node node);
  NodeName name_of(const std::string& path) const;
  Node node_of(const std::string& path) const;
  bool dead();
  void record(DiskCall call);
  void record_names(const std::vector<std::pair<std::string, Node>>& paths);
  void next_turn();

  std::string root_;
  DiskRecord record_;
  std::map<NodeName, Node> names_;  // as they can be seen now
  Node next_ = 1;
  std::map<int, Opened> opened_;  // by file descriptor
  std::map<int64_t, std::unique_ptr<FilesAround>> files_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<size_t> last_call_;
  std::optional<int64_t> flushes_left_;
  bool killed_ = false;
  int64_t writers_ = 0;  // how many take turns
  uint64_t seed_ = 0, turns_ = 0;
  std::set<int64_t> writing_;  // ranks whose file is open
  std::optional<int64_t> turn_;
};

}  // namespace harness
