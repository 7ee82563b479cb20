#include "shardproof/random.h"

#include <ATen/ATen.h>

#include "shardproof/check.h"
#include "counter_random.h"

namespace shardproof {

RandomStream& random_stream() {
  thread_local RandomStream stream;
  return stream;
}

at::Tensor dropout(const at::Tensor& x, double probability, bool training) {
  SHARD_REQUIRE(probability >= 0 && probability < 1, "dropout", "the probability must be in [0, 1), got {}", probability);
  if (!training || probability == 0) return x;
  RandomStream& stream = random_stream();
  const uint64_t key = counter_mix(stream.seed ^ counter_mix(stream.sites++));
  const auto dropped_below = static_cast<uint64_t>(probability * 0x1p32);
  at::Tensor mask = at::empty(x.sizes(), at::kFloat);
  float* values = mask.mutable_data_ptr<float>();
  const auto kept = static_cast<float>(1 / (1 - probability));
  for (int64_t i = 0; i < mask.numel(); ++i)
    values[i] = (counter_mix(key ^ static_cast<uint64_t>(i)) >> 32) < dropped_below ? 0.0f : kept;
  return x * mask.to(x.scalar_type());
}

}  // namespace shardproof
