// A save is there whole or not at all, whichever system call fails and wherever the process dies.
#include <gtest/gtest.h>

#include <cerrno>

#include "properties/doubles/cluster_disk.h"
#include "properties/kit/checkpoint_steps.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/durable.h"

namespace shardproof::checkpoint {
namespace {

// Calls save with each of its system calls failing in turn, as long as there are any.
template <typename Save, typename Look>
int64_t sweep(const Save& save_with, const Look& look) {
  int64_t failing = 0;
  for (const bool dead : {false, true})
    for (const int error : {EIO, ENOSPC})
      for (failing = 0;; ++failing) {
        const Scratch scratch;
        save_step(system_files(), step_folder(scratch.path(), 1), 1);
        ClusterDisk files({.fails = failing, .error = error, .stays = dead});
        bool threw = false;
        try {
          save_with(files, scratch.path());
        } catch (const Error&) {
          threw = true;
        }
        look(scratch.path(), threw);
        if (files.changes() <= failing) break;  // nothing failed: the end of the sweep
      }
  return failing;
}

TEST(Durable, whichever_call_of_a_save_fails_the_latest_checkpoint_is_whole) {
  const int64_t calls = sweep([](FileSystem& files, const std::string& root) { save_step(files, step_folder(root, 2), 2); },
                              [](const std::string& root, bool threw) {
                                const auto latest = latest_step(root);
                                ASSERT_TRUE(latest);
                                EXPECT_EQ(step_in(step_folder(root, *latest)), *latest);
                                EXPECT_TRUE(threw || *latest == 2);
                                for (const int64_t step : committed_steps(root))
                                  EXPECT_EQ(step_in(step_folder(root, step)), step);
                                remove_leftovers(system_files(), root);
                                EXPECT_EQ(list_folder(root).size(), committed_steps(root).size());
                              });
  EXPECT_GT(calls, 20);
}

TEST(Durable, whichever_call_of_an_overwrite_fails_old_or_new_is_there_whole) {
  const int64_t calls =
      sweep([](FileSystem& files, const std::string& root) { save_step(files, step_folder(root, 1), 2, true); },
            [](const std::string& root, bool threw) {
              const int64_t step = step_in(step_folder(root, 1));
              EXPECT_TRUE(step == 1 || step == 2);
              EXPECT_TRUE(threw || step == 2);
            });
  EXPECT_GT(calls, 20);
}

TEST(Durable, whichever_call_of_a_removal_fails_no_half_checkpoint_is_seen) {
  sweep([](FileSystem& files, const std::string& root) { remove_folder(files, step_folder(root, 1)); },
        [](const std::string& root, bool threw) {
          for (const int64_t step : committed_steps(root)) EXPECT_EQ(step_in(step_folder(root, step)), step);
          EXPECT_TRUE(threw || committed_steps(root).empty());
        });
}

TEST(Durable, what_exists_is_not_overwritten_unasked) {
  const Scratch scratch;
  save_step(system_files(), scratch / "a", 1);
  expect_error([&] { save_step(system_files(), scratch / "a", 2); }, {"exists already"});
  EXPECT_EQ(step_in(scratch / "a"), 1);
  save_step(system_files(), scratch / "a/", 2, true);
  EXPECT_EQ(step_in(scratch / "a"), 2);
  EXPECT_EQ(list_folder(scratch.path()).size(), 1U);
}

// As two runs that begin at once make their marks; NFS knows no flags of rename.
TEST(Durable, of_two_that_commit_one_name_the_first_stays) {
  struct WithoutFlags : FileSystem {
    int rename(const std::string& from, const std::string& to) override {
      return std::rename(from.c_str(), to.c_str()) == 0 ? 0 : -errno;
    }
  } without_flags;
  for (FileSystem* files : {&system_files(), static_cast<FileSystem*>(&without_flags)}) {
    const Scratch scratch;
    StagedFolder one(*files, scratch / "mark"), other(*files, scratch / "mark");
    write_file(*files, one.path() + "/file", "one");
    write_file(*files, other.path() + "/file", "other");
    one.commit();
    expect_error([&] { other.commit(); }, {"cannot rename"});
    EXPECT_EQ(slurp(scratch / "mark/file"), "one");
  }
}

TEST(Durable, an_abandoned_save_leaves_nothing) {
  const Scratch scratch;
  { StagedFolder staged(system_files(), scratch / "deep/er/step_1"); }
  EXPECT_TRUE(list_folder(scratch / "deep/er").empty());
  EXPECT_FALSE(latest_step(scratch / "deep/er"));
}

TEST(Durable, a_link_to_a_folder_of_checkpoints_is_that_folder) {
  const Scratch scratch;
  std::filesystem::create_directories(scratch / "disk/inner");
  std::filesystem::create_directory_symlink(scratch / "disk", scratch / "link");
  for (const std::string& folder : {scratch / "link", scratch / "link/", scratch / "link/inner", scratch / "link/new/er"}) {
    for (const int64_t step : {1, 2, 3}) save_step(system_files(), step_folder(folder, step), step);
    EXPECT_EQ(committed_steps(folder), (std::vector<int64_t>{1, 2, 3})) << folder;
    std::filesystem::create_directory(folder + "/.step_4.saving-1-0");
    EXPECT_EQ(remove_leftovers(system_files(), folder), 1) << folder;
    retain_steps(system_files(), folder, 1);
    EXPECT_EQ(latest_step(folder), 3);
    remove_folder(system_files(), step_folder(folder, 3));
  }
  EXPECT_EQ(list_folder(scratch / "disk"), (std::vector<std::string>{"inner", "new"}));
  EXPECT_TRUE(std::filesystem::is_symlink(scratch / "link"));
}

TEST(Durable, what_lies_behind_a_link_is_not_removed_with_it) {
  const Scratch scratch;
  save_step(system_files(), scratch / "elsewhere/kept", 1);
  std::filesystem::create_directories(scratch / "run/.step_9.saving-1-0");
  for (const char* link : {"run/step_1", "run/step_3", "run/.step_9.saving-1-0/inner", "run/.step_1.removing-1-0"})
    std::filesystem::create_directory_symlink(scratch / "elsewhere/kept", scratch / link);
  EXPECT_EQ(remove_leftovers(system_files(), scratch / "run"), 2);
  save_step(system_files(), scratch / "run/step_3", 3, /*overwrite=*/true);
  retain_steps(system_files(), scratch / "run", 1);
  EXPECT_EQ(list_folder(scratch / "run"), (std::vector<std::string>{"step_3"}));
  EXPECT_EQ(step_in(scratch / "run/step_3"), 3);
  EXPECT_EQ(step_in(scratch / "elsewhere/kept"), 1);
}

TEST(Durable, retention_keeps_the_newest) {
  const Scratch scratch;
  for (const int64_t step : {9, 10, 100, 2}) save_step(system_files(), step_folder(scratch.path(), step), step);
  std::filesystem::create_directory(scratch / "step_7");     // nothing in it: not committed by us
  std::filesystem::create_directory(scratch / "step_0100");  // not a name of ours
  EXPECT_EQ(committed_steps(scratch.path()), (std::vector<int64_t>{2, 9, 10, 100}));
  retain_steps(system_files(), scratch.path(), 2);
  EXPECT_EQ(committed_steps(scratch.path()), (std::vector<int64_t>{10, 100}));
  expect_error([&] { retain_steps(system_files(), scratch.path(), 0); }, {"at least one"});
}

// Three blocks and some, written in uneven parts.
std::string large_bytes() {
  std::string bytes(13'000'001, '\0');
  Random random(9);
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  return bytes;
}

void write_in_parts(FileSystem& files, const std::string& path, const std::string& bytes) {
  OutputFile file(files, path);
  for (size_t at = 0, part = 1; at < bytes.size(); at += part, part = part * 3 % 4'000'037)
    file.write(std::string_view(bytes).substr(at, part));
  EXPECT_EQ(file.position(), bytes.size());
  file.finish();
}

TEST(Durable, whichever_call_of_a_large_file_fails_is_an_error_unless_all_is_there) {
  const std::string bytes = large_bytes();
  int64_t errors = 0;
  for (const int error : {EIO, ENOSPC})
    for (int64_t failing = 0;; ++failing) {
      const Scratch scratch;
      ClusterDisk files({.fails = failing, .error = error});
      try {
        write_in_parts(files, scratch / "file", bytes);
        EXPECT_TRUE(slurp(scratch / "file") == bytes) << "call " << failing << ", error " << error;
      } catch (const Error&) {
        ++errors;
      }
      if (files.changes() <= failing) break;
    }
  EXPECT_GE(errors, 12);
}

TEST(Durable, a_file_system_without_direct_writes_gets_every_byte) {
  struct Refusing : FileSystem {
    int set_direct(int fd, bool wanted) override {
      return direct = wanted, refuses_all ? -EINVAL : FileSystem::set_direct(fd, wanted);
    }
    ssize_t write(int fd, const void* data, size_t count) override {
      return direct && !refuses_all ? -EINVAL : FileSystem::write(fd, data, count);
    }
    bool direct = false, refuses_all = false;
  } files;
  const std::string bytes = large_bytes();
  const Scratch scratch;
  for (const bool all : {false, true}) {
    files.refuses_all = all;
    const std::string path = scratch / (all ? "all" : "some");
    write_in_parts(files, path, bytes);
    EXPECT_TRUE(slurp(path) == bytes);
  }
}

// A write may take less than it is given.
TEST(Durable, short_writes_are_carried_on) {
  struct ShortWrites : FileSystem {
    ssize_t write(int fd, const void* data, size_t bytes) override {
      if (calls++ % 3 == 0) return -EINTR;
      return FileSystem::write(fd, data, std::min<size_t>(bytes, 7));
    }
    int64_t calls = 0;
  } files;
  const Scratch scratch;
  save_step(files, scratch / "a", 5);
  EXPECT_EQ(step_in(scratch / "a"), 5);
}

}  // namespace
}  // namespace shardproof::checkpoint
