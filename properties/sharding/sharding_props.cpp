// What sharding a module does to its memory, its collectives and its gradients. Bit equality of whole training runs is the
// business of `shardproof verify`.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "properties/kit/bits.h"
#include "properties/kit/of_set_up.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using toy::has_memory;

namespace {

void train_once(Sharded& sharded, toy::Net& net, int64_t salt, bool last = true) {
  sharded.set_last_microbatch(last);
  call(net, toy::data({4, 7}, salt)).square().sum().backward();
}

}  // namespace

TEST(Sharding, a_unit_of_zero3_has_memory_only_while_it_runs) {
  toy::on_ranks(3, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero3"));
    EXPECT_FALSE(has_memory(net->first->weight));
    EXPECT_FALSE(has_memory(net->second->weight));
    bool probed = false;
    net->between = [&] {
      probed = true;
      EXPECT_FALSE(has_memory(net->first->weight)) << "the first unit is freed before the second is gathered";
      EXPECT_FALSE(has_memory(net->second->weight));
    };
    at::Tensor loss = call(net, toy::data({4, 7}, comms->rank())).square().sum();
    EXPECT_FALSE(has_memory(net->second->weight));
    bool seen_in_backward = false;
    loss.register_hook([&](const at::Tensor&) { seen_in_backward = true; });
    loss.backward();
    EXPECT_TRUE(probed && seen_in_backward);
    EXPECT_FALSE(has_memory(net->first->weight));
    EXPECT_FALSE(has_memory(net->second->weight));
    EXPECT_FALSE(net->first->weight.grad().defined()) << "whole gradients do not stay";
  });
}

TEST(Sharding, strategies_that_keep_parameters_whole_never_free_them) {
  for (const char* name : {"ddp", "zero1", "zero2"})
    toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
      toy::Net net(toy::NetImpl::Options{});
      Sharded sharded = fully_shard(net.ptr(), comms, toy::options(name));
      train_once(sharded, net, comms->rank());
      EXPECT_TRUE(has_memory(net->first->weight)) << name;
    });
}

TEST(Sharding, reading_a_freed_parameter_is_an_error_that_names_it) {
  toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero3"));
    const auto expect_named = [](const std::function<void()>& read, const char* name = "parameter first.weight is sharded") {
      try {
        read();
        ADD_FAILURE() << "read";
      } catch (const c10::Error& error) {
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
      }
    };
    expect_named([&] { net->first->weight.sum(); });
    expect_named([&] { net->first->weight.t().narrow(0, 1, 2).clone(); });
    expect_named([&] { net->first(toy::data({4, 7}, 0)); }, "parameter first.");  // a unit entered past `call`
    expect_named([&] { net->first->weight.detach().zero_(); });
  });
}

TEST(Sharding, without_resharding_after_forward_units_stay_whole_until_their_backward) {
  toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    ShardOptions options = toy::options("zero3");
    options.reshard_after_forward = false;
    Sharded sharded = fully_shard(net.ptr(), comms, options);
    at::Tensor loss = call(net, toy::data({4, 7}, comms->rank())).square().sum();
    EXPECT_TRUE(has_memory(net->first->weight) && has_memory(net->second->weight));
    loss.backward();
    EXPECT_FALSE(has_memory(net->first->weight) || has_memory(net->second->weight));
  });
}

TEST(Sharding, an_evaluation_leaves_nothing_gathered) {
  toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    ShardOptions options = toy::options("zero3");
    options.reshard_after_forward = false;
    Sharded sharded = fully_shard(net.ptr(), comms, options);
    at::NoGradGuard no_grad;
    call(net, toy::data({4, 7}, 0));
    EXPECT_FALSE(has_memory(net->first->weight) || has_memory(net->second->weight));
  });
}

