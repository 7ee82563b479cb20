#include "shardproof/algebra/strategy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <numeric>
#include <set>

#include "shardproof/algebra/axes.h"
#include "shardproof/algebra/plan.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

constexpr const char* kShard = axes::dp_shard;
constexpr const char* kReplicate = axes::dp_replicate;

std::vector<Strategy> make_table() {
  const Layout b = replicated();
  const Layout shard = split_flat(b, {kShard, {}});
  const Layout shard_twice = split_flat(shard, {kReplicate, {}});
  const Layout terms = add_partial(add_partial(b, kReplicate), kShard);
  const Layout shard_terms = add_partial(shard, kReplicate);
  //       name      needs                  parameter compute produced accumulated  state
  return {{"ddp",    {},                    b,        b,      terms,   terms,       b},
          {"zero1",  {kShard},              b,        b,      terms,   terms,       shard},
          {"zero2",  {kShard},              b,        b,      terms,   shard_terms, shard},
          {"zero3",  {kShard},              shard,    b,      terms,   shard_terms, shard},
          {"hsdp",   {kReplicate, kShard},  shard,    b,      terms,   shard_terms, shard},
          {"hfsdp",  {kReplicate, kShard},  shard,    b,      terms,   shard_terms, shard_twice},
          {"hzero2", {kReplicate, kShard},  b,        b,      terms,   shard_terms, shard_twice}};
}

// Every row over the two axes whose sums go to the replicas last, as the table's do, but those of the table.
std::vector<Strategy> make_free_rows() {
  const Layout b = replicated();
  const Layout shard = split_flat(b, {kShard, {}}), replica = split_flat(b, {kReplicate, {}});
  const Layout both = split_flat(shard, {kReplicate, {}});
  const Layout terms = add_partial(add_partial(b, kReplicate), kShard);
  struct Part {
    std::string letters;
    Layout layout;
  };
  const std::vector<Part> parts = {{"b", b}, {"s", shard}, {"r", replica}, {"sr", both}};
  struct Sums {
    Part accumulated;
    std::vector<std::string> states;  // that the rest of the sums can lead to
  };
  const std::vector<Sums> paths = {{{"t", terms}, {"b", "s", "r", "sr"}},
                                   {{"s", add_partial(shard, kReplicate)}, {"s", "sr"}},
                                   {{"p", add_partial(b, kReplicate)}, {"b", "r"}}};
  std::vector<Strategy> rows;
  const std::vector<Strategy> table = make_table();
  for (const auto& [accumulated, states] : paths)
    for (const Part& state : parts)
      for (const Part& parameter : parts) {
        const bool begins = parameter.letters == "b" || state.letters.starts_with(parameter.letters);
        if (!begins || std::find(states.begin(), states.end(), state.letters) == states.end()) continue;
        const std::string name = "row_" + parameter.letters + "_" + accumulated.letters + "_" + state.letters;
        Strategy row{name, {}, parameter.layout, b, terms, accumulated.layout, state.layout};
        const auto same = [&](const Strategy& known) {
          return known.parameter == row.parameter && known.accumulated == row.accumulated && known.state == row.state;
        };
        if (std::none_of(table.begin(), table.end(), same)) rows.push_back(row);
        if (parameter.letters != "sr") continue;
        for (const Part& between : {parts[1], parts[2]}) {
          row.name = name + "_" + between.letters;
          row.between = between.layout;
          rows.push_back(row);
        }
      }
  return rows;
}

// The layout without the axes that the mesh lacks.
Layout on_mesh(Layout layout, const Mesh& mesh) {
  std::erase_if(layout.flat, [&](const Split& split) { return !mesh.has(split.axis); });
  std::erase_if(layout.partial, [&](const std::string& axis) { return !mesh.has(axis); });
  return layout;
}

// Rows are only added, and references to them stay valid, as the memory for the most there may be is there from the start.
constexpr size_t kRowsMax = 256;

std::vector<Strategy>& rows() {
  static std::vector<Strategy> table = [] {
    std::vector<Strategy> made;
    made.reserve(kRowsMax);
    for (Strategy& row : make_table()) made.push_back(std::move(row));
    return made;
  }();
  return table;
}

bool is_word(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

template <class Row>
auto layouts_of(Row& row) {
  std::vector layouts{&row.parameter, &row.compute, &row.produced, &row.accumulated, &row.state};
  if (row.between) layouts.push_back(&*row.between);
  return layouts;
}

// A mesh of two ranks along each axis that a row names.
Mesh smallest_mesh(const Strategy& row) {
  std::vector<Axis> axes;
  for (const std::string& name : axis_names(row)) axes.push_back({name, 2});
  return Mesh(axes);
}

void require_gather(const Strategy& row, const Mesh& mesh, const char* what, const Layout& from, const Layout& to) {
  int64_t numel = 1;
  for (const Axis& axis : mesh.axes()) numel *= axis.size;
  const Step step = lower({numel}, mesh, from, to).step;
  SHARD_REQUIRE(step == Step::none || step == Step::all_gather, "strategy",
                "{}: {} passes from {} to {} by {}; it must be nothing or an all_gather. Let {} be split as {} is, with more "
                "splits inside",
                row.name, what, from.str(), to.str(), to_string(step), from.str(), to.str());
}

}  // namespace

