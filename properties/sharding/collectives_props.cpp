// Scenarios of PyTorch's test_fully_shard_comm.py: which collectives run, when, and how sums are divided. See docs/parity.md.
#include <gtest/gtest.h>

#include "properties/kit/of_set_up.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::calls_of;
using parity::expect_near;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

namespace {

const Mesh kTwoByTwo({{"dp_replicate", 2}, {"dp_shard", 2}});
constexpr int64_t kBlocks = 4, kWidth = 4;

ShardOptions block_units(const std::string& strategy) {
  ShardOptions options = parity::block_units(strategy);
  options.broadcast_initial_values = false;
  return options;
}

// Blocks, and a parameter of the root itself.
class RootedImpl : public torch::nn::Module {
 public:
  RootedImpl() {
    chain = register_module("blocks", parity::blocks(kBlocks, kWidth));
    scale = register_parameter("scale", at::ones({kWidth}));
    initialize_parameters(*this, 7, 0.5);
  }
  at::Tensor forward(at::Tensor x) { return call(chain, x * (scale + 1)); }
  torch::nn::Sequential chain{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Rooted);

// Calls a unit that was registered before it, then one of its own, and then perhaps a weight of its own.
class CallerImpl : public torch::nn::Module {
 public:
  explicit CallerImpl(parity::Block other) : other_(std::move(other)) {
    own_ = register_module("own", parity::Block(kWidth));
    weight_ = register_parameter("weight", at::ones({kWidth}));
  }
  at::Tensor forward(at::Tensor x, bool weighs) {
    x = call(own_, call(other_, x));
    return weighs ? x * weight_ : x;
  }

