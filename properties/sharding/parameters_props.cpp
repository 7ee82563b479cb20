// Scenarios of PyTorch's test_fully_shard_init.py: what parameters may be. See docs/parity.md.
#include <gtest/gtest.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;
using parity::ranks;

namespace {

const Mesh kTwoByTwo({{"dp_replicate", 2}, {"dp_shard", 2}});

// Parameters of no dims, one element, no elements, five dims and other strides than row-major.
class ShapesImpl : public torch::nn::Module {
 public:
  ShapesImpl() {
    scalar = register_parameter("scalar", at::full({}, 0.75));
    one = register_parameter("one", at::full({1}, -0.5));
    none = register_parameter("none", at::zeros({0, 3}));
    deep = register_parameter("deep", toy::data({2, 1, 3, 1, 2}, 4));
    strided = register_parameter("strided", toy::data({4, 3}, 5).t());
    channels = register_parameter("channels", toy::data({2, 3, 2, 2}, 6).contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor y = at::tanh(at::mm(x, strided) * scalar + one);
    return y.sum() * deep.square().sum() + none.sum() + at::conv2d(x.view({1, 3, 2, 2}), channels).square().sum();
  }
  at::Tensor scalar, one, none, deep, strided, channels;
};
TORCH_MODULE(Shapes);

}  // namespace

TEST(Fsdp2Parity, parameters_of_no_dims_of_no_elements_and_of_other_strides_train_like_plain) {
  const MakeTrainee make = [] {
    Shapes model;
    return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                             return call(model, toy::data({4, 3}, salt)).square() * 0.01;
                           }};
  };
  for (const Strategy& row : strategies()) {
    const Mesh mesh = row.axes.size() == 2 ? kTwoByTwo : ranks(3);
    expect_trains_like_plain(make, {.mesh = mesh, .options = toy::options(row.name), .tolerance = 1e-6});
  }
}

namespace {

// Trained float32 and float64, frozen bfloat16, float16 and an eight-bit float, all in one unit.
class DtypesImpl : public torch::nn::Module {
 public:
  DtypesImpl() {
    single = register_parameter("single", toy::data({3, 4}, 1));
    twice = register_parameter("twice", toy::data({3, 4}, 2).to(at::kDouble));
    const auto add_frozen = [&](const char* name, at::ScalarType dtype) {
      frozen.push_back(register_parameter(name, toy::data({3, 4}, 3).to(dtype), /*requires_grad=*/false));
    };
    add_frozen("brain", at::kBFloat16);
    add_frozen("half", at::kHalf);
    add_frozen("eighth", at::kFloat8_e4m3fn);
  }
  at::Tensor forward(at::Tensor x) {
    at::Tensor y = at::linear(x, single).to(at::kDouble) * at::linear(x.to(at::kDouble), twice);
    for (const at::Tensor& parameter : frozen) y = y + at::linear(x, parameter.to(at::kFloat)).to(at::kDouble);
    return y;
  }
  at::Tensor single, twice;
  std::vector<at::Tensor> frozen;
};
TORCH_MODULE(Dtypes);

}  // namespace

TEST(Fsdp2Parity, parameters_of_several_dtypes_in_one_unit_train_like_plain) {
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"}) {
    parity::Plan plan{.mesh = ranks(3), .options = toy::options(name)};
    plan.options.ignored = [](const std::string& key, const at::Tensor&) {
      return key == "eighth";
    };  // the library has no arithmetic for it
    expect_trains_like_plain([] { return parity::trainee(Dtypes(), {2, 4}); }, plan);
  }
}

// Gradients in float64 are added up by themselves, beside the exact sum of those in float32. 24 terms of float64 are rounded at
// most 24 times.
TEST(GradientNorm, takes_gradients_of_both_dtypes_in_every_order) {
  for (const char* name : {"ddp", "zero2", "zero3"})
    parity::on_mesh(ranks(3), [&](std::shared_ptr<MeshComm> comms) {
      Dtypes model;
      ShardOptions options = toy::options(name);
      options.ignored = [](const std::string& key, const at::Tensor&) { return key == "eighth"; };
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      call(model, toy::data({2, 4}, comms->rank())).square().sum().backward();
      double magnitudes = 0, squares = 0, largest = 0;
      std::vector<at::ScalarType> dtypes;
      for (const auto& [key, gradient] : sharded.gather_gradients()) {
        dtypes.push_back(gradient.scalar_type());
        const at::Tensor wide = gradient.to(at::kDouble).abs();
        magnitudes += wide.sum().item<double>();
        squares += wide.square().sum().item<double>();
        largest = std::max(largest, wide.max().item<double>());
      }
      EXPECT_EQ(dtypes, (std::vector{at::kFloat, at::kDouble})) << name;
      EXPECT_NEAR(sharded.gradient_norm(1), magnitudes, magnitudes * 1e-14) << name;
      EXPECT_NEAR(sharded.gradient_norm(2), std::sqrt(squares), std::sqrt(squares) * 1e-14) << name;
      EXPECT_EQ(sharded.gradient_norm(INFINITY), largest) << name;
    });
}
