// Rank-threads that train on the fake device.
#pragma once

#include <memory>

#include "harness/run/case_checkpoints.h"
#include "harness/run/policies.h"
#include "harness/run/ranks.h"
#include "harness/run/sharded_options.h"
#include "harness/run/sharded_run.h"
#include "properties/doubles/fake_device.h"

namespace fake_device {

// Streams are as late as they may be.
inline harness::Ranks& ranks() {
  install();
  static const std::unique_ptr<harness::Ranks> one = harness::thread_ranks_on(device());
  return *one;
}

// Ranks and streams go on in an order that the case's seed draws.
class DrawnOrder final : public harness::Ranks {
 public:
  explicit DrawnOrder(harness::Over over = {}) : over_(std::move(over)) { install(); }

  c10::Device device() const override { return fake_device::device(); }
  harness::Steps train(const harness::Case& c, const golden::Run& run) override {
    const auto policy = harness::make_policy({.kind = harness::Interleaving::Kind::random, .seed = c.seed});
    schedule_by(policy);
    const std::shared_ptr<void> back(nullptr, [](void*) { schedule_by(nullptr); });
    const auto run_world = [&](const harness::Case& now, const harness::RankBody& body) {
      shardproof::ThreadsOptions options = harness::threads_options(now);
      options.schedule = shardproof::ThreadsOptions::Schedule::serial;
      options.completion = shardproof::ThreadsOptions::Completion::eager;
      options.policy = policy;
      options.device = device();
      shardproof::run_threads(
          now.mesh.size(), [&](const auto& comm) { body(over_ ? over_(comm) : comm); }, options);
    };
    return run_sharded({c, run, run_world, device()});
  }

 private:
  harness::Over over_;
};

}  // namespace fake_device
