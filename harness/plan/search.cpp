#include "harness/plan/search.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "harness/case/axes.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Axis;
using shardproof::Mesh;

Mesh mesh_of(int64_t replicas, int64_t shards, int64_t tensor) {
  std::vector<Axis> axes;
  if (replicas > 1) axes.push_back({axes::dp_replicate, replicas});
  axes.push_back({axes::dp_shard, shards});
  if (tensor > 1) axes.push_back({axes::tp, tensor});
  return Mesh(axes);
}

std::tuple<int, double> order_of(const Found& found) {
  return found.fits ? std::tuple(0, -found.tokens_per_second) : std::tuple(1, static_cast<double>(found.peak_bytes));
}

}  // namespace

std::vector<Choice> choices_for(int64_t ranks, const Machine& machine) {
  std::vector<Choice> choices;
  for (int64_t tensor = 1; tensor <= std::min(ranks, machine.ranks_per_host) && ranks % tensor == 0; tensor *= 2) {
    const int64_t data = ranks / tensor;
    for (const char* strategy : {"zero1", "zero2", "zero3"}) choices.push_back({mesh_of(1, data, tensor), strategy});
    for (int64_t replicas = 2; data % replicas == 0 && data / replicas > 1; replicas *= 2)
      for (const char* strategy : {"hsdp", "hfsdp"}) choices.push_back({mesh_of(replicas, data / replicas, tensor), strategy});
  }
  return choices;
}

int64_t tokens_of_step(const DryRun& what) {
  const int64_t samples = what.what.data_ranks() * what.samples * what.rounds;
  if (!what.what.model.of_tokens()) return samples;
  return samples * (what.length == 0 ? what.what.model.positions() : what.length);
}

SearchResult search(const DryRun& what, const SearchLimits& limits, const Machine& machine,
                    const std::function<void(size_t, size_t, const Choice&)>& shown) {
  SHARD_REQUIRE(limits.ranks >= 1, "plan", "--search needs at least one rank, got {}", limits.ranks);
  const std::vector<Choice> choices = choices_for(limits.ranks, machine);
  SearchResult result;
  std::set<std::string> refused;
  for (size_t i = 0; i < choices.size(); ++i) {
    shown(i, choices.size(), choices[i]);
    DryRun run = what;
    run.what.mesh = choices[i].mesh;
    run.what.strategy = choices[i].strategy;
    try {
      const DryRunResult dry = dry_run(run);
      Found found{.choice = choices[i], .peak_bytes = dry.peak_bytes, .time = walk(dry.record, machine)};
      found.tokens_per_second = static_cast<double>(tokens_of_step(run)) / found.time.seconds;
      found.fits = static_cast<double>(found.peak_bytes) <= limits.memory_max;
      result.found.push_back(std::move(found));
    } catch (const shardproof::Error& error) {
      if (refused.insert(error.what()).second)
        result.refused.push_back(fmt::format("{} {}: {}", choices[i].strategy, choices[i].mesh.str(), error.what()));
    }
  }
  std::ranges::stable_sort(result.found, {}, order_of);
  return result;
}

}  // namespace harness
