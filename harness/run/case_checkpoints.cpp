#include "harness/run/case_checkpoints.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "harness/case/random.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/durable.h"

namespace harness {
namespace {

using shardproof::checkpoint::FileSystem;

constexpr int64_t kCallsMax = 30;  // about what a small save takes

// Cases are many and test what is written, not that it lasts.
class HastyFiles : public FileSystem {
 public:
  int fsync(int) override { return 0; }
};

FileSystem& hasty_files() {
  static HastyFiles files;
  return files;
}

}  // namespace

int DyingFiles::open(const std::string& path, int flags, mode_t mode) {
  return dead() ? -EIO : FileSystem::open(path, flags, mode);
}
ssize_t DyingFiles::write(int fd, const void* data, size_t bytes) {
  return dead() ? -EIO : FileSystem::write(fd, data, bytes);
}
int DyingFiles::fsync(int) {
  return dead() ? -EIO : 0;
}
int DyingFiles::rename(const std::string& from, const std::string& to) {
  left_ = 0;
  return after_rename_ ? FileSystem::rename(from, to) : -EIO;
}
int DyingFiles::exchange(const std::string&, const std::string&) {
  left_ = 0;
  return -EIO;
}
int DyingFiles::mkdir(const std::string& path, mode_t mode) {
  return dead() ? -EIO : FileSystem::mkdir(path, mode);
}
int DyingFiles::unlink(const std::string& path) {
  return dead() ? -EIO : FileSystem::unlink(path);
}
int DyingFiles::rmdir(const std::string& path) {
  return dead() ? -EIO : FileSystem::rmdir(path);
}

bool CaseCheckpoints::draw(const Case& c) {
  bool needed = false;
  for (size_t s = 0; s < c.steps.size(); ++s) {
    needed |= c.steps[s].save || c.steps[s].crash;
    if (!c.steps[s].crash) continue;
    const int64_t calls = Draws(seed_, "crash").integer(static_cast<int64_t>(s), 0, kCallsMax);
    crashes_.try_emplace(s, after_rename(s) ? std::numeric_limits<int64_t>::max() : calls, after_rename(s));
  }
  return needed;
}

CaseCheckpoints::CaseCheckpoints(const Case& c, std::string directory)
    : seed_(c.seed), owns_(false), directory_(std::move(directory)) {
  draw(c);
}

CaseCheckpoints::CaseCheckpoints(const Case& c) : seed_(c.seed) {
  if (!draw(c)) return;
  directory_ = (std::filesystem::temp_directory_path() / "shardproof_case_XXXXXX").string();
  SHARD_REQUIRE(::mkdtemp(directory_.data()), "harness", "cannot make the folder {} for checkpoints; is TMPDIR writable?",
                directory_);
}

CaseCheckpoints::~CaseCheckpoints() {
  std::error_code ignored;
  if (owns_ && !directory_.empty()) std::filesystem::remove_all(directory_, ignored);
}

shardproof::checkpoint::ManagerOptions CaseCheckpoints::options() const {
  // A run that diverges ends with an error that says more than what became of its checkpoint.
  return {
      .keep = 2, .async = Draws(seed_, "async").bits(0) % 2 == 0, .lost = [](const std::string&) {}, .files = &hasty_files()};
}

bool CaseCheckpoints::after_rename(size_t step) const {
  return Draws(seed_, "dies after its rename").bits(static_cast<int64_t>(step)) % 4 == 0;
}

void CaseCheckpoints::crash(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer) {
  const bool all_die = Draws(seed_, "who dies").bits(static_cast<int64_t>(step)) % 2 == 0;
  const std::string folder = shardproof::checkpoint::step_folder(directory_, number(step) + 1);
  FileSystem& files = all_die || sharded.rank() == 0 ? crashes_.at(step) : hasty_files();
  bool told = true;
  try {
    shardproof::checkpoint::save(folder, sharded, &optimizer, {.step = number(step) + 1}, {.files = &files});
  } catch (const shardproof::Error&) {
    told = false;
  }
  SHARD_REQUIRE(!told, "harness", "the save before step {} died, and rank {} was told that it is there", step, sharded.rank());
  if (!after_rename(step)) return;
  shardproof::checkpoint::load(folder, sharded, &optimizer);
  if (sharded.rank() == 0) shardproof::checkpoint::remove_folder(hasty_files(), folder);
}

}  // namespace harness