const std::vector<Strategy>& strategies() { return rows(); }

void register_strategy(Strategy row) {
  SHARD_REQUIRE(is_word(row.name), "strategy", "a strategy's name is a word of letters, digits and '_', got '{}'", row.name);
  for (const std::vector<Strategy>* known : {&strategies(), &free_rows()})
    for (const Strategy& other : *known)
      SHARD_REQUIRE(other.name != row.name, "strategy", "there is a strategy '{}' already; choose another name", row.name);
  SHARD_REQUIRE(rows().size() < kRowsMax, "strategy", "'{}' is one row too many: the table holds {}", row.name, kRowsMax);
  SHARD_REQUIRE(!row.produced.partial.empty(), "strategy",
                "{}: `produced` is partial along no axis, so no rank would ever learn from another", row.name);
  const Mesh mesh = smallest_mesh(row);
  require_gather(row, mesh, "unshard", row.parameter, row.compute);
  require_gather(row, mesh, "publish", row.state, row.parameter);
  if (row.between) require_gather(row, mesh, "unshard before the backward", *row.between, row.compute);
  rows().push_back(std::move(row));
}

const std::vector<Strategy>& free_rows() {
  static const std::vector<Strategy> rows = make_free_rows();
  return rows;
}

const Strategy& strategy(std::string_view name) {
  for (const Strategy& row : free_rows())
    if (row.name == name) return row;
  std::vector<std::string> names;
  for (const Strategy& row : strategies()) {
    if (row.name == name) return row;
    names.push_back(row.name);
  }
  throw Error(fmt::format("[strategy] unknown strategy '{}': there are {}", name, fmt::join(names, ", ")));
}

std::set<std::string> axis_names(const Strategy& strategy) {
  std::set<std::string> names(strategy.axes.begin(), strategy.axes.end());
  for (const Layout* layout : layouts_of(strategy)) {
    for (const auto& dim : layout->dims)
      for (const Split& split : dim) names.insert(split.axis);
    for (const Split& split : layout->flat) names.insert(split.axis);
    names.insert(layout->partial.begin(), layout->partial.end());
  }
  return names;
}

Strategy on_mesh(Strategy strategy, const Mesh& mesh) {
  for (const std::string& axis : strategy.axes)
    SHARD_REQUIRE(mesh.has(axis), "strategy", "{} needs the mesh axis {}, which mesh '{}' lacks", strategy.name, axis,
                  mesh.str());
  const std::vector<std::string> summed = strategy.produced.partial;
  for (Layout* layout : layouts_of(strategy)) *layout = on_mesh(*layout, mesh);
  SHARD_REQUIRE(summed.empty() || !strategy.produced.partial.empty(), "strategy",
                "{} sums gradients over {}, and mesh '{}' has none of these axes", strategy.name, fmt::join(summed, ", "),
                mesh.str());
  return strategy;
}

Mesh data_parallel_mesh(const Mesh& mesh) {
  constexpr const char* kContext = axes::cp;
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

Mesh expert_mesh(const Mesh& mesh, int64_t ranks) {
  std::vector<Axis> axes = mesh.axes();
  const auto shard = mesh.has(kShard)       ? static_cast<size_t>(mesh.index(kShard))
                     : mesh.has(kReplicate) ? static_cast<size_t>(mesh.index(kReplicate)) + 1
                                            : axes.size();
  if (!mesh.has(kShard)) axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(shard), {kShard, 1});
  int64_t& shards = axes[shard].size;
  const int64_t replicas = shard > 0 && axes[shard - 1].name == kReplicate ? axes[shard - 1].size : 1;
  SHARD_REQUIRE(ranks > 0 && (shards % ranks == 0 || (ranks % shards == 0 && replicas % (ranks / shards) == 0)), "strategy",
                "{} ranks cannot share experts on mesh '{}': their number must divide its {} ranks along {}, or be a multiple "
                "of them that divides those along {} and {} together, where {} stands directly before it",
                ranks, mesh.str(), shards, kShard, kReplicate, kShard, kReplicate);
  const int64_t of_replicas = ranks / std::gcd(ranks, shards);
  if (of_replicas > 1) axes[shard - 1].size /= of_replicas;
  shards /= ranks / of_replicas;
  axes.insert(axes.begin() + static_cast<std::ptrdiff_t>(shard) + 1, {axes::ep, ranks});
  return Mesh(axes);
}

Strategy reducing_replicas_every_time(Strategy strategy) {
  if (!accumulates_before_reducing(strategy)) strategy.accumulated = strategy.state;
  return strategy;
}

bool accumulates_before_reducing(const Strategy& strategy) { return strategy.accumulated == strategy.produced; }

}  // namespace shardproof
