// Runs each part of parts.h once inside `shardproof_counted_part`, where callgrind counts; ci/instructions starts it. The first
// line of the output says with what this was built, and each further line names the part that ran.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <cstdio>

#include "bench/parts.h"

// With a name of its own in the object file, and not inlined: callgrind finds it by its name.
extern "C" __attribute__((noinline)) void shardproof_counted_part(const std::function<void()>* run) {
  (*run)();
  asm volatile("" ::: "memory");
}

// With any argument it runs the parts of growth.
int main(int count, char**) {
  at::set_num_threads(1);
  fmt::print("{{\"compiler\": \"{}\", \"torch\": \"{}\", \"instructions of the CPU\": \"{}\"}}\n", __VERSION__, TORCH_VERSION,
             at::get_cpu_capability());
  for (const bench::Part& part : count > 1 ? bench::parts_of_growth() : bench::parts()) {
    const auto run = part.prepare();
    run();  // what only a first call does
    shardproof_counted_part(&run);
    fmt::print("{}\n", part.name);
    std::fflush(stdout);
  }
}
