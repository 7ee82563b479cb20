// Gradients that are made where they are summed over ranks: the same bits as autograd's own, no copy, and nobody sees memory
// that changes afterwards.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>

#include "properties/kit/autocast.h"
#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/nn/gradient_place.h"

using namespace shardproof;
using kit::same_bits;

namespace {

// A product and a table of rows, each used as often as it is told.
class UsesImpl : public torch::nn::Module {
 public:
  struct Sizes {
    int64_t rows = 6, in = 4, out = 5, uses = 1;
    bool bias = true;
    at::ScalarType dtype = at::kFloat;
  };
  explicit UsesImpl(Sizes sizes) : sizes_(sizes) {
    table = register_parameter("table", toy::data({sizes.rows, sizes.in}, 1).to(sizes.dtype));
    weight = register_parameter("weight", toy::data({sizes.out, sizes.in}, 2).to(sizes.dtype));
    if (sizes.bias) bias = register_parameter("bias", toy::data({sizes.out}, 3).to(sizes.dtype));
  }
  at::Tensor forward(at::Tensor tokens) {
    at::Tensor sum;
    for (int64_t i = 0; i < sizes_.uses; ++i) {
      const at::Tensor y = direct::linear(direct::embedding(table, (tokens + i) % sizes_.rows, padding), weight, bias);
      sum = sum.defined() ? sum + y.sin() : y;
    }
    return sum;
  }
  at::Tensor table, weight, bias;
  int64_t padding = -1;

 private:
  Sizes sizes_;
};
TORCH_MODULE(Uses);

at::Tensor tokens_of(const std::vector<int64_t>& sizes, int64_t salt) {
  return toy::data(sizes, salt).mul(1000).abs().to(at::kLong);
}

at::Tensor loss_of(Uses& model, const at::Tensor& tokens) { return call(model, tokens).square().sum(); }

// What autograd itself gives: nobody takes gradients over, so these are at::linear and at::embedding.
std::map<std::string, at::Tensor> plain_gradients(const UsesImpl::Sizes& sizes, const std::vector<at::Tensor>& microbatches,
                                                  int64_t padding) {
  Uses model(sizes);
  model->padding = padding;
  std::map<std::string, at::Tensor> sums;
  for (const at::Tensor& tokens : microbatches) {
    loss_of(model, tokens % sizes.rows).backward();
    for (const auto& item : model->named_parameters()) {
      at::Tensor& sum = sums[item.key()];
      sum = sum.defined() ? sum + item.value().grad() : item.value().grad().clone();
      item.value().mutable_grad().reset();
    }
  }
  return sums;
}

ShardOptions options_of(const char* name, double divide = 1) {
  ShardOptions options = toy::options(name);
  options.units = {};
  options.gradient_divide = divide;
  return options;
}

// Runs on one rank, where the gradient is that of the rank.
void alone(const std::function<void(std::shared_ptr<MeshComm>)>& body) { toy::on_ranks(1, body); }

// What a backward throws on this rank.
std::string error_of(const at::Tensor& loss) {
  try {
    loss.backward();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Counts the products of this thread that write to memory that they were given.
class ProductsInPlace {
 public:
  ProductsInPlace() {
    count = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& fn) {
      const auto op = fn.operator_name();
      if (op && op->name == "aten::mm" && op->overload_name == "out") ++count;
      return std::unique_ptr<at::ObserverContext>();
    }));
  }
  ~ProductsInPlace() { at::removeCallback(handle_); }
  static thread_local int64_t count;

 private:
  at::CallbackHandle handle_;
};
thread_local int64_t ProductsInPlace::count = 0;

}  // namespace

