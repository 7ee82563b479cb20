// A file system around another one: a function stands between each call and what is done.
#pragma once

#include <fcntl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/checkpoint/format/file_system.h"

namespace harness {

enum class CallKind { open, write, read, flush, close, direct, rename, exchange, mkdir, unlink, rmdir, status, list };

// A call that somebody makes. The function may change what is done, and look at what was read.
struct FileCall {
  CallKind kind;
  std::string path;                           // that of the file descriptor, where there is one
  std::string to = {};                        // of a rename and an exchange
  int fd = -1, flags = 0;                     // the flags of an open; of direct, whether it shall be
  bool of_folder = false;                     // opened as one
  const char* from = nullptr;                 // write
  char* into = nullptr;                       // read
  size_t bytes = 0;                           // write and read
  std::vector<std::string>* names = nullptr;  // list

  // Whether it only looks.
  bool looks() const { return kind == CallKind::read || kind == CallKind::status || kind == CallKind::list; }
};

class FilesAround : public shardproof::checkpoint::FileSystem {
 public:
  using Make = std::function<ssize_t()>;
  // Returns what the caller is answered. `make` does the call; several threads may be in it at a time.
  using Around = std::function<ssize_t(FileCall& call, const Make& make)>;
  explicit FilesAround(Around around, FileSystem& inner = shardproof::checkpoint::system_files())
      : around_(std::move(around)), inner_(inner) {}

  int open(const std::string& path, int flags, mode_t mode) override {
    FileCall call{.kind = CallKind::open, .path = path, .flags = flags, .of_folder = (flags & O_DIRECTORY) != 0};
    const int fd = ask(call, [&] { return inner_.open(call.path, flags, mode); });
    const std::lock_guard lock(mutex_);
    if (fd >= 0) opened_[fd] = {path, call.of_folder};
    return fd;
  }
  ssize_t write(int fd, const void* data, size_t bytes) override {
    FileCall call = of(CallKind::write, fd);
    call.from = static_cast<const char*>(data), call.bytes = bytes;
    return around_(call, [&] { return inner_.write(fd, call.from, call.bytes); });
  }
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    FileCall call = of(CallKind::read, fd);
    call.into = static_cast<char*>(data), call.bytes = bytes;
    return around_(call, [&] { return inner_.pread(fd, call.into, call.bytes, offset); });
  }
  int set_direct(int fd, bool direct) override {
    FileCall call = of(CallKind::direct, fd);
    call.flags = direct;
    return ask(call, [&] { return inner_.set_direct(fd, direct); });
  }
  int fsync(int fd) override {
    return ask(of(CallKind::flush, fd), [&] { return inner_.fsync(fd); });
  }
  int close(int fd) override {
    return ask(of(CallKind::close, fd), [&] { return inner_.close(fd); });
  }
  int rename(const std::string& from, const std::string& to) override {
    return ask({.kind = CallKind::rename, .path = from, .to = to}, [&] { return inner_.rename(from, to); });
  }
  int exchange(const std::string& one, const std::string& two) override {
    return ask({.kind = CallKind::exchange, .path = one, .to = two}, [&] { return inner_.exchange(one, two); });
  }
  int mkdir(const std::string& path, mode_t mode) override {
    return ask({.kind = CallKind::mkdir, .path = path}, [&] { return inner_.mkdir(path, mode); });
  }
  int unlink(const std::string& path) override {
    return ask({.kind = CallKind::unlink, .path = path}, [&] { return inner_.unlink(path); });
  }
  int rmdir(const std::string& path) override {
    return ask({.kind = CallKind::rmdir, .path = path}, [&] { return inner_.rmdir(path); });
  }
  int status(const std::string& path, struct stat& status, bool of_link) override {
    FileCall call{.kind = CallKind::status, .path = path};
    return ask(call, [&] { return inner_.status(call.path, status, of_link); });
  }
  int list(const std::string& path, std::vector<std::string>& names) override {
    return ask({.kind = CallKind::list, .path = path, .names = &names}, [&] { return inner_.list(path, names); });
  }

 private:
  FileCall of(CallKind kind, int fd) {
    const std::lock_guard lock(mutex_);
    const auto& [path, folder] = opened_[fd];
    return {.kind = kind, .path = path, .fd = fd, .of_folder = folder};
  }
  int ask(FileCall&& call, const Make& make) { return static_cast<int>(around_(call, make)); }
  int ask(FileCall& call, const Make& make) { return static_cast<int>(around_(call, make)); }

  Around around_;
  FileSystem& inner_;
  std::mutex mutex_;
  std::map<int, std::pair<std::string, bool>> opened_;  // paths, and whether as folders
};

// Flushes nothing, for saves whose durability nobody asks for.
shardproof::checkpoint::FileSystem& hasty_files();

// What disks of clusters do on which every save succeeds. Chances are of each call that can show it.
struct DiskHabits {
  int folders_flush = 0;  // the errno that a flush of a folder gets
  bool refuses_direct = false;
  double interrupts = 0;  // EINTR, and the call is not made; never twice in a row
  double cuts = 0;        // half of a write or a read
  double forgets = 0;     // the answer to a change of names is lost, and asked again the server has nothing left to do
  static DiskHabits drawn(uint64_t seed);
};
FilesAround::Around with(const DiskHabits& habits, uint64_t seed);

}  // namespace harness
