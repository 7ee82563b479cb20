// Histories of checkpoints: which are there when, in the background or not, and what failures leave.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>

#include "properties/kit/checkpoint_trained.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"

namespace shardproof::checkpoint {
namespace {

const Place kPlace{"dp_shard=2", "zero3"};

// Writes wait until they are let through, then succeed or fail.
class GatedDisk : public FileSystem {
 public:
  ssize_t write(int fd, const void* data, size_t bytes) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
    return full_ ? -ENOSPC : FileSystem::write(fd, data, bytes);
  }
  void set_open(bool open, bool full = false) {
    const std::lock_guard lock(mutex_);
    open_ = open, full_ = full;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true, full_ = false;
};

// The words of what the body throws; "" when it throws nothing.
std::string error_in(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

RC_GTEST_PROP(Manager, the_last_few_are_kept_and_the_last_one_loads_with_the_values_of_its_save, ()) {
  const Place from = any_place(), to = any_place();
  const int64_t saves = *rc::gen::inRange<int64_t>(0, 4), keep = *rc::gen::inRange<int64_t>(0, 3);
  const bool async = *rc::gen::arbitrary<bool>(), polls = *rc::gen::arbitrary<bool>(), copies = *rc::gen::arbitrary<bool>();
  const Scratch scratch;
  Bits last;
  on(from, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, from, comm);
    Manager manager(scratch / "run", {.keep = keep, .async = async, .copy_in_background = copies});
    for (int64_t step = 1; step <= saves; ++step) {
      run.train(step - 1, step);
      Bits now = run.bits();
      if (comm->rank() == 0) last = std::move(now);
      manager.save(*run.sharded, &*run.optimizer, {.step = step});
      if (polls) manager.poll();
    }
    run.train(saves, saves + 1);  // right after the last save
    manager.wait();
  });
  std::vector<int64_t> expected;
  for (int64_t step = 1; step <= saves; ++step)
    if (keep == 0 || step > saves - keep) expected.push_back(step);
  RC_ASSERT(committed_steps(scratch / "run") == expected);
  if (saves > 0) RC_ASSERT(list_folder(scratch / "run").size() == expected.size());
  std::atomic<int64_t> wrong = 0;
  on(to, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, to, comm, 0.75);
    const Bits fresh = run.bits();
    Manager manager(scratch / "run");
    const auto loaded = manager.load_latest(*run.sharded, &*run.optimizer);
    if (loaded.has_value() != (saves > 0) || (loaded && loaded->trainer.step != saves)) ++wrong;
    if (run.bits() != (loaded ? last : fresh)) ++wrong;
  });
  RC_ASSERT(wrong == 0);
}

TEST(Manager, a_save_in_the_background_has_the_values_of_the_call_and_a_second_one_is_refused_or_waits) {
  for (const WhenBusy when_busy : {WhenBusy::refuse, WhenBusy::wait}) {
    const Scratch scratch;
    GatedDisk disk;
    const Bits expected = trained({}, kPlace, 1, "");
    on(kPlace, [&](std::shared_ptr<Comm> comm) {
      Trained run({}, kPlace, comm);
      Manager manager(scratch / "run", {.async = true, .when_busy = when_busy, .files = &disk});
      run.train(0, 1);
      manager.begin(*comm);
      disk.set_open(false);
      comm->barrier().wait();
      ASSERT_TRUE(manager.save(*run.sharded, &*run.optimizer, {.step = 1}));
      run.train(1, 3);
      EXPECT_FALSE(manager.poll());
      EXPECT_EQ(manager.latest(), std::nullopt) << "nothing is there before it is committed";
      if (when_busy == WhenBusy::refuse) {
        EXPECT_FALSE(manager.save(*run.sharded, &*run.optimizer, {.step = 3}));
      }
      comm->barrier().wait();
      disk.set_open(true);
      if (when_busy == WhenBusy::wait) {
        EXPECT_TRUE(manager.save(*run.sharded, &*run.optimizer, {.step = 3}));
      }
      manager.wait();
      comm->barrier().wait();
      EXPECT_EQ(manager.steps(), when_busy == WhenBusy::wait ? (std::vector<int64_t>{1, 3}) : std::vector<int64_t>{1});
      Trained other({}, kPlace, comm, 0.75);
      load(step_folder(scratch / "run", 1), *other.sharded, &*other.optimizer);
      EXPECT_EQ(other.bits(), expected);
    });
  }
}

