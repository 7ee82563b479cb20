// Folders that appear whole or not at all, on a disk that loses power: every state in which the disk could be is looked at.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "properties/kit/checkpoint_steps.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/power_loss.h"

namespace shardproof::checkpoint {
namespace {

using harness::LossyDisk;

// Of a folder of checkpoints.
struct Expected {
  std::map<int64_t, std::set<int64_t>> may = {};  // by name: the steps that a checkpoint of this name may hold
  std::set<int64_t> must = {};                    // which names have to be there
};

std::string look_at(const std::string& run, const Expected& expected) {
  const std::vector<int64_t> steps = committed_steps(run);
  std::string found = steps.empty() ? "nothing" : "";
  for (const int64_t step : steps) {
    const auto may = expected.may.find(step);
    const int64_t held = step_in(step_folder(run, step));
    if (may == expected.may.end() || !may->second.contains(held)) throw Error(fmt::format("step_{} holds {}", step, held));
    found += fmt::format("{}step_{} that holds {}", found.empty() ? "" : " and ", step, held);
  }
  for (const int64_t step : expected.must)
    if (std::find(steps.begin(), steps.end(), step) == steps.end()) throw Error(fmt::format("step_{} is lost", step));
  // The next save.
  remove_leftovers(harness::hasty_files(), run);
  save_step(harness::hasty_files(), step_folder(run, 50), 50);
  if (step_in(step_folder(run, 50)) != 50) throw Error("the next save is not there");
  if (list_folder(run).size() != steps.size() + 1) throw Error("the next save left what the last one left");
  return found;
}

// What lies on the disk before, what is done, and what must be there after each mark.
struct Story {
  std::string name;
  std::vector<int64_t> before;  // steps
  std::function<void(FileSystem& files, const std::string& run, LossyDisk& disk)> body;
  std::vector<Expected> expected;  // by mark
};

void save_before(const Story& story, const std::string& run) {
  for (const int64_t step : story.before) save_step(harness::hasty_files(), step_folder(run, step), step);
}

int64_t look_at_all(const Story& story, uint64_t block) {
  const std::string name = fmt::format("{} blocks of {}", story.name, block);
  if (replay.leaves_out(name)) return 0;
  const Scratch scratch;
  const std::string run = scratch / "run";
  save_before(story, run);
  LossyDisk disk(scratch.path());
  story.body(disk.files(), run, disk);
  return tell(name, look_at_all_states(name, disk.record(), {.block = block}, [&](const std::string& root, int64_t mark) {
                return look_at(root + "/run", story.expected.at(static_cast<size_t>(mark)));
              }));
}

const Story kFirst{"first",
                   {},
                   [](FileSystem& files, const std::string& run, LossyDisk& disk) {
                     save_step(files, step_folder(run, 1), 1);
                     disk.mark(1);
                   },
                   {{.may = {{1, {1}}}}, {.may = {{1, {1}}}, .must = {1}}}};
const Story kSecond{"second",
                    {1},
                    [](FileSystem& files, const std::string& run, LossyDisk& disk) {
                      save_step(files, step_folder(run, 2), 2);
                      disk.mark(1);
                    },
                    {{.may = {{1, {1}}, {2, {2}}}, .must = {1}}, {.may = {{1, {1}}, {2, {2}}}, .must = {1, 2}}}};
const Story kOverwrite{"overwrite",
                       {1},
                       [](FileSystem& files, const std::string& run, LossyDisk& disk) {
                         save_step(files, step_folder(run, 1), 2, true);
                         disk.mark(1);
                       },
                       {{.may = {{1, {1, 2}}}, .must = {1}}, {.may = {{1, {2}}}, .must = {1}}}};
const Story kRetain{"retain",
                    {1, 2},
                    [](FileSystem& files, const std::string& run, LossyDisk& disk) {
                      retain_steps(files, run, 1);  // which warns where it is killed
                      if (!disk.killed()) disk.mark(1);
                    },
                    {{.may = {{1, {1}}, {2, {2}}}, .must = {2}}, {.may = {{2, {2}}}, .must = {2}}}};

TEST(PowerLoss, every_state_after_a_first_save_has_all_of_it_or_nothing) {
  for (const uint64_t block : {512, 700, 4096}) expect_more_than(20, look_at_all(kFirst, block));
}

TEST(PowerLoss, every_state_after_a_second_save_has_the_first) {
  for (const uint64_t block : {512, 700, 4096}) expect_more_than(20, look_at_all(kSecond, block));
}

TEST(PowerLoss, every_state_after_an_overwrite_has_the_old_one_or_the_new_one) {
  for (const uint64_t block : {512, 700, 4096}) expect_more_than(20, look_at_all(kOverwrite, block));
}

TEST(PowerLoss, every_state_after_a_removal_has_all_of_what_can_be_seen) {
  expect_more_than(10, look_at_all(kRetain, 4096));
}

// The process is killed at each call in turn, another one removes what it left, and then power fails: at any moment, or once
// `next` has returned.
enum class Fails { any_time, at_the_end };
int64_t look_at_all_after_a_kill(const Story& story, Fails fails,
                                 const std::function<void(FileSystem&, const std::string& run)>& next) {
  FoundStates all;
  bool killed = true;
  for (int64_t calls = 0; killed; ++calls) {
    const Scratch scratch;
    const std::string run = scratch / "run";
    save_before(story, run);
    LossyDisk disk(scratch.path());
    disk.kill_after(calls);
    try {
      story.body(disk.files(), run, disk);
    } catch (const Error&) {
      // It is told to nobody.
    }
    killed = disk.killed();
    disk.restart();
    const size_t killed_after = disk.record().calls.size();
    remove_leftovers(disk.files(), run);
    next(disk.files(), run);
    disk.mark(static_cast<int64_t>(story.expected.size()) - 1);
    const size_t after = fails == Fails::any_time ? killed_after : disk.record().calls.size();
    const std::string name = fmt::format("{} killed after {} calls", story.name, calls);
    const FoundStates found = look_at_all_states(
        name, disk.record(), {.block = 1 << 20},
        [&](const std::string& root, int64_t mark) {
          return look_at(root + "/run", story.expected.at(static_cast<size_t>(mark)));
        },
        after);
    for (const auto& [what, count] : found) all[what] += count;
    if (testing::Test::HasFailure()) break;
  }
  return tell(story.name + " killed after any call", all);
}

TEST(PowerLoss, every_state_after_a_killed_overwrite_has_the_old_one_or_the_new_one) {
  Story story = kOverwrite;
  story.expected.push_back({.may = {{1, {1, 2}}}, .must = {1}});
  expect_more_than(50, look_at_all_after_a_kill(story, Fails::any_time, [](FileSystem&, const std::string&) {}));
}

TEST(PowerLoss, every_state_after_a_killed_removal_has_all_of_what_can_be_seen) {
  Story story = kRetain;
  story.expected.push_back(story.expected.front());
  expect_more_than(20, look_at_all_after_a_kill(story, Fails::any_time, [](FileSystem&, const std::string&) {}));
}

TEST(PowerLoss, every_state_after_a_save_that_follows_a_killed_first_one_has_it) {
  Story story = kFirst;
  story.expected = {{.may = {{1, {1}}, {2, {2}}}}, {.may = {{1, {1}}, {2, {2}}}}, {.may = {{1, {1}}, {2, {2}}}, .must = {2}}};
  const auto next = [](FileSystem& files, const std::string& run) { save_step(files, step_folder(run, 2), 2); };
  expect_more_than(15, look_at_all_after_a_kill(story, Fails::at_the_end, next));
}

// The last flush of an overwrite fails: whoever knows that it failed may find the old one again.
TEST(PowerLoss, every_state_after_a_flush_that_failed_has_the_old_one_or_the_new_one) {
  int64_t failed = 0, all = 0;
  for (int64_t flush = 0;; ++flush) {
    const Scratch scratch;
    const std::string run = scratch / "run";
    save_before(kOverwrite, run);
    LossyDisk disk(scratch.path());
    disk.fail_flush(flush);
    bool threw = false;
    try {
      save_step(disk.files(), step_folder(run, 1), 2, true);
      disk.mark(1);
    } catch (const Error&) {
      threw = true;
    }
    const std::string name = fmt::format("flush {} fails", flush);
    all += tell(name, look_at_all_states(name, disk.record(), {.block = 1 << 20}, [&](const std::string& root, int64_t mark) {
                  return look_at(root + "/run", kOverwrite.expected.at(static_cast<size_t>(mark)));
                }));
    failed += threw;
    if (!threw) break;
  }
  expect_more_than(5, failed);
  expect_more_than(100, all);
}

TEST(PowerLoss, every_state_after_a_file_was_written_has_all_of_it_or_nothing) {
  const Scratch scratch;
  std::filesystem::create_directory(scratch / "run");
  LossyDisk disk(scratch.path());
  const std::string bytes(2500, 'x');
  write_staged_file(disk.files(), scratch / "run/step_1.pt",
                    [&](const std::string& path) { write_file(disk.files(), path, bytes); });
  disk.mark(1);
  const FoundStates found =
      look_at_all_states("file", disk.record(), {.block = 512}, [&](const std::string& root, int64_t mark) -> std::string {
        const bool there = std::filesystem::exists(root + "/run/step_1.pt");
        if (!there && mark == 1) throw Error("the file is lost");
        if (there && slurp(root + "/run/step_1.pt") != bytes) throw Error("the file is there in part");
        remove_leftovers(harness::hasty_files(), root + "/run");
        if (list_folder(root + "/run").size() != (there ? 1U : 0U)) throw Error("something is left");
        return there ? "the file" : "nothing";
      });
  expect_more_than(30, tell("file", found));
}

// The answer to a first mkdir may be lost, and then there is a folder that nobody takes for its own.
TEST(PowerLoss, folders_that_were_left_do_not_stop_a_save_without_a_manager) {
  struct Taken : FileSystem {
    int mkdir(const std::string& path, mode_t mode) override {
      const int made = FileSystem::mkdir(path, mode);
      spill(path + "/file", "x");
      return left-- > 0 ? -EEXIST : (std::filesystem::remove(path + "/file"), made);
    }
    int left = 3;
  } files;
  const Scratch scratch;
  save_step(files, scratch / "step_1", 1);
  EXPECT_EQ(step_in(scratch / "step_1"), 1);
  EXPECT_EQ(remove_leftovers(system_files(), scratch.path()), 3);
}

// What a command prints, and whether it succeeded.
struct Ran {
  bool passed = false;
  std::string says = {};
};

Ran ran(const std::string& command) {
  Ran done;
  std::FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  SHARD_REQUIRE(pipe, "test", "cannot run {}", command);
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe)) done.says += buffer;
  done.passed = ::pclose(pipe) == 0;
  return done;
}

