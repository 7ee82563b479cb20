// Text as training data: the bytes of files laid end to end, and a fixed rule which of them a step reads.
// Nothing is drawn, so any other program can repeat a run. No Torch.
//
// Files: a path that is a file is read whatever it holds. A path that is a folder stands for the files below
// it, however deep, except hidden ones (a name with a leading dot), those under `__pycache__`, links to
// folders, and files with a zero byte among their first 8,000, which are not text. All files together are
// sorted by their path as text, byte by byte; one that is named twice counts once.
//
// Sequences: of the concatenated bytes, sequence i is bytes i * L to i * L + L inclusive; the first L are
// inputs, the last L targets. There are (bytes - 1) / L of them, rounded down; beyond the last, sequence i is
// sequence i modulo that number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace harness {

class TextData {
 public:
  // Throws Error, naming the path, when one does not exist or cannot be read, when a folder has no text in
  // it, or when all bytes together are too few for one sequence of `sequence_length`.
  TextData(const std::vector<std::string>& paths, int64_t sequence_length);

  int64_t sequence_length() const { return sequence_length_; }
  int64_t sequences() const { return (bytes_ - 1) / sequence_length_; }
  int64_t bytes() const { return bytes_; }
  std::vector<std::string> files() const;

  // The sequence_length() + 1 bytes of sequence `index` >= 0. Read when asked for: data may be larger than
  // memory.
  std::vector<uint8_t> sequence(int64_t index) const;

 private:
  struct File {
    std::string path;
    int64_t begin = 0;  // of its bytes among all
    int64_t end = 0;
  };
  std::vector<File> files_;
  int64_t bytes_ = 0;
  int64_t sequence_length_ = 0;
};

// Which sequences one microbatch has.
struct SequenceRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const SequenceRange&) const = default;
};

// How a step's global batch is cut: step s takes sequences s * global_batch to (s + 1) * global_batch - 1,
// cut in order into microbatches of `microbatch`; accumulation round k gives microbatch k * ranks + i to
// data-parallel rank i.
class BatchRule {
 public:
  // Throws Error when a number is below 1, or when the global batch is not a multiple of microbatch * ranks.
  BatchRule(int64_t global_batch, int64_t microbatch, int64_t ranks);

  int64_t global_batch() const { return global_batch_; }
  int64_t microbatch() const { return microbatch_; }
  int64_t ranks() const { return ranks_; }
  int64_t rounds() const { return global_batch_ / (microbatch_ * ranks_); }
  SequenceRange sequences(int64_t step, int64_t round, int64_t rank) const;

 private:
  int64_t global_batch_, microbatch_, ranks_;
};

}  // namespace harness
