// The loss whose logits never exist as a whole, beside LibTorch's linear and cross_entropy_loss in its dtype and in float64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "properties/doubles/fake_device.h"
#include "properties/kit/autocast.h"
#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_pieces.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/comm/traced.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using kit::same_bits;
using pieces::piece_of;

namespace {

// Autograd makes its queues with the first backward, one for each device that there is.
const bool installed = (fake_device::install(), true);

// What a loss is taken of. The leaves among its tensors get gradients.
struct Inputs {
  at::Tensor hidden, weight, bias, targets;

  Inputs in(at::ScalarType dtype) const {
    const auto cast = [&](const at::Tensor& x) {
      return x.defined() ? x.detach().to(dtype, false, /*copy=*/true).set_requires_grad(x.requires_grad()) : x;
    };
    return {cast(hidden), cast(weight), cast(bias), targets};
  }
};

struct Result {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;  // of hidden, weight and bias
};

using Loss = std::function<at::Tensor(const Inputs&)>;

Result result_of(const Loss& loss_of, const Inputs& inputs, double upstream = 1) {
  const at::Tensor loss = loss_of(inputs);
  if (loss.requires_grad()) (loss * upstream).backward();
  const auto gradient = [](const at::Tensor& x) { return x.defined() ? x.grad() : at::Tensor(); };
  return {loss.detach(), {gradient(inputs.hidden), gradient(inputs.weight), gradient(inputs.bias)}};
}

at::Tensor plain_loss(const Inputs& inputs, const CrossEntropyOptions& options) {
  const int64_t entries = inputs.weight.size(0), vocab = options.vocab > 0 ? options.vocab : entries;
  const auto bias = inputs.bias.defined() ? std::optional(inputs.bias) : std::nullopt;
  const at::Tensor logits = at::linear(inputs.hidden, inputs.weight, bias).reshape({inputs.targets.numel(), entries});
  return at::cross_entropy_loss(logits.narrow(1, 0, vocab), inputs.targets.reshape({-1}), {},
                                options.mean ? at::Reduction::Mean : at::Reduction::Sum, options.ignore_index,
                                options.label_smoothing);
}

at::Tensor fused_loss(const Inputs& inputs, const CrossEntropyOptions& options, int64_t bytes = kLogitsBytesMax) {
  return fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.bias, inputs.targets, options, bytes);
}

// The largest distance from the truth, of which NaNs are no part: where one is NaN, the other must be.
double distance(const at::Tensor& x, const at::Tensor& truth) {
  if (!at::equal(x.isnan(), truth.isnan())) return INFINITY;
  return x.numel() > 0 ? (x.to(at::kDouble) - truth).nan_to_num().abs().max().item<double>() : 0;
}

Inputs random_inputs(std::vector<int64_t> leading, int64_t in, int64_t entries, bool bias = false) {
  std::vector<int64_t> sizes = leading;
  sizes.push_back(in);
  Inputs inputs{at::randn(sizes, at::kDouble), at::randn({entries, in}, at::kDouble),
                bias ? at::randn({entries}, at::kDouble) : at::Tensor(), at::randint(entries, leading, at::kLong)};
  inputs.hidden.set_requires_grad(true);
  inputs.weight.set_requires_grad(true);
  if (bias) inputs.bias.set_requires_grad(true);
  return inputs;
}

}  // namespace

