// Runs on the disks of clusters: several hosts, several runs, and readers beside them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "properties/doubles/cluster_disk.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/checkpoint_stamped.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/comm/agree.h"

namespace shardproof::checkpoint {
namespace {

const std::vector<int64_t> kSmall = {3, 5, 2};

// A disk of this host's own: what the others have under `shared` is under `own` here. Folders are there as they are needed.
FilesAround::Around own_disk(const std::string& shared, const std::string& own) {
  return [=](FileCall& call, const auto& make) {
    if ((call.kind != CallKind::open && call.kind != CallKind::status) || !call.path.starts_with(shared)) return make();
    call.path = own + call.path.substr(shared.size());
    if ((call.flags & O_CREAT) != 0) std::filesystem::create_directories(std::filesystem::path(call.path).parent_path());
    return make();
  };
}

using Names = std::vector<std::string>;

// Runs the body on ranks with a model each.
void on_ranks(int64_t ranks, const std::function<void(Stamped& run, Comm& comm)>& body) {
  run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
    Stamped run(comm, kSmall);
    body(run, *comm);
  });
}

void save_steps(const std::string& run_folder, const std::vector<int64_t>& steps, int64_t ranks = 2,
                const ManagerOptions& options = {}) {
  on_ranks(ranks, [&](Stamped& run, Comm&) {
    Manager manager(run_folder, options);
    for (const int64_t step : steps) {
      run.stamp(step);
      manager.save(*run.sharded, &*run.optimizer, {.step = step});
    }
  });
}

// Loads the latest, on so many ranks, and returns its step.
int64_t loaded_step(const std::string& run_folder, int64_t ranks = 2) {
  std::atomic<int64_t> step = -1;
  on_ranks(ranks, [&](Stamped& run, Comm&) {
    Manager manager(run_folder);
    if (const auto loaded = manager.load_latest(*run.sharded, &*run.optimizer)) step = loaded->trainer.step;
    EXPECT_TRUE(step < 0 || run.has(step));
  });
  return step;
}

std::string this_host() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

TEST(Disks, a_reader_beside_a_run_that_saves_changes_nothing_and_the_save_is_whole) {
  const Scratch scratch;
  const std::string folder = scratch / "run";
  on_ranks(2, [&](Stamped& run, Comm& comm) {
    Manager manager(folder, {.keep = 1, .async = true});
    for (const int64_t step : {1, 2}) {
      run.stamp(step);
      manager.save(*run.sharded, &*run.optimizer, {.step = step});
      if (step == 1) manager.wait();
    }
    comm.barrier().wait();
    const Names before = list_folder(folder);
    if (comm.rank() == 0) {
      EXPECT_EQ(loaded_step(folder, 3), 1);  // evaluation
      EXPECT_EQ(list_folder(folder), before);
    }
    comm.barrier().wait();
    manager.wait();
    comm.barrier().wait();
    EXPECT_EQ(manager.steps(), std::vector<int64_t>{2});
  });
  EXPECT_TRUE(verify_checkpoint(system_files(), folder + "/step_2").problems.empty());
  EXPECT_EQ(loaded_step(folder), 2);
  EXPECT_EQ(list_folder(folder), Names{"step_2"}) << "the run's mark goes with the run";
}

TEST(Disks, what_dead_saves_left_is_removed_by_who_saves_next_and_nothing_else_is) {
  const Scratch scratch;
  save_steps(scratch.path(), {1});
  const Names others = {".exported.saving-3-0", ".weights.removing-1-0", "notes", ".step_notes"};
  for (const std::string& name : others) std::filesystem::create_directory(scratch / name);
  for (const char* name : {".step_2.saving-5-1", ".step_0.removing-5-0", ".step_7.saving-0-0123456789abcdef"})
    std::filesystem::create_directory(scratch / name);
  const Names before = list_folder(scratch.path());
  EXPECT_EQ(loaded_step(scratch.path()), 1);
  EXPECT_EQ(list_folder(scratch.path()), before) << "a reader removes nothing";
  save_steps(scratch.path(), {2});
  Names expected = others;
  expected.insert(expected.end(), {"step_1", "step_2"});
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(list_folder(scratch.path()), expected);
}

