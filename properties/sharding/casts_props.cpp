// Scenarios of PyTorch's test_fully_shard_mixed_precision.py: casts of inputs, outputs and statistics. See docs/parity.md.
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>

#include <cmath>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::on_mesh;
using parity::ranks;
using parity::with;

namespace {

// c1 -> c2 with a second input that comes from outside; writes down what arrives where.
class RecordingImpl : public torch::nn::Module {
 public:
  class PartImpl : public torch::nn::Module {
   public:
    PartImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
    at::Tensor forward(at::Tensor x, at::Tensor y) {
      seen_x.push_back(x.scalar_type());
      seen_y.push_back(y.scalar_type());
      return linear(x.to(linear->weight.scalar_type())) + y.sum().to(linear->weight.scalar_type()) * 0;
    }
    torch::nn::Linear linear;
    std::vector<at::ScalarType> seen_x, seen_y;
  };
  RecordingImpl() {
    c1 = register_module("c1", std::make_shared<PartImpl>());
    c2 = register_module("c2", std::make_shared<PartImpl>());
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor outside = at::ones({2, 5});
    const at::Tensor between = call(c1, x, outside);
    from_c1 = between.scalar_type();
    return call(c2, between, outside);
  }
  std::shared_ptr<PartImpl> c1, c2;
  at::ScalarType from_c1 = at::kFloat;
};
TORCH_MODULE(Recording);

}  // namespace

TEST(Fsdp2Parity, the_precision_of_one_unit_casts_only_there) {
  const auto run = [](const std::function<std::optional<Precision>(const std::string&)>& policy, bool recompute,
                      const std::function<void(RecordingImpl&)>& check) {
    on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
      Recording model;
      ShardOptions options = toy::options("zero3");
      options.units = by_type<RecordingImpl::PartImpl>();
      options.unit_options = [=](const std::string& unit) { return UnitOptions{.precision = policy(unit)}; };
      if (recompute) options.recompute = options.units;
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      call(model, toy::data({2, 5}, 1)).to(at::kFloat).sum().backward();
      EXPECT_GT(sharded.gradient_norm(), 0);
      check(*model);
    });
  };
  const auto only = [](const std::string& unit, Precision precision) {
    return [=](const std::string& name) { return name == unit ? std::optional(precision) : std::nullopt; };
  };
  using Dtypes = std::vector<at::ScalarType>;
  run(only("c2", {.compute = at::kHalf}), false, [](RecordingImpl& model) {
    EXPECT_EQ(model.c1->seen_x, Dtypes{at::kFloat});
    EXPECT_EQ(model.c2->seen_x, Dtypes{at::kHalf});
    EXPECT_EQ(model.c2->seen_y, Dtypes{at::kHalf}) << "the input from outside too";
  });
  run(only("c2", {.compute = at::kHalf, .cast_inputs = false}), false, [](RecordingImpl& model) {
    EXPECT_EQ(model.c2->seen_x, Dtypes{at::kFloat}) << "the module casts for itself";
    EXPECT_EQ(model.c2->seen_y, Dtypes{at::kFloat});
  });
  run(only("c1", {.compute = at::kHalf, .output = at::kFloat}), false, [](RecordingImpl& model) {
    EXPECT_EQ(model.c1->seen_x, Dtypes{at::kHalf});
    EXPECT_EQ(model.from_c1, at::kFloat);
    EXPECT_EQ(model.c2->seen_x, Dtypes{at::kFloat});
  });
}

TEST(Fsdp2Parity, inputs_of_every_module_of_a_unit_are_cast) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    parity::Block model(5);
    ShardOptions options = with("zero3", {.compute = at::kBFloat16});
    options.units = {};
    Sharded sharded = Sharding(comms, options).unit({model->inner.ptr(), model->outer.ptr()}).shard(model.ptr());
    // In float32 between the two modules.
    const at::Tensor out = call(model->outer, call(model->inner, toy::data({2, 5}, 1)).to(at::kFloat));
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    out.sum().backward();
    for (const Piece& piece : sharded.gradients()) EXPECT_EQ(piece.data.scalar_type(), at::kFloat) << piece.name;
    EXPECT_GT(sharded.gradient_norm(), 0);
  });
}

TEST(Fsdp2Parity, recomputation_sees_the_same_dtypes) {
  for (const bool output : {false, true})
    on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
      Recording model;
      ShardOptions options = toy::options("zero3");
      options.units = by_type<RecordingImpl::PartImpl>();
      options.recompute = options.units;
      options.precision =
          output ? Precision{.compute = at::kBFloat16, .output = at::kFloat} : Precision{.compute = at::kBFloat16};
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      call(model, toy::data({2, 5}, 1)).sum().backward();
      const std::vector<at::ScalarType> twice{at::kBFloat16, at::kBFloat16};
      EXPECT_EQ(model->c1->seen_x, twice) << "once in the forward, once in the backward";
      EXPECT_EQ(model->c2->seen_x, twice);
      EXPECT_EQ(model->from_c1, output ? at::kFloat : at::kBFloat16);
    });
}

TEST(Fsdp2Parity, norms_train_in_low_precision) {
  using namespace torch::nn;
  const auto layer = [] {
    return Sequential(torch::nn::Linear(8, 8), torch::nn::LayerNorm(LayerNormOptions({8})), torch::nn::Linear(8, 8));
  };
  const auto batch = [] { return Sequential(torch::nn::Linear(8, 8), BatchNorm1d(8), torch::nn::Linear(8, 8)); };
  const auto image = [] { return Sequential(Conv2d(Conv2dOptions(1, 5, 3)), BatchNorm2d(5), Conv2d(Conv2dOptions(5, 4, 3))); };
  enum class Statistics { as_built, cast, in_float32 };  // the last with a policy of its own for the norm
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf})
    for (const Statistics statistics : {Statistics::as_built, Statistics::cast, Statistics::in_float32})
      on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
        const auto run = [&](Sequential model, const at::Tensor& x) {
          ShardOptions options = with("zero3", {.main = at::kFloat, .compute = low});
          options.units = [](const std::string&, const Module&) { return true; };
          if (statistics == Statistics::in_float32)
            options.unit_options = [=](const std::string& unit) {
              UnitOptions own;
              if (unit == "1") own.precision = {.compute = at::kFloat, .output = low};
              return own;
            };
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          if (statistics == Statistics::cast)
            for (at::Tensor& buffer : model->buffers())
              if (buffer.is_floating_point()) buffer.set_data(buffer.to(low));
          const at::Tensor out = call(model, x);
          EXPECT_EQ(out.scalar_type(), low);
          out.to(at::kFloat).square().sum().backward();
          EXPECT_TRUE(std::isfinite(sharded.gradient_norm()));
        };
        run(layer(), toy::data({4, 8}, 1));
        // LibTorch's batch norm wants statistics in the dtype of its weight.
        if (statistics == Statistics::as_built) {
          EXPECT_ANY_THROW(run(batch(), toy::data({4, 8}, 1)));
        } else {
          run(batch(), toy::data({4, 8}, 1));
          run(image(), toy::data({3, 1, 9, 9}, 1));
        }
      });
}
