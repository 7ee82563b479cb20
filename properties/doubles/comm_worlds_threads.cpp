// Worlds of rank-threads.
#include <gtest/gtest.h>

#include "properties/doubles/comm_worlds.h"
#include "shardproof/base/check.h"

namespace worlds {

using shardproof::ThreadsOptions;

int64_t ranks_max() {
  return 12;
}

bool one_host() {
  return true;
}

bool finishes_sums(const shardproof::ThreadsOptions& options) {
  return options.completion == shardproof::ThreadsOptions::Completion::eager;
}

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

void run(int64_t world, const Body& body, const ThreadsOptions& options) {
  shardproof::run_threads(world, body, options);
}

std::string agree(const std::string& found) {
  return found;
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
