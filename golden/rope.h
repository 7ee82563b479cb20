// Rotary positions of long sequences, as Llama has them from 3.1 on, and DeepSeek-V3.
#pragma once

#include <algorithm>
#include <cmath>

#include "golden/golden.h"

namespace golden {

// How far a pair of features turns in one token, of how far it would turn without rope_factor. A whole turn takes `turn`
// tokens: those that take more than rope_positions / rope_low go rope_factor times slower, those that take fewer than
// rope_positions / rope_high go as fast as ever, and those between are a mixture. In the arithmetic of Real, one operation at a
// time.
//
// With rope_yarn pair i, of `turning` features, goes rope_factor times slower by the part  (i - a) / (b - a),  at least 0 and
// at most 1, and as fast as ever by the rest.  a is the place, rounded down, of the pair that turns rope_high times in
// rope_positions tokens, at least 0, and b that of rope_low times, rounded up, at most turning - 1. Where the two are equal, b
// is a + 0.001. Places are in double.
template <class Real>
Real slowed(Real rate, int64_t pair, const Llama& llama) {
  if (llama.rope_factor == 1) return rate;
  const auto factor = static_cast<Real>(llama.rope_factor), positions = static_cast<Real>(llama.rope_positions);
  if (llama.rope_yarn) {
    const auto size = static_cast<double>(llama.turning());
    const auto place = [&](double turns) {
      return size * std::log(static_cast<double>(llama.rope_positions) / (turns * 2 * M_PI)) / (2 * std::log(llama.theta));
    };
    const double a = std::max(0.0, std::floor(place(llama.rope_high)));
    const double b = std::min(size - 1, std::ceil(place(llama.rope_low)));
    const double part = (static_cast<double>(pair) - a) / (a == b ? 0.001 : b - a);
    const auto slow = static_cast<Real>(std::min(1.0, std::max(0.0, part)));
    return rate / factor * slow + rate * (1 - slow);
  }
  const auto low = static_cast<Real>(llama.rope_low), high = static_cast<Real>(llama.rope_high);
  const Real turn = static_cast<Real>(2 * M_PI) / rate;
  if (turn > positions / low) return rate / factor;
  if (turn < positions / high) return rate;
  const Real part = (positions / turn - low) / (high - low);
  return (1 - part) * rate / factor + part * rate;
}

// By this queries of latent attention are multiplied.
inline double score_factor(const Llama& llama) {
  const double root = llama.rope_yarn ? 1 + llama.rope_mscale / 10 * std::log(llama.rope_factor) : 1;
  return root * root;
}

constexpr double kLatentEps = 1e-6;

}  // namespace golden
