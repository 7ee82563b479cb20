// Parameters that are cut between blocks of elements (ShardOptions::granule): no cut falls within one, all else is as before.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>

#include "properties/kit/expect_error.h"
#include "properties/kit/granules.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::grid;
using parity::on_mesh;
using parity::ranks;

namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A bucket: parameters "0", "1", ... of these shapes, each with its granule.
struct DrawnBucket {
  Mesh mesh;
  Strategy row;
  std::vector<std::pair<Shape, int64_t>> members;
  int64_t multiple = 1;

  std::string str() const {
    std::string text = fmt::format("{} on {}, a multiple of {}:", row.name, mesh.str(), multiple);
    for (const auto& [shape, granule] : members) text += fmt::format(" {} by {}", shardproof::numel(shape), granule);
    return text;
  }
  // What the layouts of the strategy make of a bucket.
  int64_t chunks() const {
    const Strategy on = on_mesh(row, mesh);
    int64_t all = 1;
    for (const Layout* layout : {&on.parameter, &on.accumulated, &on.state, on.between ? &*on.between : &on.state}) {
      int64_t parts = 1;
      for (const Split& split : layout->flat) parts *= mesh.size(split.axis);
      all = std::lcm(all, parts);
    }
    return all;
  }
};

constexpr int64_t kAlignment = 16;  // 64 bytes

DrawnBucket drawn_bucket() {
  DrawnBucket drawn;
  drawn.mesh = grid(*rc::gen::element<int64_t>(1, 2, 3), *rc::gen::element<int64_t>(1, 2, 3, 4));
  std::vector<Strategy> rows = strategies();
  rows.insert(rows.end(), free_rows().begin(), free_rows().end());
  drawn.row = rows[*rc::gen::inRange<size_t>(0, rows.size())];
  drawn.multiple = *rc::gen::element<int64_t>(1, 1, 3, 64);
  for (int64_t i = *rc::gen::inRange<int64_t>(1, 8); i > 0; --i) {
    Shape shape(*rc::gen::inRange<size_t>(0, 4));
    for (int64_t& size : shape) size = *rc::gen::inRange<int64_t>(0, 40);
    const int64_t all = std::max<int64_t>(1, numel(shape));
    const int64_t row = shape.empty() ? 1 : std::max<int64_t>(1, all / std::max<int64_t>(1, shape[0]));
    drawn.members.emplace_back(shape, *rc::gen::element<int64_t>(1, 2, 3, 32, 48, row, row, 5 * row, all, all, 100000));
  }
  return drawn;
}

struct MembersImpl : torch::nn::Module {
  explicit MembersImpl(const DrawnBucket& drawn) {
    for (size_t i = 0; i < drawn.members.size(); ++i)
      register_parameter(std::to_string(i), at::zeros(drawn.members[i].first));
  }
};

// The most elements that a bucket may have, by its contract (bucket_layout.h).
int64_t bound(const DrawnBucket& drawn) {
  const int64_t n = drawn.chunks();
  const int64_t sizes = std::lcm(drawn.mesh.size("dp_replicate"), drawn.mesh.size("dp_shard"));
  const int64_t step = std::lcm(kAlignment, std::lcm(drawn.multiple, sizes));
  int64_t most = 0, aligned = 0, spread = 0, all = step;
  bool whole = true, free = true;
  for (const auto& [shape, given] : drawn.members) {
    const int64_t room = numel(shape), granule = std::min(given, std::max<int64_t>(1, room));
    whole &= granule >= room;
    free &= granule == 1;
    most = std::max(most, round_up(room, kAlignment));
    aligned += round_up(room, kAlignment);
    spread += room + std::lcm(kAlignment, granule) - 1;
    all = std::lcm(all, granule);
  }
  if (free || n == 1) return round_up(aligned, n * step) + n * step;
  if (whole) return n * round_up(most + (aligned + n - 1) / n, step);
  return n * std::min(round_up((spread + n - 1) / n, all),
                      round_up(std::max(most, round_up(aligned, (n + 1) / 2) / ((n + 1) / 2)), step));
}

