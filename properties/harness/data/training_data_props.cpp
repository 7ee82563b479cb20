// Which tokens a training run reads, in which order, and who gets them.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>

#include "harness/data/batch_rule.h"
#include "harness/data/sample_order.h"
#include "harness/data/training_data.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"

using namespace harness;
using shardproof::expect_error;
namespace fs = std::filesystem;

namespace {

using harness_env::Folder;

// A file of this text in the folder, and its path.
std::string write(const Folder& folder, const std::string& name, const std::string& text) {
  const fs::path path = folder / name;
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
  return path.string();
}

std::string text_of(const std::vector<uint32_t>& tokens) {
  return {tokens.begin(), tokens.end()};
}

TrainingData text(const std::vector<std::string>& paths, int64_t sequence_length) {
  return TrainingData({.paths = paths, .sequence_length = sequence_length});
}

void expect_refused(const std::vector<std::string>& paths, const std::string& words) {
  expect_error([&] { text(paths, 4); }, {words});
}

// The numbers, each as so many bytes, the lowest first.
std::string bytes_of_tokens(const std::vector<uint32_t>& tokens, int64_t width) {
  std::string bytes;
  for (const uint32_t token : tokens)
    for (int64_t byte = 0; byte < width; ++byte) bytes += static_cast<char>(token >> (8 * byte));
  return bytes;
}

std::vector<std::string> names(const Folder& folder, const TokenFiles& files) {
  std::vector<std::string> result;
  for (const std::string& file : files.files()) result.push_back(fs::path(file).lexically_relative(folder.path()).string());
  return result;
}

}  // namespace

TEST(TrainingData, sequence_i_starts_at_byte_i_times_its_length_and_ends_with_its_last_target) {
  const Folder folder;
  const TrainingData data = text({write(folder, "a", "abcdefgh")}, 3);
  EXPECT_EQ(data.sequences(), 2);
  EXPECT_EQ(text_of(data.sequence(0)), "abcd");
  EXPECT_EQ(text_of(data.sequence(1)), "defg");
}

TEST(TrainingData, after_the_last_whole_sequence_the_first_comes_again) {
  const Folder folder;
  const TrainingData data = text({write(folder, "a", "abcdefgh")}, 3);
  EXPECT_EQ(text_of(data.sequence(2)), "abcd");
  EXPECT_EQ(text_of(data.sequence(101)), "defg");
}

TEST(TrainingData, exactly_one_sequence_is_enough) {
  const Folder folder;
  EXPECT_EQ(text_of(text({write(folder, "a", "abcde")}, 4).sequence(7)), "abcde");
}

RC_GTEST_PROP(TrainingData, files_are_one_text_wherever_their_borders_lie, ()) {
  const auto texts =
      *rc::gen::container<std::vector<std::string>>(rc::gen::container<std::string>(rc::gen::inRange<char>('a', 'z')));
  const std::string all = std::accumulate(texts.begin(), texts.end(), std::string());
  RC_PRE(texts.size() < 100 && all.size() > 1);
  const auto length = *rc::gen::inRange<size_t>(1, all.size());
  const Folder folder;
  for (size_t i = 0; i < texts.size(); ++i) write(folder, fmt::format("{:02}", i), texts[i]);
  const TrainingData data = text({folder.path()}, static_cast<int64_t>(length));
  RC_ASSERT(data.files().bytes() == static_cast<int64_t>(all.size()));
  for (int64_t i = 0; i < data.sequences(); ++i)
    RC_ASSERT(text_of(data.sequence(i)) == all.substr(static_cast<size_t>(i) * length, length + 1));
  RC_ASSERT(static_cast<size_t>(data.sequences() + 1) * length + 1 > all.size());
}

TEST(TrainingData, files_are_sorted_by_their_whole_path_byte_by_byte) {
  const Folder folder;
  for (const char* name : {"b", "a/z", "a.txt", "B", "a/y/x", "a0"}) write(folder, name, name);
  const TrainingData data = text({folder.path()}, 1);
  EXPECT_EQ(names(folder, data.files()), (std::vector<std::string>{"B", "a.txt", "a/y/x", "a/z", "a0", "b"}));
}

TEST(TrainingData, the_order_of_the_paths_given_does_not_matter_and_a_file_named_twice_counts_once) {
  const Folder folder;
  const std::string a = write(folder, "d/a", "first "), b = write(folder, "d/b", "second"), c = write(folder, "c", "zero  ");
  const TrainingData data = text({b, c, folder / "d", b}, 5);
  EXPECT_EQ(names(folder, data.files()), (std::vector<std::string>{"c", "d/a", "d/b"}));
  EXPECT_EQ(data.files().bytes(), 18);
}

