#include "shardproof/algebra/strategy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

constexpr const char* kShard = "dp_shard";
constexpr const char* kReplicate = "dp_replicate";

std::vector<Strategy> make_table() {
  const Layout b = replicated();
  const Layout shard = split_flat(b, {kShard, {}});
  const Layout shard_twice = split_flat(shard, {kReplicate, {}});
  const Layout terms = add_partial(add_partial(b, kReplicate), kShard);
  const Layout shard_terms = add_partial(shard, kReplicate);
  //       name     needs                  parameter compute produced accumulated  state
  return {{"ddp",   {},                    b,        b,      terms,   terms,       b},
          {"zero1", {kShard},              b,        b,      terms,   terms,       shard},
          {"zero2", {kShard},              b,        b,      terms,   shard_terms, shard},
          {"zero3", {kShard},              shard,    b,      terms,   shard_terms, shard},
          {"hsdp",  {kReplicate, kShard},  shard,    b,      terms,   shard_terms, shard},
          {"hfsdp", {kReplicate, kShard},  shard,    b,      terms,   shard_terms, shard_twice}};
}

// The layout without the axes that the mesh lacks.
Layout on_mesh(Layout layout, const Mesh& mesh) {
  std::erase_if(layout.flat, [&](const Split& split) { return !mesh.has(split.axis); });
  std::erase_if(layout.partial, [&](const std::string& axis) { return !mesh.has(axis); });
  return layout;
}

}  // namespace

const std::vector<Strategy>& strategies() {
  static const std::vector<Strategy> table = make_table();
  return table;
}

const Strategy& strategy(std::string_view name) {
  std::vector<std::string> names;
  for (const Strategy& row : strategies()) {
    if (row.name == name) return row;
    names.push_back(row.name);
  }
  throw Error(fmt::format("[strategy] unknown strategy '{}': there are {}", name, fmt::join(names, ", ")));
}

Strategy on_mesh(Strategy strategy, const Mesh& mesh) {
  for (const std::string& axis : strategy.axes)
    SHARD_REQUIRE(mesh.has(axis), "strategy", "{} needs the mesh axis {}, which mesh '{}' lacks", strategy.name, axis,
                  mesh.str());
  const std::vector<std::string> summed = strategy.produced.partial;
  for (Layout* layout :
       {&strategy.parameter, &strategy.compute, &strategy.produced, &strategy.accumulated, &strategy.state})
    *layout = on_mesh(*layout, mesh);
  SHARD_REQUIRE(summed.empty() || !strategy.produced.partial.empty(), "strategy",
                "{} sums gradients over {}, and mesh '{}' has none of these axes", strategy.name, fmt::join(summed, ", "),
                mesh.str());
  return strategy;
}

Mesh data_parallel_mesh(const Mesh& mesh) {
  constexpr const char* kContext = "cp";
  std::vector<Axis> axes = mesh.axes();
  if (!mesh.has(kContext)) {
    if (!mesh.has(kShard) && !mesh.has(kReplicate)) axes.insert(axes.begin(), {kShard, 1});
    return Mesh(axes);
  }
  const auto context = static_cast<size_t>(mesh.index(kContext));
  if (!mesh.has(kShard)) {
    axes[context].name = kShard;
    return Mesh(axes);
  }
  const auto shard = static_cast<size_t>(mesh.index(kShard));
  SHARD_REQUIRE(context == shard + 1, "strategy",
                "mesh '{}': parameters are split over {} and {} together, so {} must follow {}", mesh.str(), kShard, kContext,
                kContext, kShard);
  axes[shard].size *= axes[context].size;
  axes.erase(axes.begin() + static_cast<std::ptrdiff_t>(context));
  return Mesh(axes);
}

Strategy reducing_replicas_every_time(Strategy strategy) {
  if (!accumulates_before_reducing(strategy)) strategy.accumulated = strategy.state;
  return strategy;
}

bool accumulates_before_reducing(const Strategy& strategy) { return strategy.accumulated == strategy.produced; }

}  // namespace shardproof
