#include <memory>

#include "harness/run/policies.h"
#include "harness/run/sharded_options.h"
#include "harness/run/sharded_run.h"

namespace harness {
namespace {

using namespace shardproof;

class ThreadRanks final : public Ranks {
 public:
  Steps train(const Case& c, const golden::Run& run) override { return run_sharded(c, run, 1, policy_of(c.interleaving)); }
};

class DeviceThreads final : public Ranks {
 public:
  explicit DeviceThreads(c10::Device device) : device_(device) {}
  c10::Device device() const override { return device_; }
  Steps train(const Case& c, const golden::Run& run) override {
    CaseCheckpoints checkpoints(c);
    const auto policy = policy_of(c.interleaving);
    const auto run_world = [this, &policy](const Case& now, const RankBody& body) {
      ThreadsOptions options = threads_options(now);
      options.policy = policy;
      options.completion = ThreadsOptions::Completion::eager;
      options.device = device_;
      run_threads(now.mesh.size(), body, options);
    };
    return run_sharded(c, run, checkpoints, run_world, device_);
  }

 private:
  c10::Device device_;
};

}  // namespace

Ranks& thread_ranks() {
  static ThreadRanks ranks;
  return ranks;
}

std::unique_ptr<Ranks> thread_ranks_on(c10::Device device) {
  return std::make_unique<DeviceThreads>(device);
}

}  // namespace harness
