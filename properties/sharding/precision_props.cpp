// Scenarios of PyTorch's test_fully_shard_mixed_precision.py and _grad_scaler.py. See docs/parity.md.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "properties/kit/bits.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::expect_near;
using parity::on_mesh;
using parity::ranks;
using parity::with;

namespace {

// The gradients of a plain copy in `compute`, each rounded to `wire`, added there rank after rank (in float32 when `wide`).
parity::Tensors plain_sum(const std::vector<std::pair<std::string, at::Tensor>>& values, at::ScalarType compute,
                          at::ScalarType wire, int64_t world, int64_t salt, int64_t rounds = 1) {
  auto plain = parity::stack({4, 6, 3});
  parity::load(*plain, values);
  plain->to(compute);
  parity::Tensors sums;
  for (int64_t k = 0; k < rounds; ++k) {
    parity::Tensors of_round;
    for (int64_t rank = 0; rank < world; ++rank) {
      const parity::Trainee on_rank{plain.ptr(), [&](int64_t s) {
                                      return plain->forward(toy::data({2, 4}, s).to(compute)).to(at::kFloat).square().sum();
                                    }};
      for (const auto& [name, gradient] : parity::plain_gradients(on_rank, salt + 10 * k + rank)) {
        const at::Tensor term = gradient.to(wire);
        of_round[name] = of_round[name].defined() ? of_round[name] + term : term;
      }
    }
    for (const auto& [name, sum] : of_round) {
      const at::Tensor wide = sum.to(at::kFloat);
      sums[name] = sums[name].defined() ? sums[name] + wide : wide;
    }
  }
  for (auto& [name, sum] : sums) sum = sum / static_cast<double>(world);
  return sums;
}

// What the ranks put on the wire for this op, as text: "reduce_scatter(sum, bfloat16 x 128)".
bool on_the_wire(const Trace& trace, const std::string& op, const std::string& dtype) {
  bool any = false;
  for (const TraceRecord& record : trace.of_rank(0)) {
    if (record.op != op) continue;
    any = true;
    if (record.call.find(dtype + " x") == std::string::npos) return false;
  }
  return any;
}

}  // namespace

TEST(Fsdp2Parity, computing_in_low_precision_equals_plain_on_cast_copies) {
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf})
    for (const Reshard& reshard : {Reshard::always(), Reshard::never(), Reshard::within(2)})
      for (const char* name : {"ddp", "zero1", "zero2", "zero3"}) {
        auto trace = std::make_shared<Trace>();
        on_mesh(
            ranks(4),
            [&](std::shared_ptr<MeshComm> comms) {
              auto model = parity::stack({4, 6, 3});
              ShardOptions options = with(name, {.main = at::kFloat, .compute = low, .reduce = low});
              options.reshard_after_forward = reshard;
              Sharded sharded = fully_shard(model.ptr(), comms, options);
              Optimizer optimizer = adamw(sharded, {.lr = 1e-2});
              for (int64_t step = 0; step < 3; ++step) {
                const parity::Tensors wanted = plain_sum(sharded.gather_parameters(), low, low, 4, 100 * step);
                const at::Tensor out = call(model, toy::data({2, 4}, 100 * step + comms->rank()));
                EXPECT_EQ(out.scalar_type(), low);
                out.to(at::kFloat).square().sum().backward();
                const parity::Tensors actual = parity::whole(sharded.gradients(), wanted, *comms);
                for (const auto& [key, gradient] : actual) expect_near(gradient, wanted.at(key), 0, key);
                optimizer.step();
                for (const Piece& piece : sharded.main_parameters()) EXPECT_EQ(piece.data.scalar_type(), at::kFloat);
              }
            },
            {}, trace);
        if (std::string(name) == "zero3") {
          EXPECT_TRUE(on_the_wire(*trace, "all_gather", low == at::kHalf ? "float16" : "bfloat16") ||
                      on_the_wire(*trace, "all_gather", low == at::kHalf ? "Half" : "BFloat16"))
              << trace->of_rank(0).front().call;
        }
      }
}