RC_GTEST_PROP(FusedLoss, is_as_exact_as_a_linear_layer_and_cross_entropy, ()) {
  at::manual_seed(*rc::gen::arbitrary<uint32_t>());
  const auto dtype = *rc::gen::element(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
  std::vector<int64_t> leading;
  for (int64_t dims = *rc::gen::inRange<int64_t>(0, 3); dims > 0; --dims) leading.push_back(*rc::gen::inRange<int64_t>(0, 9));
  const int64_t in = *rc::gen::inRange<int64_t>(1, 40), entries = *rc::gen::inRange<int64_t>(1, 60);
  const int64_t vocab = *rc::gen::inRange<int64_t>(1, entries + 1);
  const CrossEntropyOptions options{.mean = *rc::gen::arbitrary<bool>(),
                                    .label_smoothing = *rc::gen::element(0.0, 0.1, 1.0),
                                    .ignore_index = *rc::gen::element<int64_t>(-100, 0),
                                    .vocab = vocab < entries ? vocab : 0};
  Inputs inputs = random_inputs(leading, in, vocab, *rc::gen::arbitrary<bool>());
  inputs.weight = at::randn({entries, in}, at::kDouble);
  if (inputs.bias.defined()) inputs.bias = at::randn({entries}, at::kDouble);
  const double ignored = *rc::gen::element(0.0, 0.3, 1.0);
  inputs.targets = at::where(at::rand(leading, at::kDouble) < ignored, options.ignore_index, inputs.targets);
  inputs.hidden = inputs.hidden.detach() * *rc::gen::element(0.1, 3.0);
  for (at::Tensor* each : {&inputs.hidden, &inputs.weight, &inputs.bias})
    if (each->defined()) each->set_requires_grad(*rc::gen::weightedElement<bool>({{3, true}, {1, false}}));
  const double upstream = *rc::gen::element(1.0, 0.3, -700.0);
  const int64_t bytes = *rc::gen::inRange<int64_t>(1, 8 * entries * 90);

  const Inputs rounded = inputs.in(dtype);  // the same numbers for all
  const Loss plain = [&](const Inputs& given) { return plain_loss(given, options); };
  const Result truth = result_of(plain, rounded.in(at::kDouble), upstream);
  const Result theirs = result_of(plain, rounded.in(dtype), upstream);
  const Result ours = result_of([&](const Inputs& given) { return fused_loss(given, options, bytes); }, rounded, upstream);
  RC_ASSERT(ours.loss.scalar_type() == (dtype == at::kDouble ? at::kDouble : at::kFloat));

  // Logits of float32 and wider come of sums in other orders. Those of narrower dtypes are rounded as theirs.
  const double eps = dtype == at::kDouble ? 0x1p-52 : dtype == at::kFloat ? 0x1p-23 : dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
  const at::Tensor x = rounded.hidden.detach().to(at::kDouble), w = rounded.weight.detach().to(at::kDouble);
  const double hidden = x.numel() > 0 ? x.abs().max().item<double>() : 0, weight = w.abs().max().item<double>();
  const double logit = hidden * weight * static_cast<double>(in) + 10;
  const double tokens = static_cast<double>(std::max<int64_t>(x.numel() / in, 1));
  const double counted = (inputs.targets != options.ignore_index).sum().item<double>();
  const double per_token = std::abs(upstream) / (options.mean ? std::max(counted, 1.0) : 1);
  const double room = options.mean ? 1 : tokens, moved = dtype == at::kDouble || dtype == at::kFloat ? logit : 1;
  RC_ASSERT(distance(ours.loss, truth.loss) <= 2 * distance(theirs.loss, truth.loss) + eps * logit * room);
  const std::vector<double> sizes{2 * weight, tokens * hidden, tokens};
  for (size_t i = 0; i < 3; ++i) {
    RC_ASSERT(ours.gradients[i].defined() == truth.gradients[i].defined());
    if (!truth.gradients[i].defined()) continue;
    RC_ASSERT(ours.gradients[i].scalar_type() == dtype);
    RC_ASSERT(ours.gradients[i].sizes() == truth.gradients[i].sizes());
    RC_ASSERT(distance(ours.gradients[i], truth.gradients[i]) <=
              2 * distance(theirs.gradients[i], truth.gradients[i]) + eps * sizes[i] * per_token * moved);
  }
}

// Sums of many tokens: float16 does not hold that over all of them of what each adds to a row of the weight's gradient.
TEST(FusedLoss, in_low_precision_has_gradients_as_exact_as_plain_ones_in_few_chunks_and_many) {
  at::manual_seed(3);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    for (const int64_t bytes : {4 * 5 * 6, 1 << 20}) {
      Inputs inputs = random_inputs({4096}, 8, 5, true);
      inputs.hidden = (inputs.hidden.detach().abs() + 40).set_requires_grad(true);
      inputs.weight = (inputs.weight.detach() * 0.01).set_requires_grad(true);
      inputs.targets.zero_();
      const Inputs rounded = inputs.in(dtype);
      const Loss plain = [](const Inputs& given) { return plain_loss(given, {}); };
      const Result truth = result_of(plain, rounded.in(at::kDouble)), theirs = result_of(plain, rounded.in(dtype));
      const Result ours = result_of([&](const Inputs& given) { return fused_loss(given, {}, bytes); }, rounded);
      const double eps = dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
      for (size_t i = 0; i < 3; ++i)
        EXPECT_LE(distance(ours.gradients[i], truth.gradients[i]),
                  distance(theirs.gradients[i], truth.gradients[i]) + eps * truth.gradients[i].abs().max().item<double>())
            << dtype << " " << i << " " << bytes;
      EXPECT_LE(distance(ours.loss, truth.loss), truth.loss.item<double>() * eps / 2);
    }
}

TEST(FusedLoss, of_hidden_states_of_any_strides_is_that_of_contiguous_ones) {
  at::manual_seed(4);
  Inputs inputs = random_inputs({6, 5}, 7, 11);
  const Result wanted = result_of([](const Inputs& given) { return fused_loss(given, {}, 300); }, inputs.in(at::kDouble));
  Inputs turned = inputs.in(at::kDouble);
  const at::Tensor leaf = inputs.hidden.detach().transpose(0, 1).contiguous().set_requires_grad(true);
  turned.hidden = leaf.transpose(0, 1);
  fused_loss(turned, {}, 300).backward();
  EXPECT_LT(distance(leaf.grad().transpose(0, 1), wanted.gradients[0]), 1e-15);
  EXPECT_LT(distance(turned.weight.grad(), wanted.gradients[1]), 1e-14);
}

TEST(FusedLoss, has_no_more_logits_at_a_time_than_was_asked_for) {
  at::manual_seed(5);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const int64_t tokens = 256, in = 8, entries = 512, chunk = int64_t{64} << 10;
    const Inputs host = random_inputs({tokens}, in, entries).in(dtype);
    const auto grown = [&](const Loss& loss_of) {
      Inputs own{host.hidden.detach().to(fake_device::device()).set_requires_grad(true),
                 host.weight.detach().to(fake_device::device()).set_requires_grad(true), {},
                 host.targets.to(fake_device::device())};
      fake_device::synchronize();
      const int64_t before = fake_device::most_bytes_in_use(true);
      fake_device::most_bytes_in_use(true);
      result_of(loss_of, own);
      fake_device::synchronize();
      return fake_device::most_bytes_in_use(true) - before;
    };
    const int64_t whole = tokens * entries * static_cast<int64_t>(c10::elementSize(dtype));
    EXPECT_GE(grown([](const Inputs& given) { return plain_loss(given, {}); }), 2 * whole) << dtype;
    const int64_t fused = grown([&](const Inputs& given) { return fused_loss(given, {}, chunk); });
    // The gradient of the weight as float32 and in its dtype, that of hidden, a product, and numbers for each token.
    const int64_t kept = 3 * entries * in * 4 + 2 * tokens * in * 4 + tokens * 64;
    EXPECT_LE(fused, chunk + kept) << dtype;
    EXPECT_LT(chunk + kept, whole) << dtype;
  }
}

