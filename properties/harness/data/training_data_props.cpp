// Which bytes a training run reads, in which order, and who gets them.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "harness/data/training_data.h"
#include "properties/kit/expect_error.h"

using namespace harness;
using shardproof::expect_error;
namespace fs = std::filesystem;

namespace {

// A folder of its own for each test, removed at the end.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "text_data_XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path_); }

  std::string path(const std::string& name = "") const {
    return (name.empty() ? path_ : path_ / name).string();
  }
  std::string write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name);
  }

 private:
  fs::path path_;
};

std::string text_of(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

void expect_refused(const std::vector<std::string>& paths, const std::string& words) {
  expect_error([&] { TextData(paths, 4); }, {words});
}

std::vector<std::string> names(const Folder& folder, const TextData& data) {
  std::vector<std::string> result;
  for (const std::string& file : data.files())
    result.push_back(fs::path(file).lexically_relative(folder.path()).string());
  return result;
}

}  // namespace

TEST(TextData, sequence_i_starts_at_byte_i_times_its_length_and_ends_with_its_last_target) {
  const Folder folder;
  const TextData data({folder.write("a", "abcdefgh")}, 3);
  EXPECT_EQ(data.sequences(), 2);
  EXPECT_EQ(text_of(data.sequence(0)), "abcd");
  EXPECT_EQ(text_of(data.sequence(1)), "defg");
}

TEST(TextData, after_the_last_whole_sequence_the_first_comes_again) {
  const Folder folder;
  const TextData data({folder.write("a", "abcdefgh")}, 3);
  EXPECT_EQ(text_of(data.sequence(2)), "abcd");
  EXPECT_EQ(text_of(data.sequence(101)), "defg");
}

TEST(TextData, exactly_one_sequence_is_enough) {
  const Folder folder;
  EXPECT_EQ(text_of(TextData({folder.write("a", "abcde")}, 4).sequence(7)), "abcde");
}

RC_GTEST_PROP(TextData, files_are_one_text_wherever_their_borders_lie, ()) {
  const auto texts = *rc::gen::container<std::vector<std::string>>(
      rc::gen::container<std::string>(rc::gen::inRange<char>('a', 'z')));
  const std::string all = std::accumulate(texts.begin(), texts.end(), std::string());
  RC_PRE(texts.size() < 100 && all.size() > 1);
  const auto length = *rc::gen::inRange<size_t>(1, all.size());
  const Folder folder;
  for (size_t i = 0; i < texts.size(); ++i) folder.write(fmt::format("{:02}", i), texts[i]);
  const TextData data({folder.path()}, static_cast<int64_t>(length));
  RC_ASSERT(data.bytes() == static_cast<int64_t>(all.size()));
  for (int64_t i = 0; i < data.sequences(); ++i)
    RC_ASSERT(text_of(data.sequence(i)) == all.substr(static_cast<size_t>(i) * length, length + 1));
  RC_ASSERT(static_cast<size_t>(data.sequences() + 1) * length + 1 > all.size());
}

TEST(TextData, files_are_sorted_by_their_whole_path_byte_by_byte) {
  const Folder folder;
  for (const char* name : {"b", "a/z", "a.txt", "B", "a/y/x", "a0"}) folder.write(name, name);
  const TextData data({folder.path()}, 1);
  EXPECT_EQ(names(folder, data), (std::vector<std::string>{"B", "a.txt", "a/y/x", "a/z", "a0", "b"}));
}

TEST(TextData, the_order_of_the_paths_given_does_not_matter_and_a_file_named_twice_counts_once) {
  const Folder folder;
  const std::string a = folder.write("d/a", "first "), b = folder.write("d/b", "second"),
                    c = folder.write("c", "zero  ");
  const TextData data({b, c, folder.path("d"), b}, 5);
  EXPECT_EQ(names(folder, data), (std::vector<std::string>{"c", "d/a", "d/b"}));
  EXPECT_EQ(data.bytes(), 18);
}