TEST(Fsdp2Parity, reductions_are_in_the_dtype_asked_for) {
  struct Wire {
    at::ScalarType parameters, compute, reduce;
    const char* text;
  };
  for (const Wire& wire :
       {Wire{at::kFloat, at::kBFloat16, at::kFloat, "float32"}, Wire{at::kFloat, at::kFloat, at::kBFloat16, "bfloat16"},
        Wire{at::kBFloat16, at::kBFloat16, at::kBFloat16, "bfloat16"}})
    for (const bool reshard : {true, false}) {
      auto trace = std::make_shared<Trace>();
      on_mesh(
          ranks(2),
          [&](std::shared_ptr<MeshComm> comms) {
            auto model = parity::stack({4, 6, 3});
            model->to(wire.parameters);
            ShardOptions options = with("zero3", {.compute = wire.compute, .reduce = wire.reduce});
            options.reshard_after_forward = reshard;
            Sharded sharded = fully_shard(model.ptr(), comms, options);
            const parity::Tensors wanted = plain_sum(sharded.gather_parameters(), wire.compute, wire.reduce, 2, 0);
            call(model, toy::data({2, 4}, comms->rank()).to(wire.compute)).to(at::kFloat).square().sum().backward();
            for (const auto& [key, gradient] : parity::whole(sharded.gradients(), wanted, *comms)) {
              EXPECT_EQ(gradient.scalar_type(), wire.parameters);
              expect_near(gradient, wanted.at(key).to(wire.parameters), 0, key);
            }
          },
          {}, trace);
      EXPECT_TRUE(on_the_wire(*trace, "reduce_scatter", wire.text)) << trace->summary(0);
    }
}

TEST(Fsdp2Parity, a_first_forward_with_everything_frozen_does_not_fix_dtypes) {
  auto trace = std::make_shared<Trace>();
  on_mesh(
      ranks(2),
      [](std::shared_ptr<MeshComm> comms) {
        auto model = parity::stack({4, 6, 3});
        for (at::Tensor& parameter : model->parameters()) parameter.requires_grad_(false);
        Sharded sharded = fully_shard(model.ptr(), comms,
                                      with("zero3", {.main = at::kFloat, .compute = at::kBFloat16, .reduce = at::kFloat}));
        {
          const at::NoGradGuard no_grad;
          call(model, toy::data({2, 4}, 1));
        }
        for (at::Tensor& parameter : model->parameters()) parameter.requires_grad_(true);
        const parity::Tensors wanted = plain_sum(sharded.gather_parameters(), at::kBFloat16, at::kFloat, 2, 0);
        call(model, toy::data({2, 4}, comms->rank())).to(at::kFloat).square().sum().backward();
        for (const auto& [key, gradient] : parity::whole(sharded.gradients(), wanted, *comms))
          expect_near(gradient, wanted.at(key), 0, key);
      },
      {}, trace);
  EXPECT_TRUE(on_the_wire(*trace, "reduce_scatter", "float32")) << trace->summary(0);
}

TEST(Fsdp2Parity, low_precision_gradients_are_added_in_the_gradient_dtype) {
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
    for (const bool unsynced : {false, true})
      on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
        // Per rank and microbatch gradients 256, 1, ..., 1 of one weight: added in bfloat16 the ones would vanish.
        torch::nn::Linear model(torch::nn::LinearOptions(1, 2).bias(false));
        Sharded sharded =
            fully_shard(model.ptr(), comms, with(name, {.main = at::kFloat, .compute = at::kBFloat16, .gradient = at::kFloat}));
        for (int64_t k = 0; k < 5; ++k) {
          sharded.set_last_microbatch(k == 4);
          sharded.set_gradient_sync(k == 4 || !unsynced);
          call(model, at::full({1, 1}, k == 0 ? 256.0 : 1.0)).sum().backward();
        }
        for (const Piece& piece : sharded.gradients()) expect_near(piece.data, at::full({piece.run.size()}, 260.0), 0, name);
      });
}

