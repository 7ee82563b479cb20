// Scenarios of Megatron-LM's test_reduce_scatter_with_fp32_accumulation.py and of dtypes and averages in
// test_param_and_grad_buffer.py. See docs/parity.md.
#include <gtest/gtest.h>

#include "properties/kit/bits.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::block_units;
using parity::expect_near;
using parity::grid;
using parity::on_mesh;
using parity::ranks;

namespace {

// The gradient of one sharded backward over the data of all ranks.
parity::Tensors gradients_of(const Mesh& mesh, const ShardOptions& options, int64_t width = 6) {
  parity::Tensors result;
  on_mesh(mesh, [&](std::shared_ptr<MeshComm> comms) {
    auto model = parity::blocks(2, width);
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    call(model, toy::data({2, width}, comms->rank()).to(options.precision.compute.value_or(at::kFloat)))
        .to(at::kFloat)
        .square()
        .sum()
        .backward();
    const auto values = sharded.gather_parameters();
    const parity::Tensors like(values.begin(), values.end());
    const parity::Tensors whole = parity::whole(sharded.gradients(), like, *comms);
    if (comms->rank() == 0) result = whole;
  });
  return result;
}

void expect_same(const parity::Tensors& actual, const parity::Tensors& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), wanted.size());
  for (const auto& [name, tensor] : wanted) expect_near(actual.at(name), tensor, tolerance, what + " " + name);
}

}  // namespace

TEST(MegatronParity, averages_before_after_and_in_the_collective_agree) {
  // Powers of two scale without rounding, so the three are one in every bit.
  for (const Mesh& mesh : {ranks(2), ranks(4), grid(2, 2), grid(2, 4)})
    for (const char* name : {"ddp", "zero1", "zero3"}) {
      ShardOptions options = block_units(name);
      const parity::Tensors after = gradients_of(mesh, options);
      for (const Divide divide : {Divide::before, Divide::split, Divide::in_collective}) {
        options.divide = divide;
        expect_same(gradients_of(mesh, options), after, 0, name);
      }
    }
  ShardOptions options = block_units("zero3");
  const parity::Tensors after = gradients_of(ranks(3), options);
  for (const Divide divide : {Divide::before, Divide::split, Divide::in_collective}) {
    options.divide = divide;
    expect_same(gradients_of(ranks(3), options), after, 1e-6, "thirds");
  }
}

TEST(MegatronParity, float32_sums_over_a_low_precision_wire_are_sums_of_rounded_terms) {
  for (const char* name : {"ddp", "zero1", "zero3"})
    for (const auto completion : {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late}) {
      bool any_differs = false;
      on_mesh(ranks(4),
              [&](std::shared_ptr<MeshComm> comms) {
                auto wide = parity::blocks(2, 6), narrow = parity::blocks(2, 6), plain = parity::blocks(2, 6);
                ShardOptions options = block_units(name);
                options.precision = {.reduce = at::kBFloat16, .float32_sums = true};
                Sharded sharded = fully_shard(wide.ptr(), comms, options);
                options.precision.float32_sums = false;
                Sharded other = fully_shard(narrow.ptr(), comms, options);
                call(wide, toy::data({2, 6}, comms->rank())).square().sum().backward();
                call(narrow, toy::data({2, 6}, comms->rank())).square().sum().backward();
                parity::Tensors in_float, in_bfloat;
                for (int64_t rank = 0; rank < 4; ++rank)
                  for (const auto& [key, gradient] : parity::plain_gradients(parity::trainee(plain, {2, 6}), rank)) {
                    const at::Tensor term = gradient.to(at::kBFloat16), wider = term.to(at::kFloat);
                    in_float[key] = rank == 0 ? wider : in_float[key] + wider;
                    in_bfloat[key] = rank == 0 ? term : in_bfloat[key] + term;
                  }
                for (auto& [key, sum] : in_float) sum = sum.to(at::kBFloat16).to(at::kFloat) / 4.0;
                for (auto& [key, sum] : in_bfloat) sum = sum.to(at::kFloat) / 4.0;
                const auto first = parity::whole(sharded.gradients(), in_float, *comms),
                           second = parity::whole(other.gradients(), in_float, *comms);
                for (const auto& [key, sum] : in_float) {
                  expect_near(first.at(key), sum, 0, key);
                  expect_near(second.at(key), in_bfloat.at(key), 0, key);
                  if (comms->rank() == 0) any_differs |= !kit::same_bits(first.at(key), second.at(key));
                }
              },
              {{}, completion, {}, 2});
      EXPECT_TRUE(any_differs) << "the two sums are not the same thing";
    }
}