TEST(TrainingData, a_folder_stands_for_its_text_files_only) {
  const Folder folder;
  for (const char* name : {"a.py", ".hidden", ".git/config", "__pycache__/a.pyc", "sub/__pycache__/b.py", "sub/b.py"})
    write(folder, name, "text");
  write(folder, "zero.so", std::string("ELF\0binary", 10));
  write(folder, "late.txt", std::string(8000, 'x') + std::string("\0", 1));
  fs::create_directory_symlink(folder.path(), folder / "loop");
  fs::create_symlink(folder / "gone", folder / "dangling");
  fs::create_symlink(folder / "a.py", folder / "link.py");
  const TrainingData data = text({folder.path()}, 1);
  EXPECT_EQ(names(folder, data.files()), (std::vector<std::string>{"a.py", "late.txt", "link.py", "sub/b.py"}));
}

TEST(TrainingData, a_file_named_itself_is_read_whatever_it_holds) {
  const Folder folder;
  const TrainingData data = text({write(folder, ".hidden", std::string("a\0b", 3))}, 1);
  EXPECT_EQ(data.sequence(1), (std::vector<uint32_t>{0, 'b'}));
}

TEST(TrainingData, what_cannot_be_read_is_an_error_that_names_it) {
  const Folder folder;
  expect_refused({folder / "gone"}, "there is no " + folder / "gone");
  expect_refused({write(folder, "empty", "")}, folder / "empty" + " is empty");
  expect_refused({write(folder, "short", "abcd")}, "4 bytes in " + folder / "short" + " are too few");
  fs::create_directory(folder / "bare");
  expect_refused({folder / "bare"}, "no text files under " + folder / "bare");
  expect_refused({"/dev/null"}, "/dev/null is neither a file nor a folder");
  expect_error([] { TokenFiles(std::vector<std::string>{}, TokenType::uint8); }, {"no path given"});
}

TEST(TrainingData, without_files_is_a_text_that_is_the_same_on_every_machine) {
  const TrainingData data = text({}, 29);
  EXPECT_EQ(data.files().bytes(), 1 << 20);
  EXPECT_EQ(text_of(data.sequence(0)), "the green smith paints 12 gree");
  EXPECT_EQ(text_of(data.files().read((1 << 20) - 11, 11)), "patient map");
  EXPECT_EQ(data.files().fingerprint(), 0x54f1f5391043fa5e);
}

TEST(TrainingData, a_file_cut_short_during_the_run_is_an_error) {
  const Folder folder;
  const TrainingData data = text({write(folder, "a", "abcdefgh")}, 4);
  fs::resize_file(folder / "a", 3);
  expect_error([&] { data.sequence(0); }, {"became shorter"});
}

TEST(BatchRule, microbatches_go_to_the_ranks_in_turn_round_by_round) {
  const BatchRule rule(12, 2, 3);  // 6 microbatches of 2
  EXPECT_EQ(rule.rounds(), 2);
  EXPECT_EQ(rule.positions(0, 0, 0), (SampleRange{0, 2}));
  EXPECT_EQ(rule.positions(0, 0, 2), (SampleRange{4, 6}));
  EXPECT_EQ(rule.positions(0, 1, 0), (SampleRange{6, 8}));
  EXPECT_EQ(rule.positions(5, 1, 2), (SampleRange{70, 72}));
}

