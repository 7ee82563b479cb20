#include "shardproof/strategy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "shardproof/check.h"

namespace shardproof {
namespace {

constexpr const char* kAxis = "dp_shard";

std::vector<Strategy> make_table() {
  const Layout b = replicated();
  const Layout shard = split_flat(b, {kAxis, {}});
  const Layout terms = add_partial(b, kAxis);
  //       name     parameter  compute  produced  accumulated  state
  return {{"ddp", b, b, terms, terms, b},
          {"zero1", b, b, terms, terms, shard},
          {"zero2", b, b, terms, shard, shard},
          {"zero3", shard, b, terms, shard, shard}};
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

bool accumulates_before_reducing(const Strategy& strategy) { return strategy.accumulated == strategy.produced; }

}  // namespace shardproof
