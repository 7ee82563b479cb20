// Parameters that are cut by rows (Granularity::row): what a rank holds is what FSDP2's ranks hold.
#include <gtest/gtest.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::grid;
using parity::on_mesh;
using parity::ranks;

namespace {

// Shapes that no number of ranks divides, more ranks than rows, and one of no dims.
struct OddShapesImpl : torch::nn::Module {
  OddShapesImpl() {
    weight = register_parameter("weight", toy::data({7, 3}, 1));
    few = register_parameter("few", toy::data({2, 5}, 2));
    vector = register_parameter("vector", toy::data({11}, 3));
    scale = register_parameter("scale", toy::data({}, 4));
    none = register_parameter("none", at::zeros({0, 4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor narrow = at::matmul(x, weight.t()) * scale;
    return at::matmul(narrow.narrow(1, 0, 5), few.t()).sum() + (narrow.sum() * vector).sum() + none.sum();
  }
  at::Tensor weight, few, vector, scale, none;
};
TORCH_MODULE(OddShapes);

parity::MakeTrainee odd_shapes() {
  return [] { return parity::trainee(OddShapes(), {4, 3}); };
}

ShardOptions by_rows(const std::string& strategy) {
  ShardOptions options = toy::options(strategy);
  options.granularity = Granularity::row;
  return options;
}

// The rows that torch.chunk gives to a part, as a run of elements.
Interval chunk_of(const at::Tensor& whole, int64_t parts, int64_t part) {
  if (whole.numel() == 0) return {};
  const at::Tensor rows = whole.dim() == 0 ? whole.view({1}) : whole;
  const std::vector<at::Tensor> chunks = rows.chunk(parts, 0);
  if (part >= std::ssize(chunks)) return {};
  const at::Tensor& own = chunks[static_cast<size_t>(part)];
  return {own.storage_offset(), own.storage_offset() + own.numel()};
}

}  // namespace

TEST(Rows, a_rank_holds_of_each_parameter_what_torch_chunk_gives_it) {
  for (const int64_t world : {2, 3, 4, 8})
    for (const char* name : {"zero1", "zero2", "zero3"})
      on_mesh(ranks(world), [&](std::shared_ptr<MeshComm> comms) {
        OddShapes model;
        std::map<std::string, at::Tensor> whole;
        for (const auto& item : model->named_parameters()) whole[item.key()] = item.value().detach().clone();
        const Sharded sharded = fully_shard(model.ptr(), comms, by_rows(name));
        std::map<std::string, Piece> held;
        for (const Piece& piece : sharded.main_parameters())
          EXPECT_TRUE(held.emplace(piece.name, piece).second) << "two pieces";
        for (const auto& [parameter, values] : whole) {
          const Interval wanted = chunk_of(values, world, comms->rank());
          ASSERT_EQ(held.contains(parameter), wanted.size() > 0) << parameter << " on " << comms->rank();
          if (wanted.size() == 0) continue;
          EXPECT_EQ(held[parameter].run, wanted) << name << ", " << parameter << " on " << comms->rank() << " of " << world;
          EXPECT_TRUE(at::equal(held[parameter].data, values.reshape({-1}).narrow(0, wanted.begin, wanted.size())));
        }
      });
}

TEST(Rows, every_strategy_trains_like_the_plain_model) {
  for (const Mesh& mesh : {ranks(3), grid(2, 2), grid(3, 2)})
    for (const Strategy& row : strategies()) {
      if (row.axes.size() == 2 && !mesh.has("dp_replicate")) continue;
      parity::Plan plan{.mesh = mesh, .options = by_rows(row.name), .steps = 3, .microbatches = 2};
      expect_trains_like_plain(odd_shapes(), plan);
      plan.options.initialize = normal_initializer(5, 0.5);
      plan.options.publish = Publish::at_first_use;
      plan.options.prefetch_forward = plan.options.prefetch_backward = 2;
      plan.options.bucket_bytes_max = 300;
      plan.meta = true;
      expect_trains_like_plain([] { return parity::trainee(parity::blocks(2, 5), {3, 5}); }, plan);
    }
}

TEST(Rows, what_was_gathered_is_freed_once_it_is_copied) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = parity::stack({64, 64});  // the weight's halves and the bias's fill a bucket without padding
    ShardOptions options = by_rows("zero3");
    options.units = {};
    options.alignment_bytes = 64;
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    const int64_t whole = (64 * 64 + 64) * static_cast<int64_t>(sizeof(float));
    sharded.unit("").unshard();
    EXPECT_EQ(sharded.memory().now(MemoryKind::gathered), whole);
    EXPECT_EQ(sharded.memory().peak(MemoryKind::gathered), 2 * whole);
    sharded.unit("").reshard();
    EXPECT_EQ(sharded.memory().now(MemoryKind::gathered), 0);
  });
}

TEST(Rows, neighbours_and_rows_of_layouts_keep_a_part_between_forward_and_backward) {
  // Of units below the root, which stays gathered.
  const auto make = [] { return parity::trainee(parity::blocks(2, 5), {3, 5}); };
  parity::Plan plan{.mesh = ranks(4), .options = by_rows("zero3"), .microbatches = 2};
  plan.options.reshard_after_forward = Reshard::within(2);
  expect_trains_like_plain(make, plan);
  plan = {.mesh = grid(2, 2), .options = by_rows("row_sr_t_sr_s"), .microbatches = 2};
  expect_trains_like_plain(make, plan);
}

TEST(Rows, what_would_be_lost_is_refused) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    ShardOptions options = by_rows("zero3");
    options.gather = Gather::side_by_side;
    expect_error([&] { fully_shard(OddShapes().ptr(), comms, options); }, {"side_by_side", "granularity `row`"});
    // The optimizer of zero1 works on rows that lie elsewhere.
    OddShapes model;
    const Sharded sharded = fully_shard(model.ptr(), comms, by_rows("zero1"));
    const at::NoGradGuard no_grad;
    model->weight.add_(1);
    expect_error([&] { sharded.parameters(); }, {"weight", "changed in place"});
  });
}

TEST(Rows, a_bad_element_is_named_by_its_place_in_the_parameter) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = parity::stack({3, 5});
    Sharded sharded = fully_shard(model.ptr(), comms, by_rows("zero3"));
    at::Tensor x = at::zeros({1, 5});
    x[0][4] = NAN;
    expect_error([&] { (call(model, toy::data({1, 3}, 1)) * x).sum().backward(); }, {"element 12 of 15"});
  });
}
