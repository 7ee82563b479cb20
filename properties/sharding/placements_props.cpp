// Sharded::placements: what all ranks hold, told by each of them alone.
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>

#include "properties/kit/drawn_sharding.h"
#include "properties/kit/granules.h"
#include "shardproof/comm/traced.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using kit::drawn_sharding;
using kit::DrawnModel;
using kit::DrawnSharding;

namespace {

// The pieces of one parameter, in storage order.
std::map<std::string, std::vector<Piece>> by_name(const std::vector<Piece>& pieces) {
  std::map<std::string, std::vector<Piece>> sorted;
  for (const Piece& piece : pieces) sorted[piece.name].push_back(piece);
  return sorted;
}

// Whether a rank holds what its placement says, and, where values are given, the values of those elements.
void expect_held(const std::string& where, const ParameterPlacement& of, const Placement& placement, int64_t rank,
                 const std::vector<Piece>& pieces, const at::Tensor& values, at::ScalarType dtype) {
  std::vector<Interval> wanted, held;
  for (const OwnedRun& run : owned_runs(of.shape, placement.mesh, placement.layout, rank)) {
    if (!wanted.empty() && wanted.back().end == run.whole.begin)
      wanted.back().end = run.whole.end;
    else
      wanted.push_back(run.whole);
  }
  for (const Piece& piece : pieces) {
    EXPECT_EQ(piece.shape, of.shape) << where;
    EXPECT_EQ(piece.data.scalar_type(), dtype) << where;
    if (!held.empty() && held.back().end == piece.run.begin)
      held.back().end = piece.run.end;
    else
      held.push_back(piece.run);
    if (!values.defined()) continue;
    const at::Tensor part = values.reshape({-1}).narrow(0, piece.run.begin, piece.run.size()).to(dtype);
    EXPECT_TRUE(piece.data.equal(part)) << where << " elements from " << piece.run.begin;
  }
  EXPECT_EQ(held, wanted) << where << " under " << placement.layout.str();
}

std::string str(const std::map<std::string, ParameterPlacement>& placements) {
  std::string text;
  for (const auto& [name, placed] : placements) {
    text += fmt::format("{} [{}] {} {}", name, fmt::join(placed.shape, ","), c10::toString(placed.compute),
                        c10::toString(placed.main));
    for (const Placement* each : {&placed.parameter, &placed.state})
      text += fmt::format(" {} on {}", each->layout.str(), each->mesh.str());
    text += "\n";
  }
  return text;
}

void expect_told_alone(const DrawnSharding& d) {
  std::vector<std::string> told(static_cast<size_t>(d.mesh.size()));
  const auto trace = std::make_shared<Trace>();
  run_threads(d.mesh.size(), [&](std::shared_ptr<Comm> world) {
    const int64_t rank = world->rank();
    const auto comms = std::make_shared<MeshComm>(traced(std::move(world), trace), d.mesh);
    const DrawnModel model = d.make();
    std::map<std::string, at::Tensor> whole;
    for (const auto& item : model.module->named_parameters()) whole[item.key()] = item.value().detach().clone();
    const auto parallel = d.cut(model, comms);
    Sharded sharded = fully_shard(model.module, comms, d.options());
    Optimizer optimizer = adamw(sharded, {});
    const size_t calls = trace->of_rank(rank).size();
    const auto placements = sharded.placements();
    EXPECT_EQ(trace->of_rank(rank).size(), calls) << "placements are known without a call";
    told[static_cast<size_t>(rank)] = str(placements);

    auto parameters = by_name(sharded.parameters()), main = by_name(sharded.main_parameters());
    auto state = by_name(optimizer.state("exp_avg"));
    for (const auto& [name, placed] : placements) {
      const std::string where = fmt::format("{}, rank {}, {}", d.str(), rank, name);
      if (d.granularity == Granularity::element)
        for (const Placement* at : {&placed.parameter, &placed.state})
          kit::expect_between_granules(where, placed.shape, *at, [&](const Shape& part) { return d.granule_of(part); });
      expect_held(where, placed, placed.parameter, rank, parameters[name], whole.at(name), at::kBFloat16);
      expect_held(where, placed, placed.state, rank, main[name], whole.at(name), at::kFloat);
      expect_held(where + ".exp_avg", placed, placed.state, rank, state[name], {}, at::kFloat);
    }
    for (const auto* pieces : {&parameters, &main})
      for (const auto& [name, of_name] : *pieces) EXPECT_TRUE(placements.contains(name)) << name;

    const at::Tensor tokens = at::arange(16, at::kLong).remainder(13).view({2, 8});
    model.forward(tokens).to(at::kFloat).square().sum().backward();
    auto gradients = by_name(sharded.gradients());
    for (const auto& [name, placed] : placements)
      expect_held(fmt::format("{}, rank {}, gradient of {}", d.str(), rank, name), placed, placed.state, rank,
                  gradients[name], {}, at::kFloat);
  });
  for (const std::string& one : told) EXPECT_EQ(one, told.front()) << d.str();
}

}  // namespace

RC_GTEST_PROP(Placements, are_what_every_rank_holds_and_each_knows_them_alone, ()) {
  const DrawnSharding d = drawn_sharding();
  expect_told_alone(d);
  if (::testing::Test::HasFailure()) RC_FAIL(d.str());
}
