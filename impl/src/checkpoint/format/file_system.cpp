#include "shardproof/checkpoint/format/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "checkpoint/format/cause.h"
#include "shardproof/base/check.h"
#include "internal/base/stream_copy.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kEnd = 2048;        // of a slice, kept
constexpr uint64_t kWhole = 2 * kEnd;  // a slice of at most so many bytes is kept as a whole
constexpr size_t kCallBytes = size_t{1} << 30;
constexpr size_t kBlockBytes = size_t{4} << 20;  // of output files; a file holds two in memory

template <typename Result>
Result or_errno(Result result) {
  return result < 0 ? static_cast<Result>(-errno) : result;
}

}  // namespace

int FileSystem::open(const std::string& path, int flags, mode_t mode) {
  return or_errno(::open(path.c_str(), flags, mode));
}
ssize_t FileSystem::write(int fd, const void* data, size_t bytes) {
  return or_errno(::write(fd, data, bytes));
}
ssize_t FileSystem::pread(int fd, void* data, size_t bytes, off_t offset) {
  return or_errno(::pread(fd, data, bytes, offset));
}
int FileSystem::fsync(int fd) {
  return or_errno(::fsync(fd));
}
int FileSystem::close(int fd) {
  return or_errno(::close(fd));
}
int FileSystem::set_direct(int fd, bool direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return -errno;
  return or_errno(::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT));
}
int FileSystem::rename(const std::string& from, const std::string& to) {
  const int done = or_errno(::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE));
  // Where the flag is unknown a plain rename still refuses to replace a folder that holds something.
  return done == -EINVAL || done == -ENOSYS ? or_errno(::rename(from.c_str(), to.c_str())) : done;
}
int FileSystem::exchange(const std::string& one, const std::string& two) {
  return or_errno(::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, two.c_str(), RENAME_EXCHANGE));
}
int FileSystem::mkdir(const std::string& path, mode_t mode) {
  return or_errno(::mkdir(path.c_str(), mode));
}
int FileSystem::unlink(const std::string& path) {
  return or_errno(::unlink(path.c_str()));
}
int FileSystem::rmdir(const std::string& path) {
  return or_errno(::rmdir(path.c_str()));
}
int FileSystem::status(const std::string& path, struct stat& status, bool of_link) {
  return or_errno((of_link ? ::lstat : ::stat)(path.c_str(), &status));
}
int FileSystem::list(const std::string& path, std::vector<std::string>& names) {
  DIR* folder = ::opendir(path.c_str());
  if (!folder) return -errno;
  errno = 0;  // at the end it stays so
  while (const dirent* entry = ::readdir(folder)) names.emplace_back(entry->d_name);
  const int error = errno;
  ::closedir(folder);
  return -error;
}

std::optional<struct stat> look_at(FileSystem& files, const std::string& path, Links links) {
  struct stat status {};
  const int done = again([&] { return files.status(path, status, links == Links::not_followed); });
  if (done == -ENOENT || done == -ENOTDIR) return std::nullopt;
  SHARD_REQUIRE(done >= 0, "checkpoint", "cannot find out what {} is: {}", path, cause(done));
  return status;
}

uint64_t file_bytes(FileSystem& files, const std::string& path) {
  const auto found = look_at(files, path);
  SHARD_REQUIRE(found, "checkpoint", "cannot open {}: {}", path, cause(-ENOENT));
  SHARD_REQUIRE(S_ISREG(found->st_mode), "checkpoint", "{} is no regular file", path);
  return static_cast<uint64_t>(found->st_size);
}

void require_written(FileSystem& files, const std::string& path, uint64_t bytes) {
  const auto found = look_at(files, path);
  SHARD_REQUIRE(found && static_cast<uint64_t>(found->st_size) == bytes, "checkpoint",
                "its rank wrote {} bytes to {}, and rank 0 finds {} on {}. All ranks must see one disk under this path", bytes,
                path, found ? fmt::format("{} bytes", found->st_size) : "no such file", host_name());
}

FileSystem& system_files() {
  static FileSystem files;
  return files;
}

