// In which order samples are taken. It is a rule that any program can repeat: a function of how many samples there are, of a
// seed and of the position in the run. So it does not depend on how many ranks there are, a run goes on at any position, and
// nothing has to be stored. No Torch.
//
// Position p is in epoch e = p div n, at place i = p mod n; an epoch takes each of the n samples once. Without a seed place i
// takes sample i. With one it takes sample S(e, i), where S(e, .) is a permutation of the numbers below n: a Feistel network
// over 2b bits, b being the least number of 1 and more for which 4^b >= n, that is repeated until its result is below n.
//
//   mix(x)     the finaliser of splitmix64 (harness/case/random.h); all arithmetic is modulo 2^64
//   k        = mix(mix(seed) + e)
//   one pass : left = i div 2^b, right = i mod 2^b
//              eight times, for r = 0 to 7: (left, right) = (right, left xor (mix(mix(k + r) xor right) mod 2^b))
//              i = left * 2^b + right
//   S(e, i)  = the first i below n, after one pass or more
//
// docs/howto/train_on_my_data.md has the same in ten lines of Python.
#pragma once

#include <cstdint>
#include <optional>

namespace harness {

class SampleOrder {
 public:
  // Of `samples` samples; without a seed in their own order. Throws Error unless there is a sample.
  SampleOrder(int64_t samples, std::optional<uint64_t> seed);

  int64_t samples() const { return samples_; }
  // Which sample position `position` >= 0 takes.
  int64_t sample(int64_t position) const;

 private:
  int64_t samples_;
  std::optional<uint64_t> seed_;
  int half_bits_ = 1;
};

}  // namespace harness
