// Scenarios of PyTorch's test_fully_shard_frozen.py, _autograd.py, _clip_grad_norm_.py and _memory.py. See docs/parity.md.
#include <gtest/gtest.h>

#include <cmath>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::expect_near;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

namespace {

const std::vector<Reshard> kReshards{Reshard::always(), Reshard::never(), Reshard::within(2)};

void freeze(const torch::nn::Module& module, const std::function<bool(const std::string&)>& which, bool frozen = true) {
  for (auto& item : module.named_parameters())
    if (which(item.key())) item.value().requires_grad_(!frozen);
}
thread_local int64_t step_of_rank = 0;  // of the rank that runs on this thread
bool is_weight(const std::string& name) {
  return name.ends_with("weight");
}

}  // namespace

TEST(Fsdp2Parity, frozen_weights_and_trained_biases_in_one_unit_train_like_plain) {
  for (const Reshard& reshard : kReshards)
    for (const bool recompute : {false, true})
      for (const bool after : {false, true}) {
        const MakeTrainee make = [after] {
          parity::Trainee own = parity::trainee(parity::blocks(3, 4), {3, 4});
          if (!after) freeze(*own.module, is_weight);
          return own;
        };
        parity::Plan plan{.mesh = ranks(4), .options = parity::block_units("zero3")};
        plan.options.reshard_after_forward = reshard;
        if (recompute) plan.options.recompute = plan.options.units;
        if (after) {
          plan.on_step = [](Sharded&, torch::nn::Module& module, int64_t step) {
            if (step == 0) freeze(module, is_weight);
          };
          plan.on_plain_step = [](const torch::nn::Module& module) { freeze(module, is_weight); };
        }
        expect_trains_like_plain(make, plan);
      }
}

TEST(Fsdp2Parity, only_what_is_trained_is_reduced) {
  auto trace = std::make_shared<Trace>();
  on_mesh(
      ranks(2),
      [](std::shared_ptr<MeshComm> comms) {
        auto model = parity::blocks(1, 32);
        freeze(*model, is_weight);
        ShardOptions options = parity::block_units("zero3");
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        call(model, toy::data({3, 32}, 1)).sum().backward();
      },
      {}, trace);
  int64_t bytes = 0;
  for (const TraceRecord& record : trace->of_rank(0))
    if (record.op == "reduce_scatter") bytes += record.bytes;
  EXPECT_EQ(bytes, 2 * 32 * 4) << "two biases";
}

TEST(Fsdp2Parity, freezing_and_unfreezing_between_steps_trains_like_plain) {
  const auto first_half = [](const std::string& name) { return name.starts_with("0") || name.starts_with("4"); };
  for (const char* name : {"ddp", "zero1", "zero3"})
    for (const Reshard& reshard : kReshards) {
      // Plain and sharded model are told alike, before each step: frozen, frozen, trained, frozen.
      parity::Plan plan{.mesh = ranks(4), .options = toy::options(name), .steps = 4};
      plan.options.reshard_after_forward = reshard;
      plan.threads.schedule = ThreadsOptions::Schedule::serial;
      const auto is_frozen = [](int64_t step) { return step != 2; };
      plan.on_step = [&](Sharded&, torch::nn::Module& module, int64_t step) {
        step_of_rank = step;
        freeze(module, first_half, is_frozen(step));
        if (step != 1) return;
        const at::NoGradGuard no_grad;
        call(*module.as<torch::nn::Sequential>(), toy::data({3, 5}, 9));
      };
      plan.on_plain_step = [&](const torch::nn::Module& module) { freeze(module, first_half, is_frozen(step_of_rank)); };
      expect_trains_like_plain([] { return parity::trainee(parity::stack({5, 5, 5, 5}), {3, 5}); }, plan);
    }
}

namespace {

// Layers run again and again, with and without a graph, one of them frozen.
class ManyCallsImpl : public torch::nn::Module {
 public:
  ManyCallsImpl() {
    first = register_module("first", torch::nn::Linear(5, 5));
    frozen = register_module("frozen", torch::nn::Linear(5, 5));
    trained = register_module("trained", torch::nn::Linear(5, 5));
    initialize_parameters(*this, 6, 0.4);
    freeze(*frozen, [](const std::string&) { return true; });
  }
  at::Tensor forward(at::Tensor x) {
    x = call(first, x);
    for (int64_t i = 0; i < 3; ++i) {
      x = call(frozen, at::relu(call(trained, x)));
      const at::NoGradGuard no_grad;
      x += at::relu(call(trained, x));
    }
    return x;
  }
  torch::nn::Linear first{nullptr}, frozen{nullptr}, trained{nullptr};
};
TORCH_MODULE(ManyCalls);

}  // namespace

TEST(Fsdp2Parity, units_called_with_and_without_gradients_in_one_forward_train_like_plain) {
  for (const char* name : {"ddp", "zero2", "zero3"})
    for (const Reshard& reshard : kReshards) {
      parity::Plan plan{.mesh = ranks(2), .options = toy::options(name), .steps = 3};
      plan.options.reshard_after_forward = reshard;
      expect_trains_like_plain([] { return parity::trainee(ManyCalls(), {8, 5}); }, plan);
    }
}

TEST(Fsdp2Parity, an_output_that_the_loss_does_not_use_changes_nothing) {
  for (const Reshard& reshard : kReshards) {
    const MakeTrainee make = [] {
      parity::DoubleLinear model(/*run_second=*/true);
      return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                               const auto [a, b] = call(model, toy::data({2, 5}, salt));
                               return salt < 2000 ? (a * b).sum() : a.sum();  // the first two steps use both
                             }};
    };
    parity::Plan plan{.mesh = ranks(4), .options = toy::options("zero3"), .steps = 4};
    plan.options.units = by_name("lin1");
    plan.options.reshard_after_forward = reshard;
    expect_trains_like_plain(make, plan);
  }
}

