#include "golden/jitter.h"

#include <ATen/ATen.h>

#include <limits>
#include <random>

namespace golden {
namespace {

// Floats of one sign are ordered as their bits are.
template <class Bits>
void move(at::Tensor& bits, std::mt19937_64& draws) {
  Bits* values = bits.mutable_data_ptr<Bits>();
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  for (int64_t i = 0; i < bits.numel(); ++i) {
    const uint64_t draw = draws() >> 62;
    if ((values[i] & kMagnitude) == 0 || draw > 1) continue;
    values[i] = static_cast<Bits>(draw == 0 ? values[i] + 1 : values[i] - 1);
  }
}

}  // namespace

at::Tensor jittered(const at::Tensor& tensor, uint64_t seed) {
  if (tensor.scalar_type() == at::kDouble) return tensor;
  std::mt19937_64 draws(seed);
  const at::Tensor moved = tensor.clone(at::MemoryFormat::Contiguous);
  at::Tensor bits = moved.view(tensor.scalar_type() == at::kFloat ? at::kInt : at::kShort);
  if (tensor.scalar_type() == at::kFloat)
    move<int32_t>(bits, draws);
  else
    move<int16_t>(bits, draws);
  return moved;
}

}  // namespace golden
