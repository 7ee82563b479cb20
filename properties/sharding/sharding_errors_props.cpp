// Every misuse ends in one error that says what to do.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/parallel/tensor/tensor_parallel.h"

using namespace shardproof;

namespace {

at::Tensor loss_of(toy::Net& net, int64_t salt) { return call(net, toy::data({4, 7}, salt)).square().sum(); }

}  // namespace

TEST(ShardingErrors, an_unknown_strategy_lists_those_there_are) {
  expect_says(refusal([] { strategy("zero9"); }), {"zero9", "ddp", "zero1", "zero2", "zero3"});
}

TEST(ShardingErrors, a_strategy_whose_axis_the_mesh_lacks_names_both) {
  expect_says(refusal([] {
                run_threads(2, [](std::shared_ptr<Comm> comm) {
                  toy::Net net(toy::NetImpl::Options{});
                  fully_shard(net.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_replicate", 2}})), toy::options("zero3"));
                });
              }),
              {"zero3", "dp_shard", "dp_replicate=2"});
}

TEST(ShardingErrors, a_strategy_that_splits_a_dim_of_its_buckets_is_told_of_flat_splits) {
  for (const auto layout : {&Strategy::parameter, &Strategy::state, &Strategy::accumulated})
    expect_says(refusal([&] {
                  toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
                    toy::Net net(toy::NetImpl::Options{});
                    ShardOptions options = toy::options("zero3");
                    options.strategy.name = "mine";
                    (options.strategy.*layout).dims = {std::exchange((options.strategy.*layout).flat, {})};
                    fully_shard(net.ptr(), comms, options);
                  });
                }),
                {"mine", "a dim of its buckets", "`flat`"});
}

TEST(ShardingErrors, ranks_that_would_share_nothing_are_told_the_names_of_axes) {
  const auto refusal_of = [](const char* row, const Mesh& mesh, bool parallel) {
    return refusal([&] {
      run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
        torch::nn::Linear linear(4, 4);
        const auto comms = std::make_shared<MeshComm>(comm, mesh);
        if (parallel) parallelize(linear.ptr(), comms, {.styles = {{"", ColumnParallel{}}}});
        fully_shard(linear.ptr(), comms, toy::options(row));
      });
    });
  };
  expect_says(refusal_of("ddp", Mesh({{"dp", 2}}), false),
              {"dp=2", "'ddp'", "dp_replicate and dp_shard", "along dp would", "Name that axis"});
  expect_says(refusal_of("zero3", Mesh({{"dp_shard", 1}, {"data", 2}}), false), {"data=2", "'zero3'", "along data would"});
  expect_says(refusal_of("zero1", Mesh({{"dp", 2}, {"tp", 2}}), true), {"dp=2", "'zero1'", "along dp would"});
}

TEST(ShardingErrors, a_second_backward_after_the_last_one_says_how_to_accumulate) {
  for (const Strategy& row : strategies())
    expect_says(refusal([&] {
                  toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
                    toy::Net net(toy::NetImpl::Options{});
                    Sharded sharded = fully_shard(net.ptr(), comms, toy::options(row.name));
                    loss_of(net, 1).backward();
                    loss_of(net, 2).backward();
                  });
                }),
                {"second.", "set_last_microbatch(false)"});
}

TEST(ShardingErrors, a_step_without_gradients_says_what_is_missing) {
  expect_says(refusal([] {
                toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
                  toy::Net net(toy::NetImpl::Options{});
                  Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero2"));
                  Optimizer optimizer = sgd(sharded, {});
                  sharded.set_last_microbatch(false);
                  loss_of(net, 1).backward();
                  optimizer.step();
                });
              }),
              {"Optimizer::step", "step 1", "set_last_microbatch(true)"});
}

TEST(ShardingErrors, a_nan_gradient_names_rank_step_and_parameter_before_any_communication) {
  for (const Strategy& row : strategies()) {
    const std::string message = refusal([&] {
      toy::on_ranks(3, [&](std::shared_ptr<MeshComm> comms) {
        toy::Net net(toy::NetImpl::Options{});
        Sharded sharded = fully_shard(net.ptr(), comms, toy::options(row.name));
        Optimizer optimizer = sgd(sharded, {});
        for (int step = 0; step < 2; ++step) {
          at::Tensor input = toy::data({4, 7}, comms->rank());
          if (step == 1 && comms->rank() == 2) input[1][3] = NAN;
          call(net, input).square().sum().backward();
          optimizer.step();
        }
      });
    });
    expect_says(message, {"rank 2", "step 2", "second.", "nan"});
  }
}

