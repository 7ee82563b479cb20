// Parameters that are cut by rows, or along another dim (Granularity::row): what a rank holds is what FSDP2's ranks hold.
#include <gtest/gtest.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/sharding/hand_over.h"

using namespace shardproof;
using parity::grid;
using parity::on_mesh;
using parity::ranks;

namespace {

// Shapes that no number of ranks divides, more ranks than rows, three dims, and none.
struct OddShapesImpl : torch::nn::Module {
  OddShapesImpl() {
    weight = register_parameter("weight", toy::data({7, 3}, 1));
    few = register_parameter("few", toy::data({2, 5}, 2));
    vector = register_parameter("vector", toy::data({11}, 3));
    scale = register_parameter("scale", toy::data({}, 4));
    none = register_parameter("none", at::zeros({0, 4}));
    cube = register_parameter("cube", toy::data({2, 3, 5}, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor narrow = at::matmul(x, weight.t()) * scale;
    return at::matmul(narrow.narrow(1, 0, 5), few.t()).sum() + (narrow.sum() * vector).sum() + none.sum() +
           (at::matmul(x, cube).square().sum({0, 1}) * few).sum();
  }
  at::Tensor weight, few, vector, scale, none, cube;
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

// The dims that have the names of those of OddShapes, each another one than the last.
int64_t other_dims(const std::string& name, const at::Tensor& parameter) {
  return name == "cube" ? -2 : name == "few" ? 1 : parameter.dim() - 1;
}

// Which elements torch.chunk gives to a part along a dim.
at::Tensor chunk_of(const at::Tensor& whole, int64_t parts, int64_t part, int64_t dim) {
  const at::Tensor numbers = at::arange(whole.numel()).view(whole.dim() == 0 ? Shape{1} : whole.sizes().vec());
  const std::vector<at::Tensor> chunks = numbers.chunk(parts, dim);
  return part < std::ssize(chunks) ? chunks[static_cast<size_t>(part)].reshape({-1}) : numbers.view({-1}).narrow(0, 0, 0);
}

}  // namespace

TEST(Rows, a_rank_holds_of_each_parameter_what_torch_chunk_gives_it) {
  for (const ParameterDim& dim_of : {ParameterDim(), ParameterDim(other_dims)})
    for (const int64_t world : {2, 3, 4, 8})
      for (const char* name : {"zero1", "zero2", "zero3"})
        on_mesh(ranks(world), [&](std::shared_ptr<MeshComm> comms) {
          OddShapes model;
          std::map<std::string, at::Tensor> whole;
          for (const auto& item : model->named_parameters()) whole[item.key()] = item.value().detach().clone();
          ShardOptions options = by_rows(name);
          options.shard_dim_of = dim_of;
          const Sharded sharded = fully_shard(model.ptr(), comms, options);
          std::map<std::string, at::Tensor> held;  // each in one tensor
          for (const Shard& shard : main_shards(sharded))
            EXPECT_TRUE(held.emplace(shard.name, shard.data).second) << "two of " << shard.name;
          std::map<std::string, std::vector<at::Tensor>> runs;
          for (const Piece& piece : sharded.main_parameters())
            runs[piece.name].push_back(at::arange(piece.run.begin, piece.run.end));
          for (const auto& [parameter, values] : whole) {
            const int64_t dim = dim_of && values.dim() > 0 ? (dim_of(parameter, values) + values.dim()) % values.dim() : 0;
            const at::Tensor wanted = chunk_of(values, world, comms->rank(), dim);
            ASSERT_EQ(held.contains(parameter), wanted.numel() > 0) << parameter << " on " << comms->rank();
            if (wanted.numel() == 0) continue;
            EXPECT_TRUE(at::equal(at::cat(runs[parameter]), wanted))
                << name << ", " << parameter << " on " << comms->rank() << " of " << world;
            EXPECT_TRUE(at::equal(held[parameter], values.reshape({-1}).index_select(0, wanted)));
          }
        });
}

TEST(Rows, every_strategy_trains_like_the_plain_model) {
  for (const Mesh& mesh : {ranks(3), grid(2, 2), grid(3, 2)})
    for (const Strategy& row : strategies()) {
      if (row.axes.size() == 2 && !mesh.has("dp_replicate")) continue;
      parity::Plan plan{.mesh = mesh, .options = by_rows(row.name), .steps = 3, .microbatches = 2};
      expect_trains_like_plain(odd_shapes(), plan);
      plan.options.shard_dim_of = other_dims;
      expect_trains_like_plain(odd_shapes(), plan);
      plan.options.shard_dim_of = {};
      plan.options.shard_dim = mesh.has("dp_replicate");
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
    options = by_rows("zero3");
    options.shard_dim_of = [&](const std::string&, const at::Tensor&) { return comms->rank() == 0 ? 2 : 0; };
    expect_error([&] { fully_shard(OddShapes().ptr(), comms, options); }, {"dim 2 for parameter weight, which has 2 dims"});
    options.shard_dim_of = [&](const std::string&, const at::Tensor& of) { return comms->rank() == 0 ? 0 : of.dim() - 1; };
    expect_error([&] { fully_shard(OddShapes().ptr(), comms, options); }, {"parameter weight", "cut along dim"});
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
    for (const int64_t dim : {0, 1}) {
      ShardOptions options = by_rows("zero3");
      options.shard_dim = dim;
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      at::Tensor x = at::zeros({1, 5});
      x[0][4] = NAN;
      expect_error([&] { (call(model, toy::data({1, 3}, 1)) * x).sum().backward(); }, {"element 12 of 15"});
    }
  });
}
