// Worlds of ranks over the NCCL backend, on the double of NCCL. Where tensors are on the double's device, what the caller's own
// kernels do around a call happens late, in the caller's stream, so that a stream that does not wait for another is seen.
#include <gtest/gtest.h>

#include <cstring>

#include "properties/doubles/comm_worlds.h"
#include "properties/doubles/nccl_worlds.h"
#include "shardproof/base/check.h"

namespace worlds {

using shardproof::ThreadsOptions;

int64_t ranks_max() {
  return 5;
}

bool one_host() {
  return true;
}

bool finishes_sums(const shardproof::ThreadsOptions&) {
  return false;
}

std::vector<ThreadsOptions> all_options() {
  std::vector<ThreadsOptions> list;
  for (const auto schedule : {ThreadsOptions::Schedule::parallel, ThreadsOptions::Schedule::serial})
    for (const auto completion : {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::random})
      list.push_back({.schedule = schedule, .completion = completion, .seed = 1});
  return list;
}

namespace {

nccl_worlds::Arrangement setup_of(const ThreadsOptions& options) {
  nccl_worlds::Arrangement arrangement;
  arrangement.plan.host_tensors = options.schedule == ThreadsOptions::Schedule::serial;
  arrangement.plan.seed = options.completion == ThreadsOptions::Completion::eager ? 0 : options.seed + 1;
  arrangement.presses = !arrangement.plan.host_tensors;
  return arrangement;
}

}  // namespace

void run(int64_t world, const Body& body, const ThreadsOptions& options) {
  nccl_worlds::run(world, setup_of(options), body);
}

std::string agree(const std::string& found) {
  return found;
}

std::string error_of(int64_t world, const Body& body, const ThreadsOptions& options) {
  return nccl_worlds::error_of(world, setup_of(options), body);
}

}  // namespace worlds
