#include "harness/data/training_data.h"

#include <fmt/ranges.h>

#include <cmath>

#include "harness/data/generated_text.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

int64_t sequences_of(const TokenFiles& files, const std::vector<std::string>& paths, int64_t length) {
  SHARD_REQUIRE(files.tokens() > length, "data",
                "{} {} in {} are too few for one sequence of {} inputs and targets, which takes {}; give more text or a "
                "smaller --seq",
                files.tokens(), files.type() == TokenType::uint8 ? "bytes" : "tokens", fmt::join(paths, " "), length,
                length + 1);
  return (files.tokens() - 1) / length;
}

}  // namespace

TrainingData::TrainingData(DataOptions options) : options_(std::move(options)) {
  const DataOptions& o = options_;
  SHARD_REQUIRE(o.sequence_length >= 1, "data", "a sequence has at least 1 token, got {}", o.sequence_length);
  SHARD_REQUIRE(o.validation_part >= 0 && o.validation_part < 1, "data", "--validation-part must be in [0, 1), got {}",
                o.validation_part);
  SHARD_REQUIRE(o.validation_part == 0 || o.validation_paths.empty(), "data",
                "--validation-part and --validation-data exclude each other; leave one of them out");
  files_ = o.paths.empty() ? std::make_unique<TokenFiles>(generated_text()) : std::make_unique<TokenFiles>(o.paths, o.type);
  const int64_t all = sequences_of(*files_, o.paths, o.sequence_length);
  if (!o.validation_paths.empty()) {
    validation_files_ = std::make_unique<TokenFiles>(o.validation_paths, o.type);
    validation_sequences_ = sequences_of(*validation_files_, o.validation_paths, o.sequence_length);
  } else if (o.validation_part > 0) {
    validation_sequences_ = static_cast<int64_t>(std::floor(o.validation_part * static_cast<double>(all)));
    SHARD_REQUIRE(validation_sequences_ >= 1, "data",
                  "--validation-part {} of {} sequences is none; raise it, or give more data", o.validation_part, all);
    validation_begin_ = all - validation_sequences_;
  }
  order_.emplace(validation_files_ ? all : all - validation_sequences_, o.shuffle);
}

std::vector<uint32_t> TrainingData::read(const TokenFiles& files, int64_t sequence) const {
  const int64_t begin = sequence * options_.sequence_length;
  std::vector<uint32_t> tokens = files.read(begin, options_.sequence_length + 1);
  if (options_.vocab > 0)
    for (size_t i = 0; i < tokens.size(); ++i)
      SHARD_REQUIRE(tokens[i] < options_.vocab, "data", "{} is {}, and the model has vocab={}; is it of another --token-type?",
                    files.place(begin + static_cast<int64_t>(i)), tokens[i], options_.vocab);
  return tokens;
}

std::vector<uint32_t> TrainingData::sequence(int64_t position) const {
  return read(*files_, order_->sample(position));
}

std::vector<uint32_t> TrainingData::validation_sequence(int64_t index) const {
  SHARD_CHECK(index >= 0 && index < validation_sequences_, "data", "there are {} sequences to validate with, not number {}",
              validation_sequences_, index);
  return read(validation_files_ ? *validation_files_ : *files_, validation_begin_ + index);
}

}  // namespace harness