// A process of its own looks at the states, and with the fault one of them is wrong. This process reads what it prints.
TEST(PowerLoss, the_line_that_a_wrong_state_prints_looks_at_that_state_again) {
  const std::string story = "file of two blocks", fault = "SHARDPROOF_POWER_LOSS_FAULT";
  if (replay.asked() || std::getenv(fault.c_str())) {
    const Scratch scratch;
    LossyDisk disk(scratch.path());
    write_file(disk.files(), scratch / "file", "01234567");
    const auto look = [&](const std::string& root, int64_t) -> std::string {
      const std::string bytes = slurp(root + "/file");
      if (bytes == "0123" && std::getenv(fault.c_str())) throw Error("half of the file is there");
      return bytes == "0123" ? "half" : "another";
    };
    return expect_more_than(5, tell(story, look_at_all_states(story, disk.record(), {.block = 4}, look)));
  }
  const std::string any = replay_line(story, ""), command = any.substr(any.rfind("' ") + 2);
  const Ran first = ran(fault + "=1 " + command);
  EXPECT_FALSE(first.passed) << first.says;
  const size_t begin = first.says.find("replay: ");
  ASSERT_NE(begin, std::string::npos) << first.says;
  const std::string line = first.says.substr(begin, first.says.find('\n', begin) - begin), again = line.substr(8);
  const Ran with_fault = ran(fault + "=1 " + again), without = ran(again);
  EXPECT_FALSE(with_fault.passed);
  expect_says(with_fault.says, {"half of the file is there", line + "\n"});
  EXPECT_TRUE(without.passed) << without.says;
  expect_says(without.says, {story + ": 1 crash states, 1 of half\n"});
  // What there is not.
  const auto refused = [&](const std::string& asked, std::initializer_list<std::string> parts) {
    const Ran done = ran("SHARDPROOF_POWER_LOSS='" + asked + "' " + command);
    EXPECT_FALSE(done.passed) << asked;
    expect_says(done.says, parts);
  };
  refused(story + " 99", {"choice 1 is 99, expected 0 to 3"});
  refused(story + " 0.0", {"there is no state 0.0 of '" + story + "': after 0 nothing is left to choose"});
  refused("files 3", {"the story 'files'", "have these:\n  " + story + "\n"});
  refused("3", {"'3', expected 'STORY CHOICES'"});
}

