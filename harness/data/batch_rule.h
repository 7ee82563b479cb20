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

}  // namespace harness