RC_GTEST_PROP(DirectGradients, have_the_bits_of_autograds_own, ()) {
  const UsesImpl::Sizes sizes{.rows = *rc::gen::inRange<int64_t>(1, 9),
                              .in = *rc::gen::inRange<int64_t>(1, 40),
                              .out = *rc::gen::inRange<int64_t>(1, 40),
                              .uses = *rc::gen::inRange<int64_t>(1, 4),
                              .bias = *rc::gen::arbitrary<bool>(),
                              .dtype = *rc::gen::element(at::kFloat, at::kDouble)};
  const int64_t padding = *rc::gen::inRange<int64_t>(-1, sizes.rows);
  std::vector<int64_t> shape;
  for (int64_t dim = *rc::gen::inRange<int64_t>(1, 4); dim > 0; --dim) shape.push_back(*rc::gen::inRange<int64_t>(1, 6));
  std::vector<at::Tensor> microbatches;
  for (int64_t m = *rc::gen::inRange<int64_t>(1, 4); m > 0; --m) microbatches.push_back(tokens_of(shape, m));
  const auto wanted = plain_gradients(sizes, microbatches, padding);
  const char* name = *rc::gen::element("ddp", "zero1", "zero3");
  std::map<std::string, at::Tensor> got;
  alone([&](std::shared_ptr<MeshComm> comms) {
    Uses model(sizes);
    model->padding = padding;
    Sharded sharded = fully_shard(model.ptr(), comms, options_of(name));
    for (size_t m = 0; m < microbatches.size(); ++m) {
      sharded.set_last_microbatch(m + 1 == microbatches.size());
      loss_of(model, microbatches[m] % sizes.rows).backward();
    }
    got = sharded.gather_gradients();
  });
  for (const auto& [parameter, gradient] : wanted) {
    // Sums of several microbatches begin with a copy of the first here, too.
    if (!same_bits(got.at(parameter), gradient)) RC_FAIL(parameter + " of " + name);
  }
}

TEST(DirectGradients, of_a_first_microbatch_are_made_in_their_bucket_and_later_ones_are_added) {
  for (const bool reduces_early : {false, true})
    toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
      Uses model(UsesImpl::Sizes{});
      Sharded sharded = fully_shard(model.ptr(), comms, options_of(reduces_early ? "zero3" : "zero1"));
      for (int64_t m = 0; m < 3; ++m) {
        sharded.set_last_microbatch(m == 2);
        const at::Tensor loss = loss_of(model, tokens_of({2, 3}, m) % 6);
        ProductsInPlace products;
        loss.backward();
        EXPECT_EQ(ProductsInPlace::count, m == 0 || reduces_early ? 1 : 0) << "microbatch " << m;
      }
    });
}

// Two ranks with the same data: half of twice the gradient has the bits of the gradient.
TEST(DirectGradients, of_several_microbatches_are_divided_once) {
  const std::vector<at::Tensor> microbatches = {tokens_of({2, 3}, 1), tokens_of({2, 3}, 2), tokens_of({2, 3}, 3)};
  const UsesImpl::Sizes sizes{};
  const auto wanted = plain_gradients(sizes, microbatches, -1);
  for (const char* name : {"ddp", "zero2", "zero3"})
    toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
      Uses model(sizes);
      Sharded sharded = fully_shard(model.ptr(), comms, options_of(name, 2));
      for (size_t m = 0; m < microbatches.size(); ++m) {
        sharded.set_last_microbatch(m + 1 == microbatches.size());
        loss_of(model, microbatches[m] % sizes.rows).backward();
      }
      const auto got = sharded.gather_gradients();
      for (const auto& [parameter, gradient] : wanted) EXPECT_TRUE(same_bits(got.at(parameter), gradient)) << name << parameter;
    });
}

TEST(DirectGradients, of_a_weight_that_has_hooks_are_the_hooks_to_keep) {
  alone([](std::shared_ptr<MeshComm> comms) {
    Uses model(UsesImpl::Sizes{});
    Sharded sharded = fully_shard(model.ptr(), comms, options_of("zero3", /*divide=*/4));
    at::Tensor seen, copied;
    const unsigned hook = model->weight.register_hook([&](const at::Tensor& gradient) {
      seen = gradient;
      copied = gradient.clone();
    });
    loss_of(model, tokens_of({2, 3}, 1) % 6).backward();
    ASSERT_TRUE(seen.defined());
    EXPECT_TRUE(same_bits(seen, copied)) << "the division by 4 is of what the bucket has";
    EXPECT_TRUE(same_bits(sharded.gather_gradients().at("weight"), copied / 4));
    model->weight.remove_hook(hook);
  });
}

