// What a training run reads: sequences of tokens, in the order in which they are trained on, and others that are held out to
// validate with. Any other program can repeat which tokens a step reads. No Torch.
//
// Sequences: of the tokens of the files (harness/data/token_files.h), sequence i is tokens i * L to i * L + L inclusive; the
// first L are inputs, the last L targets. There are (tokens - 1) / L of them, rounded down. With a part P for validation the
// last floor(P * their number) are validated with, and are never trained on. Files of their own can be validated with instead.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/data/sample_order.h"
#include "harness/data/token_files.h"

namespace harness {

struct DataOptions {
  std::vector<std::string> paths = {};  // none: generated_text()
  int64_t sequence_length = 64;
  TokenType type = TokenType::uint8;
  std::optional<uint64_t> shuffle = {};            // the seed of the order; nothing: the order of the files
  double validation_part = 0;                      // of the sequences
  std::vector<std::string> validation_paths = {};  // instead of a part
  int64_t vocab = 0;                               // a token of this and more is an error where it is read; 0: any is taken
};

class TrainingData {
 public:
  // Throws Error when options do not fit each other, when files cannot be read (TokenFiles), or when there are too few tokens
  // for one sequence to train on, or to validate with if that is asked for.
  explicit TrainingData(DataOptions options);

  const DataOptions& options() const { return options_; }
  int64_t sequence_length() const { return options_.sequence_length; }
  const TokenFiles& files() const { return *files_; }
  // Those of their own that are validated with; null where there are none.
  const TokenFiles* validation_files() const { return validation_files_.get(); }
  // How many there are to train on. After the last one an epoch ends.
  int64_t sequences() const { return order_->samples(); }
  int64_t validation_sequences() const { return validation_sequences_; }

  // The sequence_length() + 1 tokens that position `position` >= 0 of the run takes.
  std::vector<uint32_t> sequence(int64_t position) const;
  std::vector<uint32_t> validation_sequence(int64_t index) const;

 private:
  std::vector<uint32_t> read(const TokenFiles& files, int64_t sequence) const;

  DataOptions options_;
  std::unique_ptr<const TokenFiles> files_, validation_files_;  // the latter only where validation has files of its own
  std::optional<SampleOrder> order_;
  int64_t validation_begin_ = 0, validation_sequences_ = 0;
};

}  // namespace harness