// A run that was killed, or one that lives elsewhere: its mark, with some of what it says replaced.
class Marked {
 public:
  explicit Marked(const std::string& folder) : mark_(folder + "/.step_owner") {
    const std::string copy = folder + ".copy";
    on_ranks(2, [&](Stamped&, Comm& comm) {
      Manager manager(folder);
      manager.begin(comm);
      comm.barrier().wait();
      if (comm.rank() == 0) std::filesystem::copy(mark_, copy, std::filesystem::copy_options::recursive);
      comm.barrier().wait();
    });
    EXPECT_FALSE(std::filesystem::exists(mark_)) << "it is given back";
    std::filesystem::rename(copy, mark_);
    text_ = slurp(mark_ + "/rank_0");
  }
  void say(const std::map<std::string, std::string>& facts) const {
    std::filesystem::create_directories(mark_);
    std::string text = "\n" + text_;
    for (const auto& [name, value] : facts) {
      const size_t begin = text.find("\n" + name + " ");
      ASSERT_NE(begin, std::string::npos) << name << " in" << text;
      const size_t end = text.find('\n', begin + 1);
      text.replace(begin, end - begin, "\n" + name + " " + value);
    }
    spill(mark_ + "/rank_0", text.substr(1));
  }
  std::string said(const std::string& name) const {
    const std::string text = "\n" + text_;
    const size_t begin = text.find("\n" + name + " ") + name.size() + 2;
    return text.substr(begin, text.find('\n', begin) - begin);
  }
  const std::string& path() const { return mark_; }

 private:
  std::string mark_, text_;
};

std::string began(const std::string& process) {
  const std::string text = slurp("/proc/" + process + "/stat");
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) fields >> field;
  return field;
}

TEST(Disks, a_second_run_is_refused_by_the_owners_name_unless_the_owner_is_known_to_be_gone) {
  const Scratch scratch;
  const std::string folder = scratch / "run";
  const Marked mark(folder);
  const std::string parent = std::to_string(::getppid());  // it lives
  int64_t step = 0;
  const auto taken = [&](const std::map<std::string, std::string>& facts) {
    mark.say(facts);
    EXPECT_NO_THROW(save_steps(folder, {++step}));
    EXPECT_FALSE(std::filesystem::exists(mark.path()));
  };
  const auto refused = [&](const std::map<std::string, std::string>& facts, const std::string& host) {
    mark.say(facts);
    const std::string said = slurp(mark.path() + "/rank_0");
    const std::vector<int64_t> before = committed_steps(folder);
    expect_error([&] { save_steps(folder, {step + 1}); }, {"another run saves in " + folder, host, "rm -r " + mark.path()});
    EXPECT_EQ(slurp(mark.path() + "/rank_0"), said);
    EXPECT_EQ(committed_steps(folder), before);
  };
  taken({{"process", parent}, {"began", "1"}});  // of a process that had the number before
  taken({{"process", "4194305"}});               // more than there may be
  taken({{"id", "left"}});                       // of this process, whose manager could not give it back
  refused({{"process", parent}, {"began", began(parent)}}, this_host());
  refused({{"host", "node17"}, {"boot", "another"}, {"process", "4194305"}}, "node17");
  refused({{"host", "node17"}, {"boot", "another"}, {"since", "1999-12-31 23:59:59 UTC"}}, "node17");  // no clock counts
  refused({{"processes", "pid:[1]"}, {"process", "4194305"}}, this_host());  // of another container of this host
  if (mark.said("machine").empty())
    refused({{"boot", "another"}}, this_host());
  else
    taken({{"boot", "another"}});
  ::setenv("SLURM_JOB_ID", "77", 1);
  const std::map<std::string, std::string> elsewhere = {{"host", "node17"}, {"boot", "another"}, {"job", "77"}};
  refused(elsewhere, "node17");  // two steps of one job
  ::setenv("SLURM_RESTART_COUNT", "1", 1);
  taken(elsewhere);
  ::unsetenv("SLURM_JOB_ID");
  ::unsetenv("SLURM_RESTART_COUNT");
  std::filesystem::create_directories(mark.path());
  expect_error([&] { save_steps(folder, {++step}); }, {"another run", "unknown"});
}