TEST(ShardingErrors, a_gradient_above_the_largest_magnitude_allowed_names_rank_step_and_parameter) {
  toy::Net plain(toy::NetImpl::Options{});
  (plain->forward(toy::data({1, 7}, 0)).sum() * 6.0).backward();
  double most = 0;
  std::string name;
  for (const auto& item : plain->named_parameters())
    if (const double own = item.value().grad().abs().max().item<double>(); own > most) most = own, name = item.key();
  for (const bool allowed : {false, true}) {
    const auto train = [&] {
      toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
        toy::Net net(toy::NetImpl::Options{});
        ShardOptions options = toy::options("zero2");
        options.gradient_magnitude_max = allowed ? most * 1.001 : most * 0.999;
        Sharded sharded = fully_shard(net.ptr(), comms, options);
        Optimizer optimizer = sgd(sharded, {.lr = 0});
        for (const double scale : {0.5, 6.0}) {
          (call(net, toy::data({1, 7}, 0)).sum() * (comms->rank() == 1 ? scale : 0.5)).backward();
          optimizer.step();
        }
      });
    };
    if (allowed)
      train();
    else
      expect_says(refusal(train), {"rank 1", "step 2", name.c_str(), "as this rank alone computed it"});
  }
}

TEST(ShardingErrors, an_infinite_sum_of_finite_gradients_names_the_parameter) {
  const std::string message = refusal([] {
    toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
      toy::Net net(toy::NetImpl::Options{});
      initialize_parameters(*net, 3, 0.001);
      Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero3"));
      (call(net, toy::data({1, 7}, 0)).sum() * 2e38).backward();
      sharded.gradient_norm();
    });
  });
  expect_says(message, {"step 1", "second.bias", "overflowed"});
}

TEST(ShardingErrors, a_module_is_sharded_once) {
  expect_says(refusal([] {
                toy::on_ranks(1, [](std::shared_ptr<MeshComm> comms) {
                  toy::Net net(toy::NetImpl::Options{});
                  Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero3"));
                  Sharded again = fully_shard(net.ptr(), comms, toy::options("zero3"));
                });
              }),
              {"sharded already"});
}

TEST(ShardingErrors, a_parameter_of_integers_is_refused_by_name) {
  expect_says(refusal([] {
                toy::on_ranks(1, [](std::shared_ptr<MeshComm> comms) {
                  toy::Net net(toy::NetImpl::Options{});
                  net->second->register_parameter("counts", at::zeros({3}, at::kInt), /*requires_grad=*/false);
                  fully_shard(net.ptr(), comms, toy::options("zero3"));
                });
              }),
              {"second.counts", "floating", "Int"});
}

TEST(ShardingErrors, options_out_of_range_say_what_is_allowed) {
  const auto error_with = [](const std::function<void(ShardOptions&)>& change) {
    return refusal([&] {
      toy::on_ranks(1, [&](std::shared_ptr<MeshComm> comms) {
        toy::Net net(toy::NetImpl::Options{});
        ShardOptions options = toy::options("zero3");
        change(options);
        fully_shard(net.ptr(), comms, options);
      });
    });
  };
  expect_says(error_with([](ShardOptions& o) { o.alignment_bytes = 48; }), {"alignment_bytes", "48"});
  expect_says(error_with([](ShardOptions& o) { o.bucket_bytes_max = -1; }), {"bucket_bytes_max", "-1"});
  expect_says(error_with([](ShardOptions& o) { o.bucket_multiple = 0; }), {"bucket_multiple", "at least 1", "0"});
  expect_says(error_with([](ShardOptions& o) { o.gradient_divide = -2; }), {"gradient_divide", "-2"});
}

TEST(ShardingErrors, a_graph_from_before_the_step_is_refused) {
  toy::on_ranks(1, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    Sharded sharded = fully_shard(net.ptr(), comms, toy::options("ddp"));
    Optimizer optimizer = sgd(sharded, {});
    at::Tensor old = loss_of(net, 1);
    loss_of(net, 2).backward();
    optimizer.step();
    EXPECT_THROW(old.backward(), c10::Error);
  });
}

TEST(ShardingErrors, a_node_that_is_called_by_hand_is_refused_and_training_goes_on) {
  toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero2"));
    const at::Tensor parameter = net->parameters().front();
    const auto node = torch::autograd::impl::grad_accumulator(parameter);
    expect_says(refusal([&] { (*node)({at::ones_like(parameter)}); }), {"called by hand, outside of a backward", "backward()"});
    loss_of(net, 1).backward();
    EXPECT_GT(sharded.gradient_norm(), 0);
  });
}