TEST(FusedLoss, lets_no_host_wait_for_a_device) {
  at::manual_seed(6);
  Inputs host = random_inputs({40}, 6, 30, true).in(at::kFloat);
  host.targets[3] = -100;
  const auto on = [](const at::Tensor& x) {
    return x.detach().to(fake_device::device()).set_requires_grad(x.requires_grad());
  };
  Inputs own{on(host.hidden), on(host.weight), on(host.bias), on(host.targets)};
  const auto before = fake_device::host_waits();
  const at::Tensor loss = fused_loss(own, {.label_smoothing = 0.1}, 4 * 30 * 7);
  loss.backward();
  EXPECT_EQ(fake_device::host_waits(), before);
  const Result wanted = result_of([](const Inputs& given) { return fused_loss(given, {.label_smoothing = 0.1}); }, host);
  EXPECT_LT(distance(loss.detach().cpu(), wanted.loss.to(at::kDouble)), 1e-5);
  EXPECT_LT(distance(own.weight.grad().cpu(), wanted.gradients[1].to(at::kDouble)), 1e-5);
}

TEST(FusedLoss, of_a_target_outside_of_the_vocabulary_is_an_error_or_nan_where_the_host_cannot_look) {
  at::manual_seed(7);
  for (const int64_t wrong : {int64_t{30}, int64_t{-1}}) {
    Inputs host = random_inputs({4, 10}, 6, 30).in(at::kFloat);
    host.targets[2][3] = wrong;
    expect_error([&] { fused_loss(host, {}); },
                 {"[cross_entropy]", fmt::format("target {} of token 23", wrong), "vocabulary of 30", "ignored -100"});
    const auto on = [](const at::Tensor& x) { return x.detach().to(fake_device::device()); };
    Inputs own{on(host.hidden).set_requires_grad(true), on(host.weight).set_requires_grad(true), {}, on(host.targets)};
    const at::Tensor loss = fused_loss(own, {}, 4 * 30 * 7);
    loss.backward();
    EXPECT_TRUE(loss.isnan().cpu().item<bool>());
    EXPECT_TRUE(own.weight.grad().isnan().all().cpu().item<bool>());
  }
}