TEST(Disks, a_run_whose_folder_was_taken_meanwhile_commits_nothing) {
  const Scratch scratch;
  const std::string folder = scratch / "run";
  const Marked mark(folder);
  std::filesystem::remove_all(mark.path());
  std::atomic<int64_t> errors = 0;
  on_ranks(2, [&](Stamped& run, Comm& comm) {
    Manager manager(folder, {.async = true});
    manager.save(*run.sharded, &*run.optimizer, {.step = 1});
    if (comm.rank() == 0) mark.say({{"host", "node17"}});
    comm.barrier().wait();
    try {
      manager.wait();
    } catch (const Error& error) {
      errors += std::string(error.what()).find("node17") != std::string::npos;
    }
  });
  EXPECT_EQ(errors, 2);
  EXPECT_EQ(list_folder(folder), Names{".step_owner"}) << "the other's mark stays, and no checkpoint is there";
}

TEST(Disks, what_the_disk_refuses_is_known_before_the_first_save_with_host_and_folder) {
  for (const int64_t unlucky : {0, 1})
    for (const auto& [call, error, says] :
         std::vector<std::tuple<CallKind, int, std::string>>{{CallKind::open, EACCES, "Permission denied"},
                                                             {CallKind::write, ENOSPC, "No space left on device"},
                                                             {CallKind::rename, EXDEV, "Invalid cross-device link"},
                                                             {CallKind::mkdir, EEXIST, "File exists"}}) {
      if ((call == CallKind::rename || call == CallKind::mkdir) && unlucky == 1) continue;  // rank 0's calls
      const Scratch scratch;
      const std::string folder = scratch / "run";
      std::atomic<int64_t> errors = 0;
      const char* const part = call == CallKind::open ? "rank_" : call == CallKind::mkdir ? ".step_owner" : "";
      ClusterDisk faulty({.refuses = {{call, error}}, .part = part});
      on_ranks(3, [&](Stamped&, Comm& comm) {
        ManagerOptions options;
        if (comm.rank() == unlucky) options.files = &faulty;
        Manager manager(folder, options);
        try {
          manager.begin(comm);
        } catch (const Error& thrown) {
          const std::string words = thrown.what();
          for (const std::string& part : {says + " on " + this_host(), folder, "rank " + std::to_string(unlucky)})
            errors += words.find(part) != std::string::npos;
        }
      });
      EXPECT_EQ(errors, 3 * 3) << says << " on rank " << unlucky;
      EXPECT_TRUE(list_folder(folder).empty()) << says << " on rank " << unlucky;
    }
}

TEST(Disks, a_file_that_a_rank_wrote_to_a_disk_of_its_own_is_missed_before_the_commit) {
  for (const bool by_manager : {false, true}) {
    const Scratch scratch;
    const std::string folder = scratch / "run";
    save_steps(folder, {1}, 3);
    std::atomic<int64_t> errors = 0;
    on_ranks(3, [&](Stamped& run, Comm& comm) {
      FilesAround own(own_disk(scratch / "run", scratch / "node1"));
      FileSystem* const files = comm.rank() == 1 ? &own : &system_files();
      try {
        if (by_manager)
          Manager(folder, {.files = files}).save(*run.sharded, &*run.optimizer, {.step = 2});
        else
          save(folder + "/step_2", *run.sharded, &*run.optimizer, {.step = 2}, {.files = files});
      } catch (const Error& error) {
        const std::string words = error.what();
        errors += words.find("one disk") != std::string::npos && words.find(this_host()) != std::string::npos;
      }
    });
    EXPECT_EQ(errors, 3);
    EXPECT_EQ(list_folder(folder), Names{"step_1"});
  }
}