// Shapes that no number of ranks divides, more ranks than rows, three dims, and none.
struct OddShapesImpl : torch::nn::Module {
  OddShapesImpl() {
    weight = register_parameter("weight", toy::data({37, 3}, 1));
    few = register_parameter("few", toy::data({2, 50}, 2));
    vector = register_parameter("vector", toy::data({11}, 3));
    scale = register_parameter("scale", toy::data({}, 4));
    none = register_parameter("none", at::zeros({0, 4}));
    cube = register_parameter("cube", toy::data({5, 3, 7}, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor wide = at::matmul(x, weight.t()) * scale;
    const at::Tensor wider = at::tanh(at::cat({wide, wide}, 1).narrow(1, 0, 50) * few[0] + few[1]);
    return wider.mean() + at::tanh(wide.mean() * vector).mean() + none.sum() + at::tanh(at::matmul(x, cube)).mean();
  }
  at::Tensor weight, few, vector, scale, none, cube;
};
TORCH_MODULE(OddShapes);

parity::MakeTrainee odd_shapes() {
  return [] { return parity::trainee(OddShapes(), {4, 3}); };
}

int64_t granule_of_odd(const std::string& name, const at::Tensor& part) {
  return name == "weight" ? 3 : name == "few" ? 50 : name == "cube" ? 32 : part.numel();
}

ShardOptions in_granules(const std::string& strategy) {
  ShardOptions options = toy::options(strategy);
  options.granule_of = granule_of_odd;
  return options;
}

}  // namespace

RC_GTEST_PROP(Granules, no_cut_falls_within_one_nothing_overlaps_and_padding_is_bounded, ()) {
  const DrawnBucket drawn = drawn_bucket();
  std::vector<std::string> told(static_cast<size_t>(drawn.mesh.size()));
  on_mesh(drawn.mesh, [&](std::shared_ptr<MeshComm> comms) {
    const auto module = std::make_shared<MembersImpl>(drawn);
    const Sharded sharded = fully_shard(module, comms,
                                        {.strategy = drawn.row,
                                         .alignment_bytes = 64,
                                         .bucket_multiple = drawn.multiple,
                                         .granule_of = [&](const std::string& name, const at::Tensor&) {
                                           return drawn.members[std::stoul(name)].second;
                                         }});
    std::vector<Interval> held;
    int64_t length = 0;
    for (const auto& [name, placed] : sharded.placements()) {
      const int64_t granule = drawn.members[std::stoul(name)].second;
      for (const Placement* at : {&placed.parameter, &placed.state})
        kit::expect_between_granules(drawn.str() + ", " + name, placed.shape, *at, [&](const Shape&) { return granule; });
      const BucketPlace& place = placed.state.layout.bucket;
      told[static_cast<size_t>(comms->rank())] += placed.state.layout.str() + " ";
      if (placed.state.layout.flat.empty() || numel(placed.shape) == 0) continue;
      EXPECT_EQ(place.offset % kAlignment, 0);
      held.push_back({place.offset, place.offset + numel(placed.shape)});
      length = place.length;
    }
    std::ranges::sort(held, {}, &Interval::begin);
    for (size_t i = 1; i < held.size(); ++i) EXPECT_LE(held[i - 1].end, held[i].begin) << drawn.str();
    if (held.empty()) return;
    EXPECT_LE(held.back().end, length);
    EXPECT_LE(length, bound(drawn)) << drawn.str();
    EXPECT_EQ(length % drawn.multiple, 0);
  });
  for (const std::string& one : told) EXPECT_EQ(one, told.front()) << drawn.str();
  if (::testing::Test::HasFailure()) RC_FAIL(drawn.str());
}

TEST(Granules, every_strategy_trains_like_the_plain_model) {
  for (const Mesh& mesh : {ranks(3), grid(2, 2), grid(3, 2)})
    for (const Strategy& row : strategies()) {
      if (row.axes.size() == 2 && !mesh.has("dp_replicate")) continue;
      parity::Plan plan{.mesh = mesh, .options = in_granules(row.name), .steps = 3, .microbatches = 2};
      expect_trains_like_plain(odd_shapes(), plan);
      plan.options.gather = Gather::side_by_side;
      expect_trains_like_plain(odd_shapes(), plan);
      plan.options = toy::options(row.name);
      plan.options.granule = 5;
      plan.options.initialize = normal_initializer(5, 0.5);
      plan.options.publish = Publish::at_first_use;
      plan.options.prefetch_forward = plan.options.prefetch_backward = 2;
      plan.options.offload = Offload::pageable;
      plan.options.bucket_bytes_max = 300;
      plan.meta = true;
      expect_trains_like_plain([] { return parity::trainee(parity::blocks(2, 5), {3, 5}); }, plan);
    }
}

TEST(Granules, neighbours_and_rows_of_layouts_keep_a_part_between_forward_and_backward) {
  const auto make = [] { return parity::trainee(parity::blocks(2, 5), {3, 5}); };  // units below the root
  parity::Plan plan{.mesh = ranks(4), .options = toy::options("zero3"), .microbatches = 2};
  plan.options.granule = 5;
  plan.options.reshard_after_forward = Reshard::within(2);
  expect_trains_like_plain(make, plan);
  plan = {.mesh = grid(2, 2), .options = toy::options("row_sr_t_sr_s"), .microbatches = 2};
  plan.options.granule = 5;
  expect_trains_like_plain(make, plan);
}

TEST(Granules, what_a_parameter_does_not_exceed_keeps_it_whole_as_muon_needs_it) {
  on_mesh(ranks(3), [](std::shared_ptr<MeshComm> comms) {
    auto model = parity::stack({7, 5, 3});
    ShardOptions options = toy::options("zero3");
    options.granule = 35;
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    for (const Piece& piece : sharded.main_parameters()) EXPECT_EQ(piece.run.size(), numel(piece.shape)) << piece.name;
    Optimizer optimizer = muon(sharded, {}, {});
    call(model, toy::data({2, 7}, 1)).square().sum().backward();
    optimizer.step();
  });
}

TEST(Granules, a_cut_falls_between_rows_of_all_parts_that_tensor_parallelism_leaves) {
  on_mesh(Mesh({{"dp_shard", 2}, {"tp", 2}}), [](std::shared_ptr<MeshComm> comms) {
    torch::nn::Linear linear(torch::nn::LinearOptions(7, 100).bias(false));  // rows of 4 and of 3
    const TensorParallel parallel = parallelize(linear.ptr(), comms, {.styles = {{"", RowParallel{}}}});
    const auto row = [](const Shape& part) { return part[1]; };
    const Sharded sharded = fully_shard(linear.ptr(), comms,
                                        {.alignment_bytes = 64, .granule_of = [&](const std::string&, const at::Tensor& part) {
                                           return row(part.sizes().vec());
                                         }});
    const ParameterPlacement placed = sharded.placements().at("weight");
    kit::expect_between_granules("weight", placed.shape, placed.state, row);
    EXPECT_FALSE(sharded.main_parameters().empty()) << "a rank along dp_shard has nothing";
  });
}

TEST(Granules, what_contradicts_them_is_refused_on_every_rank) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    const auto refused = [&](const ShardOptions& options, std::initializer_list<std::string> words) {
      expect_error([&] { fully_shard(OddShapes().ptr(), comms, options); }, words);
    };
    const bool is_first = comms->rank() == 0;
    ShardOptions options = toy::options("zero3");
    options.granule = 0;
    refused(options, {"granule must be at least 1, got 0"});
    options.granule = is_first ? 2 : 3;
    refused(options, {"option granule", "'2' on rank 0", "'3' on rank 1"});
    for (const Granularity granularity : {Granularity::tensor, Granularity::row}) {
      options = in_granules("zero3");
      options.granularity = granularity;
      refused(options, {"granule", "Leave one of the two out"});
      options.granule_of = {};
      options.granule = 2;
      refused(options, {"granule", "Leave one of the two out"});
    }
    options = in_granules("zero3");
    options.granule_of = [](const std::string& name, const at::Tensor&) { return name == "few" ? 0 : 1; };
    refused(options, {"granule_of", "says 0 elements for parameter few", "Let it return 1 or more"});
    options.granule_of = [&](const std::string&, const at::Tensor&) { return is_first ? 3 : 4; };
    refused(options, {"parameter weight", "in granules of 3", "in granules of 4"});
    if (is_first) options.granule_of = {};
    refused(options, {"granule_of", "'not given' on rank 0", "'given' on rank 1"});
    options.granule_of = [&](const std::string& name, const at::Tensor&) -> int64_t {
      if (is_first && name == "cube") throw std::runtime_error("no granule of a cube");
      return 1;
    };
    refused(options, {"no granule of a cube"});
  });
}