TEST(Sharding, every_rank_starts_from_the_values_of_rank_0) {
  for (const Strategy& row : strategies())
    toy::on_ranks(4, [&](std::shared_ptr<MeshComm> comms) {
      toy::Net net(toy::NetImpl::Options{});
      std::map<std::string, at::Tensor> wanted;  // equal on all ranks, until the others change theirs
      for (const auto& item : net->named_parameters()) wanted[item.key()] = item.value().detach().clone();
      if (comms->rank() != 0) initialize_parameters(*net, 1000 + comms->rank());
      const bool both = row.axes.size() == 2;
      Sharded sharded = fully_shard(net.ptr(), both ? comms->on(Mesh({{"dp_replicate", 2}, {"dp_shard", 2}})) : comms,
                                    toy::options(row.name));
      std::vector<std::string> own;  // that this rank has a piece of: a gather takes each from the rank that has it
      for (const Piece& piece : sharded.main_parameters()) {
        own.push_back(piece.name);
        const at::Tensor part = wanted.at(piece.name).view({-1}).narrow(0, piece.run.begin, piece.run.size());
        EXPECT_TRUE(kit::same_bits(piece.data, part)) << row.name << " rank " << comms->rank() << " " << piece.name;
      }
      EXPECT_FALSE(own.empty()) << row.name << " rank " << comms->rank() << " holds nothing";
      size_t gathered = 0;
      for (const auto& [name, tensor] : sharded.gather_parameters()) {
        EXPECT_TRUE(kit::same_bits(tensor, wanted.at(name))) << row.name << " rank " << comms->rank() << " " << name;
        ++gathered;
      }
      EXPECT_EQ(gathered, wanted.size());
    });
}

TEST(Sharding, pieces_of_all_ranks_tile_every_parameter) {
  for (const char* name : {"zero1", "zero2", "zero3"})
    for (int64_t world = 1; world <= 8; ++world) {
      std::vector<std::vector<Piece>> pieces(world);
      toy::on_ranks(world, [&](std::shared_ptr<MeshComm> comms) {
        toy::Net net(toy::NetImpl::Options{});
        Sharded sharded = fully_shard(net.ptr(), comms, toy::options(name));
        train_once(sharded, net, comms->rank());
        pieces[comms->rank()] = sharded.gradients();
      });
      std::map<std::string, std::vector<int>> times;
      for (const auto& rank : pieces)
        for (const Piece& piece : rank) {
          auto& count = times[piece.name];
          count.resize(numel(piece.shape));
          for (int64_t i = piece.run.begin; i < piece.run.end; ++i) ++count[i];
        }
      EXPECT_EQ(times.size(), 4u);
      for (const auto& [parameter, count] : times)
        for (const int n : count) ASSERT_EQ(n, 1) << name << " world " << world << " " << parameter;
    }
}

TEST(Sharding, collectives_of_a_step_are_those_the_layouts_ask_for) {
  struct Expected {
    const char* strategy;
    int64_t gathers, reduce_scatters, all_reduces;
  };
  // Two units and an empty root, two microbatches, one step.
  for (const Expected& expected : {Expected{"ddp", 0, 0, 2}, Expected{"zero1", 2, 2, 0}, Expected{"zero2", 2, 4, 0},
                                   Expected{"zero3", 8, 4, 0}}) {
    auto trace = std::make_shared<Trace>();
    run_threads(3, [&](std::shared_ptr<Comm> comm) {
      auto comms = std::make_shared<MeshComm>(traced(comm, trace), Mesh({{"dp_shard", 3}}));
      toy::Net net(toy::NetImpl::Options{});
      ShardOptions options = toy::options(expected.strategy);
      options.broadcast_initial_values = false;
      Sharded sharded = fully_shard(net.ptr(), comms, options);
      Optimizer optimizer = sgd(sharded, {.lr = 0.1});
      train_once(sharded, net, comms->rank(), false);
      train_once(sharded, net, comms->rank(), true);
      optimizer.step();
    });
    std::map<std::string, int64_t> calls;
    for (const auto& record : trace->of_rank(0))
      if (!of_set_up(record)) ++calls[record.op];
    EXPECT_EQ(calls["all_gather"], expected.gathers) << expected.strategy;
    EXPECT_EQ(calls["reduce_scatter"], expected.reduce_scatters) << expected.strategy;
    EXPECT_EQ(calls["all_reduce"], expected.all_reduces) << expected.strategy;
  }
}

TEST(Sharding, an_unused_parameter_has_a_zero_gradient) {
  for (const Strategy& row : strategies())
    toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
      toy::Net net(toy::NetImpl::Options{.unused = true});
      Sharded sharded = fully_shard(net.ptr(), comms, toy::options(row.name));
      train_once(sharded, net, comms->rank());
      bool found = false;
      for (const Piece& piece : sharded.gradients())
        if (piece.name == "unused") {
          found = true;
          EXPECT_TRUE(kit::same_bits(piece.data, at::zeros({piece.run.size()}))) << row.name;
        }
      EXPECT_TRUE(found || row.state.splits("dp_shard"));
    });
}

