#include "harness/run/case_checkpoints.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "harness/case/random.h"
#include "harness/run/power_loss.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/comm/agree.h"

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
    : seed_(c.seed), owns_(false), directory_(std::move(directory)), steps_(c.steps.size()) {
  draw(c);
}

CaseCheckpoints::CaseCheckpoints(const Case& c, bool ranks_are_threads)
    : seed_(c.seed), ranks_are_threads_(ranks_are_threads), steps_(c.steps.size()) {
  if (!draw(c)) return;
  directory_ = (std::filesystem::temp_directory_path() / "shardproof_case_XXXXXX").string();
  SHARD_REQUIRE(::mkdtemp(directory_.data()), "harness", "cannot make the folder {} for checkpoints; is TMPDIR writable?",
                directory_);
}

CaseCheckpoints::~CaseCheckpoints() {
  std::error_code ignored;
  if (!owns_ || directory_.empty()) return;
  std::filesystem::remove_all(directory_, ignored);
  for (size_t step = 0; step < steps_; ++step) std::filesystem::remove_all(adapters(step), ignored);
}

shardproof::checkpoint::ManagerOptions CaseCheckpoints::options() const {
  const uint64_t drawn = Draws(seed_, "async").bits(0);
  // A run that diverges ends with an error that says more than what became of its checkpoint.
  return {.keep = 2,
          .async = drawn % 2 == 0,
          .copy_in_background = drawn / 2 % 2 == 0,
          .lost = [](const std::string&) {},
          .files = &hasty_files()};
}

bool CaseCheckpoints::after_rename(size_t step) const {
  return Draws(seed_, "dies after its rename").bits(static_cast<int64_t>(step)) % 4 == 0;
}

void CaseCheckpoints::crash(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer,
                            shardproof::Comm& world) {
  const auto at = static_cast<int64_t>(step);
  if (ranks_are_threads_ && Draws(seed_, "loses power").bits(at) % 3 == 0) return lose_power(step, sharded, optimizer, world);
  const bool all_die = Draws(seed_, "who dies").bits(at) % 2 == 0;
  const std::string folder = shardproof::checkpoint::step_folder(directory_, number(step) + 1);
  FileSystem& files = all_die || sharded.rank() == 0 ? crashes_.at(step) : hasty_files();
  bool told = true;
  try {
    shardproof::checkpoint::save(folder, sharded, &optimizer, {.step = number(step) + 1}, {.files = &files});
  } catch (const shardproof::Error&) {
    told = false;
  }
  SHARD_REQUIRE(!told, "harness", "the save before step {} died, and rank {} was told that it is there", step + 1,
                sharded.rank());
  if (!after_rename(step)) return;
  shardproof::checkpoint::load(folder, sharded, &optimizer);
  if (sharded.rank() == 0) shardproof::checkpoint::remove_folder(hasty_files(), folder);
}

// Half of the saves are killed as well. Rank 0 acts for all, while the others wait for what it tells.
void CaseCheckpoints::lose_power(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer,
                                 shardproof::Comm& world) {
  const Draws draws = Draws(seed_, "power").at(static_cast<int64_t>(step));
  const int64_t saved = number(step) + 1;
  const std::string folder = shardproof::checkpoint::step_folder(directory_, saved);
  shardproof::from_rank_0(world, [&] {
    disk_ = std::make_unique<LossyDisk>(directory_);
    if (draws.bits(0) % 2 == 0) disk_->kill_after(draws.integer(1, 0, kCallsMax));
    return std::string();
  });
  bool returned = true;
  try {
    shardproof::checkpoint::save(folder, sharded, &optimizer, {.step = saved}, {.files = &disk_->files(sharded.rank())});
  } catch (const shardproof::Error&) {
    returned = false;
  }
  world.barrier().wait();
  const std::string there = shardproof::from_rank_0(world, [&]() -> std::string {
    if (returned) disk_->mark(1);
    const std::vector<int64_t> before = shardproof::checkpoint::committed_steps(directory_);
    RandomChoice choices(draws.bits(2));
    const DiskState state = harness::lose_power(disk_->record(), choices, {.block = draws.bits(3) % 2 == 0 ? 512U : 1000U});
    disk_.reset();
    restore(state, directory_);
    const std::vector<int64_t> after = shardproof::checkpoint::committed_steps(directory_);
    for (const int64_t known : before)
      SHARD_REQUIRE((known == saved && state.mark == 0) || std::find(after.begin(), after.end(), known) != after.end(),
                    "harness", "checkpoint {} is lost: power failed {} step {}", known,
                    state.mark == 0 ? "while one was saved before" : "after one was saved before", step + 1);
    for (const int64_t known : after) {
      const std::string path = shardproof::checkpoint::step_folder(directory_, known);
      const auto verified = shardproof::checkpoint::verify_checkpoint(shardproof::checkpoint::system_files(), path);
      SHARD_REQUIRE(verified.problems.empty(), "harness", "after a loss of power before step {}, checkpoint {} is damaged: {}",
                    step + 1, known, verified.problems[0].str());
    }
    return after.empty() || after.back() != saved ? "" : "there";
  });
  if (there.empty()) return;
  shardproof::checkpoint::load(folder, sharded, &optimizer);
  if (sharded.rank() == 0) shardproof::checkpoint::remove_folder(hasty_files(), folder);
}

}  // namespace harness
