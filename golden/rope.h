// Rotary positions of long sequences, as Llama has them from 3.1 on.
#pragma once

#include <cmath>

#include "golden/golden.h"

namespace golden {

// How far a pair of features turns in one token, of how far it would turn without rope_factor. A whole turn takes `turn`
// tokens: those that take more than rope_positions / rope_low go rope_factor times slower, those that take fewer than
// rope_positions / rope_high go as fast as ever, and those between are a mixture. In the arithmetic of Real, one operation at a
// time.
template <class Real>
Real slowed(Real rate, const Llama& llama) {
  if (llama.rope_factor == 1) return rate;
  const auto factor = static_cast<Real>(llama.rope_factor), positions = static_cast<Real>(llama.rope_positions);
  const auto low = static_cast<Real>(llama.rope_low), high = static_cast<Real>(llama.rope_high);
  const Real turn = static_cast<Real>(2 * M_PI) / rate;
  if (turn > positions / low) return rate / factor;
  if (turn < positions / high) return rate;
  const Real part = (positions / turn - low) / (high - low);
  return (1 - part) * rate / factor + part * rate;
}

}  // namespace golden