 private:
  parity::Block other_, own_{nullptr};
  at::Tensor weight_;
};
TORCH_MODULE(Caller);

// Runs `body(model, sharded)` on four blocks under one root over these ranks, and returns rank 0's calls.
std::vector<TraceRecord> traced_run(int64_t world, ShardOptions options, const std::function<void(Rooted&, Sharded&)>& body) {
  auto trace = std::make_shared<Trace>();
  on_mesh(
      ranks(world),
      [&](std::shared_ptr<MeshComm> comms) {
        Rooted model;
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        body(model, sharded);
      },
      {}, trace);
  auto records = trace->of_rank(0);
  std::erase_if(records, of_set_up);
  return records;
}

at::Tensor loss_of(Rooted& model) {
  return call(model, toy::data({2, kWidth}, 1)).square().sum();
}

int64_t count(const std::vector<TraceRecord>& records, const std::string& op) {
  return std::count_if(records.begin(), records.end(), [&](const TraceRecord& record) { return record.op == op; });
}

}  // namespace

TEST(Fsdp2Parity, gathers_and_reductions_of_a_step_are_counted_for_every_reshard_setting) {
  struct Expected {
    Reshard reshard;
    int64_t backward_gathers;
  };
  // The root keeps its own, so it is gathered once whatever the setting.
  for (const auto& [reshard, backward_gathers] :
       {Expected{Reshard::always(), kBlocks}, Expected{Reshard::never(), 0}, Expected{Reshard::within(2), kBlocks}}) {
    ShardOptions options = block_units("zero3");
    options.reshard_after_forward = reshard;
    EXPECT_EQ(count(traced_run(4, options, [](Rooted& model, Sharded&) { loss_of(model); }), "all_gather"), kBlocks + 1);
    const auto records = traced_run(4, options, [](Rooted& model, Sharded&) { loss_of(model).backward(); });
    EXPECT_EQ(count(records, "all_gather"), kBlocks + 1 + backward_gathers);
    EXPECT_EQ(count(records, "reduce_scatter"), kBlocks + 1);
    EXPECT_EQ(count(records, "all_reduce"), 0);
    if (reshard.ranks() == 2) {
      EXPECT_NE(records[kBlocks + 1].group, records[1].group) << "the second gather is within a group of two";
    }
  }
}

TEST(Fsdp2Parity, parameters_freed_by_hand_between_forward_and_backward_are_gathered_again) {
  ShardOptions options = block_units("zero3");
  options.reshard_after_forward = false;
  const auto records = traced_run(2, options, [](Rooted& model, Sharded& sharded) {
    const at::Tensor loss = loss_of(model);
    for (UnitHandle unit : sharded.units()) unit.reshard();
    loss.backward();
    EXPECT_GT(sharded.gradient_norm(), 0);
  });
  EXPECT_EQ(count(records, "all_gather"), 2 * (kBlocks + 1));
}

TEST(Fsdp2Parity, a_reshard_setting_changed_at_run_time_changes_the_gathers) {
  for (const bool initially : {true, false})
    for (const bool all : {true, false}) {
      ShardOptions options = block_units("zero3");
      options.reshard_after_forward = initially;
      const auto records = traced_run(2, options, [&](Rooted& model, Sharded& sharded) {
        for (UnitHandle unit : sharded.units())
          if (all || unit.name().empty()) unit.set_reshard_after_forward(!initially);
        loss_of(model).backward();
      });
      const bool blocks_reshard = all ? !initially : initially, root_reshards = !initially;
      EXPECT_EQ(count(records, "all_gather"), kBlocks + 1 + (blocks_reshard ? kBlocks : 0) + (root_reshards ? 1 : 0));
      EXPECT_EQ(count(records, "reduce_scatter"), kBlocks + 1);
    }
}

TEST(Fsdp2Parity, a_custom_divisor_is_applied_once_on_every_mesh) {
  for (const Mesh& mesh : {ranks(4), kTwoByTwo, Mesh({{"dp_replicate", 4}, {"dp_shard", 1}})})
    for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
      for (const double divisor : {4.0, 8.0, 3.0})
        for (const Divide divide : {Divide::after, Divide::before, Divide::split})
          on_mesh(mesh, [&](std::shared_ptr<MeshComm> comms) {
            auto model = parity::blocks(2, 3), plain = parity::blocks(2, 3);
            ShardOptions options = block_units(name);
            options.gradient_divide = divisor;
            options.divide = divide;
            Sharded sharded = fully_shard(model.ptr(), comms, options);
            call(model, toy::data({2, 3}, comms->rank())).square().sum().backward();
            parity::Tensors wanted;
            for (int64_t rank = 0; rank < mesh.size(); ++rank)
              for (const auto& [key, gradient] : parity::plain_gradients(parity::trainee(plain, {2, 3}), rank))
                wanted[key] = wanted[key].defined() ? wanted[key] + gradient / divisor : gradient / divisor;
            for (const auto& [key, gradient] : parity::whole(sharded.gradients(), wanted, *comms))
              expect_near(gradient, wanted.at(key), 1e-6, key);
          });
}

TEST(Fsdp2Parity, a_limit_on_bytes_in_flight_changes_no_bit) {
  const MakeTrainee make = [] { return parity::trainee(Rooted(), {2, kWidth}); };
  for (const Mesh& mesh : {ranks(4), kTwoByTwo})
    for (const int64_t bytes : {0, 1, 300, 1000000})
      for (const Buffers buffers : {Buffers::freed, Buffers::pooled}) {
        parity::Plan plan{.mesh = mesh, .options = block_units("zero3")};
        plan.options.bytes_in_flight_max = bytes;
        plan.options.prefetch_forward = 2;
        plan.options.prefetch_backward = 2;
        plan.options.buffers = buffers;
        plan.threads = {ThreadsOptions::Schedule::serial, ThreadsOptions::Completion::late, {}, 1};
        expect_trains_like_plain(make, plan);
      }
}

TEST(Fsdp2Parity, a_unit_of_two_modules_one_never_called_trains_like_plain) {
  const MakeTrainee make = [] {
    parity::DoubleLinear model(/*run_second=*/false);
    return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                             return call(model, toy::data({3, 5}, salt)).first.square().sum();
                           }};
  };
  parity::Plan plan{.mesh = ranks(2), .options = toy::options("zero3"), .steps = 3};
  plan.options.units = {};
  plan.shard = [&](const parity::Trainee& own, std::shared_ptr<MeshComm> comms) {
    return Sharding(comms, plan.options).unit(own.module->children()).shard(own.module);
  };
  expect_trains_like_plain(make, plan);
}

// The other unit is gathered for its backward between that of the caller's own unit and the caller's end.
TEST(Collectives, of_a_unit_that_ranks_use_in_part_start_when_its_backward_is_over) {
  auto trace = std::make_shared<Trace>();
  const auto run = [&](std::shared_ptr<MeshComm> comms) {
    torch::nn::Sequential model;
    const parity::Block other(kWidth);
    const Caller caller(other);
    model->push_back(other);
    model->push_back("caller", caller);
    ShardOptions options = block_units("zero3");
    options.units = [](const std::string& name, const torch::nn::Module&) { return name == "0" || name.starts_with("caller"); };
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    call(caller, toy::data({2, kWidth}, comms->rank()), comms->rank() == 0).square().sum().backward();
  };
  on_mesh(ranks(2), run, {}, trace);
  const auto calls = [&](int64_t rank) {
    std::vector<std::string> seen;
    for (const TraceRecord& record : trace->of_rank(rank)) seen.push_back(record.call);
    return seen;
  };
  EXPECT_EQ(calls(0), calls(1));
}