TEST(Fsdp2Parity, an_infinite_gradient_on_one_rank_skips_the_step_on_all) {
  for (const bool infinite : {true, false})
    for (const char* name : {"ddp", "zero1", "zero3", "hfsdp"})
      on_mesh(Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}), [&](std::shared_ptr<MeshComm> comms) {
        auto model = parity::stack({4, 4, 4});
        ShardOptions options = toy::options(name);
        options.check_gradients = false;
        // One element of one rank's gradient, so that after the sum one shard has it.
        if (infinite && comms->rank() == 3)
          model->parameters()[0].register_hook([](const at::Tensor& gradient) {
            at::Tensor changed = gradient.clone();
            changed[0][0] = INFINITY;
            return changed;
          });
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        Optimizer optimizer = adamw(sharded, {.lr = 1e-2});
        LossScaler scaler({.initial = 2});
        const auto before = sharded.gather_parameters();
        const at::Tensor loss = call(model, toy::data({4, 4}, comms->rank())).sum();
        scaler.scale(loss).backward();
        EXPECT_EQ(scaler.unscale(sharded), !infinite) << "rank " << comms->rank();
        if (!infinite) optimizer.step();
        EXPECT_EQ(scaler.value(), infinite ? 1 : 2);
        EXPECT_EQ(sharded.step(), 1);
        const auto after = sharded.gather_parameters();
        bool moved = false;
        for (size_t i = 0; i < before.size(); ++i) moved |= !kit::same_bits(before[i].second, after[i].second);
        EXPECT_EQ(moved, !infinite);
        EXPECT_EQ(optimizer.updates("0.weight"), infinite ? 0 : 1);
      });
}

TEST(LossScaler, does_not_grow_beyond_what_a_number_holds) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    torch::nn::Linear model(torch::nn::LinearOptions(1, 4));
    ShardOptions options = toy::options("zero2");
    options.check_gradients = false;
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    LossScaler scaler({.initial = 1, .growth = 1e200, .growth_interval = 1});
    for (const double wanted : {1e200, 1e200}) {
      call(model, at::zeros({1, 1})).mul(0).sum().backward();
      EXPECT_TRUE(scaler.unscale(sharded));
      sharded.skip_step();
      EXPECT_EQ(scaler.value(), wanted);
    }
    scaler.set_state(scaler.state());  // as a run that goes on from a checkpoint does
  });
}

namespace {

// The gradient of one weight, to which each rank adds `term` in each microbatch; nothing where that was refused.
std::optional<double> canonical_sum(const Mesh& mesh, const char* strategy, double term, int64_t microbatches) {
  std::optional<double> sum;
  const auto body = [&](std::shared_ptr<MeshComm> comms) {
    torch::nn::Linear model(torch::nn::LinearOptions(8, 1).bias(false));
    ShardOptions options = toy::options(strategy);
    options.numerics = Numerics::canonical;
    options.gradient_divide = 1;
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    for (int64_t k = 1; k <= microbatches; ++k) {
      sharded.set_last_microbatch(k == microbatches);
      call(model, at::full({1, 8}, term)).sum().backward();
    }
    const at::Tensor gradient = sharded.gather_gradient("weight");
    if (comms->rank() == 0) sum = gradient[0][0].item<double>();
  };
  try {
    on_mesh(mesh, body);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("ixed-point"), std::string::npos) << error.what();
    return {};
  }
  return sum;
}

}  // namespace

TEST(CanonicalSums, are_exact_or_refused_however_large_their_terms_are) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp", "hzero2"}) {
    const Mesh mesh = strategy[0] == 'h' ? parity::grid(2, 2) : ranks(4);
    for (const int64_t microbatches : {1, 3})
      for (const double term : {0x1p13, 0x1p14, 0x1p15, 0x1p16 - 1, -0x1p16, 0x1p17, -0x1p18 + 1}) {
        const double expected = 4 * static_cast<double>(microbatches) * term;
        const std::optional<double> sum = canonical_sum(mesh, strategy, term, microbatches);
        EXPECT_EQ(sum.has_value(), std::abs(expected) < 0x1p18) << strategy << ", " << microbatches << " times " << term;
        EXPECT_EQ(sum.value_or(expected), expected) << strategy << ", " << microbatches << " times " << term;
      }
  }
}
