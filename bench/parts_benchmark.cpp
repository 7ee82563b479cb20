// Times the parts of parts.h. Usage: bench_parts [--benchmark_filter=update/.*], with all options of Google Benchmark.
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include "bench/parts.h"

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const bench::Part& part : bench::parts())
    benchmark::RegisterBenchmark(part.name.c_str(), [part](benchmark::State& state) {
      const auto run = part.prepare();
      run();  // what only a first call does
      for (auto _ : state) run();
    });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