// Of all ranks at the same point: early, in the middle, or when everything was reduced already.
TEST(ShardingErrors, a_backward_that_failed_is_forgotten_and_training_goes_on_with_the_same_bits) {
  enum class Fails { nowhere, at_the_loss, between_units, at_the_input };
  const auto train = [](const char* name, Fails where) {
    std::vector<std::pair<std::string, at::Tensor>> result;
    toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
      toy::Net net(toy::NetImpl::Options{});
      Sharded sharded = fully_shard(net.ptr(), comms, toy::options(name));
      Optimizer optimizer = adamw(sharded, {.lr = 0.1});
      const auto step = [&](Fails fails) {
        const auto fail_at = [](const at::Tensor& x) {
          x.register_hook([](const at::Tensor&) { throw std::runtime_error("planted"); });
        };
        at::Tensor x = toy::data({4, 7}, comms->rank()).set_requires_grad(true);
        if (fails == Fails::at_the_input) fail_at(x);
        at::Tensor hidden = at::tanh(call(net->first, x));
        if (fails == Fails::between_units) fail_at(hidden);
        const at::Tensor y = call(net->second, hidden);
        if (fails == Fails::at_the_loss) fail_at(y);
        y.square().sum().backward();
      };
      step(Fails::nowhere);
      optimizer.step();
      if (where != Fails::nowhere) {
        EXPECT_THROW(step(where), std::runtime_error);
        expect_error([&] { step(Fails::nowhere); }, {"ended in an exception", "zero_gradients"});
        expect_error([&] { optimizer.step(); }, {"ended in an exception", "zero_gradients"});
        sharded.zero_gradients();
      }
      step(Fails::nowhere);
      optimizer.step();
      const auto whole = sharded.gather_parameters();
      if (comms->rank() == 0) result = whole;
    });
    return result;
  };
  for (const char* name : {"ddp", "zero1", "zero3"}) {
    const auto expected = train(name, Fails::nowhere);
    for (const Fails where : {Fails::at_the_loss, Fails::between_units, Fails::at_the_input}) {
      const auto seen = train(name, where);
      ASSERT_EQ(seen.size(), expected.size());
      for (size_t i = 0; i < seen.size(); ++i)
        EXPECT_TRUE(kit::same_bits(seen[i].second, expected[i].second)) << name << " " << seen[i].first;
    }
  }
}

namespace {

// In a process of its own, whose first backward this is.
[[noreturn]] void change_the_microbatch_inside_of_the_first_backward() {
  toy::on_ranks(1, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero2"));
    const at::Tensor hidden = at::tanh(call(net->first, toy::data({4, 7}, 1)));
    hidden.register_hook(
        [&](const at::Tensor&) { fprintf(stderr, "%s\n", refusal([&] { sharded.set_last_microbatch(true); }).c_str()); });
    call(net->second, hidden).square().sum().backward();
  });
  _exit(0);
}

// Its forward takes something else than a tensor.
struct Multiplied : torch::nn::Module {
  Multiplied() { weight = register_parameter("weight", at::ones({3})); }
  at::Tensor forward(double factor) { return weight * factor; }
  at::Tensor weight;
};

}  // namespace

TEST(ShardingErrorsDeathTest, the_first_backward_of_a_process_is_one_like_any_other) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(change_the_microbatch_inside_of_the_first_backward(), testing::ExitedWithCode(0),
              "set_last_microbatch inside a backward");
}

TEST(ShardingErrors, a_unit_in_a_sequential_that_takes_no_tensor_is_named_and_an_error_of_its_own_stays_what_it_is) {
  const auto error_of = [](torch::nn::Sequential model) {
    std::string message;
    toy::on_ranks(1, [&](std::shared_ptr<MeshComm> comms) {
      ShardOptions options = toy::options("zero3");
      options.units = by_name("1");
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      try {
        call(model, at::ones({2, 3}));
      } catch (const std::exception& error) {
        message = error.what();
      }
    });
    return message;
  };
  const std::string says = "must take one tensor and return one";
  expect_says(error_of(torch::nn::Sequential(torch::nn::Linear(3, 3), Multiplied())), {"[unit]", says, "Multiplied"});
  const std::string own = error_of(torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::Linear(4, 3)));
  expect_says(own, {"shapes cannot be multiplied"});
  EXPECT_EQ(own.find(says), std::string::npos) << own;
}
