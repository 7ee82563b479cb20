#include <algorithm>
#include <map>
#include <memory>

#include "harness/run/policies.h"
#include "harness/run/sharded_options.h"
#include "harness/run/sharded_run.h"

namespace harness {
namespace {

using namespace shardproof;

class ThreadRanks final : public Ranks {
 public:
  Steps train(const Case& c, const golden::Run& run) override {
    return run_sharded({c, run, on_threads(policy_of(c.interleaving))});
  }
};

class DeviceThreads final : public Ranks {
 public:
  DeviceThreads(c10::Device device, Over over) : device_(device), over_(std::move(over)) {}
  c10::Device device() const override { return device_; }
  Steps train(const Case& c, const golden::Run& run) override {
    const auto policy = policy_of(c.interleaving);
    const auto run_world = [this, &policy](const Case& now, const RankBody& body) {
      ThreadsOptions options = threads_options(now);
      options.policy = policy;
      options.completion = ThreadsOptions::Completion::eager;
      options.device = device_;
      run_threads(
          now.mesh.size(),
          [&](std::shared_ptr<Comm> comm) { body(over_ ? over_(std::move(comm)) : std::move(comm)); }, options);
    };
    return run_sharded({c, run, run_world, device_});
  }

 private:
  c10::Device device_;
  Over over_;
};

const std::vector<std::string> kOurs = {"threads", "mpi", "nccl"};

std::map<std::string, std::function<std::unique_ptr<Ranks>()>>& registered() {
  static std::map<std::string, std::function<std::unique_ptr<Ranks>()>> all;
  return all;
}

}  // namespace

void register_ranks(const std::string& name, std::function<std::unique_ptr<Ranks>()> make) {
  const bool is_new = std::ranges::count(kOurs, name) == 0 && !registered().contains(name);
  SHARD_REQUIRE(make && is_new, "register_ranks", "'{}' is the name of other ranks, or there is nothing that makes them", name);
  registered().emplace(name, std::move(make));
}

std::unique_ptr<Ranks> registered_ranks(const std::string& name) {
  const auto found = registered().find(name);
  return found == registered().end() ? nullptr : found->second();
}

std::vector<std::string> names_of_backends() {
  std::vector<std::string> names = kOurs;
  for (const auto& [name, make] : registered()) names.push_back(name);
  return names;
}

Ranks& thread_ranks() {
  static ThreadRanks ranks;
  return ranks;
}

std::unique_ptr<Ranks> thread_ranks_on(c10::Device device, Over over) {
  return std::make_unique<DeviceThreads>(device, std::move(over));
}

}  // namespace harness