TEST(FusedLoss, takes_inputs_that_fit_and_refuses_others) {
  const at::Tensor x = at::ones({2, 3}), w = at::ones({5, 3}), t = at::zeros({2}, at::kLong);
  EXPECT_NO_THROW(fused_linear_cross_entropy(x, w, {}, t));
  const auto refused = [&](const Inputs& given, std::initializer_list<std::string> says,
                           const CrossEntropyOptions& options = {}, int64_t bytes = 100) {
    expect_error([&] { fused_loss(given, options, bytes); }, says);
  };
  refused({x, at::ones({5, 4}), {}, t}, {"[fused_linear_cross_entropy]", "[2, 3], [5, 4]"});
  refused({x, w, {}, at::zeros({3}, at::kLong)}, {"targets [..], got [2, 3], [5, 3], [] and [3]"});
  refused({x, w, at::ones({4}), t}, {"a bias [entries] or none", "[4]"});
  refused({x, w.to(at::kBFloat16), {}, t}, {"hidden is float32, weight bfloat16", "one floating dtype"});
  refused({x, w, at::ones({5}, at::kDouble), t}, {"bias float64"});
  refused({x, w, {}, t.to(at::kInt)}, {"targets must be int64, got int32"});
  refused({x, w, {}, t}, {"vocab 6 of 5 entries"}, {.vocab = 6});
  refused({x, w, {}, t}, {"label_smoothing 1.5"}, {.label_smoothing = 1.5});
  refused({x, w, {}, t}, {"logits_bytes_max must be positive, got 0"}, {}, 0);
}

TEST(FusedLoss, is_differentiated_once_and_as_often_as_the_graph_is_kept) {
  at::manual_seed(8);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Inputs inputs = random_inputs({9}, 4, 6, true).in(dtype), again = inputs.in(dtype);
    const at::Tensor loss = fused_loss(inputs, {}, 60);
    loss.backward({}, /*retain_graph=*/true);
    std::vector<at::Tensor> first;
    for (const at::Tensor& each : {inputs.hidden, inputs.weight, inputs.bias}) {
      first.push_back(each.grad().clone());
      each.mutable_grad().reset();
    }
    loss.backward();
    size_t i = 0;
    for (const at::Tensor& each : {inputs.hidden, inputs.weight, inputs.bias}) {
      EXPECT_TRUE(same_bits(each.grad(), first[i++]));
    }
    EXPECT_THROW(loss.backward(), c10::Error);
    const at::Tensor other = fused_loss(again, {}, 60);
    expect_error([&] { torch::autograd::grad({other}, {again.weight}, {}, true, /*create_graph=*/true); },
                 {"[fused_linear_cross_entropy]", "create_graph", "no second gradient"});
  }
}