TEST(Manager, a_failure_in_the_background_is_an_error_of_the_next_call_on_every_rank_and_only_of_that) {
  for (const char* call : {"wait", "poll", "save", "load"}) {
    const Scratch scratch;
    std::atomic<int64_t> errors = 0;
    on(kPlace, [&](std::shared_ptr<Comm> comm) {
      GatedDisk disk;
      Trained run({}, kPlace, comm);
      Manager manager(scratch / "run", {.async = true, .files = &disk});
      manager.save(*run.sharded, &*run.optimizer, {.step = 1});
      manager.wait();
      disk.set_open(true, comm->rank() == 1);
      manager.save(*run.sharded, &*run.optimizer, {.step = 2});
      const std::string words = error_in([&] {
        if (call == std::string("wait")) manager.wait();
        if (call == std::string("poll"))
          while (!manager.poll()) continue;
        if (call == std::string("save")) manager.save(*run.sharded, &*run.optimizer, {.step = 3});
        if (call == std::string("load")) manager.load_latest(*run.sharded, &*run.optimizer);
      });
      EXPECT_NE(words.find("space"), std::string::npos) << call << ": " << words;
      EXPECT_NE(words.find("rank 1"), std::string::npos) << call << ": " << words;
      errors += !words.empty();
      disk.set_open(true);
      manager.wait();
      comm->barrier().wait();
      EXPECT_EQ(manager.steps(), std::vector<int64_t>{1}) << call;
      manager.save(*run.sharded, &*run.optimizer, {.step = 4});
      manager.wait();
      comm->barrier().wait();
      EXPECT_EQ(manager.latest(), 4);
    });
    EXPECT_EQ(errors, 2) << call;
  }
}

TEST(Manager, a_save_that_nobody_waited_for_is_lost_aloud_and_leaves_nothing) {
  const Scratch scratch;
  testing::internal::CaptureStderr();
  on(kPlace, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, kPlace, comm);
    Manager manager(scratch / "run", {.async = true});
    manager.save(*run.sharded, &*run.optimizer, {.step = 7});
  });
  const std::string words = testing::internal::GetCapturedStderr();
  EXPECT_NE(words.find("step_7 was not committed"), std::string::npos) << words;
  EXPECT_EQ(latest_step(scratch / "run"), std::nullopt);
}

// One system call dies as the process would: it and all after it fail.
class DyingDisk : public FileSystem {
 public:
  explicit DyingDisk(int64_t calls) : left_(calls) {}
  int open(const std::string& path, int flags, mode_t mode) override {
    return dead() ? -EIO : FileSystem::open(path, flags, mode);
  }
  ssize_t write(int fd, const void* data, size_t bytes) override { return dead() ? -EIO : FileSystem::write(fd, data, bytes); }
  int fsync(int fd) override { return dead() ? -EIO : FileSystem::fsync(fd); }
  int rename(const std::string& a, const std::string& b) override { return dead() ? -EIO : FileSystem::rename(a, b); }
  int exchange(const std::string& a, const std::string& b) override { return dead() ? -EIO : FileSystem::exchange(a, b); }
  int mkdir(const std::string& path, mode_t mode) override { return dead() ? -EIO : FileSystem::mkdir(path, mode); }
  int unlink(const std::string& path) override { return dead() ? -EIO : FileSystem::unlink(path); }
  int rmdir(const std::string& path) override { return dead() ? -EIO : FileSystem::rmdir(path); }
  bool died() const { return left_ < 0; }

 private:
  bool dead() { return left_-- <= 0; }
  std::atomic<int64_t> left_;
};