TEST(MegatronParity, units_chosen_by_name_add_gradients_in_float32) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = std::make_shared<torch::nn::Module>("two");
    const torch::nn::LinearOptions shape = torch::nn::LinearOptions(1, 2).bias(false);
    torch::nn::Linear wide(shape), narrow(shape);
    model->register_module("wide", wide);
    model->register_module("narrow", narrow);
    model->to(at::kBFloat16);
    ShardOptions options = toy::options("zero2");
    options.precision = {.main = at::kFloat, .gradient = at::kBFloat16};
    options.unit_options = [](const std::string& unit) {
      UnitOptions own;
      if (name_matches("w*", unit)) own.precision = {.main = at::kFloat, .gradient = at::kFloat};
      return own;
    };
    Sharded sharded = fully_shard(model, comms, options);
    for (int64_t k = 0; k < 5; ++k) {
      sharded.set_last_microbatch(k == 4);
      const at::Tensor x = at::full({1, 1}, k == 0 ? 256.0 : 1.0, at::kBFloat16);
      (call(wide, x).sum() + call(narrow, x).sum()).backward();
    }
    for (const Piece& piece : sharded.gradients()) {
      const double wanted = piece.name == "wide.weight" ? 260 : 256;  // ones vanish beside 256 in bfloat16
      expect_near(piece.data, at::full({piece.run.size()}, wanted), 0, piece.name);
    }
  });
}

TEST(MegatronParity, main_parameters_and_gradients_have_the_dtypes_asked_for) {
  for (const char* name : {"zero1", "zero2", "zero3", "hsdp", "hfsdp"})
    for (const bool wide : {false, true})
      for (const std::optional<at::ScalarType> wire : {std::optional<at::ScalarType>(), std::optional(at::kHalf)})
        on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
          auto model = parity::blocks(2, 8);
          int64_t model_bytes = 0;
          for (const at::Tensor& parameter : model->parameters()) model_bytes += static_cast<int64_t>(parameter.nbytes());
          ShardOptions options = block_units(name);
          options.precision.gradient = at::kFloat;
          options.precision.reduce = wire;
          if (wide) options.precision.main = at::kDouble;
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          Optimizer optimizer = adamw(sharded, {.lr = 1e-2});
          // Parameters are kept once, unless layouts differ or whole ones have another dtype.
          const int64_t shard = std::string(name) == "hfsdp" ? 4 : 2;
          const bool whole = std::string(name) == "zero1" || std::string(name) == "zero2";
          int64_t bytes = whole ? model_bytes : model_bytes / 2;
          if (wide) bytes = (whole || shard == 4 ? bytes : 0) + 2 * model_bytes / shard;
          EXPECT_GE(sharded.memory().now(MemoryKind::parameter), bytes) << name;
          for (int64_t step = 0; step < 2; ++step) {
            call(model, toy::data({2, 8}, comms->rank())).square().sum().backward();
            const at::ScalarType main = wide ? at::kDouble : at::kFloat;
            for (const Piece& piece : sharded.main_parameters()) EXPECT_EQ(piece.data.scalar_type(), main);
            for (const Piece& piece : sharded.gradients()) EXPECT_EQ(piece.data.scalar_type(), main);
            for (const Piece& piece : optimizer.state("exp_avg")) EXPECT_EQ(piece.data.scalar_type(), main);
            for (const Piece& piece : sharded.parameters()) EXPECT_EQ(piece.data.scalar_type(), at::kFloat);
            EXPECT_GT(sharded.gradient_norm(), 0);
            optimizer.step();
          }
        });
}
