// Two processes on one folder of a run: whatever the second does between any two calls of the first, both find whole
// checkpoints, and who is refused is told so. The second one is a manager with a file system of its own, which acts while the
// first waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <charconv>

#include "harness/commands/checkpoint_command.h"
#include "properties/doubles/cluster_disk.h"
#include "properties/kit/checkpoint_stamped.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/power_loss.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/comm/agree.h"

namespace shardproof::checkpoint {
namespace {

// What the first process is made to do. Its checkpoint has the stamp 77, and those before it their steps.
constexpr int64_t kFirst = 77, kSecond = 88;

struct Story {
  std::string name;
  int64_t ranks = 1;
  bool async = false;
  std::vector<int64_t> before = {1};
  int64_t step = 2;
  int64_t keep = 0;
  bool overwrite = false;
  uint64_t habits = 0;  // the seed of those of the disk; 0: none

  std::string str() const {
    return fmt::format("{} by {} rank{}{}{}", name, ranks, ranks > 1 ? "s" : "", async ? " in the background" : "",
                       habits ? fmt::format(" over disk {}", habits) : "");
  }
  ManagerOptions options(FileSystem& files) const {
    return {.keep = keep, .async = async, .overwrite = overwrite, .lost = [](const std::string&) {}, .files = &files};
  }
};

TrainerState trainer_of(int64_t step, int64_t stamp) {
  return {.step = step, .data_position = stamp, .of_rank = {{"stamp", Value::integer(stamp)}}};
}

// With `before`, each of which has itself as its stamp.
void make_run(const std::string& run, const std::vector<int64_t>& before) {
  run_threads(1, [&](std::shared_ptr<Comm> comm) {
    Stamped model(comm, {2, 2});
    Manager manager(run, {.files = &harness::hasty_files()});
    for (const int64_t step : before) {
      model.stamp(step);
      manager.save(*model.sharded, &*model.optimizer, trainer_of(step, step));
    }
  });
}

// What can be read, by a process that reads: the stamp of each step, all of which are whole.
std::map<int64_t, int64_t> stamps_in(const std::string& run, Stamped& model, FileSystem& files) {
  std::map<int64_t, int64_t> stamps;
  for (const int64_t step : committed_steps(run, files)) {
    const Verified verified = verify_checkpoint(files, step_folder(run, step));
    if (!verified.problems.empty()) throw Error(fmt::format("step {}: {}", step, verified.problems[0].str()));
    const TrainerState trainer = load(step_folder(run, step), *model.sharded, &*model.optimizer, {.files = &files}).trainer;
    if (trainer.step != step || !model.has(trainer.data_position)) throw Error(fmt::format("step {} is a mix", step));
    stamps[step] = trainer.data_position;
  }
  return stamps;
}

std::map<int64_t, int64_t> read_by_a_second_process(const std::string& run, FileSystem& files) {
  std::map<int64_t, int64_t> stamps;
  run_threads(1, [&](std::shared_ptr<Comm> comm) {
    Stamped model(comm, {2, 2});
    stamps = stamps_in(run, model, files);
    Manager manager(run, {.files = &files});
    const auto loaded = manager.load_latest(*model.sharded, &*model.optimizer, {.files = &files});
    const bool is_last = stamps.empty() ? !loaded
                                        : loaded && loaded->trainer.data_position == stamps.rbegin()->second &&
                                              model.has(stamps.rbegin()->second);
    if (!is_last) throw Error("load_latest did not load the last one");
  });
  return stamps;
}

std::string str(const std::map<int64_t, int64_t>& stamps) {
  std::string text;
  for (const auto& [step, stamp] : stamps) text += fmt::format(" step {} of stamp {}", step, stamp);
  return text.empty() ? " nothing" : text;
}

// The first process's save. Throws what it is told.
void save_first(const Story& story, const std::string& run, const std::vector<FileSystem*>& files) {
  run_threads(story.ranks, [&](std::shared_ptr<Comm> comm) {
    Stamped model(comm, {2, 2});
    model.stamp(kFirst);
    Manager manager(run, story.options(*files.at(static_cast<size_t>(comm->rank()))));
    manager.save(*model.sharded, &*model.optimizer, trainer_of(story.step, kFirst));
    model.stamp(kFirst + 1);
    manager.wait();
  });
}

// The calls of a process, counted. `at` is called before each of them, and nothing of the process is done meanwhile.
class Calls {
 public:
  explicit Calls(std::function<void(int64_t number, const FileCall&)> at) : at_(std::move(at)) {}
  FilesAround::Around around() {
    return [this](FileCall& call, const auto& make) {
      const std::lock_guard lock(mutex_);
      at_(made_++, call);
      return make();
    };
  }
  int64_t made() const { return made_; }

