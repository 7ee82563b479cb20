#include "harness/run/lossy_disk.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "harness/case/random.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

bool is_folder(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

}  // namespace

void rename_in(std::map<NodeName, Node>& names, const DiskCall& call) {
  for (const auto& [name, node] : call.names) {
    if (node == kNoNode)
      names.erase(name);
    else
      names[name] = node;
  }
}

// A call of one rank. It begins when the rank has its turn, if the file is one that is written in turns.
class LossyDisk::Turn {
 public:
  Turn(LossyDisk& disk, int64_t rank, bool takes_turns) : disk_(disk), lock_(disk.mutex_), takes_turns_(takes_turns) {
    if (!takes_turns_) return;
    const bool in_time =
        disk_.changed_.wait_for(lock_, std::chrono::seconds(60), [&] { return disk_.dead() || disk_.turn_ == rank; });
    SHARD_CHECK(in_time, "harness", "rank {} waited for its turn to write for a minute; do all ranks write a file?", rank);
  }
  ~Turn() {
    if (takes_turns_) disk_.next_turn();
  }

 private:
  LossyDisk& disk_;
  std::unique_lock<std::mutex> lock_;
  bool takes_turns_;
};

bool LossyDisk::takes_turns(int64_t rank, const FileCall& call) {
  const std::lock_guard lock(mutex_);
  if (call.fd >= 0) return opened_.contains(call.fd) && opened_.at(call.fd).takes_turns;
  if (call.kind != CallKind::open || (call.flags & O_CREAT) == 0 || !call.path.ends_with(".distcp") || writers_ == 0)
    return false;
  // The first turn is drawn when all ranks are about to write.
  writing_.insert(rank);
  if (static_cast<int64_t>(writing_.size()) == writers_ && !turn_) next_turn();
  return true;
}

ssize_t LossyDisk::around(int64_t rank, FileCall& call, const FilesAround::Make& make) {
  if (call.looks()) return make();
  // The record does not tell blocks that went around the cache from others: both need a flush.
  if (call.kind == CallKind::direct) return call.flags != 0 ? -EINVAL : 0;
  const bool in_turns = takes_turns(rank, call);
  const Turn turn(*this, rank, in_turns);
  if (call.kind == CallKind::close) {  // of a process that is killed as well
    if (in_turns) writing_.erase(rank);
    opened_.erase(call.fd);
    const ssize_t closed = make();
    return dead() ? -EIO : closed;
  }
  if (dead() || (call.kind == CallKind::flush && flushes_left_ && (*flushes_left_)-- == 0)) return -EIO;
  const bool is_new = call.kind == CallKind::open && (call.flags & O_CREAT) != 0 && node_of(call.path) == kNoNode;
  const ssize_t done = call.kind == CallKind::flush ? 0 : make();
  if (done < 0 && call.kind == CallKind::open && in_turns) writing_.erase(rank);
  if (done < 0) return done;
  if (call.kind == CallKind::open) {
    if (is_new) record_names({{call.path, next_++}});
    opened_[static_cast<int>(done)] = {node_of(call.path), 0, in_turns};
  } else if (call.kind == CallKind::write) {
    Opened& file = opened_.at(call.fd);
    record({.kind = DiskCall::Kind::bytes,
            .node = file.node,
            .offset = file.offset,
            .bytes = std::string(call.from, static_cast<size_t>(done))});
    file.offset += static_cast<uint64_t>(done);
  } else if (call.kind == CallKind::flush) {
    const Node node = opened_.at(call.fd).node;
    if (node != kNoNode) record({.kind = DiskCall::Kind::flush, .node = node});
  } else if (call.kind == CallKind::rename) {
    record_names({{call.path, kNoNode}, {call.to, node_of(call.path)}});
  } else if (call.kind == CallKind::exchange) {
    record_names({{call.path, node_of(call.to)}, {call.to, node_of(call.path)}});
  } else if (call.kind == CallKind::mkdir) {
    record_.folders.insert(next_);
    record_names({{call.path, next_++}});
  } else {
    record_names({{call.path, kNoNode}});
  }
  return done;
}

LossyDisk::LossyDisk(std::string root) : root_(std::move(root)) {
  read_folder(root_, 0);
  names_ = record_.names;
}

LossyDisk::~LossyDisk() = default;

void LossyDisk::read_folder(const std::string& path, Node node) {
  for (const std::string& name : shardproof::checkpoint::list_folder(path)) {
    const std::string inner = path + "/" + name;
    const Node its = next_++;
    record_.names[{node, name}] = its;
    if (is_folder(inner)) {
      record_.folders.insert(its);
      read_folder(inner, its);
    } else {
      record_.files[its] = shardproof::checkpoint::read_file(shardproof::checkpoint::system_files(), inner, UINT64_MAX);
    }
  }
}

shardproof::checkpoint::FileSystem& LossyDisk::files(int64_t rank) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<FilesAround>& found = files_[rank];
  if (!found)
    found = std::make_unique<FilesAround>([this, rank](FileCall& call, const auto& make) { return around(rank, call, make); });
  return *found;
}

NodeName LossyDisk::name_of(const std::string& path) const {
  SHARD_REQUIRE(path.starts_with(root_ + "/"), "harness", "{} does not lie under {}, which is recorded", path, root_);
  NodeName at{kNoNode, ""};
  Node folder = 0;
  for (size_t begin = root_.size() + 1; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    at = {folder, path.substr(begin, end - begin)};
    const auto found = names_.find(at);
    folder = found == names_.end() ? kNoNode : found->second;
    begin = end + 1;
  }
  return at;
}

Node LossyDisk::node_of(const std::string& path) const {
  if (path == root_) return 0;
  if (!path.starts_with(root_ + "/")) return kNoNode;
  const auto found = names_.find(name_of(path));
  return found == names_.end() ? kNoNode : found->second;
}

bool LossyDisk::dead() {
  killed_ = killed_ || (last_call_ && record_.calls.size() >= *last_call_);
  return killed_;
}

void LossyDisk::record(DiskCall call) {
  record_.calls.push_back(std::move(call));
  if (dead()) changed_.notify_all();
}

void LossyDisk::record_names(const std::vector<std::pair<std::string, Node>>& paths) {
  DiskCall call{.kind = DiskCall::Kind::names};
  for (const auto& [path, node] : paths) call.names.emplace_back(name_of(path), node);
  rename_in(names_, call);
  record(std::move(call));
}

void LossyDisk::next_turn() {
  turn_.reset();
  if (!writing_.empty()) {
    const auto drawn = static_cast<int64_t>(Draws(seed_, "whose turn").bits(static_cast<int64_t>(turns_++)) % writing_.size());
    turn_ = *std::next(writing_.begin(), drawn);
  }
  changed_.notify_all();
}

void LossyDisk::mark(int64_t mark) {
  const std::lock_guard lock(mutex_);
  record_.calls.push_back({.mark = mark});
}

void LossyDisk::take_turns(int64_t ranks, uint64_t seed) {
  writers_ = ranks;
  seed_ = seed;
}

void LossyDisk::kill_after(int64_t calls) {
  last_call_ = record_.calls.size() + static_cast<size_t>(calls);
}

void LossyDisk::fail_flush(int64_t number) {
  flushes_left_ = number;
}

void LossyDisk::restart() {
  killed_ = false;
  last_call_.reset();
  flushes_left_.reset();
  writing_.clear();
  turn_.reset();
}

}  // namespace harness