RC_GTEST_PROP(BatchRule, every_sequence_is_read_once_whatever_the_number_of_ranks, ()) {
  const auto small = rc::gen::inRange<int64_t>(1, 6);
  const auto microbatch = *small, ranks = *small, rounds = *small;
  const BatchRule rule(microbatch * ranks * rounds, microbatch, ranks);
  std::vector<int64_t> read;
  for (int64_t step = 0; step < 3; ++step)
    for (int64_t round = 0; round < rounds; ++round)
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const SampleRange range = rule.positions(step, round, rank);
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

TEST(TokenFiles, numbers_have_their_lowest_byte_first_and_run_on_from_file_to_file) {
  const Folder folder;
  const std::vector<uint32_t> tokens{1, 255, 256, 65535, 4660, 0, 7, 8, 9};
  for (const TokenType type : {TokenType::uint16, TokenType::uint32}) {
    const int64_t width = bytes_of_token(type);
    const std::string all = bytes_of_tokens(tokens, width);
    const auto cut = static_cast<size_t>(4 * width);
    const std::string a = write(folder, "a.bin", all.substr(0, cut)), empty = write(folder, "b.bin", ""),
                      c = write(folder, "c.bin", all.substr(cut));
    const TokenFiles files({c, empty, a}, type);
    EXPECT_EQ(files.tokens(), 9);
    EXPECT_EQ(files.bytes(), 9 * width);
    for (int64_t begin = 0; begin < 9; ++begin)
      for (int64_t end = begin + 1; end <= 9; ++end)
        EXPECT_EQ(files.read(begin, end - begin), std::vector<uint32_t>(tokens.begin() + begin, tokens.begin() + end));
    EXPECT_EQ(files.place(5), "token 1 of " + c);
  }
  const std::vector<uint32_t> large{4294967295, 1};
  EXPECT_EQ(TokenFiles({write(folder, "large.bin", bytes_of_tokens(large, 4))}, TokenType::uint32).read(0, 2), large);
}

TEST(TokenFiles, a_folder_of_tokens_stands_for_its_bin_files) {
  const Folder folder;
  for (const char* name : {"train_1.bin", "train_0.bin", "sub/more.bin", ".hidden.bin", "tokenizer.json", "train.bin.txt"})
    write(folder, name, std::string("\0\1", 2));
  EXPECT_EQ(names(folder, TokenFiles({folder.path()}, TokenType::uint16)),
            (std::vector<std::string>{"sub/more.bin", "train_0.bin", "train_1.bin"}));
  fs::create_directory(folder / "bare");
  expect_error([&] { TokenFiles({folder / "bare"}, TokenType::uint16); }, {"no .bin files under"});
}

TEST(TokenFiles, a_file_that_ends_inside_a_token_or_is_cut_later_is_an_error) {
  const Folder folder;
  const std::string path = write(folder, "a.bin", std::string(12, 'x'));
  expect_error([&] { TokenFiles({write(folder, "odd.bin", "abc")}, TokenType::uint16); }, {"odd.bin has 3 bytes", "uint16"});
  expect_error([&] { TokenFiles({write(folder, "six.bin", "abcdef")}, TokenType::uint32); }, {"six.bin has 6 bytes", "uint32"});
  const TokenFiles files({path}, TokenType::uint16);
  fs::resize_file(path, 6);
  EXPECT_EQ(files.read(0, 3).size(), 3U);
  expect_error([&] { files.read(1, 3); }, {"became shorter"});
}

TEST(TokenFiles, a_type_that_is_not_there_is_an_error) {
  EXPECT_EQ(token_type("uint32"), TokenType::uint32);
  expect_error([] { token_type("int64"); }, {"uint8, uint16 or uint32, got 'int64'"});
}

TEST(TrainingData, a_token_that_the_model_does_not_know_is_an_error_that_says_where_it_is) {
  const Folder folder;
  const std::string path = write(folder, "a.bin", bytes_of_tokens({1, 2, 3, 4, 500, 6, 7}, 2));
  const TrainingData data({.paths = {path}, .sequence_length = 3, .type = TokenType::uint16, .vocab = 500});
  EXPECT_EQ(TrainingData({.paths = {path}, .sequence_length = 2, .type = TokenType::uint16, .vocab = 501}).sequence(1),
            (std::vector<uint32_t>{3, 4, 500}));
  expect_error([&] { data.sequence(1); }, {"token 4 of " + path + " is 500", "vocab=500"});
}

TEST(TrainingData, the_last_part_is_held_out_and_never_trained_on) {
  const Folder folder;
  std::string letters;
  for (char letter = 'A'; letter <= 'U'; ++letter) letters += letter;  // 10 sequences of 2
  for (const std::optional<uint64_t> shuffle : {std::optional<uint64_t>(), std::optional<uint64_t>(3)}) {
    const TrainingData data(
        {.paths = {write(folder, "a", letters)}, .sequence_length = 2, .shuffle = shuffle, .validation_part = 0.39});
    EXPECT_EQ(data.sequences(), 7);
    EXPECT_EQ(data.validation_sequences(), 3);
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(text_of(data.validation_sequence(i)), letters.substr(14 + 2 * i, 3));
    std::vector<std::string> read, expected;
    for (int64_t i = 0; i < 7; ++i) read.push_back(text_of(data.sequence(21 + i)));
    for (size_t i = 0; i < 7; ++i) expected.push_back(letters.substr(2 * i, 3));
    EXPECT_EQ(read == expected, !shuffle);
    std::sort(read.begin(), read.end());
    EXPECT_EQ(read, expected);
  }
}

TEST(TrainingData, files_of_their_own_can_be_validated_with) {
  const Folder folder;
  const TrainingData data(
      {.paths = {write(folder, "a", "abcdefg")}, .sequence_length = 3, .validation_paths = {write(folder, "b", "ABCDEFG")}});
  EXPECT_EQ(data.sequences(), 2);
  EXPECT_EQ(data.validation_sequences(), 2);
  EXPECT_EQ(text_of(data.validation_sequence(1)), "DEFG");
  EXPECT_EQ(text_of(data.sequence(1)), "defg");
}

TEST(TrainingData, a_split_that_leaves_nothing_is_an_error) {
  const Folder folder;
  const std::string path = write(folder, "a", "abcdefg");
  const auto split = [&](double part, const std::vector<std::string>& paths) {
    TrainingData({.paths = {path}, .sequence_length = 3, .validation_part = part, .validation_paths = paths});
  };
  expect_error([&] { split(0.49, {}); }, {"0.49 of 2 sequences is none"});
  expect_error([&] { split(1, {}); }, {"in [0, 1), got 1"});
  expect_error([&] { split(-0.1, {}); }, {"in [0, 1)"});
  expect_error([&] { split(0.5, {path}); }, {"exclude each other"});
  expect_error([&] { split(0, {write(folder, "short", "abc")}); }, {"3 bytes in", "too few"});
}

// The vectors that docs/howto/train_on_my_data.md has as well.
TEST(SampleOrder, is_the_documented_rule) {
  const auto taken = [](int64_t samples, uint64_t seed, std::vector<int64_t> positions) {
    const SampleOrder order(samples, seed);
    for (int64_t& position : positions) position = order.sample(position);
    return positions;
  };
  std::vector<int64_t> twice(20);
  std::iota(twice.begin(), twice.end(), 0);
  EXPECT_EQ(taken(10, 1, twice), (std::vector<int64_t>{9, 0, 3, 7, 4, 1, 6, 2, 8, 5, 1, 7, 6, 0, 9, 3, 8, 2, 5, 4}));
  EXPECT_EQ(taken(1000003, 7, {0, 1, 2, 3, 4, 5}), (std::vector<int64_t>{524981, 59832, 290216, 79318, 621438, 785233}));
  const int64_t many = (int64_t{1} << 40) + 5;
  EXPECT_EQ(taken(many, ~uint64_t{0}, {0, 1, many - 1, many, int64_t{5} << 40}),
            (std::vector<int64_t>{668846634251, 237692843250, 422653708687, 834553013549, 444249485402}));
}

TEST(SampleOrder, without_a_seed_is_the_order_of_the_samples) {
  const SampleOrder order(3, {});
  EXPECT_EQ((std::vector<int64_t>{order.sample(0), order.sample(2), order.sample(3), order.sample(10)}),
            (std::vector<int64_t>{0, 2, 0, 1}));
  expect_error([] { SampleOrder(0, {}); }, {"at least 1 sample"});
}

RC_GTEST_PROP(SampleOrder, an_epoch_takes_each_sample_once, ()) {
  const auto samples = *rc::gen::inRange<int64_t>(1, 300);
  const auto seed = *rc::gen::arbitrary<uint64_t>();
  const auto epoch = *rc::gen::inRange<int64_t>(0, 1000000);
  const SampleOrder order(samples, seed);
  std::vector<int64_t> taken, all(static_cast<size_t>(samples));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t i = 0; i < samples; ++i) taken.push_back(order.sample(epoch * samples + i));
  std::sort(taken.begin(), taken.end());
  RC_ASSERT(taken == all);
}