 private:
  std::mutex mutex_;
  int64_t made_ = 0;
  std::function<void(int64_t, const FileCall&)> at_;
};

// Before which call something was wrong, and the line that looks there again.
std::string where(const std::string& story, int64_t number, const FileCall* call) {
  return fmt::format("\nbefore call {}{} of the first process\n{}", number,
                     call ? fmt::format(" (kind {}, {} {})", static_cast<int>(call->kind), call->path, call->to) : "",
                     replay_line(story, std::to_string(number)));
}

bool is_asked(int64_t number) {
  return !replay.asked() || replay.choices() == std::to_string(number);
}

void tell_points(const std::string& story, int64_t points, const std::string& what) {
  if (!replay.asked()) std::printf("%s: %lld points, %s\n", story.c_str(), static_cast<long long>(points), what.c_str());
}

// The file systems of the ranks of the first process: `calls` hears of what reaches the disk.
struct FirstFiles {
  FirstFiles(const Story& story, Calls& calls, bool cuts = true) : heard(calls.around(), harness::hasty_files()) {
    ClusterHabits habits{.harmless = harness::DiskHabits::drawn(story.habits)};
    if (!cuts) habits.harmless.cuts = 0;
    for (int64_t rank = 0; rank < story.ranks; ++rank) {
      if (story.habits != 0)
        disks.push_back(std::make_unique<ClusterDisk>(habits, story.habits + static_cast<uint64_t>(rank), heard));
      all.push_back(story.habits != 0 ? disks.back().get() : static_cast<FileSystem*>(&heard));
    }
  }
  FilesAround heard;
  std::vector<std::unique_ptr<ClusterDisk>> disks;
  std::vector<FileSystem*> all;
};

// A reader before each call that changes something, which is between any two states of the folder.
int64_t read_between_all_calls(const Story& story) {
  const std::string name = "reader beside " + story.str();
  if (replay.leaves_out(name)) return 0;
  const Scratch scratch;
  const std::string run = scratch / "run";
  make_run(run, story.before);
  std::map<int64_t, int64_t> old;
  for (const int64_t step : story.before) old[step] = step;
  bool was_new = false;
  int64_t points = 0, new_ones = 0;
  ClusterDisk disk({.harmless = story.habits ? harness::DiskHabits::drawn(story.habits + 100) : harness::DiskHabits{}},
                   story.habits);
  const auto look = [&](int64_t number, const FileCall* call) {
    if (!is_asked(number)) return;
    ++points;
    try {
      const auto before = contents(scratch.path());
      const std::map<int64_t, int64_t> stamps = read_by_a_second_process(run, disk);
      if (contents(scratch.path()) != before) throw Error("a reader changed something");
      const int64_t last = stamps.empty() ? 0 : stamps.rbegin()->second, last_of_old = old.empty() ? 0 : old.rbegin()->second;
      if (last != kFirst && (last != last_of_old || was_new)) throw Error("the last one is lost, there is" + str(stamps));
      for (const auto& [step, stamp] : stamps)
        if (stamp != kFirst && (!old.contains(step) || old.at(step) != stamp)) throw Error("never saved:" + str(stamps));
      was_new |= last == kFirst;
      new_ones += last == kFirst;
    } catch (const std::exception& error) {
      throw Error(error.what() + where(name, number, call));
    }
  };
  Calls calls([&](int64_t number, const FileCall& call) {
    if (!call.looks()) look(number, &call);
  });
  FirstFiles files(story, calls);
  try {
    save_first(story, run, files.all);
    look(calls.made(), nullptr);
    EXPECT_TRUE(was_new || replay.asked()) << name;
    const int64_t left = story.keep ? story.keep : std::ssize(old) + (old.contains(story.step) ? 0 : 1);
    EXPECT_TRUE(std::ssize(list_folder(run)) == left || story.habits != 0) << name << " left something";
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  tell_points(name, points, fmt::format("{} of them with the new one", new_ones));
  return points;
}

void read_beside_all_kinds(Story story, int64_t few) {
  for (const int64_t ranks : {1, 2})
    for (const bool async : {false, true})
      for (const uint64_t habits : {0, 1, 2}) {
        story.ranks = ranks, story.async = async, story.habits = habits;
        expect_more_than(few, read_between_all_calls(story));
      }
}

TEST(DisksShared, a_reader_between_any_two_calls_of_a_first_save_sees_nothing_or_all_of_it_and_changes_nothing) {
  read_beside_all_kinds({.name = "first save", .before = {}, .step = 1}, 20);
}

TEST(DisksShared, a_reader_between_any_two_calls_of_a_save_sees_the_last_committed_or_the_new_one_and_changes_nothing) {
  read_beside_all_kinds({.name = "second save"}, 20);
}

TEST(DisksShared, a_reader_between_any_two_calls_of_an_overwrite_sees_the_old_one_or_the_new_one_and_changes_nothing) {
  read_beside_all_kinds({.name = "overwriting save", .step = 1, .overwrite = true}, 20);
}

TEST(DisksShared, a_reader_between_any_two_calls_of_a_save_that_removes_sees_the_last_committed_or_the_new_one) {
  read_beside_all_kinds({.name = "removing save", .before = {1, 2}, .step = 3, .keep = 1}, 30);
}

// The other way round: all of a save between two calls of a reader, which may have been told of what is removed then.
TEST(DisksShared, a_save_between_any_two_calls_of_a_reader_is_seen_or_not_and_never_makes_the_folder_look_empty) {
  const Scratch scratch;
  make_run(scratch / "before", {1, 2});
  int64_t olds = 0, news = 0, number = 0;
  const Story story{.name = "save beside reader", .step = 3, .keep = 1};
  if (replay.leaves_out(story.str())) return;
  for (bool more = true; more; ++number) {
    const std::string run = scratch / fmt::format("run{}", number);
    if (!is_asked(number)) continue;
    std::filesystem::copy(scratch / "before", run, std::filesystem::copy_options::recursive);
    const auto save_at = [&](int64_t made, const FileCall&) {
      if (made == number) save_first(story, run, {&harness::hasty_files()});
    };
    Calls calls(save_at);
    FilesAround reader(calls.around());
    run_threads(1, [&](std::shared_ptr<Comm> comm) {
      Stamped model(comm, {2, 2});
      Manager manager(run, {.files = &reader});
      try {
        const auto loaded = manager.load_latest(*model.sharded, &*model.optimizer, {.files = &reader});
        ASSERT_TRUE(loaded) << "nothing is there, it seems\n" << replay_line(story.str(), std::to_string(number));
        const int64_t stamp = loaded->trainer.data_position;
        EXPECT_TRUE(loaded->trainer.step == (stamp == kFirst ? 3 : 2) && (stamp == kFirst || stamp == 2) && model.has(stamp))
            << replay_line(story.str(), std::to_string(number));
        ++(stamp == kFirst ? news : olds);
      } catch (const Error& error) {
        ADD_FAILURE() << error.what() << where(story.str(), number, nullptr);
      }
    });
    more = calls.made() > number && !replay.asked();
    std::filesystem::remove_all(run);
  }
  tell_points(story.str(), number, fmt::format("{} of them with the old one, {} with the new one", olds, news));
  if (replay.asked()) return;
  EXPECT_GT(number, 20);
  EXPECT_GT(news, 1);
}

// A process as the other sees it. Of an owner that lives elsewhere nobody knows whether it is gone; of one that seems to be of
// this process, and is none that this process knows, everybody thinks that it is.
FilesAround::Around seen_as(char host, bool gone) {
  return [=, own = std::make_shared<std::string>()](FileCall& call, const auto& make) {
    const bool is_mark = call.path.find("/.step_owner") != std::string::npos && call.path.ends_with("/rank_0");
    if (is_mark && call.kind == CallKind::write) {
      *own = std::string(call.from, call.bytes);
      if (!gone)
        for (const char* fact : {"\nboot ", "\nhost "}) (*own)[own->find(fact) + 6] = host;
      call.from = own->data();
    }
    const ssize_t done = make();
    if (is_mark && call.kind == CallKind::read && done > 0 && std::string(call.into, static_cast<size_t>(done)) != *own) {
      const std::string text(call.into, static_cast<size_t>(done));
      char& last = call.into[text.find('\n', text.find("\nid ") + 1) - 1];
      last = last == '0' ? '1' : '0';  // not one of this process's
    }
    return done;
  };
}

// What the second thinks of the first, which lives, and whether its manager stays until the first has ended.
enum class Owner { lives, seems_gone };
enum class After { stays, ends };

// At one point a second process resumes and saves the next step.
struct Second {
  std::string error;
  int64_t step = -1;
  std::shared_ptr<Manager> stays;
};

Second resume_and_save(const std::string& run, FileSystem& files, After after) {
  Second second;
  run_threads(1, [&](std::shared_ptr<Comm> comm) {
    Stamped model(comm, {2, 2});
    auto manager = std::make_shared<Manager>(run, ManagerOptions{.files = &files});
    second.error = error_of([&] {
      const auto loaded = manager->load_latest(*model.sharded, &*model.optimizer);
      model.stamp(kSecond);
      const int64_t step = loaded ? loaded->trainer.step + 1 : 1;
      manager->save(*model.sharded, &*model.optimizer, trainer_of(step, kSecond));
      second.step = step;
    });
    if (after == After::stays) second.stays = manager;
  });
  return second;
}

// The second process comes before each call in turn. Each time every checkpoint that can be seen is whole and of who was told
// that it is there, and who was refused was told of the other run.
int64_t save_between_all_calls(const Story& story, Owner owner, After after) {
  const std::string name = fmt::format("{} beside {}, whose owner {}", after == After::stays ? "run" : "save", story.str(),
                                       owner == Owner::lives ? "lives" : "seems gone");
  if (replay.leaves_out(name)) return 0;
  const Scratch scratch;
  make_run(scratch / "before", story.before);
  int64_t number = 0, both = 0, first_only = 0, second_only = 0;
  for (bool more = true; more && !testing::Test::HasFailure(); ++number) {
    if (!is_asked(number)) continue;
    const std::string run = scratch / fmt::format("run{}", number);
    std::filesystem::copy(scratch / "before", run, std::filesystem::copy_options::recursive);
    FilesAround second_files(seen_as('B', false), harness::hasty_files());
    Second second;
    bool came = false, was_committed = false;
    FileCall at{.kind = CallKind::open, .path = ""};
    Calls calls([&](int64_t made, const FileCall& call) {
      if (made != number) return;
      came = true, at = call, was_committed = std::filesystem::exists(step_folder(run, story.step));
      second = resume_and_save(run, second_files, after);
    });
    FirstFiles files(story, calls, /*cuts=*/false);  // marks are told apart by whole reads
    std::vector<std::unique_ptr<FilesAround>> hosts;
    std::vector<FileSystem*> first_files;
    for (FileSystem* const rank : files.all) {
      hosts.push_back(std::make_unique<FilesAround>(seen_as('A', owner == Owner::seems_gone), *rank));
      first_files.push_back(hosts.back().get());
    }
    testing::internal::CaptureStderr();  // warnings of who finds removed what it was about to remove
    const std::string first_error = error_of([&] { save_first(story, run, first_files); });
    second.stays.reset();
    testing::internal::GetCapturedStderr();
    std::map<int64_t, int64_t> stamps;
    std::string wrong = error_of([&] { stamps = read_by_a_second_process(run, system_files()); });
    const bool first = first_error.empty(), saved = came && second.error.empty();
    int64_t firsts = 0, seconds = 0;
    for (const auto& [step, stamp] : stamps) firsts += stamp == kFirst, seconds += stamp == kSecond;
    const auto says = [](const std::string& error, const char* words) { return error.find(words) != std::string::npos; };
    if (!wrong.empty())
      wrong = "what is there is not whole: " + wrong;
    else if (seconds != saved || (saved && stamps[second.step] != kSecond))
      wrong = "what the second was told is not what is there";
    else if (firsts != first && !(first && saved && story.keep == 1))
      wrong = "what the first was told is not what is there";
    else if (saved ? first != was_committed : !first)
      wrong = "of two runs at a time not one saves";
    else if (!first && !says(first_error, "another run") && !says(first_error, "does not come after"))
      wrong = "the first is not told why";
    else if (came && !saved && !says(second.error, "another run saves in"))
      wrong = "the second is not told why";
    if (!wrong.empty())
      ADD_FAILURE() << wrong << "\nthe first was told '" << first_error << "', the second '" << second.error
                    << "', and there is" << str(stamps) << where(name, number, &at);
    ++(first && saved ? both : first ? first_only : second_only);
    more = came && !replay.asked();
    std::filesystem::remove_all(run);
  }
  tell_points(name, number, fmt::format("saved by both {}, by the first {}, by the second {}", both, first_only, second_only));
  return number;
}

void save_beside_all_kinds(Owner owner, After after) {
  for (const Story& story : {Story{.name = "second save"}, Story{.name = "second save", .async = true},
                             Story{.name = "removing save", .ranks = 2, .async = true, .before = {1, 2}, .step = 3, .keep = 1},
                             Story{.name = "second save", .habits = 1}})
    expect_more_than(70, save_between_all_calls(story, owner, after));
}

TEST(DisksShared, a_run_that_begins_between_any_two_calls_of_another_is_refused_or_the_other_is) {
  save_beside_all_kinds(Owner::lives, After::stays);
}

TEST(DisksShared, a_run_that_comes_and_goes_between_any_two_calls_of_another_is_refused_or_the_other_is) {
  save_beside_all_kinds(Owner::lives, After::ends);
}

TEST(DisksShared, a_run_that_takes_over_between_any_two_calls_of_one_that_lives_is_the_only_one_that_commits) {
  save_beside_all_kinds(Owner::seems_gone, After::stays);
}

TEST(DisksShared, a_run_that_takes_over_and_ends_between_any_two_calls_of_one_that_lives_is_the_only_one_that_commits) {
  save_beside_all_kinds(Owner::seems_gone, After::ends);
}

// What `convert` makes of the run's first step, in the run's own folder.
struct Conversion {
  std::string to;
  std::string in(const std::string& run) const { return run + "/exported" + (to == "torch" ? ".pt" : ""); }
  void make(const std::string& run, FileSystem& files = harness::hasty_files()) const {
    static int64_t depth = 0;  // one may come between the calls of another
    if (depth++ == 0) testing::internal::CaptureStdout();
    const std::string error =
        error_of([&] { harness::checkpoint_convert({.one = run + "/step_1", .two = in(run), .to = to, .files = &files}); });
    if (--depth == 0) testing::internal::GetCapturedStdout();
    if (!error.empty()) throw Error(error);
  }
  // Its files, without the folder's name.
  std::map<std::string, std::string> made(const std::string& run) const {
    std::map<std::string, std::string> files;
    if (!std::filesystem::exists(in(run))) return files;
    if (to == "torch") return {std::pair(std::string(), slurp(in(run)))};
    if (to == "dcp" && !verify_checkpoint(system_files(), in(run)).problems.empty()) return {{"damaged", ""}};
    for (const auto& [path, bytes] : contents(in(run))) {
      const std::string name = path.substr(in(run).size());
      files[name] = name == "/.metadata" || name == "/.shardproof" ? "" : bytes;  // these have a random id
    }
    return files;
  }
};

TEST(DisksShared, between_any_two_calls_of_a_convert_its_target_is_whole_or_absent_and_a_run_reads_and_saves_beside_it) {
  for (const Conversion& conversion : {Conversion{"dcp"}, Conversion{"safetensors"}, Conversion{"torch"}}) {
    const std::string name = "run beside convert to " + conversion.to;
    if (replay.leaves_out(name)) continue;
    const Scratch scratch;
    const std::string run = scratch / "run", alone = scratch / "alone";
    make_run(run, {1});
    std::filesystem::copy(run, alone, std::filesystem::copy_options::recursive);
    conversion.make(alone);
    const auto expected = conversion.made(alone);
    int64_t points = 0;
    const auto look = [&](int64_t number, const FileCall* call) {
      if (!is_asked(number)) return;
      const auto before = contents(scratch.path());
      read_by_a_second_process(run, system_files());
      EXPECT_TRUE(contents(scratch.path()) == before) << "a reader changed something" << where(name, number, call);
      const auto made = conversion.made(run);
      EXPECT_TRUE(made.empty() || made == expected) << where(name, number, call);
      const Second second =
          resume_and_save(run, harness::hasty_files(), After::ends);  // which removes leftovers of its own only
      EXPECT_EQ(second.error, "") << where(name, number, call);
      ++points;
    };
    Calls calls([&](int64_t number, const FileCall& call) {
      if (!call.looks()) look(number, &call);
    });
    FilesAround files(calls.around(), harness::hasty_files());
    EXPECT_NO_THROW(conversion.make(run, files));
    look(calls.made(), nullptr);
    EXPECT_TRUE(conversion.made(run) == expected);
    EXPECT_EQ(std::ssize(committed_steps(run)), points + 1);
    tell_points(name, points, "a save at each");
    expect_more_than(10, points);
  }
}

TEST(DisksShared, of_two_converts_to_one_target_one_is_refused_and_the_other_is_whole) {
  for (const Conversion& conversion : {Conversion{"dcp"}, Conversion{"safetensors"}, Conversion{"torch"}}) {
    const std::string name = "convert beside convert to " + conversion.to;
    if (replay.leaves_out(name)) continue;
    const Scratch scratch;
    make_run(scratch / "before", {1});
    std::map<std::string, std::string> expected;
    int64_t number = 0;
    for (bool more = true; more && !HasFailure(); ++number) {
      if (!is_asked(number)) continue;
      const std::string run = scratch / fmt::format("run{}", number);
      std::filesystem::copy(scratch / "before", run, std::filesystem::copy_options::recursive);
      std::string second;
      bool came = false;
      Calls calls([&](int64_t made, const FileCall&) {
        if (made != number) return;
        came = true;
        second = error_of([&] { conversion.make(run); });
      });
      FilesAround files(calls.around(), harness::hasty_files());
      const std::string first = error_of([&] { conversion.make(run, files); });
      if (expected.empty()) expected = conversion.made(run);
      EXPECT_TRUE(conversion.made(run) == expected) << where(name, number, nullptr);
      EXPECT_EQ(std::ssize(list_folder(run)), 2) << "nothing is left" << where(name, number, nullptr);
      EXPECT_TRUE(!came || first.empty() != second.empty()) << first << second << where(name, number, nullptr);
      if (came) expect_says(first + second, {conversion.in(run), "xists"});
      more = came && !replay.asked();
      std::filesystem::remove_all(run);
    }
    tell_points(name, number, "one of two at each");
    expect_more_than(20, number);
  }
}

}  // namespace
}  // namespace shardproof::checkpoint
