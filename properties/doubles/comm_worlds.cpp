#include "properties/doubles/comm_worlds.h"

#include <cmath>

namespace worlds {

using shardproof::ThreadsOptions;

std::string name(const ThreadsOptions& options) {
  return fmt::format("schedule {}, completion {}, seed {}", static_cast<int>(options.schedule),
                     static_cast<int>(options.completion), options.seed);
}

at::Tensor values(int64_t numel, at::ScalarType dtype, int64_t rank, int64_t salt) {
  at::Tensor tensor = at::empty({numel}, at::kDouble);
  double* elements = tensor.mutable_data_ptr<double>();
  for (int64_t i = 0; i < numel; ++i) {
    const auto mixed = static_cast<uint32_t>((i + 1) * 2654435761u + (rank + 1) * 40503u + salt * 97u);
    const double unit = static_cast<double>(mixed % 20001) / 10000 - 1;
    elements[i] = at::isFloatingType(dtype) ? unit * std::pow(10.0, static_cast<double>(mixed % 7) - 3) : std::round(unit * 9);
  }
  return dtype == at::kByte ? tensor.abs().to(dtype) : tensor.to(dtype);
}

}  // namespace worlds