TEST(Disks, ranks_that_see_different_checkpoints_of_one_name_load_neither) {
  const Scratch scratch;
  for (const char* folder : {"run", "node1"}) save_steps(scratch / folder, {4});
  for (const bool check_before : {true, false}) {
    std::atomic<int64_t> errors = 0, kept = 0;
    on_ranks(2, [&](Stamped& run, Comm& comm) {
      FilesAround own(own_disk(scratch / "run", scratch / "node1"));
      run.stamp(9);
      try {
        load(scratch / "run/step_4", *run.sharded, &*run.optimizer,
             {.check_before = check_before, .files = comm.rank() == 1 ? &own : &system_files()});
      } catch (const Error& error) {
        const std::string words = error.what();
        errors += words.find("different checkpoints") != std::string::npos && words.find("rank 1") != std::string::npos;
      }
      kept += run.has(9);
    });
    EXPECT_EQ(errors, 2);
    EXPECT_EQ(kept, 2);
  }
}

TEST(Disks, a_rank_whose_list_is_old_loads_what_rank_0_has_found) {
  const Scratch scratch;
  save_steps(scratch.path(), {2, 4});
  FilesAround old([](FileCall& call, const auto& make) {
    const ssize_t done = make();
    if (call.kind == CallKind::list) std::erase(*call.names, "step_4");
    return done;
  });
  on_ranks(2, [&](Stamped& run, Comm& comm) {
    Manager manager(scratch.path(), {.files = comm.rank() == 1 ? &old : &system_files()});
    const auto loaded = manager.load_latest(*run.sharded, &*run.optimizer);
    EXPECT_TRUE(loaded && loaded->trainer.step == 4 && run.has(4));
  });
}

TEST(Disks, where_the_disk_does_not_tell_what_is_there_nothing_begins_anew) {
  const Scratch scratch;
  save_steps(scratch.path(), {2, 4});
  for (const auto& [call, error] : std::map<CallKind, int>{{CallKind::status, ESTALE}, {CallKind::list, EIO}}) {
    ClusterDisk faulty({.refuses = {{call, error}}, .part = call == CallKind::status ? "step_4/.metadata" : ""});
    std::atomic<int64_t> errors = 0;
    on_ranks(2, [&](Stamped& run, Comm&) {
      Manager manager(scratch.path(), {.files = &faulty});
      errors += !error_of([&] { manager.latest(); }).empty();
      errors += !error_of([&] { manager.load_latest(*run.sharded, &*run.optimizer); }).empty();
      errors += !error_of([&] { manager.save(*run.sharded, &*run.optimizer, {.step = 5}); }).empty();
    });
    EXPECT_EQ(errors, 6) << error;
  }
  EXPECT_EQ(committed_steps(scratch.path()), (std::vector<int64_t>{2, 4}));
}

TEST(Disks, what_cannot_be_removed_is_a_warning_and_the_run_goes_on) {
  for (const auto& errors : std::vector<std::map<CallKind, int>>{
           {{CallKind::rmdir, ENOTEMPTY}}, {{CallKind::unlink, EACCES}}, {{CallKind::rename, EXDEV}}}) {
    const Scratch scratch;
    save_steps(scratch.path(), {1});
    std::filesystem::create_directory(scratch / ".step_1.saving-5-1");
    spill(scratch / ".step_1.saving-5-1/file", "x");
    ClusterDisk faulty({.refuses = errors, .part = "step_1"});
    testing::internal::CaptureStderr();
    EXPECT_NO_THROW(save_steps(scratch.path(), {2, 3}, 2, {.keep = 1, .files = &faulty}));
    EXPECT_NO_THROW(save_steps(scratch.path(), {4}, 2, {.keep = 1, .files = &faulty}));
    const std::string words = testing::internal::GetCapturedStderr();
    EXPECT_NE(words.find("This is a warning"), std::string::npos) << words;
    EXPECT_EQ(latest_step(scratch.path()), 4);
    EXPECT_EQ(loaded_step(scratch.path()), 4);
    save_steps(scratch.path(), {5}, 2, {.keep = 1});
    EXPECT_EQ(list_folder(scratch.path()), Names{"step_5"}) << "and a later save removes it";
  }
}

