#include "harness/plan/calibrate.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <thread>

#include "harness/case/axes.h"
#include "harness/plan/dry_run.h"
#include "harness/plan/timeline.h"
#include "shardproof/comm/threads/threads.h"

namespace harness {
namespace {

constexpr int kRounds = 7;

double clock_seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// How long rank 0 takes for its body in the fastest round, when so many threads run theirs at the same time. `make` is called
// on each thread, which owns what its body reads and writes. `clock`: CLOCK_THREAD_CPUTIME_ID for what a thread does alone, so
// that other programs on its core do not count; CLOCK_MONOTONIC where threads wait for each other.
double seconds_of(clockid_t clock, int64_t threads, const std::function<std::function<void()>(shardproof::Comm&)>& make) {
  double fastest = std::numeric_limits<double>::infinity();
  shardproof::run_threads(threads, [&](std::shared_ptr<shardproof::Comm> comm) {
    const std::function<void()> body = make(*comm);
    body();
    for (int round = 0; round < kRounds; ++round) {
      comm->barrier().wait();
      const double start = clock_seconds(clock);
      body();
      if (comm->rank() == 0) fastest = std::min(fastest, clock_seconds(clock) - start);
    }
    comm->barrier().wait();
  });
  return fastest;
}

// The products of a step, over more weights than caches hold: forwards, gradients of inputs, and gradients of weights. Those of
// one matrix again and again would be faster than any training's.
double product_rate(int64_t cores, at::ScalarType dtype) {
  constexpr int64_t kRows = 256, kSize = 768;
  const int64_t layers = dtype == at::kFloat ? 16 : 4;  // some processors have no instructions for bf16
  const double seconds = seconds_of(CLOCK_THREAD_CPUTIME_ID, cores, [&](shardproof::Comm&) {
    const at::Tensor x = at::ones({kRows, kSize}, dtype), weights = at::ones({layers, kSize, kSize}, dtype);
    return [=, y = at::empty_like(x), gradients = at::empty_like(weights)]() mutable {
      for (int64_t i = 0; i < layers; ++i) at::mm_out(y, x, weights[i].t());
      for (int64_t i = 0; i < layers; ++i) {
        at::mm_out(y, x, weights[i]);
        at::Tensor gradient = gradients[i];
        at::mm_out(gradient, x.t(), x);
      }
    };
  });
  return 3 * 2.0 * kRows * kSize * kSize * static_cast<double>(layers) / seconds;
}

double copy_rate(int64_t cores) {
  constexpr int64_t kElements = int64_t{8} << 20;
  const double seconds = seconds_of(CLOCK_THREAD_CPUTIME_ID, cores, [&](shardproof::Comm&) {
    return [from = at::ones({kElements}), to = at::zeros({kElements})]() mutable { to.copy_(from); };
  });
  return 2.0 * 4 * kElements / seconds;
}

double small_operator() {
  constexpr int kTimes = 1000;
  const double seconds = seconds_of(CLOCK_THREAD_CPUTIME_ID, 1, [](shardproof::Comm&) {
    return [x = at::ones({16})]() mutable {
      for (int i = 0; i < kTimes; ++i) x.add_(1);
    };
  });
  return seconds / kTimes;
}

// An all_gather between two ranks: each sends half of the buffer.
Link link_of_threads() {
  constexpr int64_t kElements = int64_t{4} << 20;
  const auto gather = [](int64_t elements, int times) {
    const double seconds = seconds_of(CLOCK_MONOTONIC, 2, [=](shardproof::Comm& comm) {
      return [&comm, times, whole = at::zeros({2 * elements}), own = at::ones({elements})] {
        for (int i = 0; i < times; ++i) comm.all_gather(whole, own).wait();
      };
    });
    return seconds / times;
  };
  const double small = gather(16, 50), large = gather(kElements, 1);
  return {small, 4.0 * kElements / std::max(large - small, 1e-9)};
}

// A step of a GPT whose matrices do not fit into caches, on a replica a core.
DryRun small_training(int64_t cores) {
  DryRun run;
  run.samples = 4;
  run.what.mesh = shardproof::Mesh({{axes::dp_replicate, cores}});
  run.what.strategy = "ddp";
  run.what.model.kind = golden::Model::Kind::gpt;
  run.what.model.gpt = {.layers = 2, .hidden = 512, .heads = 8, .vocab = 2048, .positions = 128};
  return run;
}

// The efficiency that makes the predicted step as long as a measured one.
double training_efficiency(int64_t cores, Machine machine) {
  const DryRun run = small_training(cores);
  const double seconds = seconds_of(CLOCK_THREAD_CPUTIME_ID, cores, [&](shardproof::Comm& comm) {
    // The threads own the communicator for as long as this runs.
    auto comms = std::make_shared<shardproof::MeshComm>(std::shared_ptr<shardproof::Comm>(&comm, [](auto*) {}), run.what.mesh);
    return [training = training_of(run, comms, at::kCPU, /*computes=*/true)] {
      training.loss().backward();
      training.optimizer.step();
    };
  });
  machine.ranks_at_once = 0;  // processor time of one thread
  return efficiency_of(dry_run(run).record, machine, seconds);
}

}  // namespace

Machine calibrate(const std::function<void(const std::string&)>& shown) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto cores = static_cast<int64_t>(std::max(1U, std::thread::hardware_concurrency()));
  Machine machine{.name = "this machine", .source = "measured by plan --calibrate, with all cores at work"};
  shown("matrix products in float32");
  machine.flops["float32"] = product_rate(cores, at::kFloat);
  shown("matrix products in bf16");
  machine.flops["bf16"] = product_rate(cores, at::kBFloat16);
  shown("copies");
  machine.memory_bytes_per_second = copy_rate(cores);
  shown("small operators");
  machine.operator_seconds = small_operator();
  shown("the communicator of threads");
  machine.inside = machine.between = link_of_threads();
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  machine.memory_bytes = memory / static_cast<double>(cores);
  machine.ranks_per_host = shardproof::kThreadsWorldMax;
  machine.ranks_at_once = cores;
  machine.overlaps = false;  // the ranks' own threads carry what is sent
  shown("steps of a small GPT");
  machine.efficiency = training_efficiency(cores, machine);
  at::set_num_threads(threads);
  validate(machine);
  return machine;
}

}  // namespace harness