// Of 24 orders of four samples each comes as often as the others, over seeds and over epochs. The seeds are fixed, so the test
// always ends alike.
TEST(SampleOrder, every_order_is_as_likely_as_the_others) {
  for (const bool epochs : {false, true}) {
    std::map<std::vector<int64_t>, int64_t> times;
    for (int64_t draw = 0; draw < 24000; ++draw) {
      const SampleOrder order(4, epochs ? 5 : static_cast<uint64_t>(draw));
      std::vector<int64_t> taken;
      for (int64_t i = 0; i < 4; ++i) taken.push_back(order.sample((epochs ? 4 * draw : 0) + i));
      ++times[taken];
    }
    EXPECT_EQ(times.size(), 24U);
    for (const auto& [taken, count] : times) EXPECT_NEAR(static_cast<double>(count), 1000, 150);
  }
}

RC_GTEST_PROP(ValidationRule, microbatches_are_the_same_however_many_ranks_share_them, ()) {
  const auto samples = *rc::gen::inRange<int64_t>(0, 40), microbatch = *rc::gen::inRange<int64_t>(1, 6),
             ranks = *rc::gen::inRange<int64_t>(1, 6);
  const ValidationRule rule(samples, microbatch, ranks);
  std::vector<int64_t> read, all(static_cast<size_t>(samples));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t round = 0; round < rule.rounds(); ++round)
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const SampleRange range = rule.samples(round, rank);
      if (range.begin == range.end) continue;
      RC_ASSERT(range.begin % microbatch == 0);
      RC_ASSERT(range.end == std::min(samples, range.begin + microbatch));
      for (int64_t i = range.begin; i < range.end; ++i) read.push_back(i);
    }
  RC_ASSERT(read == all);
  RC_ASSERT(rule.rounds() * microbatch * ranks < samples + microbatch * ranks);
}
