// A file system whose calls fail.
#pragma once

#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

// The call of this number fails; or all from it on (`dead`: the process is gone, so nothing is cleaned up either). Of one rank:
// its calls come one after the other.
class FailingFiles : public FileSystem {
 public:
  FailingFiles(int64_t failing, int error, bool dead = false) : failing_(failing), error_(error), dead_(dead) {}
  int64_t calls() const { return calls_; }

  int open(const std::string& path, int flags, mode_t mode) override {
    return fails() ? -error_ : FileSystem::open(path, flags, mode);
  }
  ssize_t write(int fd, const void* data, size_t bytes) override {
    if (!fails()) return FileSystem::write(fd, data, bytes);
    if (bytes > 1 && !dead_) FileSystem::write(fd, data, bytes / 2);  // a part may have come through
    return -error_;
  }
  int set_direct(int fd, bool direct) override { return fails() ? -error_ : FileSystem::set_direct(fd, direct); }
  int fsync(int fd) override { return fails() ? -error_ : FileSystem::fsync(fd); }
  int close(int fd) override {
    const int closed = FileSystem::close(fd);  // as the system does, whatever it says
    return fails() ? -error_ : closed;
  }
  int rename(const std::string& from, const std::string& to) override {
    return fails() ? -error_ : FileSystem::rename(from, to);
  }
  int exchange(const std::string& one, const std::string& two) override {
    return fails() ? -error_ : FileSystem::exchange(one, two);
  }
  int mkdir(const std::string& path, mode_t mode) override { return fails() ? -error_ : FileSystem::mkdir(path, mode); }
  int unlink(const std::string& path) override { return fails() ? -error_ : FileSystem::unlink(path); }
  int rmdir(const std::string& path) override { return fails() ? -error_ : FileSystem::rmdir(path); }

 private:
  bool fails() {
    const int64_t call = calls_++;
    return dead_ ? call >= failing_ : call == failing_;
  }
  int64_t failing_, calls_ = 0;
  int error_;
  bool dead_;
};

}  // namespace shardproof::checkpoint
