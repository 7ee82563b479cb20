#include "harness/plan/calibrate.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "shardproof/comm/threads/threads.h"

namespace harness {
namespace {

constexpr int kRounds = 7;

// The median time of a call, after one that is not timed.
double seconds_of(const std::function<void()>& body) {
  body();
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    body();
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::ranges::nth_element(times, times.begin() + kRounds / 2);
  return times[kRounds / 2];
}

double product_rate(at::ScalarType dtype) {
  constexpr int64_t kRows = 256, kSize = 768;
  const at::Tensor a = at::ones({kRows, kSize}, dtype), b = at::ones({kSize, kSize}, dtype);
  at::Tensor out = at::empty({kRows, kSize}, dtype);
  return 2.0 * kRows * kSize * kSize / seconds_of([&] { at::mm_out(out, a, b); });
}

double copy_rate() {
  constexpr int64_t kElements = int64_t{8} << 20;
  const at::Tensor from = at::ones({kElements});
  at::Tensor to = at::zeros({kElements});
  return 2.0 * 4 * kElements / seconds_of([&] { to.copy_(from); });
}

double small_operator() {
  constexpr int kTimes = 1000;
  at::Tensor x = at::ones({16});
  return seconds_of([&] {
           for (int i = 0; i < kTimes; ++i) x.add_(1);
         }) /
         kTimes;
}

// An all_gather between two ranks: each sends half of the buffer.
Link link_of_threads() {
  constexpr int64_t kElements = int64_t{4} << 20;
  constexpr int kTimes = 50;
  Link link;
  shardproof::run_threads(2, [&](std::shared_ptr<shardproof::Comm> comm) {
    const auto gather = [&](int64_t elements, int times) {
      at::Tensor whole = at::zeros({2 * elements});
      const at::Tensor own = at::ones({elements});
      return seconds_of([&] {
               for (int i = 0; i < times; ++i) comm->all_gather(whole, own).wait();
             }) /
             times;
    };
    const double small = gather(16, kTimes), large = gather(kElements, 1);
    if (comm->rank() == 0) link = {small, 4.0 * kElements / std::max(large - small, 1e-9)};
  });
  return link;
}

}  // namespace

Machine calibrate(const std::function<void(const std::string&)>& shown) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto cores = static_cast<int64_t>(std::max(1U, std::thread::hardware_concurrency()));
  Machine machine{.name = "this machine", .source = "measured by plan --calibrate"};
  shown("matrix products in float32");
  machine.flops["float32"] = product_rate(at::kFloat);
  shown("matrix products in bf16");
  machine.flops["bf16"] = product_rate(at::kBFloat16);
  shown("copies");
  machine.memory_bytes_per_second = copy_rate();
  shown("small operators");
  machine.operator_seconds = small_operator();
  shown("the communicator of threads");
  machine.inside = machine.between = link_of_threads();
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  machine.memory_bytes = memory / static_cast<double>(cores);
  machine.ranks_per_host = shardproof::kThreadsWorldMax;
  machine.ranks_at_once = cores;
  machine.overlaps = false;  // the ranks' own threads carry what is sent
  at::set_num_threads(threads);
  validate(machine);
  return machine;
}

}  // namespace harness
