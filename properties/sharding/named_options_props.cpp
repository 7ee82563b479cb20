// Options of fully_shard by name: one table that cases, commands and Python set them through.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "harness/case/case.h"
#include "properties/kit/expect_error.h"
#include "shardproof/sharding/named_options.h"

using namespace shardproof;

namespace {

// Values that the option may have besides its default: all words, both flags, and some numbers.
std::vector<double> others_of(const NamedOption& option) {
  std::vector<double> values;
  for (size_t word = 0; word < option.words.size(); ++word) values.push_back(static_cast<double>(word));
  if (option.kind == NamedOption::Kind::flag) values = {0, 1};
  if (values.empty()) values = {option.least + 3, 1 << 20};
  if (option.kind == NamedOption::Kind::number) values.push_back(0.1);
  std::erase(values, option.standard());
  return values;
}

}  // namespace

TEST(NamedOptions, each_sets_its_own_member_and_no_other) {
  for (const NamedOption& option : named_options())
    for (const double value : others_of(option)) {
      ShardOptions options;
      option.set(options, value);
      for (const NamedOption& other : named_options())
        EXPECT_EQ(other.get(options), &other == &option ? value : other.standard()) << option.name << " and " << other.name;
    }
}

TEST(NamedOptions, a_text_says_every_value) {
  for (const NamedOption& option : named_options()) {
    std::vector<double> values = others_of(option);
    values.push_back(option.standard());
    values.insert(values.end(), option.drawn.begin(), option.drawn.end());
    for (const double value : values) {
      ShardOptions options;
      set_options(options, {option.name + "=" + option.text(value)});
      EXPECT_EQ(option.get(options), value) << option.name << "=" << option.text(value);
    }
  }
  ShardOptions options;
  set_options(options, {"bucket_bytes_max=64KiB", "bytes_in_flight_max=1GiB", "gradient_magnitude_max=inf"});
  EXPECT_EQ(options.bucket_bytes_max, 65536);
  EXPECT_EQ(options.bytes_in_flight_max, 1 << 30);
  const int64_t most = std::numeric_limits<int64_t>::max();
  options.keep_whole_numel_max = most;  // as a user says that there is no limit
  ShardOptions copy;
  named_option("keep_whole_numel_max").set(copy, named_option("keep_whole_numel_max").get(options));
  EXPECT_EQ(copy.keep_whole_numel_max, most);
}

TEST(NamedOptions, what_is_no_option_and_no_value_says_what_is) {
  const auto says = [](const std::string& text, const std::string& words) {
    ShardOptions options;
    expect_error([&] { set_options(options, {text}); }, {words});
  };
  says("bukket_count=2", "bucket_count");
  says("bucket_count", "name=value");
  says("bucket_count=", "must be a number");
  says("bucket_count=two", "must be a number");
  says("bucket_count=2KiB", "must be a number");
  says("bucket_count=1.5", "whole number");
  says("bucket_count=-1", "at least 0");
  says("bucket_count=nan", "at least 0");
  says("alignment_bytes=32", "at least 64");
  says("reshard_after_backward=1", "must be one of false, true");
  says("buffers=pool", "must be one of freed, pooled");
}

// What is drawn has to reach fully_shard, else a case tests nothing.
TEST(NamedOptions, a_case_gives_the_library_what_its_text_says) {
  harness::Case c = harness::Case::parse("mlp(widths=3-2) mesh(dp_shard=2) zero3 sgd(lr=0.1) ordered seed=1 : step");
  for (const NamedOption& option : named_options())
    for (const double value : option.drawn) {
      c.options = {};
      c.options.set(option.name, option.text(value));
      ShardOptions options;
      apply(harness::Case::parse(c.str()).options, options);
      EXPECT_EQ(option.get(options), value) << c.str();
    }
  expect_error([&] { c.options.set("numerics", "fast"); }, {"is no option of a case"});
}
