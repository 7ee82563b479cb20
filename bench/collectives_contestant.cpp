#include "bench/collectives_contestant.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "bench/stopwatch.h"
#include "shardproof/base/check.h"

namespace bench {
namespace {

using namespace shardproof;

void start_and_wait(Comm& comm, const std::string& op, const at::Tensor& whole, const at::Tensor& part) {
  if (op == "all_reduce") comm.all_reduce(whole).wait();
  if (op == "all_gather") comm.all_gather(whole, part).wait();
  if (op == "reduce_scatter") comm.reduce_scatter(part, whole).wait();
}

}  // namespace

nlohmann::json time_collectives(Comm& comm, const CollectivesTask& task) {
  nlohmann::json result;
  for (const char* op : {"all_reduce", "all_gather", "reduce_scatter"})
    for (const int64_t mib : task.sizes_mib) {
      const int64_t numel = (mib << 18) / comm.size() * comm.size();
      at::Tensor whole = at::ones({numel}), part = at::ones({numel / comm.size()});
      std::vector<double> times;
      for (int64_t i = -task.warmup; i < task.repeats; ++i) {
        whole.fill_(1), part.fill_(1);
        comm.barrier().wait();
        const auto start = Clock::now();
        start_and_wait(comm, op, whole, part);
        at::Tensor slowest = at::full({1}, milliseconds_since(start), at::kDouble);
        comm.all_reduce(slowest, Reduce::max).wait();
        if (i >= 0) times.push_back(slowest.item<double>());
      }
      const float expected = std::string(op) == "all_gather" ? 1.f : static_cast<float>(comm.size());
      const at::Tensor& changed = std::string(op) == "reduce_scatter" ? part : whole;
      SHARD_CHECK(changed.eq(expected).all().item<bool>(), "bench", "{} of {} MiB has a wrong result", op, mib);
      result[op][fmt::format("{}", mib)] = times;
    }
  return result;
}

double copy_gb_per_s() {
  constexpr size_t kBytes = 64 << 20;
  const at::Tensor from = at::ones({kBytes}, at::kByte), to = at::zeros({kBytes}, at::kByte);
  double best_ms = 1e30;
  for (int repeat = 0; repeat < 6; ++repeat) {
    const auto start = Clock::now();
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), kBytes);
    best_ms = std::min(best_ms, milliseconds_since(start));
  }
  return static_cast<double>(kBytes) / best_ms / 1e6;
}

}  // namespace bench