TEST(Disks, folders_that_cannot_be_flushed_calls_that_are_interrupted_and_answers_that_are_lost_stop_no_run) {
  const auto expect_works = [](FileSystem& files) {
    const Scratch scratch;
    save_steps(scratch.path(), {1, 2, 3}, 2, {.keep = 2, .files = &files});
    save_steps(scratch.path(), {3, 4}, 2, {.keep = 1, .overwrite = true, .files = &files});
    EXPECT_EQ(list_folder(scratch.path()), Names{"step_4"});
    on_ranks(2, [&](Stamped& run, Comm&) {
      Manager manager(scratch.path(), {.files = &files});
      const auto loaded = manager.load_latest(*run.sharded, &*run.optimizer, {.files = &files});
      EXPECT_TRUE(loaded && loaded->trainer.step == 4 && run.has(4));
    });
  };
  for (const int error : {EINVAL, EOPNOTSUPP, ENOSYS}) {
    ClusterDisk faulty({.harmless = {.folders_flush = error}});
    expect_works(faulty);
  }
  ClusterDisk interrupted({.harmless = {.interrupts = 1}});
  expect_works(interrupted);
  EXPECT_GT(interrupted.partial(), 100);
  ClusterDisk cutting({.harmless = {.cuts = 1}});
  expect_works(cutting);
  EXPECT_GT(cutting.partial(), 100);
  ClusterDisk forgetful({.harmless = {.forgets = 1}});
  expect_works(forgetful);
  ClusterDisk broken({.harmless = {.folders_flush = EIO}});
  const Scratch scratch;
  expect_error([&] { save_steps(scratch / "run", {1}, 2, {.files = &broken}); }, {"cannot flush"});
}

// Saves by several ranks over a disk with habits that the seed draws: of all ranks, or of one alone. Throws Error when a rank
// is told something else than the others, or something is lost or mixed.
void save_and_load_over(uint64_t seed, int64_t& refused, int64_t& saved) {
  const Scratch scratch;
  const std::string folder = scratch / "run";
  harness::Chooser draw(harness::Draws(seed, "history"));
  const bool harmless = draw.chance(0.3), everywhere = draw.chance(0.5);
  const ClusterHabits habits =
      harmless ? ClusterHabits{.harmless = harness::DiskHabits::drawn(seed)} : ClusterHabits::harmful(seed);
  const int64_t ranks = draw.integer(1, 3), unlucky = draw.integer(0, ranks - 1), keep = draw.integer(0, 2);
  std::vector<std::unique_ptr<ClusterDisk>> disks;
  for (int64_t rank = 0; rank < ranks; ++rank)
    disks.push_back(std::make_unique<ClusterDisk>(everywhere || rank == unlucky ? habits : ClusterHabits{},
                                                  seed + static_cast<uint64_t>(rank), harness::hasty_files()));
  int64_t told = 0, step = 0;
  const auto agree_to = [&](const std::vector<std::string>& errors, const char* what) {
    for (const std::string& error : errors) {
      if (error.empty() != errors[0].empty())
        throw Error(fmt::format("{}: rank 0 is told '{}', another '{}'", what, errors[0], error));
      if (error.empty()) continue;
      if (harmless) throw Error(fmt::format("{} failed: {}", what, error));
      if (error.find(std::filesystem::temp_directory_path()) == std::string::npos ||
          error.find(this_host()) == std::string::npos)
        throw Error(fmt::format("{}: an error without folder or host: {}", what, error));
    }
    return errors[0].empty();
  };
  for (int64_t saves = draw.integer(2, 4); saves > 0; --saves) {
    const bool async = draw.chance(0.5);
    std::vector<std::string> errors(static_cast<size_t>(ranks)), reads(errors);
    const int64_t next = latest_step(folder).value_or(0) + 1;
    on_ranks(ranks, [&](Stamped& run, Comm& comm) {
      FileSystem& disk = *disks[static_cast<size_t>(comm.rank())];
      run.stamp(next);
      errors[static_cast<size_t>(comm.rank())] = error_of([&] {
        Manager manager(folder, {.keep = keep, .async = async, .lost = [](const std::string&) {}, .files = &disk});
        manager.save(*run.sharded, &*run.optimizer, {.step = next});
        run.stamp(next + 1000);
        manager.wait();
      });
    });
    if (agree_to(errors, "a save"))
      told = next, ++saved;
    else
      ++refused;
    on_ranks(ranks, [&](Stamped& run, Comm& comm) {
      FileSystem& disk = *disks[static_cast<size_t>(comm.rank())];
      reads[static_cast<size_t>(comm.rank())] = error_of([&] {
        Manager reader(folder, {.files = &disk});
        const auto loaded = reader.load_latest(*run.sharded, &*run.optimizer, {.files = &disk});
        if (loaded ? !run.has(loaded->trainer.step) : told > 0 && habits.list_age == 0) throw std::logic_error("mixed or lost");
      });
    });
    agree_to(reads, "a load");
  }
  const std::optional<int64_t> latest = latest_step(folder);
  if (latest.value_or(0) < told) throw Error(fmt::format("step {} was saved, and {} is there", told, latest.value_or(0)));
  for (const int64_t known : committed_steps(folder)) {
    if (!verify_checkpoint(system_files(), step_folder(folder, known)).problems.empty()) throw Error("damaged");
    step = known;
  }
  if (step > 0 && loaded_step(folder) != step) throw Error("what is there does not load");
}