// The model itself.
harness::DiskState only_state(const harness::DiskRecord& record, const std::string& choices) {
  EachChoice choice(choices);
  return harness::lose_power(record, choice, {.block = 4});
}

TEST(PowerLoss, states_are_those_that_the_model_allows) {
  const Scratch scratch;
  LossyDisk disk(scratch.path());
  FileSystem& files = disk.files();
  const auto states = [&] {
    std::set<std::string> all;
    EachChoice choices;
    do {
      const harness::DiskState state = harness::lose_power(disk.record(), choices, {.block = 4, .fill = '.'});
      if (state.calls != disk.record().calls.size()) continue;
      std::string text;
      for (const auto& [path, bytes] : state.paths) text += path + (bytes ? "=" + *bytes : "/") + " ";
      all.insert(text);
    } while (choices.next());
    return all;
  };
  using Texts = std::set<std::string>;
  ASSERT_EQ(files.mkdir(scratch / "a", 0755), 0);
  EXPECT_EQ(states(), (Texts{"", "a/ "}));
  const int file = files.open(scratch / "a/f", O_WRONLY | O_CREAT | O_EXCL, 0644);
  ASSERT_EQ(files.write(file, "012345", 6), 6);
  EXPECT_EQ(states(), (Texts{"", "a/ ", "a/ a/f= ", "a/ a/f=.... ", "a/ a/f=0123 ", "a/ a/f=...... ", "a/ a/f=0123.. ",
                             "a/ a/f=....45 ", "a/ a/f=012345 "}));
  ASSERT_EQ(files.fsync(file), 0);
  EXPECT_EQ(states(), (Texts{"", "a/ ", "a/ a/f=012345 "})) << "a flush of a file is none of its name";
  files.close(file);
  const int folder = files.open(scratch / "a", O_RDONLY | O_DIRECTORY, 0);
  ASSERT_EQ(files.fsync(folder), 0);
  files.close(folder);
  EXPECT_EQ(states(), (Texts{"", "a/ a/f=012345 "}));
  ASSERT_EQ(files.rename(scratch / "a", scratch / "b"), 0);
  EXPECT_EQ(states(), (Texts{"", "a/ a/f=012345 ", "b/ b/f=012345 "})) << "a rename is there or not";
  ASSERT_EQ(files.unlink(scratch / "b/f"), 0);
  EXPECT_EQ(states(), (Texts{"", "a/ a/f=012345 ", "b/ b/f=012345 ", "a/ ", "b/ "}))
      << "changes of different names have no order";
  const int root = files.open(scratch.path(), O_RDONLY | O_DIRECTORY, 0);
  ASSERT_EQ(files.fsync(root), 0);
  files.close(root);
  EXPECT_EQ(states(), (Texts{"b/ b/f=012345 ", "b/ "}));
  EXPECT_EQ(only_state(disk.record(), std::to_string(disk.record().calls.size()) + ".1").str(), "b/\n");
}

}  // namespace
}  // namespace shardproof::checkpoint