TEST(DirectGradients, that_are_asked_for_by_name_stay_what_they_are) {
  alone([](std::shared_ptr<MeshComm> comms) {
    const UsesImpl::Sizes sizes;
    Uses model(sizes);
    Sharded sharded = fully_shard(model.ptr(), comms, options_of("zero1", /*divide=*/2));
    const at::Tensor tokens = tokens_of({2, 3}, 1) % 6;
    const at::Tensor loss = loss_of(model, tokens);
    sharded.set_last_microbatch(false);
    const at::Tensor own = torch::autograd::grad({loss}, {model->weight}, {}, /*retain_graph=*/true).at(0);
    const at::Tensor copied = own.clone();
    sharded.zero_gradients();
    sharded.set_last_microbatch(true);
    loss.backward();
    EXPECT_TRUE(same_bits(own, copied));
    EXPECT_TRUE(same_bits(sharded.gather_gradients().at("weight"), plain_gradients(sizes, {tokens}, -1).at("weight") / 2));
  });
}

TEST(DirectGradients, of_a_gradient_are_those_of_plain_autograd) {
  const UsesImpl::Sizes sizes;
  const at::Tensor tokens = tokens_of({2, 3}, 1) % 6, x = toy::data({3, 4}, 7);
  // The loss is the squared gradient by the input.
  const auto penalty = [&](Uses& model) {
    const at::Tensor input = x.clone().requires_grad_();
    const auto product = [&](at::Tensor given) { return direct::linear(given, model->weight, model->bias); };
    const at::Tensor y = call_as(model, product, input);
    return torch::autograd::grad({y.sin().sum()}, {input}, {}, true, /*create_graph=*/true).at(0).square().sum();
  };
  Uses plain(sizes);
  penalty(plain).backward();
  alone([&](std::shared_ptr<MeshComm> comms) {
    Uses model(sizes);
    Sharded sharded = fully_shard(model.ptr(), comms, options_of("ddp"));
    sharded.set_last_microbatch(false);
    const at::Tensor loss = penalty(model);
    sharded.zero_gradients();
    sharded.set_last_microbatch(true);
    loss.backward();
    EXPECT_TRUE(same_bits(sharded.gather_gradients().at("weight"), plain->weight.grad()));
  });
}

TEST(DirectGradients, that_are_not_finite_name_their_parameter) {
  alone([](std::shared_ptr<MeshComm> comms) {
    Uses model(UsesImpl::Sizes{.bias = false});  // so that none of its gradients is copied
    Sharded sharded = fully_shard(model.ptr(), comms, options_of("zero3"));
    const std::string message = error_of(loss_of(model, tokens_of({2, 3}, 1) % 6) * std::numeric_limits<float>::infinity());
    EXPECT_NE(message.find("gradient of table"), std::string::npos) << message;
    sharded.zero_gradients();
  });
}

namespace {

// Three units, of weights whose gradients are made in their place and biases whose gradients are copied there.
class StackImpl : public torch::nn::Module {
 public:
  StackImpl() {
    first_ = register_module("layer1", Linear(torch::nn::LinearOptions(8, 8)));
    second_ = register_module("layer2", Linear(torch::nn::LinearOptions(8, 8)));
    third_ = register_module("layer3", Linear(torch::nn::LinearOptions(8, 8)));
    int64_t salt = 0;
    for (const at::Tensor& parameter : parameters()) parameter.data().copy_(toy::data(parameter.sizes().vec(), ++salt));
  }
  at::Tensor forward(at::Tensor x) { return call(third_, call(second_, call(first_, x))); }