TEST(Disks, whatever_a_disk_of_a_cluster_does_what_was_saved_is_there_to_the_bit_and_an_error_is_one_on_all_ranks) {
  const char* asked = std::getenv("SHARDPROOF_DISK_SEED");
  int64_t refused = 0, saved = 0;
  testing::internal::CaptureStderr();  // warnings
  for (uint64_t seed = asked ? std::strtoull(asked, nullptr, 10) : 0;
       seed < (asked ? std::strtoull(asked, nullptr, 10) + 1 : 100); ++seed) {
    const std::string error = error_of([&] { save_and_load_over(seed, refused, saved); });
    if (error.empty()) continue;
    ADD_FAILURE() << error << "\nover a disk with " << ClusterHabits::harmful(seed).str()
                  << "\nreplay: SHARDPROOF_DISK_SEED=" << seed << " checkpoint_failures_props --gtest_filter=Disks.whatever_*";
    break;
  }
  testing::internal::GetCapturedStderr();
  std::printf("%lld saves, and %lld that were refused\n", static_cast<long long>(saved), static_cast<long long>(refused));
  EXPECT_TRUE(asked || (refused > 30 && saved > 100));
}

TEST(Disks, an_error_of_the_last_checkpoint_names_the_one_before) {
  const Scratch scratch;
  save_steps(scratch.path(), {2, 4});
  std::filesystem::remove(scratch / "step_4/__1_0.distcp");
  expect_error([&] { loaded_step(scratch.path()); }, {"step_4/__1_0.distcp", this_host(), scratch / "step_2"});
  std::filesystem::remove_all(scratch / "step_2");
  EXPECT_EQ(error_of([&] { loaded_step(scratch.path()); }).find("before it"), std::string::npos);
}

TEST(Disks, a_load_opens_about_three_files_a_rank) {
  const Scratch scratch;
  constexpr int64_t kRanks = 8;
  save_steps(scratch.path(), {1}, kRanks);
  std::atomic<int64_t> opens = 0;
  FilesAround files([&](FileCall& call, const auto& make) -> ssize_t {
    opens += call.kind == CallKind::open;
    return (call.flags & O_NONBLOCK) != 0 ? -EAGAIN : make();  // as a file that somebody else holds
  });
  on_ranks(kRanks, [&](Stamped& run, Comm&) {
    load(scratch / "step_1", *run.sharded, &*run.optimizer, {.files = &files});
    EXPECT_TRUE(run.has(1));
  });
  EXPECT_LE(opens, 3 * kRanks + 2);
  EXPECT_GE(opens, 2 * kRanks);
}

TEST(Disks, the_umask_says_who_may_read_and_write) {
  const Scratch scratch;
  const mode_t before = ::umask(0002);
  save_steps(scratch / "new/run", {1});
  ::umask(before);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(scratch / "new")) {
    struct stat status {};
    ASSERT_EQ(::stat(entry.path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, entry.is_directory() ? 0775U : 0664U) << entry.path();
  }
}

}  // namespace
}  // namespace shardproof::checkpoint