TEST(Sharding, a_frozen_unit_passes_gradients_on_and_has_none) {
  for (const Strategy& row : strategies())
    toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
      toy::Net net(toy::NetImpl::Options{.freeze_second = true});
      Sharded sharded = fully_shard(net.ptr(), comms, toy::options(row.name));
      Optimizer optimizer = sgd(sharded, {.lr = 0.1, .momentum = 0.5});
      train_once(sharded, net, comms->rank());
      std::set<std::string> names;
      for (const Piece& piece : sharded.gradients()) names.insert(piece.name);
      for (const Piece& piece : optimizer.state("momentum_buffer")) names.insert(piece.name);
      EXPECT_FALSE(names.contains("second.weight")) << row.name;
      EXPECT_GT(sharded.gradient_norm(), 0);
      optimizer.step();
    });
}

TEST(Sharding, a_frozen_weight_is_there_for_the_backward_after_the_last_trainable_gradient) {
  toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
    auto holder = std::make_shared<torch::nn::Module>("holder");
    toy::Net net(toy::NetImpl::Options{});
    toy::Adapter adapter(7, 7);
    holder->register_module("net", net);
    holder->register_module("adapter", adapter);
    Sharded sharded = fully_shard(holder, comms, toy::options("zero3"));
    const at::Tensor hidden = at::tanh(call(net->first, toy::data({4, 7}, comms->rank())));
    call(adapter, hidden).square().sum().backward();
    const at::Tensor gradient = sharded.gather_gradients().at("net.first.weight");
    EXPECT_GT(gradient.abs().sum().item<float>(), 0);
  });
}

TEST(Sharding, a_unit_called_several_times_gets_the_sum_of_its_gradients) {
  at::Tensor wanted;
  {
    toy::Net net(toy::NetImpl::Options{.calls_of_first = 3});
    call(net, toy::data({4, 7}, 0)).square().sum().backward();
    wanted = net->first->weight.grad();
  }
  for (const Strategy& row : strategies())
    toy::on_ranks(1, [&](std::shared_ptr<MeshComm> comms) {
      toy::Net net(toy::NetImpl::Options{.calls_of_first = 3});
      Sharded sharded = fully_shard(net.ptr(), comms, toy::options(row.name));
      train_once(sharded, net, 0);
      EXPECT_TRUE(kit::same_bits(sharded.gather_gradients().at("first.weight"), wanted)) << row.name;
    });
}

TEST(Sharding, a_tensor_under_two_names_is_one_parameter_of_the_root) {
  toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
    Gpt gpt(GptOptions{.layers = 1, .hidden = 6, .heads = 2, .vocab = 11, .positions = 5, .tied = true});
    auto tied = std::make_shared<torch::nn::Module>("tied");
    tied->register_module("gpt", gpt);
    tied->register_parameter("head", gpt->named_parameters()["wte.weight"]);
    ShardOptions options = toy::options("zero3");
    options.units = by_type<GptBlockImpl>();
    Sharded sharded = fully_shard(tied, comms, options);
    std::set<std::string> held, named;
    for (const Piece& piece : sharded.parameters()) held.insert(piece.name);
    for (const auto& [name, tensor] : sharded.gather_parameters()) named.insert(name);
    EXPECT_FALSE(held.contains("head") && held.contains("gpt.wte.weight")) << "held once";
    EXPECT_TRUE(named.contains("head") && named.contains("gpt.wte.weight")) << "known under both names";
  });
}

TEST(Sharding, a_destroyed_sharded_leaves_a_module_that_can_be_sharded_again) {
  toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    { Sharded first = fully_shard(net.ptr(), comms, toy::options("ddp")); }
    Sharded second = fully_shard(net.ptr(), comms, toy::options("zero3"));
    train_once(second, net, comms->rank());
    EXPECT_GT(second.gradient_norm(), 0);
  });
}

// A unit with dropout, in which masks of two microbatches differ.
class DropsImpl : public torch::nn::Module {
 public:
  DropsImpl() : linear(register_module("linear", torch::nn::Linear(7, 7))) {}
  at::Tensor forward(const at::Tensor& x) { return shardproof::dropout(at::tanh(linear(x)), 0.4, is_training()); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Drops);

TEST(Sharding, a_recomputed_unit_drops_the_elements_that_it_dropped_first) {
  std::map<bool, at::Tensor> gradients;
  for (const bool recompute : {false, true})
    toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
      auto holder = std::make_shared<torch::nn::Module>("holder");
      Drops first, second;
      holder->register_module("first", first);
      holder->register_module("second", second);
      initialize_parameters(*holder, 3);
      ShardOptions options = toy::options("zero3");
      options.units = by_type<DropsImpl>();
      if (recompute) options.recompute = by_type<DropsImpl>();
      Sharded sharded = fully_shard(holder, comms, options);
      random_stream() = {.seed = 5 + static_cast<uint64_t>(comms->rank())};
      call(second, call(first, toy::data({64, 7}, comms->rank()))).square().sum().backward();
      const at::Tensor gradient = sharded.gather_gradients().at("first.linear.weight");
      if (comms->rank() == 0) gradients[recompute] = gradient;
    });
  EXPECT_TRUE(kit::same_bits(gradients[false], gradients[true]));
  EXPECT_GT(gradients[true].abs().sum().item<float>(), 0);
}