TEST(Fsdp2Parity, a_module_that_the_loss_does_not_use_has_a_zero_gradient) {
  for (const bool ran : {true, false})
    for (const Reshard& reshard : kReshards)
      for (const char* name : {"ddp", "zero1", "zero2", "zero3"}) {
        const MakeTrainee make = [ran] {
          parity::DoubleLinear model(ran);
          return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                                   return call(model, toy::data({2, 5}, salt)).first.square().sum();
                                 }};
        };
        parity::Plan plan{.mesh = ranks(4), .options = toy::options(name), .microbatches = 2};
        plan.options.reshard_after_forward = reshard;
        plan.options.prefetch_backward = 1;
        expect_trains_like_plain(make, plan);
      }
}

TEST(Fsdp2Parity, clipping_by_norms_1_2_and_infinity_equals_plain) {
  for (const double order : {1.0, 2.0, static_cast<double>(INFINITY)})
    for (const Strategy& row : strategies()) {
      const Mesh mesh = row.axes.size() == 2 ? Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}) : ranks(3);
      auto trace = std::make_shared<Trace>();
      on_mesh(
          mesh,
          [&](std::shared_ptr<MeshComm> comms) {
            auto model = parity::stack({4, 5, 3}), plain = parity::stack({4, 5, 3});
            Sharded sharded = fully_shard(model.ptr(), comms, toy::options(row.name));
            call(model, toy::data({2, 4}, comms->rank())).square().sum().backward();
            std::map<std::string, std::vector<std::vector<at::Tensor>>> terms;
            for (int64_t rank = 0; rank < mesh.size(); ++rank)
              for (const auto& [name, gradient] : parity::plain_gradients(parity::trainee(plain, {2, 4}), rank))
                terms[name].push_back({gradient});
            parity::Tensors wanted;
            std::vector<at::Tensor> flat;
            for (const auto& [name, term] : terms) {
              wanted[name] = parity::combine(term, mesh, on_mesh(row, mesh));
              flat.push_back(wanted[name].flatten().to(at::kDouble));
            }
            const double norm = at::cat(flat).norm(order).item<double>();
            EXPECT_GT(norm, 1);
            EXPECT_NEAR(sharded.clip_gradients(1, order), norm, 1e-6 * norm) << row.name << " order " << order;
            for (auto& [name, gradient] : wanted) gradient = gradient * (1 / (norm + 1e-6));
            for (const auto& [name, gradient] : parity::whole(sharded.gradients(), wanted, *comms))
              expect_near(gradient, wanted.at(name), 1e-6, name);
            EXPECT_LE(sharded.gradient_norm(order), 1 + 1e-6);
          },
          {}, trace);
    }
}

TEST(Fsdp2Parity, memory_between_and_within_steps_is_what_the_strategy_needs) {
  constexpr int64_t kWidth = 32, kBlocks = 3, kRanks = 2;
  constexpr int64_t kBlock = 2 * (kWidth * kWidth + kWidth) * 4, kModel = kBlocks * kBlock;
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
    for (const bool reshard : {true, false})
      on_mesh(ranks(kRanks), [&](std::shared_ptr<MeshComm> comms) {
        auto model = parity::blocks(kBlocks, kWidth);
        ShardOptions options = parity::block_units(name);
        options.reshard_after_forward = reshard;
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        const bool zero3 = std::string(name) == "zero3", ddp = std::string(name) == "ddp",
                   whole_gradient = ddp || std::string(name) == "zero1";
        const int64_t parameters = zero3 ? kModel / kRanks : kModel;
        const auto expect_resting = [&](int64_t gradient, int64_t optimizer, const char* when) {
          const MemoryUse use = sharded.memory();
          EXPECT_EQ(use.now(MemoryKind::parameter), parameters) << name << " " << when;
          EXPECT_EQ(use.now(MemoryKind::gathered), 0) << name << " " << when;
          EXPECT_EQ(use.now(MemoryKind::gradient), gradient) << name << " " << when;
          EXPECT_EQ(use.now(MemoryKind::optimizer), optimizer) << name << " " << when;
          EXPECT_EQ(use.now(MemoryKind::communication), 0) << name << " " << when;
        };
        expect_resting(0, 0, "after sharding");
        Optimizer optimizer = adamw(sharded, {});
        const int64_t state = 2 * (ddp ? kModel : kModel / kRanks);
        expect_resting(0, state, "with an optimizer");
        for (int64_t step = 0; step < 3; ++step) {
          sharded.reset_peak_memory();
          const at::Tensor loss = call(model, toy::data({1, kWidth}, comms->rank())).sum();
          if (zero3) {
            EXPECT_EQ(sharded.memory().now(MemoryKind::gathered), reshard ? 0 : kModel);
            EXPECT_EQ(sharded.memory().peak(MemoryKind::gathered), reshard ? kBlock : kModel);
          }
          sharded.set_last_microbatch(false);
          loss.backward();
          expect_resting(whole_gradient ? kModel : kModel / kRanks, state, "after a microbatch");
          sharded.set_last_microbatch(true);
          call(model, toy::data({1, kWidth}, comms->rank())).sum().backward();
          expect_resting(ddp ? kModel : kModel / kRanks, state, "after the last one");
          optimizer.step();
          expect_resting(0, state, "after the step");
        }
      });
}
