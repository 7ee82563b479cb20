// build/shardproof_doubles: `shardproof` with ranks over the doubles, by --backend (docs/extending.md). Of a device and of
// process groups there are two: one as late as it may be, and one in an order that each case's seed draws.
#include "harness/commands/program.h"
#include "properties/doubles/fake_ranks.h"
#include "properties/doubles/nccl_ranks.h"
#include "properties/doubles/unkind_groups.h"

int main(int argc, char** argv) {
  const harness::Over none, unkind_groups = [](std::shared_ptr<shardproof::Comm> comm) {
    return unkind::world_over(std::move(comm));
  };
  for (const auto& [name, over] : {std::pair{"device", none}, {"groups", unkind_groups}}) {
    harness::register_ranks("late_" + std::string(name), [over] {
      fake_device::install();
      return harness::thread_ranks_on(fake_device::device(), over);
    });
    harness::register_ranks("drawn_" + std::string(name), [over] { return std::make_unique<fake_device::DrawnOrder>(over); });
  }
  harness::register_ranks("nccl_double", [] { return nccl_worlds::ranks({.plan = {.host_tensors = true}}); });
  return harness::run_program(argc, argv);
}
