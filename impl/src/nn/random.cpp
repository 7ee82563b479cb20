#include "shardproof/nn/random.h"

#include <ATen/ATen.h>

#include <numeric>

#include "base/counter_random.h"
#include "shardproof/base/check.h"

namespace shardproof {

RandomStream& random_stream() {
  thread_local RandomStream stream;
  return stream;
}

DimRows whole_rows(int64_t rows) {
  DimRows dim{std::vector<int64_t>(static_cast<size_t>(rows)), rows};
  std::iota(dim.rows.begin(), dim.rows.end(), int64_t{0});
  return dim;
}

DropoutSite next_dropout_site(double probability) {
  SHARD_REQUIRE(probability >= 0 && probability < 1, "dropout", "the probability must be in [0, 1), got {}", probability);
  RandomStream& stream = random_stream();
  return {counter_mix(stream.seed ^ counter_mix(stream.sites++)), probability};
}

at::Tensor dropout_mask(const DropoutSite& site, const std::vector<DimRows>& dims, at::ScalarType dtype) {
  const auto dropped_below = static_cast<uint64_t>(site.probability * 0x1p32);
  const auto kept = static_cast<float>(1 / (1 - site.probability));
  std::vector<int64_t> sizes, indices{0};  // of the rows of all dims but the last
  for (const DimRows& dim : dims) sizes.push_back(std::ssize(dim.rows));
  for (size_t d = 0; d + 1 < dims.size(); ++d) {
    std::vector<int64_t> next;
    next.reserve(indices.size() * dims[d].rows.size());
    for (const int64_t index : indices)
      for (const int64_t row : dims[d].rows) next.push_back(index * dims[d].length + row);
    indices = std::move(next);
  }
  at::Tensor mask = at::empty(sizes, at::kFloat);
  float* value = mask.mutable_data_ptr<float>();
  const auto fill = [&](int64_t index) {
    *value++ = (counter_mix(site.key ^ static_cast<uint64_t>(index)) >> 32) < dropped_below ? 0.0f : kept;
  };
  if (dims.empty())
    fill(0);
  else
    for (const int64_t index : indices)
      for (const int64_t row : dims.back().rows) fill(index * dims.back().length + row);
  return mask.to(dtype);
}

at::Tensor dropout(const at::Tensor& x, double probability, bool training) {
  SHARD_REQUIRE(probability >= 0 && probability < 1, "dropout", "the probability must be in [0, 1), got {}", probability);
  if (!training || probability == 0) return x;
  std::vector<DimRows> dims;
  for (const int64_t size : x.sizes()) dims.push_back(whole_rows(size));
  if (!dims.empty())
    for (int64_t& row : dims[0].rows) row += random_stream().first_sample;
  return x * dropout_mask(next_dropout_site(probability), dims, x.scalar_type()).to(x.device());
}

}  // namespace shardproof
