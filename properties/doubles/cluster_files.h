// What the disks of clusters do.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

// Calls of one kind fail where the path has `part`: those that are named in `errors`, by "open", "rename", "rmdir" and so on.
class FaultyFiles : public FileSystem {
 public:
  explicit FaultyFiles(std::map<std::string, int> errors, std::string part = "")
      : errors_(std::move(errors)), part_(std::move(part)) {}

  int open(const std::string& path, int flags, mode_t mode) override {
    if (const int error = error_of((flags & O_DIRECTORY) != 0 ? "open folder" : "open", path)) return -error;
    const int fd = FileSystem::open(path, flags, mode);
    const std::lock_guard lock(mutex_);
    if ((flags & O_DIRECTORY) != 0)
      folders_.insert(fd);
    else
      folders_.erase(fd);
    return fd;
  }
  ssize_t write(int fd, const void* data, size_t bytes) override {
    const int error = error_of("write", part_);
    return error ? -error : FileSystem::write(fd, data, bytes);
  }
  int fsync(int fd) override {
    const std::lock_guard lock(mutex_);
    const int error = error_of(folders_.contains(fd) ? "fsync folder" : "fsync", part_);
    return error ? -error : FileSystem::fsync(fd);
  }
  int rename(const std::string& from, const std::string& to) override {
    const int error = error_of("rename", from);
    return error ? -error : FileSystem::rename(from, to);
  }
  int rmdir(const std::string& path) override {
    const int error = error_of("rmdir", path);
    return error ? -error : FileSystem::rmdir(path);
  }
  int unlink(const std::string& path) override {
    const int error = error_of("unlink", path);
    return error ? -error : FileSystem::unlink(path);
  }
  int status(const std::string& path, struct stat& status, bool of_link) override {
    const int error = error_of("stat", path);
    return error ? -error : FileSystem::status(path, status, of_link);
  }
  // A part of the names comes all the same.
  int list(const std::string& path, std::vector<std::string>& names) override {
    const int listed = FileSystem::list(path, names), error = error_of("list", path);
    if (error) names.resize(names.size() / 2);
    return error ? -error : listed;
  }

 private:
  int error_of(const std::string& call, const std::string& path) const {
    const auto found = errors_.find(call);
    return found != errors_.end() && path.find(part_) != std::string::npos ? found->second : 0;
  }
  const std::map<std::string, int> errors_;
  const std::string part_;
  std::mutex mutex_;
  std::set<int> folders_;  // open ones
};

// Every call is interrupted once before it is made.
class InterruptedFiles : public FileSystem {
 public:
  int open(const std::string& path, int flags, mode_t mode) override {
    return interrupted() ? -EINTR : FileSystem::open(path, flags, mode);
  }
  ssize_t write(int fd, const void* data, size_t bytes) override {
    return interrupted() ? -EINTR : FileSystem::write(fd, data, bytes);
  }
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return interrupted() ? -EINTR : FileSystem::pread(fd, data, bytes, offset);
  }
  int fsync(int fd) override { return interrupted() ? -EINTR : FileSystem::fsync(fd); }
  int rename(const std::string& from, const std::string& to) override {
    return interrupted() ? -EINTR : FileSystem::rename(from, to);
  }
  int exchange(const std::string& one, const std::string& two) override {
    return interrupted() ? -EINTR : FileSystem::exchange(one, two);
  }
  int mkdir(const std::string& path, mode_t mode) override { return interrupted() ? -EINTR : FileSystem::mkdir(path, mode); }
  int unlink(const std::string& path) override { return interrupted() ? -EINTR : FileSystem::unlink(path); }
  int rmdir(const std::string& path) override { return interrupted() ? -EINTR : FileSystem::rmdir(path); }
  int status(const std::string& path, struct stat& status, bool of_link) override {
    return interrupted() ? -EINTR : FileSystem::status(path, status, of_link);
  }
  int list(const std::string& path, std::vector<std::string>& names) override {
    return interrupted() ? -EINTR : FileSystem::list(path, names);
  }
  int64_t interrupted_calls() const { return calls_ / 2; }

 private:
  bool interrupted() { return calls_++ % 2 == 0; }
  std::atomic<int64_t> calls_ = 0;
};

// A server that renames, whose answer is lost, and that finds nothing to rename when it is asked again.
class ForgetfulFiles : public FileSystem {
 public:
  int rename(const std::string& from, const std::string& to) override {
    const int done = FileSystem::rename(from, to);
    return done == 0 ? -ENOENT : done;
  }
};

// A disk of this host's own: what the others have under `shared` is under `own` here. Folders are there as they are needed.
class OwnDisk : public FileSystem {
 public:
  OwnDisk(std::string shared, std::string own) : shared_(std::move(shared)), own_(std::move(own)) {}
  int open(const std::string& path, int flags, mode_t mode) override {
    const std::string here = of(path);
    if ((flags & O_CREAT) != 0) std::filesystem::create_directories(std::filesystem::path(here).parent_path());
    return FileSystem::open(here, flags, mode);
  }
  int status(const std::string& path, struct stat& status, bool of_link) override {
    return FileSystem::status(of(path), status, of_link);
  }

 private:
  std::string of(const std::string& path) const {
    return path.starts_with(shared_) ? own_ + path.substr(shared_.size()) : path;
  }
  const std::string shared_, own_;
};

// Counts what is opened, and refuses not to wait, as a file does that somebody else holds.
class CountedOpens : public FileSystem {
 public:
  int open(const std::string& path, int flags, mode_t mode) override {
    ++opens_;
    return (flags & O_NONBLOCK) != 0 ? -EAGAIN : FileSystem::open(path, flags, mode);
  }
  int64_t opens() const { return opens_; }

 private:
  std::atomic<int64_t> opens_ = 0;
};

}  // namespace shardproof::checkpoint