TEST(Manager, a_run_that_dies_at_any_system_call_leaves_a_checkpoint_that_loads) {
  bool died = true;
  for (int64_t calls = 0; died; ++calls) {
    const Scratch scratch;
    DyingDisk disk(calls);
    std::atomic<bool> wrong = false;
    on(kPlace, [&](std::shared_ptr<Comm> comm) {
      Trained run({}, kPlace, comm);
      const Bits at_1 = run.bits();
      Manager(scratch / "run").save(*run.sharded, &*run.optimizer, {.step = 1});
      run.train(0, 1);
      const Bits at_2 = run.bits();
      const std::string words = error_in([&] {
        Manager manager(scratch / "run", {.keep = 1, .files = &disk});
        manager.save(*run.sharded, &*run.optimizer, {.step = 2});
      });
      comm->barrier().wait();
      wrong = wrong || (words.empty() && latest_step(scratch / "run") != 2);  // to keep less is no part of a save
      comm->barrier().wait();
      Trained other({}, kPlace, comm, 0.75);
      Manager after(scratch / "run", {.keep = 1});
      const auto loaded = after.load_latest(*other.sharded, &*other.optimizer);
      wrong = wrong || !loaded || other.bits() != (loaded->trainer.step == 1 ? at_1 : at_2);
      after.save(*other.sharded, &*other.optimizer, {.step = 3});
    });
    EXPECT_FALSE(wrong) << "dead after " << calls << " calls";
    EXPECT_EQ(list_folder(scratch / "run"), std::vector<std::string>{"step_3"}) << "dead after " << calls << " calls";
    died = disk.died();
  }
}

TEST(Manager, steps_only_go_up_unless_the_last_is_to_be_overwritten) {
  const Scratch scratch;
  on(kPlace, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, kPlace, comm);
    Manager manager(scratch / "run");
    manager.save(*run.sharded, &*run.optimizer, {.step = 5});
    for (const int64_t step : {4, 5, -1})
      EXPECT_NE(error_in([&] { manager.save(*run.sharded, &*run.optimizer, {.step = step}); }), "");
    run.train(0, 1);
    Manager overwriting(scratch / "run", {.overwrite = true});
    EXPECT_NE(error_in([&] { overwriting.save(*run.sharded, &*run.optimizer, {.step = 4}); }), "");
    overwriting.save(*run.sharded, &*run.optimizer, {.step = 5});
    Trained other({}, kPlace, comm, 0.75);
    overwriting.load_latest(*other.sharded, &*other.optimizer);
    EXPECT_EQ(other.bits(), run.bits());
  });
  EXPECT_NE(error_in([&] { Manager(scratch / "run", {.keep = -1}); }), "");
  EXPECT_NE(error_in([&] { Manager(""); }), "");
}

// A disk whose writes break an invariant of the program, as a thread of its own finds out.
class BrokenDisk : public FileSystem {
 public:
  ssize_t write(int fd, const void* data, size_t bytes) override {
    if (broken) throw BrokenInvariant("the disk has two heads");
    return FileSystem::write(fd, data, bytes);
  }
  bool broken = false;
};

TEST(Manager, an_invariant_that_breaks_in_the_background_is_thrown_at_the_next_call_and_the_other_ranks_fail_with_it) {
  const Scratch scratch;
  std::atomic<int64_t> broken = 0, failed = 0;
  on(kPlace, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, kPlace, comm);
    BrokenDisk disk;
    ManagerOptions options{.async = true};
    if (comm->rank() == 1) options.files = &disk;
    Manager manager(scratch / "run", options);
    manager.begin(*comm);
    disk.broken = true;
    manager.save(*run.sharded, &*run.optimizer, {.step = 1});
    try {
      manager.wait();
    } catch (const BrokenInvariant& error) {
      broken += std::string(error.what()).find("two heads") != std::string::npos;
    } catch (const Error& error) {
      ++failed;
    }
    manager.wait();  // what was reported once is over
    EXPECT_EQ(manager.latest(), std::nullopt);
  });
  EXPECT_EQ(broken, 1);
  EXPECT_EQ(failed, 1);
}

}  // namespace
}  // namespace shardproof::checkpoint
