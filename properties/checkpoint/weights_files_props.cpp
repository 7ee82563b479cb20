// Weights in several files of torch.save, parameters that no rank shards, and matrices that are read in parts.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "properties/kit/bits.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/torch_file.h"
#include "shardproof/checkpoint/weights.h"
#include "shardproof/shardproof.h"

namespace shardproof::checkpoint {
namespace {

using Values = std::map<std::string, at::Tensor>;

void write_torch(const std::string& path, const Values& values) {
  std::map<std::string, SafeTensorSpec> specs;
  for (const auto& [name, value] : values) specs[name] = {value.scalar_type(), value.sizes().vec()};
  write_torch_file(system_files(), path, specs, {}, {}, [&](const std::string& name) { return bytes_in(values.at(name)); });
}

at::Tensor stepped(at::IntArrayRef sizes) {
  return at::sin(at::arange(numel(sizes.vec()), at::kFloat)).view(sizes);
}

// One linear layer on so many ranks, whose values are all `fill`.
struct Layer {
  Layer(const std::shared_ptr<Comm>& world, int64_t in, int64_t out, const ShardOptions& options, float fill = -1)
      : linear(in, out) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : linear->parameters()) parameter.fill_(fill);
    sharded.emplace(fully_shard(linear.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", world->size()}})), options));
  }
  torch::nn::Linear linear;
  std::optional<Sharded> sharded;
};

ShardOptions without_bias() {
  ShardOptions options{.strategy = strategy("zero3")};
  options.ignored = [](const std::string& key, const at::Tensor&) { return key == "bias"; };
  return options;
}

}  // namespace

TEST(WeightsFiles, an_index_of_torch_save_files_joins_what_they_hold) {
  const Scratch scratch;
  const at::Tensor weight = stepped({5, 3}), bias = stepped({5});
  write_torch(scratch / "pytorch_model-1.bin", {{"weight", weight}});
  write_torch(scratch / "pytorch_model-2.bin", {{"bias", bias}});
  const std::string index = scratch / "pytorch_model.bin.index.json";
  spill(index, R"({"weight_map":{"weight":"pytorch_model-1.bin","bias":"pytorch_model-2.bin"}})");
  for (const std::string& path : {scratch.path(), index})
    run_threads(2, [&](std::shared_ptr<Comm> world) {
      Layer layer(world, 3, 5, {.strategy = strategy("zero3")});
      load_weights(path, *layer.sharded);
      const auto found = layer.sharded->gather_main_parameters();
      EXPECT_TRUE(kit::same_bits(found.at("weight"), weight));
      EXPECT_TRUE(kit::same_bits(found.at("bias"), bias));
    });
  spill(index, R"({"weight_map":{"weight":"pytorch_model-1.bin","bias":"pytorch_model-1.bin"}})");
  expect_error([&] { open_weights(system_files(), scratch.path()); }, {"index.json", "bias is not in pytorch_model-1.bin"});
}

TEST(WeightsFiles, a_parameter_that_no_rank_shards_is_saved_and_loaded_with_the_others) {
  const Scratch scratch;
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Layer saved(world, 3, 5, without_bias(), 0.25F);
    {
      const at::NoGradGuard no_grad;
      saved.linear->bias.copy_(stepped({5}));
    }
    save_weights(scratch / "both", *saved.sharded);
    Layer layer(world, 3, 5, without_bias());
    const LoadedWeights loaded = load_weights(scratch / "both", *layer.sharded);
    EXPECT_TRUE(loaded.missing.empty());
    EXPECT_TRUE(kit::same_bits(layer.linear->bias.detach(), stepped({5})));
    EXPECT_TRUE(layer.sharded->gather_main_parameters().at("weight").eq(0.25).all().item<bool>());
  });
}

TEST(WeightsFiles, a_parameter_that_no_rank_shards_is_missed_by_name) {
  const Scratch scratch;
  write_torch(scratch / "weight.bin", {{"weight", stepped({5, 3})}});
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Layer layer(world, 3, 5, without_bias());
    expect_error([&] { load_weights(scratch / "weight.bin", *layer.sharded); }, {"weight.bin", "the file lacks bias"});
    const LoadedWeights loaded = load_weights(scratch / "weight.bin", *layer.sharded, {.partial = true});
    EXPECT_EQ(loaded.missing, std::vector<std::string>{"bias"});
    EXPECT_TRUE(layer.linear->bias.eq(-1).all().item<bool>());
  });
}

// Of more elements than are read at once, and of a number of rows that the parts do not divide.
TEST(WeightsFiles, a_matrix_that_is_read_in_parts_has_every_row_in_its_place) {
  const Scratch scratch;
  const at::Tensor weight = stepped({4099, 2111});
  write_torch(scratch / "large.bin", {{"weight", weight}, {"bias", stepped({4099})}});
  run_threads(1, [&](std::shared_ptr<Comm> world) {
    Layer layer(world, 2111, 4099, {.strategy = strategy("ddp")});
    const LoadedWeights loaded = load_weights(scratch / "large.bin", *layer.sharded);
    EXPECT_EQ(loaded.bytes_read, weight.nbytes() + 4099 * 4);
    EXPECT_TRUE(kit::same_bits(layer.linear->weight.detach(), weight));
  });
}

}  // namespace shardproof::checkpoint
