// Masks of dropout, by their definition: sites count from 0 in the order in which a forward meets them, and the element of
// row-major index i of what is dropped at site k is zeroed when the upper 32 bits of mix(mix(seed ^ mix(k)) ^ i) are below
// probability * 2^32; mix adds 0x9e3779b97f4a7c15 and finalises as splitmix64 does. What stays is multiplied by
// 1 / (1 - probability), rounded to float32 and then to the dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace golden {

// The masks of one forward.
class Dropout {
 public:
  Dropout(uint64_t seed, double probability) : seed_(seed), probability_(probability) {}

  bool drops() const { return probability_ > 0; }
  // At the next site; x itself when nothing is dropped.
  at::Tensor operator()(const at::Tensor& x) { return dropped(x, probability_); }
  // The next site's factors, row-major, for a tensor of so many elements; none when nothing is dropped.
  std::vector<double> mask(int64_t elements) { return mask(elements, probability_); }
  // The same with a probability of the site's own.
  at::Tensor dropped(const at::Tensor& x, double probability);
  std::vector<double> mask(int64_t elements, double probability);

 private:
  uint64_t seed_;
  double probability_;
  uint64_t sites_ = 0;
};

}  // namespace golden
