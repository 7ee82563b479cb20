// Scenarios of PyTorch's test_fully_shard_training.py: ties, accumulation, replicas, many roots. See docs/parity.md.
#include <gtest/gtest.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::block_units;
using parity::calls_of;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

namespace {

constexpr int64_t kWorld = 4, kRows = 4 * kWorld + 1;
const Mesh kTwoByTwo({{"dp_replicate", 2}, {"dp_shard", 2}});

MakeTrainee make_blocks(int64_t count, int64_t width) {
  return [=] { return parity::trainee(parity::blocks(count, width), {3, width}); };
}

}  // namespace

TEST(Fsdp2Parity, tied_modules_in_one_unit_train_like_plain_to_the_last_row) {
  const MakeTrainee make = [] {
    parity::Tied model(kRows, 6);
    return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                             const at::Tensor ids = (at::arange(kRows) * 5 + salt).remainder(kRows);
                             return call(model, ids).square().sum() * 1e-2;
                           }};
  };
  for (const bool reshard : {true, false}) {
    parity::Plan plan{.mesh = ranks(kWorld), .options = toy::options("zero3"), .steps = 3};
    plan.options.reshard_after_forward = reshard;
    plan.shard = [&](const parity::Trainee& own, std::shared_ptr<MeshComm> comms) {
      auto& model = dynamic_cast<parity::TiedImpl&>(*own.module);
      return Sharding(comms, plan.options).unit({model.embed.ptr(), model.head.ptr()}).shard(own.module);
    };
    at::Tensor initial;
    plan.on_step = [&](Sharded& sharded, torch::nn::Module&, int64_t step) {
      for (const auto& [name, now] : sharded.gather_parameters()) {
        if (name != "head.weight") continue;
        if (step > 0) {
          const at::Tensor first = make().module->parameters()[0];
          EXPECT_TRUE((now != first).any(1).all().item<bool>()) << "every row moves";
        }
      }
    };
    expect_trains_like_plain(make, plan);
  }
}

TEST(Fsdp2Parity, tied_modules_of_different_units_train_like_plain) {
  const MakeTrainee make = [] {
    parity::ChunkedHead model(/*tied=*/true);
    return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                             return call_as(
                                        model, [&](at::Tensor ids) { return call(model->head, model->hidden(std::move(ids))); },
                                        parity::tokens(salt))
                                 .square()
                                 .sum();
                           }};
  };
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
    for (const bool reshard : {true, false})
      for (const bool recompute : {false, true}) {
        ShardOptions options = toy::options(name);
        options.units = by_name("*");
        options.reshard_after_forward = reshard;
        if (recompute) options.recompute = by_name("body");
        expect_trains_like_plain(make, {.mesh = ranks(4), .options = options});
      }
}

TEST(Fsdp2Parity, models_built_sharded_and_dropped_in_turn_are_never_mistaken_for_each_other) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    for (int64_t round = 0; round < 30; ++round) {
      auto model = parity::blocks(2, 4 + round % 3);
      Sharded sharded = fully_shard(model.ptr(), comms, block_units("zero3"));
      call(model, toy::data({2, 4 + round % 3}, comms->rank())).sum().backward();
      EXPECT_EQ(sharded.units().size(), 3u);
      EXPECT_GT(sharded.gradient_norm(), 0);
    }
  });
}

TEST(Fsdp2Parity, recomputed_units_train_like_plain_in_every_grouping) {
  const MakeTrainee make = make_blocks(3, 4);
  for (const bool reshard : {true, false})
    for (const bool nested : {false, true})
      for (const bool grouped : {false, true}) {
        parity::Plan plan{.mesh = ranks(2), .options = toy::options("zero3"), .microbatches = 2};
        plan.options.units = {};
        plan.options.reshard_after_forward = reshard;
        plan.options.prefetch_backward = 1;
        plan.shard = [&](const parity::Trainee& own, std::shared_ptr<MeshComm> comms) {
          const auto blocks = own.module->children();
          Sharding sharding(comms, plan.options);
          if (nested)
            for (const auto& block : blocks) sharding.unit(block->children()[0], {.recompute = true});
          sharding.unit(blocks[0], {.recompute = true});
          if (grouped)
            sharding.unit({blocks[1], blocks[2]}, {.recompute = true});
          else
            sharding.unit(blocks[1], {.recompute = true}).unit(blocks[2], {.recompute = true});
          return sharding.shard(own.module);
        };
        expect_trains_like_plain(make, plan);
      }
}

TEST(Fsdp2Parity, accumulation_trains_like_plain_and_reduces_when_the_strategy_says) {
  for (const Mesh& mesh : {ranks(3), kTwoByTwo, Mesh({{"dp_replicate", 2}, {"dp_shard", 1}})})
    for (const Strategy& row : strategies()) {
      if (row.axes.size() == 2 && !mesh.has("dp_replicate")) continue;
      for (const bool unsynced : {false, true})
        for (const bool reshard : {true, false}) {
          parity::Plan plan{.mesh = mesh, .options = block_units(row.name), .microbatches = 3, .unsynced = unsynced};
          plan.options.reshard_after_forward = reshard;
          expect_trains_like_plain(make_blocks(2, 3), plan);
        }
    }
}