OutputFile::OutputFile(FileSystem& files, std::string path) : files_(files), path_(std::move(path)) {
  fd_ = again([&] { return files_.open(path_, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
  SHARD_REQUIRE(fd_ >= 0, "checkpoint", "cannot create {}: {}. Is its folder there and writable?", path_, cause(fd_));
}

OutputFile::~OutputFile() {
  pending_.reset();
  if (fd_ >= 0) files_.close(fd_);
}

void OutputFile::Free::operator()(char* memory) const {
  std::free(memory);
}

OutputFile::Block OutputFile::make_block() {
  Block block(static_cast<char*>(std::aligned_alloc(kBlockBytes, kBlockBytes)));
  if (!block) throw std::bad_alloc();
  prefer_large_pages(block.get(), kBlockBytes);  // and the disk gets fewer pieces
  return block;
}

void OutputFile::write(const void* data, size_t bytes) {
  SHARD_CHECK(fd_ >= 0, "checkpoint", "{} is already finished", path_);
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    if (!filling_) filling_ = make_block();
    const size_t count = std::min(bytes, kBlockBytes - filled_);
    std::memcpy(filling_.get() + filled_, from, count);
    filled_ += count;
    from += count;
    bytes -= count;
    position_ += count;
    if (filled_ == kBlockBytes) start_block();
  }
}

// Only whole blocks may go around the cache; a file that has one is large.
void OutputFile::start_block() {
  if (const std::unique_ptr<HostJob> before = std::move(pending_)) before->wait();
  if (written_ == 0) direct_ = files_.set_direct(fd_, true) >= 0;
  std::swap(filling_, leaving_);
  filled_ = 0;
  pending_ = start_host_job([this] { write_out(leaving_.get(), kBlockBytes); });
}

void OutputFile::write_out(const char* from, size_t bytes) {
  pause_here();
  while (bytes > 0) {
    const ssize_t count = again([&] { return files_.write(fd_, from, bytes); });
    if (direct_ && (count == -EINVAL || (count > 0 && static_cast<size_t>(count) < bytes))) {
      direct_ = false;  // blocks here are larger than ours, or what is left is none
      SHARD_REQUIRE(files_.set_direct(fd_, false) >= 0, "checkpoint", "cannot write {} through the page cache", path_);
      if (count == -EINVAL) continue;
    }
    SHARD_REQUIRE(count > 0, "checkpoint", "cannot write {} at byte {}: {}", path_, written_,
                  count == 0 ? "nothing was accepted" : cause(count));
    from += count;
    bytes -= static_cast<size_t>(count);
    written_ += static_cast<uint64_t>(count);
  }
}

void OutputFile::finish() {
  SHARD_CHECK(fd_ >= 0, "checkpoint", "{} is already finished", path_);
  if (const std::unique_ptr<HostJob> before = std::move(pending_)) before->wait();
  if (direct_) {
    const int cached = files_.set_direct(fd_, false);
    SHARD_REQUIRE(cached >= 0, "checkpoint", "cannot write {} through the page cache: {}", path_, cause(cached));
    direct_ = false;
  }
  write_out(filling_.get(), filled_);
  const int flushed = again([&] { return files_.fsync(fd_); });
  SHARD_REQUIRE(flushed >= 0, "checkpoint", "cannot flush {} to the disk: {}", path_, cause(flushed));
  const int closed = files_.close(std::exchange(fd_, -1));
  SHARD_REQUIRE(closed >= 0, "checkpoint", "cannot close {}: {}", path_, cause(closed));
}

std::string ByteSource::read_string(uint64_t offset, uint64_t bytes, uint64_t bytes_max) const {
  SHARD_REQUIRE(bytes <= bytes_max, "checkpoint", "{}: {} bytes at {} are more than the {} allowed here", name(), bytes, offset,
                bytes_max);
  SHARD_REQUIRE(offset <= size() && bytes <= size() - offset, "checkpoint",
                "{}: bytes {} to {} lie behind its end, it has {}. Was it cut off?", name(), offset, offset + bytes, size());
  std::string data(bytes, '\0');
  read(offset, data.data(), bytes);
  return data;
}

void MemorySource::read(uint64_t offset, void* data, size_t bytes) const {
  SHARD_REQUIRE(offset <= data_.size() && bytes <= data_.size() - offset, "checkpoint",
                "{}: {} bytes at {} lie behind its end, it has {}", name_, bytes, offset, data_.size());
  if (bytes > 0) std::memcpy(data, data_.data() + offset, bytes);
}

FileSource::FileSource(FileSystem& files, std::string path) : files_(files), path_(std::move(path)) {
  // Looked at first: to open a named pipe takes until somebody writes to it.
  size_ = file_bytes(files_, path_);
  fd_ = again([&] { return files_.open(path_, O_RDONLY | O_CLOEXEC, 0); });
  SHARD_REQUIRE(fd_ >= 0, "checkpoint", "cannot open {}: {}", path_, cause(fd_));
  struct stat status {};
  if (::fstat(fd_, &status) == 0) size_ = static_cast<uint64_t>(status.st_size);  // a network disk knows better once it is open
}

FileSource::~FileSource() {
  files_.close(fd_);
}

void FileSource::read(uint64_t offset, void* data, size_t bytes) const {
  SHARD_REQUIRE(offset <= size_ && bytes <= size_ - offset, "checkpoint",
                "{}: {} bytes at {} lie behind its end, it has {}. Was it cut off?", path_, bytes, offset, size_);
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count = again([&] { return files_.pread(fd_, to, std::min(bytes, kCallBytes), static_cast<off_t>(offset)); });
    SHARD_REQUIRE(count > 0, "checkpoint", "cannot read {} at byte {}: {}", path_, offset,
                  count == 0 ? "it ends there now" : cause(count));
    to += count;
    bytes -= static_cast<size_t>(count);
    offset += static_cast<uint64_t>(count);
  }
}

SliceSource::SliceSource(const ByteSource& whole, uint64_t offset, uint64_t bytes, std::string name)
    : whole_(whole), offset_(offset), size_(bytes), name_(std::move(name)) {
  SHARD_REQUIRE(offset <= whole.size() && bytes <= whole.size() - offset, "checkpoint",
                "{}: bytes {} to {} lie behind the end of {}, which has {}. Was it cut off?", name_, offset, offset + bytes,
                whole.name(), whole.size());
  head_.resize(bytes <= kWhole ? bytes : kEnd);
  whole_.read(offset_, head_.data(), head_.size());
  tail_.resize(std::min(bytes - head_.size(), kEnd));
  whole_.read(offset_ + size_ - tail_.size(), tail_.data(), tail_.size());
}

bool SliceSource::is_kept() const {
  return head_.size() == size_;
}

void SliceSource::read(uint64_t offset, void* data, size_t bytes) const {
  SHARD_REQUIRE(offset <= size_ && bytes <= size_ - offset, "checkpoint", "{}: {} bytes at {} lie behind its end, it has {}",
                name_, bytes, offset, size_);
  if (bytes == 0) return;
  if (offset + bytes <= head_.size())
    std::memcpy(data, head_.data() + offset, bytes);
  else if (offset >= size_ - tail_.size())
    std::memcpy(data, tail_.data() + (offset - (size_ - tail_.size())), bytes);
  else
    whole_.read(offset_ + offset, data, bytes);
}

std::string read_file(FileSystem& files, const std::string& path, uint64_t bytes_max) {
  const FileSource source(files, path);
  return source.read_string(0, source.size(), bytes_max);
}

void write_file(FileSystem& files, const std::string& path, std::string_view data) {
  OutputFile file(files, path);
  file.write(data);
  file.finish();
}

std::vector<std::string> list_folder(const std::string& path, FileSystem& files) {
  std::vector<std::string> names;
  const int done = again([&] {
    names.clear();  // of a call that was interrupted
    return files.list(path, names);
  });
  SHARD_REQUIRE(done >= 0, "checkpoint", "cannot list {}: {}", path, cause(done));
  std::erase_if(names, [](const std::string& name) { return name == "." || name == ".."; });
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace shardproof::checkpoint