TEST(Fsdp2Parity, gathers_by_hand_run_beside_the_callers_own_collectives) {
  for (const auto completion :
       {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late, ThreadsOptions::Completion::random}) {
    run_threads(2,
                [](std::shared_ptr<Comm> world) {
                  auto own = world->split(0, world->rank(), "own");
                  auto comms = std::make_shared<MeshComm>(world, ranks(2));
                  auto model = parity::stack({5, 5, 5, 5}), plain = parity::stack({5, 5, 5, 5});
                  Sharded sharded = fully_shard(model.ptr(), comms, toy::options("zero3"));
                  std::vector<at::Tensor> sums;
                  std::vector<Work> works;
                  auto units = sharded.units();
                  for (size_t i = 1; i < units.size(); ++i) {
                    sums.push_back(toy::data({2, 5}, static_cast<int64_t>(i) + 10 * world->rank()));
                    works.push_back(own->all_reduce(sums.back()));
                    units[i].start_unshard();
                  }
                  at::Tensor x = at::zeros({2, 5}), y = at::zeros({2, 5});
                  for (size_t i = 0; i < sums.size(); ++i) {
                    works[i].wait();
                    x = x + call(model, sums[i]);
                    const auto index = static_cast<int64_t>(i) + 1;
                    y = y + call(plain, toy::data({2, 5}, index) + toy::data({2, 5}, index + 10));
                  }
                  expect_near(x, y, 0, "the output");
                  x.sum().backward();
                  EXPECT_GT(sharded.gradient_norm(), 0);
                },
                {ThreadsOptions::Schedule::serial, completion, {}, 5});
  }
}

TEST(Fsdp2Parity, a_unit_without_parameters_can_be_unsharded) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = parity::stack({4, 4, 4});
    ShardOptions options = toy::options("zero3");
    options.units = [](const std::string&, const torch::nn::Module&) { return true; };  // the tanh too
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    for (const char* name : {"", "1"}) {
      UnitHandle unit = sharded.unit(name);
      unit.start_unshard();
      unit.unshard();
      unit.reshard();
    }
    call(model, toy::data({2, 4}, 1)).sum().backward();
    EXPECT_GT(sharded.gradient_norm(), 0);
  });
}

TEST(Fsdp2Parity, unsharding_before_the_first_forward_gives_the_values_from_before) {
  for (const char* name : {"ddp", "zero3", "hfsdp"})
    on_mesh(kTwoByTwo, [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::stack({4, 5, 3});
      const auto plain = parity::stack({4, 5, 3});
      Sharded sharded = fully_shard(model.ptr(), comms, toy::options(name));
      for (UnitHandle unit : sharded.units()) unit.unshard();
      for (size_t i = 0; i < plain->parameters().size(); ++i)
        expect_near(model->parameters()[i], plain->parameters()[i], 0, name);
      const auto gathered = sharded.gather_parameters();
      ASSERT_EQ(gathered.size(), plain->parameters().size());
      for (const auto& [key, value] : gathered) expect_near(value, plain->named_parameters()[key], 0, key);
    });
}

TEST(Fsdp2Parity, a_world_of_one_divides_by_what_is_given_and_nothing_else) {
  for (const double divisor : {0.0, 1.0, 2.0})
    for (const Strategy& row : strategies())
      on_mesh(Mesh({{"dp_replicate", 1}, {"dp_shard", 1}}), [&](std::shared_ptr<MeshComm> comms) {
        torch::nn::Linear model(torch::nn::LinearOptions(8, 4).bias(false));
        ShardOptions options = toy::options(row.name);
        options.gradient_divide = divisor;
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        call(model, at::ones({3, 8})).sum().backward();
        ASSERT_EQ(sharded.gradients().size(), 1u);
        expect_near(sharded.gradients()[0].data, at::full({32}, 3 / (divisor == 0 ? 1 : divisor)), 0, row.name);
      });
}

TEST(TensorParallel, gradients_of_whole_parameters_are_compared_where_there_is_another_rank_to_compare_with) {
  const auto calls_on = [](int64_t tp, bool compares) {
    auto trace = std::make_shared<Trace>();
    on_mesh(
        Mesh({{"dp_shard", 2}, {"tp", tp}}),
        [&](std::shared_ptr<MeshComm> comms) {
          torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 3));
          initialize_parameters(*model, 7, 0.5);
          ParallelPlan plan{.styles = {{"0", ColumnParallel{.gather_output = true}}}};
          plan.compare_replicas = compares;
          const TensorParallel parallel = parallelize(model.ptr(), comms, plan);
          Sharded sharded = fully_shard(model.ptr(), comms, toy::options("zero3"));
          call(model, toy::data({2, 4}, 1)).square().sum().backward();
        },
        {}, trace);
    return std::ssize(trace->of_rank(0));
  };
  EXPECT_EQ(calls_on(1, true), calls_on(1, false));
  EXPECT_GT(calls_on(2, true), calls_on(2, false));
}
