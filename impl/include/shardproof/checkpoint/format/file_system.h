// The system calls that checkpoints make. All of them go through FileSystem, so that a test can make each of them fail. This
// header does not include Torch.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shardproof/base/host_work.h"

namespace shardproof::checkpoint {

// Each function does what the system call of the same name does, but returns -errno when it fails. The functions of this class
// make the system's own calls; a test overrides them.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual int open(const std::string& path, int flags, mode_t mode);
  virtual ssize_t write(int fd, const void* data, size_t bytes);
  virtual ssize_t pread(int fd, void* data, size_t bytes, off_t offset);
  virtual int fsync(int fd);
  virtual int close(int fd);
  virtual int set_direct(int fd, bool direct);  // whether writes go around the page cache (O_DIRECT)
  virtual int rename(const std::string& from, const std::string& to);    // fails when `to` exists (RENAME_NOREPLACE)
  virtual int exchange(const std::string& one, const std::string& two);  // exchanges the two atomically (RENAME_EXCHANGE)
  virtual int mkdir(const std::string& path, mode_t mode);
  virtual int unlink(const std::string& path);
  virtual int rmdir(const std::string& path);
  virtual int status(const std::string& path, struct stat& status, bool of_link);  // `of_link`: lstat, else stat
  // The names in a folder, in any order, "." and ".." too.
  virtual int list(const std::string& path, std::vector<std::string>& names);
};

// The file system of this machine.
FileSystem& system_files();

// A new file that is written from front to back. The path must not exist, and the umask says who may read it. Every member
// throws Error, which names the path and the cause. The error of a write may be thrown by a later call, by `finish` at the
// latest. Large files go around the page cache where that is possible, which saves a copy and keeps cached what others need.
// While one block is filled, a thread writes the one before.
class OutputFile {
 public:
  OutputFile(FileSystem& files, std::string path);
  ~OutputFile();  // closes the file; without `finish` it is not durable
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  void write(const void* data, size_t bytes);
  void write(std::string_view data) { write(data.data(), data.size()); }
  uint64_t position() const { return position_; }
  // Flushes the file to the disk and closes it.
  void finish();

 private:
  FileSystem& files_;
  std::string path_;
  int fd_ = -1;
  uint64_t position_ = 0;

  struct Free {
    void operator()(char* memory) const;
  };
  using Block = std::unique_ptr<char, Free>;
  static Block make_block();
  void start_block();
  void write_out(const char* from, size_t bytes);
  Block filling_, leaving_;
  size_t filled_ = 0;
  uint64_t written_ = 0;
  bool direct_ = false;
  std::unique_ptr<HostJob> pending_;  // the write of leaving_
};

// A sequence of bytes that can be read at any offset.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual uint64_t size() const = 0;
  // Throws Error, which names the source, when the range does not lie inside [0, size()) or cannot be read.
  virtual void read(uint64_t offset, void* data, size_t bytes) const = 0;
  virtual std::string name() const = 0;
  // Returns the range as a string. Throws Error when it has more than `bytes_max` bytes.
  std::string read_string(uint64_t offset, uint64_t bytes, uint64_t bytes_max) const;
};

class MemorySource : public ByteSource {
 public:
  // Does not copy the data, which must outlive this object.
  MemorySource(std::string_view data, std::string name) : data_(data), name_(std::move(name)) {}
  uint64_t size() const override { return data_.size(); }
  void read(uint64_t offset, void* data, size_t bytes) const override;
  std::string name() const override { return name_; }

 private:
  std::string_view data_;
  std::string name_;
};

class FileSource : public ByteSource {
 public:
  // Throws Error, which names the path, when it is not a readable regular file. Where another program holds the file for itself
  // (a lease), it waits.
  FileSource(FileSystem& files, std::string path);
  ~FileSource() override;
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;
  uint64_t size() const override { return size_; }
  void read(uint64_t offset, void* data, size_t bytes) const override;
  std::string name() const override { return path_; }

 private:
  FileSystem& files_;
  std::string path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

// The range [offset, offset + bytes) of another source, which must outlive this object. Its first and last 2 KiB are read once
// and kept, because zip files describe themselves there. A range of up to 4 KiB is kept as a whole.
class SliceSource : public ByteSource {
 public:
  SliceSource(const ByteSource& whole, uint64_t offset, uint64_t bytes, std::string name);
  uint64_t size() const override { return size_; }
  void read(uint64_t offset, void* data, size_t bytes) const override;
  std::string name() const override { return name_; }
  // Whether all of it was read already.
  bool is_kept() const;

 private:
  const ByteSource& whole_;
  uint64_t offset_, size_;
  std::string name_;
  std::string head_, tail_;
};

// Returns the content of a file. Throws Error when it has more than `bytes_max` bytes.
std::string read_file(FileSystem& files, const std::string& path, uint64_t bytes_max);
// Writes a new file and flushes it to the disk.
void write_file(FileSystem& files, const std::string& path, std::string_view data);
// Returns the names in a folder, ascending, without "." and "..". Throws Error when the folder cannot be listed completely.
std::vector<std::string> list_folder(const std::string& path, FileSystem& files = system_files());

}  // namespace shardproof::checkpoint
