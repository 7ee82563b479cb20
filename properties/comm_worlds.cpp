#include "comm_worlds.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "shardproof/check.h"

namespace worlds {

using shardproof::ThreadsOptions;

std::vector<ThreadsOptions> all_options() {
  std::vector<ThreadsOptions> list;
  for (const auto schedule : {ThreadsOptions::Schedule::parallel, ThreadsOptions::Schedule::serial})
    for (const auto completion :
         {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late, ThreadsOptions::Completion::random})
      for (const uint64_t seed : {1, 2}) {
        ThreadsOptions options;
        options.schedule = schedule;
        options.completion = completion;
        options.seed = seed;
        list.push_back(options);
      }
  return list;
}

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

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.numel() == b.numel() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

std::string error_of(int64_t world, const Body& body, const ThreadsOptions& options) {
  try {
    shardproof::run_threads(world, body, options);
  } catch (const shardproof::Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "the world ended well";
  return "";
}

}  // namespace worlds
