#include "shardproof/nn/random.h"

#include <ATen/ATen.h>

#include <numeric>

#include "internal/base/counter_random.h"
#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"
#include "shardproof/device/device_graph.h"
#include "shardproof/device/model_math.h"
#include "shardproof/nn/dropout_mask.h"

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
  SHARD_REQUIRE(!is_capturing(), "dropout",
                "dropout inside of a captured step: its masks come from numbers of the host, and each replay would have those "
                "of the capture. Set the probability to 0, or train without a graph");
  RandomStream& stream = random_stream();
  return {counter_mix(stream.seed ^ counter_mix(stream.sites++)), probability};
}

at::Tensor dropout_mask(const DropoutSite& site, const std::vector<DimRows>& dims, at::ScalarType dtype, c10::Device device) {
  std::vector<int64_t> sizes, rows{0};  // of all dims but the last
  for (const DimRows& dim : dims) sizes.push_back(std::ssize(dim.rows));
  for (size_t d = 0; d + 1 < dims.size(); ++d) {
    std::vector<int64_t> next;
    next.reserve(rows.size() * dims[d].rows.size());
    for (const int64_t before : rows)
      for (const int64_t row : dims[d].rows) next.push_back(before * dims[d].length + row);
    rows = std::move(next);
  }
  const DimRows columns = dims.empty() ? whole_rows(1) : dims.back();
  at::Tensor mask = at::empty(sizes, at::TensorOptions(dtype).device(device));
  const at::Tensor rows_there = at::tensor(rows, at::kLong).to(device);
  const at::Tensor columns_there = at::tensor(columns.rows, at::kLong).to(device);
  const MaskScalars scalars{.key = site.key,
                            .dropped_below = static_cast<uint64_t>(site.probability * 0x1p32),
                            .length = columns.length,
                            .kept = static_cast<float>(1 / (1 - site.probability))};
  model_math(device_math(device))
      .dropout_mask(element_type(dtype), scalars, rows_there.const_data_ptr<int64_t>(), columns_there.const_data_ptr<int64_t>(),
                    std::ssize(columns.rows), mask.numel(), static_cast<std::byte*>(mask.mutable_data_ptr()));
  return mask;
}

at::Tensor dropout_mask(const DropoutSite& site, const std::vector<DimRows>& dims, at::ScalarType dtype) {
  return dropout_mask(site, dims, dtype, at::kCPU);
}

at::Tensor dropout(const at::Tensor& x, double probability, bool training) {
  SHARD_REQUIRE(probability >= 0 && probability < 1, "dropout", "the probability must be in [0, 1), got {}", probability);
  if (!training || probability == 0) return x;
  std::vector<DimRows> dims;
  for (const int64_t size : x.sizes()) dims.push_back(whole_rows(size));
  if (!dims.empty())
    for (int64_t& row : dims[0].rows) row += random_stream().first_sample;
  return x * dropout_mask(next_dropout_site(probability), dims, x.scalar_type(), x.device());
}

}  // namespace shardproof