TEST(FusedLoss, of_chosen_inputs_gives_their_gradients_alone) {
  at::manual_seed(9);
  const Inputs inputs = random_inputs({9}, 4, 6, true).in(at::kDouble);
  const Result wanted = result_of([](const Inputs& given) { return plain_loss(given, {}); }, inputs.in(at::kDouble));
  const auto of = [&](const at::Tensor& chosen) { return torch::autograd::grad({fused_loss(inputs, {}, 60)}, {chosen}).at(0); };
  EXPECT_LT(distance(of(inputs.hidden), wanted.gradients[0]), 1e-14);
  EXPECT_LT(distance(of(inputs.weight), wanted.gradients[1]), 1e-14);
  EXPECT_LT(distance(of(inputs.bias), wanted.gradients[2]), 1e-14);
}

TEST(FusedLoss, under_autocast_computes_in_its_dtype_and_gives_gradients_in_that_of_the_inputs) {
  at::manual_seed(10);
  const Inputs inputs = random_inputs({33}, 12, 20, true).in(at::kFloat);
  const auto under = [](const Loss& loss_of) {
    return [loss_of](const Inputs& given) {
      const kit::Autocast on;
      return loss_of(given);
    };
  };
  const Result truth = result_of([](const Inputs& given) { return plain_loss(given, {}); }, inputs.in(at::kDouble));
  const Result theirs = result_of(under([](const Inputs& given) { return plain_loss(given, {}); }), inputs.in(at::kFloat));
  const Result ours = result_of(under([](const Inputs& given) { return fused_loss(given, {}, 500); }), inputs.in(at::kFloat));
  EXPECT_EQ(ours.loss.scalar_type(), at::kFloat);
  EXPECT_GT(distance(ours.loss, truth.loss), 1e-5) << "products are in bfloat16";
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(ours.gradients[i].scalar_type(), at::kFloat);
    EXPECT_LE(distance(ours.gradients[i], truth.gradients[i]), 2 * distance(theirs.gradients[i], truth.gradients[i]) + 1e-4);
  }
}

TEST(FusedLoss, of_a_vocabulary_that_is_cut_is_that_of_the_whole_one) {
  at::manual_seed(11);
  for (const int64_t n : {1, 2, 4, 5})
    for (const double smoothing : {0.0, 0.2})
      for (const int64_t vocab : {13, 10}) {
        Inputs inputs = random_inputs({3, 4}, 6, 13, true).in(at::kDouble);
        inputs.targets = inputs.targets.remainder(10);
        inputs.targets[1][2] = -100;
        const CrossEntropyOptions options{.label_smoothing = smoothing, .vocab = vocab};
        const Loss plain = [&](const Inputs& given) { return plain_loss(given, options); };
        const Result wanted = result_of(plain, inputs.in(at::kDouble));
        auto trace = std::make_shared<Trace>();
        const int64_t tokens = 5, most = piece({}, 13, n, 0).size();
        run_threads(n, [&](std::shared_ptr<Comm> comm) {
          const std::shared_ptr<Comm> group = traced(comm, trace);
          const auto own = [&](const at::Tensor& whole) {
            return piece_of(whole.detach(), 0, n, comm->rank()).clone().set_requires_grad(true);
          };
          const Inputs part{inputs.in(at::kDouble).hidden, own(inputs.weight), own(inputs.bias), inputs.targets};
          const at::Tensor loss =
              fused_linear_cross_entropy(part.hidden, part.weight, part.bias, part.targets, options,
                                         tokens * most * 8, VocabSplit{13, group.get()});
          loss.backward();
          EXPECT_NEAR(loss.item<double>(), wanted.loss.item<double>(), 1e-12);
          EXPECT_LT(distance(part.hidden.grad(), wanted.gradients[0]), 1e-13);
          EXPECT_LT(distance(part.weight.grad(), piece_of(wanted.gradients[1], 0, n, comm->rank())), 1e-13);
          EXPECT_LT(distance(part.bias.grad(), piece_of(wanted.gradients[2], 0, n, comm->rank())), 1e-13);
        });
        // Two for each of three chunks, and one for the gradient of hidden.
        for (int64_t rank = 0; rank < n; ++rank) EXPECT_EQ(std::ssize(trace->of_rank(rank)), n > 1 ? 7 : 0) << n;
      }
  const Inputs whole = random_inputs({3}, 6, 13).in(at::kDouble);
  expect_error(
      [&] {
        run_threads(2, [&](std::shared_ptr<Comm> comm) {
          fused_linear_cross_entropy(whole.hidden, whole.weight, {}, whole.targets, {}, 100, VocabSplit{13, comm.get()});
        });
      },
      {"[fused_linear_cross_entropy]", "rows of a weight of 13 entries, got 13", "its own rows"});
}