TEST(Fsdp2Parity, units_kept_whole_over_microbatches_are_gathered_once) {
  for (const bool ahead : {false, true}) {
    auto trace = std::make_shared<Trace>();
    on_mesh(
        ranks(2),
        [&](std::shared_ptr<MeshComm> comms) {
          auto model = parity::blocks(3, 4);
          ShardOptions options = block_units("zero3");
          options.reshard_after_forward = false;
          options.reshard_after_backward = false;
          options.broadcast_initial_values = false;
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          Optimizer optimizer = sgd(sharded, {.lr = 0.1});
          for (int64_t step = 0; step < 2; ++step) {
            const size_t before = trace->of_rank(comms->rank()).size();
            if (ahead)
              for (UnitHandle unit : sharded.units()) unit.start_unshard();
            for (int64_t k = 0; k < 3; ++k) {
              sharded.set_last_microbatch(k == 2);
              sharded.set_gradient_sync(k == 2);
              call(model, toy::data({2, 4}, comms->rank() + k)).square().sum().backward();
            }
            optimizer.step();
            auto calls = calls_of(*trace, comms->rank(), before);
            EXPECT_EQ(calls["all_gather"], 3);
            EXPECT_EQ(calls["reduce_scatter"], 3);
          }
        },
        {}, trace);
  }
}

TEST(Fsdp2Parity, hsdp_trains_like_plain) {
  for (const int64_t width : {3, 17})
    for (const bool reshard : {true, false})
      for (const bool recompute : {false, true})
        for (const bool unsynced : {false, true}) {
          parity::Plan plan{.mesh = kTwoByTwo, .options = block_units("hsdp"), .microbatches = 3, .unsynced = unsynced};
          plan.options.reshard_after_forward = reshard;
          if (recompute) plan.options.recompute = plan.options.units;
          plan.threads = {ThreadsOptions::Schedule::serial, ThreadsOptions::Completion::random, {}, 3};
          expect_trains_like_plain(make_blocks(2, width), plan);
        }
  for (const char* name : {"hsdp", "hfsdp", "zero3"}) {
    parity::Plan plan{.mesh = Mesh({{"dp_replicate", 2}, {"dp_shard", 4}}), .options = block_units(name)};
    plan.options.reshard_after_forward = Reshard::within(2);
    expect_trains_like_plain(make_blocks(2, 5), plan);
  }
}

TEST(Fsdp2Parity, roots_sharded_one_by_one_train_like_plain) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = parity::blocks(3, 4), plain = parity::blocks(3, 4);
    ShardOptions options = block_units("zero3");
    std::vector<Sharded> roots;
    const auto children = model->children();
    roots.push_back(fully_shard(children[0], comms, options));
    options.strategy = strategy("ddp");
    roots.push_back(fully_shard(children[1], comms, options));
    options.strategy = strategy("zero2");
    roots.push_back(fully_shard(children[2], comms, options));
    const auto forward = [&](at::Tensor x) {
      for (const auto& child : children) x = call(std::dynamic_pointer_cast<parity::BlockImpl>(child), x);
      return x.square().sum();
    };
    forward(toy::data({3, 4}, comms->rank())).backward();
    std::vector<parity::Tensors> terms;
    for (int64_t rank = 0; rank < 2; ++rank) terms.push_back(parity::plain_gradients(parity::trainee(plain, {3, 4}), rank));
    for (size_t i = 0; i < roots.size(); ++i) {
      parity::Tensors wanted;
      for (const auto& [name, gradient] : terms[0])
        if (name.starts_with(std::to_string(i) + ".")) wanted[name.substr(2)] = (gradient + terms[1].at(name)) / 2.0;
      EXPECT_EQ(wanted.size(), 4u);
      for (const auto& [name, gradient] : parity::whole(roots[i].gradients(), wanted, *comms))
        parity::expect_near(gradient, wanted.at(name), 0, name);
    }
  });
}

TEST(Fsdp2Parity, a_world_of_one_makes_no_calls_and_trains_like_plain) {
  for (const Strategy& row : strategies()) {
    const Mesh mesh({{"dp_replicate", 1}, {"dp_shard", 1}});
    expect_trains_like_plain(make_blocks(2, 5), {.mesh = mesh, .options = block_units(row.name), .microbatches = 2});
    auto trace = std::make_shared<Trace>();
    on_mesh(
        mesh,
        [&](std::shared_ptr<MeshComm> comms) {
          auto model = parity::blocks(2, 5);
          Sharded sharded = fully_shard(model.ptr(), comms, block_units(row.name));
          Optimizer optimizer = adamw(sharded, {});
          call(model, toy::data({3, 5}, 1)).sum().backward();
          sharded.clip_gradients(1);
          optimizer.step();
        },
        {}, trace);
    EXPECT_TRUE(trace->of_rank(0).empty()) << row.name;
  }
}
