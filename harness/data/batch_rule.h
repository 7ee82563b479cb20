// Which samples a rank takes in a step. No Torch.
#pragma once

#include <cstdint>

namespace harness {

// Positions in the order of the run: begin <= position < end.
struct SampleRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const SampleRange&) const = default;
};

// How a step's global batch is cut: step s takes the positions s * global_batch to (s + 1) * global_batch - 1, cut in order
// into microbatches of `microbatch`; accumulation round k gives microbatch k * ranks + i to data-parallel rank i. So no
// position goes to two ranks, and a step takes the same samples however many ranks there are.
class BatchRule {
 public:
  // Throws Error when a number is below 1, or when the global batch is not a multiple of microbatch * ranks.
  BatchRule(int64_t global_batch, int64_t microbatch, int64_t ranks);

  int64_t global_batch() const { return global_batch_; }
  int64_t microbatch() const { return microbatch_; }
  int64_t ranks() const { return ranks_; }
  int64_t rounds() const { return global_batch_ / (microbatch_ * ranks_); }
  SampleRange positions(int64_t step, int64_t round, int64_t rank) const;

 private:
  int64_t global_batch_, microbatch_, ranks_;
};

// How samples that are held out are cut: in their order into microbatches of `microbatch`, of which the last one may be
// shorter; round k gives microbatch k * ranks + i to data-parallel rank i, while there are any. So microbatches, and with them
// the bits of their losses, are the same however many ranks there are.
class ValidationRule {
 public:
  // Throws Error unless `microbatch` and `ranks` are at least 1. There may be no samples.
  ValidationRule(int64_t samples, int64_t microbatch, int64_t ranks);

  int64_t samples() const { return samples_; }
  int64_t ranks() const { return ranks_; }
  int64_t rounds() const;
  // Empty where no microbatch is left.
  SampleRange samples(int64_t round, int64_t rank) const;

 private:
  int64_t samples_, microbatch_, ranks_;
};

}  // namespace harness
