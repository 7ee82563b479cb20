#include "harness/run/case_checkpoints.h"

#include <algorithm>
#include <array>
#include <atomic>
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

// Every call after the first few fails, and the rename with all after it: what was written never becomes a checkpoint. Or the
// rename is the last call that is done: the checkpoint is there, and nobody was told. What a process that died did not do is
// not done afterwards either. No call reaches the disk any sooner than the system likes.
FilesAround::Around dying(int64_t calls, bool after_rename) {
  return [left = std::make_shared<std::atomic<int64_t>>(calls), after_rename](FileCall& call, const auto& make) -> ssize_t {
    if (call.looks() || call.kind == CallKind::close || call.kind == CallKind::direct) return make();
    const bool commits = call.kind == CallKind::rename || call.kind == CallKind::exchange;
    if (commits) *left = 0;
    if (commits ? !after_rename : (*left)-- <= 0) return -EIO;
    return call.kind == CallKind::flush ? 0 : make();
  };
}

void load_and_remove(const std::string& folder, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer) {
  shardproof::checkpoint::load(folder, sharded, &optimizer);
  if (sharded.rank() == 0) shardproof::checkpoint::remove_folder(hasty_files(), folder);
}

}  // namespace

bool CaseCheckpoints::draw(const Case& c) {
  if (Draws(seed_, "disk of a cluster").bits(0) % 2 == 0)
    disk_of_cluster_.emplace(with(DiskHabits::drawn(seed_), seed_), hasty_files());
  bool needed = false;
  for (size_t s = 0; s < c.steps.size(); ++s) {
    needed |= c.steps[s].save || c.steps[s].crash;
    if (!c.steps[s].crash) continue;
    const int64_t calls = Draws(seed_, "crash").integer(static_cast<int64_t>(s), 0, kCallsMax);
    crashes_.try_emplace(s, dying(after_rename(s) ? std::numeric_limits<int64_t>::max() : calls, after_rename(s)));
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

shardproof::checkpoint::ManagerOptions CaseCheckpoints::options() {
  const uint64_t drawn = Draws(seed_, "async").bits(0);
  // A run that diverges ends with an error that says more than what became of its checkpoint.
  return {.keep = 2,
          .async = drawn % 2 == 0,
          .copy_in_background = drawn / 2 % 2 == 0,
          .lost = [](const std::string&) {},
          .files = disk_of_cluster_ ? &*disk_of_cluster_ : &hasty_files()};
}

bool CaseCheckpoints::after_rename(size_t step) const {
  return Draws(seed_, "dies after its rename").bits(static_cast<int64_t>(step)) % 4 == 0;
}

void CaseCheckpoints::crash(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer,
                            shardproof::Comm& world) {
  const auto at = static_cast<int64_t>(step);
  if (ranks_are_threads_ && Draws(seed_, "loses power").bits(at) % 3 == 0) return lose_power(step, sharded, optimizer, world);
  if (Draws(seed_, "is refused").bits(at) % 3 == 0) return refuse(step, sharded, optimizer, world);
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
  load_and_remove(folder, sharded, optimizer);
}

// One call of one rank fails, as where a quota is used up. All ranks are told, or none.
void CaseCheckpoints::refuse(size_t step, shardproof::Sharded& sharded, shardproof::Optimizer& optimizer,
                             shardproof::Comm& world) {
  const Draws draws = Draws(seed_, "refusal").at(static_cast<int64_t>(step));
  const std::string folder = shardproof::checkpoint::step_folder(directory_, number(step) + 1);
  const int error = std::array{EDQUOT, ENOSPC, EIO, ESTALE}.at(draws.bits(0) % 4);
  std::atomic<int64_t> left = draws.integer(1, 0, kCallsMax);
  const auto refusing = [&](FileCall& call, const auto& make) -> ssize_t {
    if (call.looks() || left-- != 0) return make();
    if (call.kind == CallKind::close) make();
    return -error;
  };
  FilesAround disk(refusing, hasty_files());
  FileSystem& files = draws.integer(2, 0, world.size() - 1) == world.rank() ? disk : hasty_files();
  const std::string told = shardproof::error_of(
      [&] { shardproof::checkpoint::save(folder, sharded, &optimizer, {.step = number(step) + 1}, {.files = &files}); });
  for (const std::string& others : shardproof::gather_texts(world, told))
    SHARD_REQUIRE(others.empty() == told.empty(), "harness",
                  "a disk refused what was saved before step {}. One rank was told {}, another {}", step + 1,
                  told.empty() ? "nothing" : told, others.empty() ? "nothing" : others);
  if (shardproof::from_rank_0(world, [&] { return std::string(std::filesystem::exists(folder) ? "there" : ""); }).empty()) {
    SHARD_REQUIRE(!told.empty(), "harness", "{} was saved before step {}, and is not there", folder, step + 1);
    return;
  }
  load_and_remove(folder, sharded, optimizer);
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
  load_and_remove(folder, sharded, optimizer);
}

}  // namespace harness