namespace {

// A model that gives its loss. Its head is a unit, or the embedding's weight.
struct ModelOfLossImpl : torch::nn::Module {
  ModelOfLossImpl(bool tied, bool is_fused, at::ScalarType dtype) : fused(is_fused) {
    embed = register_module("embed", Embedding(11, 6));
    body = register_module("body", Linear(6, 6));
    if (tied) {
      place = register_module("head", std::make_shared<torch::nn::Module>("head"));
      place->register_parameter("weight", embed->weight);
    } else {
      head = register_module("head", Linear(torch::nn::LinearOptions(6, 11).bias(false)));
    }
    int64_t salt = 0;
    for (const at::Tensor& parameter : parameters()) parameter.data().copy_(toy::data(parameter.sizes().vec(), ++salt));
    to(dtype);
  }
  at::Tensor forward(at::Tensor tokens, at::Tensor targets) {
    const at::Tensor hidden = call(body, call(embed, tokens)).tanh();
    const auto loss = [this, targets](const at::Tensor& x) {  // perhaps once more, in the backward
      const Inputs inputs{x, head ? head->weight : embed->weight, {}, targets};
      return fused ? fused_loss(inputs, {}, 8 * 11 * 4) : plain_loss(inputs, {});
    };
    return call_as(head ? static_cast<torch::nn::Module&>(*head) : *place, loss, hidden);
  }
  bool fused;
  Embedding embed{nullptr};
  Linear body{nullptr}, head{nullptr};
  std::shared_ptr<torch::nn::Module> place;
};
TORCH_MODULE(ModelOfLoss);

std::map<std::string, at::Tensor> trained(bool tied, bool fused, const ShardOptions& options) {
  std::map<std::string, at::Tensor> values;
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    ModelOfLoss model(tied, fused, at::kDouble);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})), options);
    if (fused && !tied && !options.recompute) sharded.unit("head").set_unshard_in_backward(false);
    Optimizer optimizer = sgd(sharded, {.lr = 0.1});
    for (int64_t step = 0; step < 3; ++step) {
      for (int64_t round = 0; round < 2; ++round) {
        sharded.set_last_microbatch(round == 1);
        const at::Tensor tokens = toy::data({3, 5}, comm->rank() + 10 * round + 100 * step).mul(1000).abs().to(at::kLong) % 11;
        (call(model, tokens, (tokens * 3 + 1) % 11) * 0.7).backward();
      }
      optimizer.step();
    }
    const auto whole = sharded.gather_parameters();
    if (comm->rank() == 0)
      for (const auto& [name, value] : whole) values[name] = value.clone();
  });
  return values;
}

}  // namespace

TEST(FusedLoss, of_a_head_that_is_a_unit_or_shared_trains_as_plain) {
  for (const bool tied : {false, true})
    for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
      for (const bool recompute : {false, true}) {
        ShardOptions options = toy::options(name);
        options.units = tied ? by_name("body") : by_type<LinearImpl>();
        if (recompute) options.recompute = options.units;
        const auto wanted = trained(tied, false, options), got = trained(tied, true, options);
        ASSERT_EQ(wanted.size(), 4U) << "a tied one has both names";
        for (const auto& [parameter, value] : wanted)
          EXPECT_LT(distance(got.at(parameter), value), 1e-13) << name << " " << parameter << " tied " << tied;
      }
}
