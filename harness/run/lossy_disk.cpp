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

using shardproof::checkpoint::FileSystem;

bool is_folder(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

}  // namespace

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

class LossyDisk::Files : public FileSystem {
 public:
  Files(LossyDisk& disk, int64_t rank) : disk_(disk), rank_(rank) {}

  int open(const std::string& path, int flags, mode_t mode) override {
    const bool takes_turns = (flags & O_CREAT) != 0 && path.ends_with(".distcp") && begin_writing();
    const Turn turn(disk_, rank_, takes_turns);
    if (disk_.dead()) return -EIO;
    const bool is_new = disk_.node_of(path) == kNoNode;
    const int fd = FileSystem::open(path, flags, mode);
    if (fd < 0 && takes_turns) disk_.writing_.erase(rank_);
    if (fd < 0) return fd;
    if (is_new && (flags & O_CREAT) != 0) disk_.record_names({{path, disk_.next_++}});
    disk_.opened_[fd] = {disk_.node_of(path), 0, takes_turns};
    return fd;
  }
  ssize_t write(int fd, const void* data, size_t bytes) override {
    const Turn turn(disk_, rank_, takes_turns(fd));
    if (disk_.dead()) return -EIO;
    const ssize_t count = FileSystem::write(fd, data, bytes);
    if (count <= 0) return count;
    Opened& file = disk_.opened_.at(fd);
    disk_.record({.kind = DiskCall::Kind::bytes,
                  .node = file.node,
                  .offset = file.offset,
                  .bytes = std::string(static_cast<const char*>(data), static_cast<size_t>(count))});
    file.offset += static_cast<uint64_t>(count);
    return count;
  }
  int fsync(int fd) override {
    const Turn turn(disk_, rank_, takes_turns(fd));
    if (disk_.dead()) return -EIO;
    if (disk_.flushes_left_ && (*disk_.flushes_left_)-- == 0) return -EIO;
    const Node node = disk_.opened_.at(fd).node;
    if (node != kNoNode) disk_.record({.kind = DiskCall::Kind::flush, .node = node});
    return 0;
  }
  int close(int fd) override {
    const bool took_turns = takes_turns(fd);
    const Turn turn(disk_, rank_, took_turns);
    if (took_turns) disk_.writing_.erase(rank_);
    disk_.opened_.erase(fd);
    const int closed = FileSystem::close(fd);  // of a process that is killed as well
    return disk_.dead() ? -EIO : closed;
  }
  // The record does not tell blocks that went around the cache from others: both need a flush.
  int set_direct(int, bool direct) override { return direct ? -EINVAL : 0; }

  int rename(const std::string& from, const std::string& to) override {
    const Turn turn(disk_, rank_, false);
    if (disk_.dead()) return -EIO;
    const int done = FileSystem::rename(from, to);
    if (done >= 0) disk_.record_names({{from, kNoNode}, {to, disk_.node_of(from)}});
    return done;
  }
  int exchange(const std::string& one, const std::string& two) override {
    const Turn turn(disk_, rank_, false);
    if (disk_.dead()) return -EIO;
    const int done = FileSystem::exchange(one, two);
    if (done >= 0) disk_.record_names({{one, disk_.node_of(two)}, {two, disk_.node_of(one)}});
    return done;
  }
  int mkdir(const std::string& path, mode_t mode) override {
    const Turn turn(disk_, rank_, false);
    if (disk_.dead()) return -EIO;
    const int done = FileSystem::mkdir(path, mode);
    if (done < 0) return done;
    disk_.record_.folders.insert(disk_.next_);
    disk_.record_names({{path, disk_.next_++}});
    return done;
  }
  int unlink(const std::string& path) override {
    const Turn turn(disk_, rank_, false);
    if (disk_.dead()) return -EIO;
    const int done = FileSystem::unlink(path);
    if (done >= 0) disk_.record_names({{path, kNoNode}});
    return done;
  }
  int rmdir(const std::string& path) override {
    const Turn turn(disk_, rank_, false);
    if (disk_.dead()) return -EIO;
    const int done = FileSystem::rmdir(path);
    if (done >= 0) disk_.record_names({{path, kNoNode}});
    return done;
  }

 private:
  bool takes_turns(int fd) {
    const std::lock_guard lock(disk_.mutex_);
    const auto found = disk_.opened_.find(fd);
    return found != disk_.opened_.end() && found->second.takes_turns;
  }
  // The first turn is drawn when all ranks are about to write.
  bool begin_writing() {
    const std::lock_guard lock(disk_.mutex_);
    if (disk_.writers_ == 0) return false;
    disk_.writing_.insert(rank_);
    if (static_cast<int64_t>(disk_.writing_.size()) == disk_.writers_ && !disk_.turn_) disk_.next_turn();
    return true;
  }

  LossyDisk& disk_;
  int64_t rank_;
};

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

FileSystem& LossyDisk::files(int64_t rank) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Files>& found = files_[rank];
  if (!found) found = std::make_unique<Files>(*this, rank);
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
  for (const auto& [name, node] : call.names) {
    if (node == kNoNode)
      names_.erase(name);
    else
      names_[name] = node;
  }
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