TEST(TextData, a_folder_stands_for_its_text_files_only) {
  const Folder folder;
  for (const char* name :
       {"a.py", ".hidden", ".git/config", "__pycache__/a.pyc", "sub/__pycache__/b.py", "sub/b.py"})
    folder.write(name, "text");
  folder.write("zero.so", std::string("ELF\0binary", 10));
  folder.write("late.txt", std::string(8000, 'x') + std::string("\0", 1));
  fs::create_directory_symlink(folder.path(), folder.path("loop"));
  fs::create_symlink(folder.path("gone"), folder.path("dangling"));
  fs::create_symlink(folder.path("a.py"), folder.path("link.py"));
  const TextData data({folder.path()}, 1);
  EXPECT_EQ(names(folder, data), (std::vector<std::string>{"a.py", "late.txt", "link.py", "sub/b.py"}));
}

TEST(TextData, a_file_named_itself_is_read_whatever_it_holds) {
  const Folder folder;
  const TextData data({folder.write(".hidden", std::string("a\0b", 3))}, 1);
  EXPECT_EQ(data.sequence(1), (std::vector<uint8_t>{0, 'b'}));
}

TEST(TextData, what_cannot_be_read_is_an_error_that_names_it) {
  const Folder folder;
  expect_refused({folder.path("gone")}, "there is no " + folder.path("gone"));
  expect_refused({folder.write("empty", "")}, folder.path("empty") + " is empty");
  expect_refused({folder.write("short", "abcd")}, "4 bytes in " + folder.path("short") + " are too few");
  fs::create_directory(folder.path("bare"));
  expect_refused({folder.path("bare")}, "no text files under " + folder.path("bare"));
  expect_refused({"/dev/null"}, "/dev/null is neither a file nor a folder");
  expect_refused({}, "no path given");
}

TEST(TextData, a_file_cut_short_during_the_run_is_an_error) {
  const Folder folder;
  const TextData data({folder.write("a", "abcdefgh")}, 4);
  fs::resize_file(folder.path("a"), 3);
  expect_error([&] { data.sequence(0); }, {"became shorter"});
}

TEST(BatchRule, microbatches_go_to_the_ranks_in_turn_round_by_round) {
  const BatchRule rule(12, 2, 3);  // 6 microbatches of 2
  EXPECT_EQ(rule.rounds(), 2);
  EXPECT_EQ(rule.sequences(0, 0, 0), (SequenceRange{0, 2}));
  EXPECT_EQ(rule.sequences(0, 0, 2), (SequenceRange{4, 6}));
  EXPECT_EQ(rule.sequences(0, 1, 0), (SequenceRange{6, 8}));
  EXPECT_EQ(rule.sequences(5, 1, 2), (SequenceRange{70, 72}));
}

RC_GTEST_PROP(BatchRule, every_sequence_is_read_once_whatever_the_number_of_ranks, ()) {
  const auto small = rc::gen::inRange<int64_t>(1, 6);
  const auto microbatch = *small, ranks = *small, rounds = *small;
  const BatchRule rule(microbatch * ranks * rounds, microbatch, ranks);
  std::vector<int64_t> read;
  for (int64_t step = 0; step < 3; ++step)
    for (int64_t round = 0; round < rounds; ++round)
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const SequenceRange range = rule.sequences(step, round, rank);
        for (int64_t i = range.begin; i < range.end; ++i) read.push_back(i);
      }
  std::vector<int64_t> expected(static_cast<size_t>(3 * rule.global_batch()));
  std::iota(expected.begin(), expected.end(), 0);
  RC_ASSERT(read == expected);
}

TEST(BatchRule, a_global_batch_that_the_ranks_cannot_share_is_an_error) {
  expect_error([] { BatchRule(10, 2, 2); }, {"multiple of microbatch 2 x 2 data-parallel ranks = 4"});
  expect_error([] { BatchRule(0, 1, 1); }, {"at least 1, got 0, 1 and 1"});
  expect_error([] { BatchRule(4, -1, 1); }, {"at least 1"});
}