// The input of its linear layer is transposed, as that behind a convolution is.
class TurnedImpl : public torch::nn::Module {
 public:
  TurnedImpl()
      : linear(register_module("linear", torch::nn::Linear(12, 20))), scale(register_parameter("scale", at::ones({12}))) {}
  at::Tensor forward(const at::Tensor& x) { return call(linear, (x * scale).transpose(1, 2).contiguous().transpose(1, 2)); }
  torch::nn::Linear linear;
  at::Tensor scale;
};
TORCH_MODULE(Turned);

// Sums in another order of strides have other bits.
TEST(Sharding, the_gradient_of_a_recomputed_units_input_has_the_strides_that_it_has_without) {
  std::map<bool, at::Tensor> gradients;
  for (int64_t seed = 1; seed <= 5; ++seed) {
    for (const bool recompute : {false, true})
      toy::on_ranks(1, [&](std::shared_ptr<MeshComm> comms) {
        Turned model;
        initialize_parameters(*model, static_cast<uint64_t>(seed), 0.5);
        ShardOptions options = toy::options("zero3");
        options.units = by_type<torch::nn::LinearImpl>();
        if (recompute) options.recompute = by_type<torch::nn::LinearImpl>();
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        call(model, toy::data({4, 5, 12}, seed)).tanh().sum().backward();
        gradients[recompute] = sharded.gather_gradients().at("scale");
      });
    EXPECT_TRUE(kit::same_bits(gradients[false], gradients[true])) << seed;
  }
}

TEST(Sharding, side_by_side_nothing_is_gathered_and_a_step_only_meets) {
  auto trace = std::make_shared<Trace>();
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(traced(comm, trace), Mesh({{"dp_shard", 2}}));
    toy::Net net(toy::NetImpl::Options{});
    ShardOptions options = toy::options("zero3");
    options.gather = Gather::side_by_side;
    Sharded sharded = fully_shard(net.ptr(), comms, options);
    Optimizer optimizer = sgd(sharded, {.lr = 0.1});
    const auto meetings = [&] {
      const auto records = trace->of_rank(comm->rank());
      return std::count_if(records.begin(), records.end(), [](const auto& record) { return record.op == "barrier"; });
    };
    int64_t buckets = 0;
    for (int step = 0; step < 2; ++step) {
      const int64_t before = meetings();
      call(net, toy::data({4, 7}, comm->rank())).square().sum().backward();
      buckets = meetings() - before;
      optimizer.step();
      EXPECT_EQ(meetings() - before, buckets + 1) << "each bucket before its first use, and all before their update";
    }
    const int64_t before = meetings();
    sharded.main_parameters_will_change();
    EXPECT_EQ(meetings() - before, 1) << "a user's update waits for the neighbours, too";
    EXPECT_EQ(buckets, 2);
    EXPECT_EQ(sharded.memory().peak_bytes[static_cast<size_t>(MemoryKind::gathered)], 0);
  });
  for (const auto& record : trace->of_rank(0)) EXPECT_NE(record.op, "all_gather");
}

TEST(Sharding, recomputation_gathers_nothing_a_second_time) {
  std::map<bool, int64_t> gathers;
  for (const bool recompute : {false, true}) {
    auto trace = std::make_shared<Trace>();
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      auto comms = std::make_shared<MeshComm>(traced(comm, trace), Mesh({{"dp_shard", 2}}));
      auto holder = std::make_shared<torch::nn::Module>("holder");
      toy::Net net(toy::NetImpl::Options{});
      holder->register_module("net", net);
      ShardOptions options = toy::options("zero3");
      options.units = by_type<toy::NetImpl, torch::nn::LinearImpl>();  // units within a recomputed one
      if (recompute) options.recompute = by_type<toy::NetImpl>();
      Sharded sharded = fully_shard(holder, comms, options);
      call(net, toy::data({4, 7}, comm->rank()).set_requires_grad(true)).square().sum().backward();
      sharded.zero_gradients();
    });
    for (const auto& record : trace->of_rank(0)) gathers[recompute] += record.op == "all_gather";
  }
  EXPECT_GT(gathers[false], 0);
  EXPECT_EQ(gathers[true], gathers[false]);
}