 private:
  Linear first_{nullptr}, second_{nullptr}, third_{nullptr};
};
TORCH_MODULE(Stack);

// The gradients of a step on four ranks, and what `before` did before it.
std::map<std::string, at::Tensor> stack_gradients(const char* name,
                                                  const std::function<void(Stack&, Sharded&, int64_t rank)>& before) {
  const bool replicas = std::string(name) == "hsdp";
  std::map<std::string, at::Tensor> got;
  run_threads(4, [&](std::shared_ptr<Comm> comm) {
    const Mesh mesh = replicas ? Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}) : Mesh({{"dp_shard", 4}});
    Stack model;
    ShardOptions options = toy::options(name);
    options.units = by_type<LinearImpl>();
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, mesh), options);
    before(model, sharded, comm->rank());
    call(model, toy::data({5, 8}, comm->rank())).square().sum().backward();
    const auto gradients = sharded.gather_gradients();
    if (comm->rank() == 0) got = gradients;
  });
  return got;
}

}  // namespace

// The sum says that somebody's terms are not finite, while that of another unit is under way. Then each rank looks at its own,
// whether they were made in their place or copied there.
TEST(DirectGradients, that_are_not_finite_on_every_rank_are_forgotten_and_leave_no_trace) {
  for (const char* name : {"ddp", "zero1", "zero2", "zero3", "hsdp"}) {
    const auto wanted = stack_gradients(name, [](Stack&, Sharded&, int64_t) {});
    const auto got = stack_gradients(name, [&](Stack& model, Sharded& sharded, int64_t rank) {
      // An infinite input spoils the gradients of weights alone. A loss that is NaN spoils all.
      at::Tensor input = toy::data({5, 8}, rank);
      if (rank == 0) input[2][3] = INFINITY;
      const at::Tensor loss = call(model, input).sum() * (rank == 0 ? 1 : NAN);
      const std::string message = error_of(loss);
      EXPECT_NE(message.find(fmt::format("rank {}, step 1", rank)), std::string::npos) << name << ": " << message;
      EXPECT_NE(message.find("the gradient of layer"), std::string::npos) << name << ": " << message;
      sharded.zero_gradients();
    });
    for (const auto& [parameter, gradient] : wanted) EXPECT_TRUE(same_bits(got.at(parameter), gradient)) << name << parameter;
  }
}

TEST(DirectGradients, that_are_not_finite_on_one_rank_name_it_wherever_they_were_made) {
  for (const char* name : {"zero2", "zero3", "hsdp"})
    for (const bool in_place : {true, false}) {
      const std::string message = refusal([&] {
        stack_gradients(name, [&](Stack& model, Sharded&, int64_t rank) {
          if (rank != 2) return;
          at::Tensor input = toy::data({5, 8}, rank);
          if (in_place) input[2][3] = INFINITY;
          (call(model, input).sum() * (in_place ? 1 : NAN)).backward();
        });
      });
      expect_says(message, {"rank 2, step 1", "the gradient of layer"});
    }
}

// Autocast rounds products and their gradients, and casts weights through the graph. That is left to autograd.
TEST(DirectGradients, under_autocast_are_those_of_plain_autograd) {
  const at::Tensor tokens = tokens_of({3, 2}, 5);
  const auto gradients_of = [&](Uses& model) {
    const kit::Autocast on;
    const at::Tensor y = call(model, tokens % 6);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.to(at::kFloat).square().sum().backward();
  };
  Uses plain(UsesImpl::Sizes{});
  gradients_of(plain);
  alone([&](std::shared_ptr<MeshComm> comms) {
    Uses model(UsesImpl::Sizes{});
    Sharded sharded = fully_shard(model.ptr(), comms, options_of("zero3"));
    gradients_of(model);
    for (const auto& [name, gradient] : sharded.gather_gradients())
      EXPECT_TRUE(same_bits(gradient, plain->named_parameters()[name].grad())) << name;
  });
}
