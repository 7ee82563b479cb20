// Gradients of weights that are made when the next unit's gather has started: the same bits, within the memory that was asked
// for, and nothing left over after an error.
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>
#include <set>

#include "harness/case/generate.h"
#include "harness/case/network.h"
#include "properties/doubles/fake_device_env.h"
#include "properties/doubles/fake_ranks.h"
#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/held_cases.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/comm/decorated.h"
#include "shardproof/nn/gradient_place.h"

using namespace shardproof;
using kit::same_bits;

namespace {

c10::impl::VirtualGuardImpl streams() {
  return c10::impl::VirtualGuardImpl(fake_device::device().type());
}

void order(c10::Stream first, c10::Stream second) {
  c10::Event event(first.device_type());
  event.record(first);
  event.block(second);
}

constexpr int64_t kUnlimited = int64_t{1} << 40;

struct Uses {
  int64_t of_b = 1;          // one after the other
  bool by_autograd = false;  // also in a product that the library does not know
  bool of_weights = false;   // a product of two weights
};

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t width, Uses uses, int64_t salt) : uses_(uses) {
    const auto matrix = [&](const char* name, int64_t each) {
      return register_parameter(name, toy::data({width, width}, 10 * salt + each));
    };
    a = matrix("a", 1), b = matrix("b", 2);
    if (uses.of_weights) c = matrix("c", 3);
    bias = register_parameter("bias", toy::data({width}, 10 * salt + 4));
  }
  at::Tensor forward(at::Tensor x) {
    at::Tensor y = direct::linear(x, a, bias).tanh();
    for (int64_t i = 0; i < uses_.of_b; ++i) {
      const at::Tensor given = y * 2;  // which only the product saves
      if (given.requires_grad() && after_b)
        given.register_hook([this, input = given.detach()](const at::Tensor&) { after_b(input); });
      y = times_b(given).sin();
    }
    if (uses_.by_autograd) y = y + at::linear(x, b) + at::linear(x, b).cos();
    if (uses_.of_weights) y = y + direct::linear(a, c, {}).sum(0);
    return x + y;
  }
  at::Tensor a, b, c, bias;
  std::function<void(at::Tensor)> after_b;  // when a backward has passed a product with b, whose input it gets
  std::optional<c10::Stream> stream_of_b;

 private:
  at::Tensor times_b(const at::Tensor& given) {
    if (!stream_of_b) return direct::linear(given, b, {});
    const c10::Stream here = streams().getStream(fake_device::device());
    order(here, *stream_of_b);
    at::Tensor product;
    {
      const c10::StreamGuard guard(*stream_of_b);
      product = direct::linear(given, b, {});
      given.record_stream(*stream_of_b);  // as LibTorch asks
    }
    order(*stream_of_b, here);
    product.record_stream(here);
    return product;
  }
  Uses uses_;
};
TORCH_MODULE(Block);

class StackImpl : public torch::nn::Module {
 public:
  struct Sizes {
    int64_t layers = 3, width = 5, rows = 7;
    Uses uses = {};
    int64_t calls = 1;  // of every block
    bool tied = false;
  };
  explicit StackImpl(Sizes sizes) : sizes_(sizes) {
    table = register_parameter("table", toy::data({sizes.rows, sizes.width}, 1));
    for (int64_t i = 0; i < sizes.layers; ++i)
      blocks.push_back(register_module(std::to_string(i), Block(sizes.width, sizes.uses, i + 2)));
  }
  at::Tensor forward(at::Tensor tokens) {
    at::Tensor x = direct::embedding(table, tokens);
    for (const Block& block : blocks)
      for (int64_t i = 0; i < sizes_.calls; ++i) x = call(block, x);
    return sizes_.tied ? direct::linear(x, table, {}) : x;
  }
  at::Tensor table;
  std::vector<Block> blocks;

 private:
  Sizes sizes_;
};
TORCH_MODULE(Stack);

using Body = std::function<at::Tensor(at::Tensor)>;

// A program's own recomputation, which the library does not know of: each use of a weight is in a graph of its own.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::Tensor x, const Body* body) {
    ctx->save_for_backward({x});
    ctx->saved_data["body"] = reinterpret_cast<int64_t>(body);
    return (*body)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list dy) {
    const auto* body = reinterpret_cast<const Body*>(ctx->saved_data["body"].toInt());
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode with_graph(true);
    torch::autograd::backward({(*body)(x)}, {dy[0]});
    return {x.grad(), {}};
  }
};

// Its weight is used three times before a block, once by autograd's own product.
class RecomputingImpl : public torch::nn::Module {
 public:
  RecomputingImpl() {
    weight = register_parameter("weight", toy::data({5, 5}, 1));
    block = register_module("block", Block(5, Uses{}, 2));
  }
  at::Tensor forward(at::Tensor x) {
    for (const Body* body : {&own_, &autograds_, &own_}) x = Recomputed::apply(x, body);
    return call(block, x);
  }
  at::Tensor weight;
  Block block{nullptr};

 private:
  const Body own_ = [this](at::Tensor x) { return direct::linear(x, weight, {}).tanh(); };
  const Body autograds_ = [this](at::Tensor x) { return at::linear(x, weight).tanh(); };
};
TORCH_MODULE(Recomputing);

at::Tensor tokens_of(int64_t rows, int64_t salt) {
  return toy::data({3, 4}, salt).mul(1000).abs().to(at::kLong) % rows;
}

ShardOptions options_of(const char* name, int64_t bytes_max) {
  ShardOptions options = toy::options(name);
  options.units = by_type<BlockImpl>();
  options.delayed_gradient_bytes_max = bytes_max;
  return options;
}

using Gradients = std::map<std::string, at::Tensor>;

void expect_same(const Gradients& one, const Gradients& other) {
  ASSERT_EQ(one.size(), other.size());
  for (const auto& [name, value] : one) EXPECT_TRUE(same_bits(value, other.at(name))) << name;
}

// What this thread does: g and r where a gather and a reduce_scatter start, x and w where the gradients of an input and of a
// weight are made.
thread_local std::string done;

class Noted final : public DecoratedComm {
 public:
  explicit Noted(std::shared_ptr<Comm> inner) : DecoratedComm(std::move(inner)) {}

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { return std::make_shared<Noted>(group); }
  Work start(Call call) override {
    if (call.op == Op::all_gather) done += 'g';
    if (call.op == Op::reduce_scatter) done += 'r';
    return inner().issue(std::move(call));
  }
};

class NotedProducts {
 public:
  NotedProducts() {
    done.clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& fn) {
      const auto op = fn.operator_name();
      if (op && op->name == "aten::mm") done += op->overload_name == "out" ? 'w' : 'x';
      return std::unique_ptr<at::ObserverContext>();
    }));
  }
  ~NotedProducts() { at::removeCallback(handle_); }

 private:
  at::CallbackHandle handle_;
};

// Units of one matrix each, and nothing in the root.
constexpr int64_t kUnits = 4, kWidth = 6, kRows = 3, kProductBytes = 2 * kRows * kWidth * 4;

void with_equal_units(const ShardOptions& options, const std::function<void(Mlp&, Sharded&, const at::Tensor& loss)>& body) {
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    Mlp model(MlpOptions{.widths = std::vector<int64_t>(kUnits + 1, kWidth), .bias = false});
    initialize_parameters(*model, 3);
    const auto comms = std::make_shared<MeshComm>(std::make_shared<Noted>(comm), Mesh({{"dp_shard", 2}}));
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    body(model, sharded, call(model, toy::data({kRows, kWidth}, comm->rank())).square().sum());
  });
}

ShardOptions equal_units(int64_t bytes_max) {
  ShardOptions options = toy::options("zero3");
  options.delayed_gradient_bytes_max = bytes_max;
  return options;
}

struct Subject {
  StackImpl::Sizes sizes = {};
  ShardOptions options = options_of("zero3", 0);
  int64_t ranks = 2, microbatches = 2;
  bool keeps_losses = false;  // whose graphs live on
  bool syncs_at_last = false;
};

Gradients train(const Subject& subject, int64_t delayed_bytes) {
  Gradients got;
  toy::on_ranks(subject.ranks, [&](std::shared_ptr<MeshComm> comms) {
    const int64_t rank = comms->rank();
    Stack model(subject.sizes);
    ShardOptions own = subject.options;
    own.delayed_gradient_bytes_max = delayed_bytes;
    Sharded sharded = fully_shard(model.ptr(), comms, own);
    std::vector<at::Tensor> losses;
    for (int64_t m = 0; m < subject.microbatches; ++m) {
      const bool last = m + 1 == subject.microbatches;
      sharded.set_last_microbatch(last);
      sharded.set_gradient_sync(last || !subject.syncs_at_last);
      const at::Tensor loss = call(model, tokens_of(7, 10 * rank + m)).square().sum();
      loss.backward();
      if (subject.keeps_losses) losses.push_back(loss);
    }
    Gradients all = sharded.gather_gradients();
    if (rank == 0) got = std::move(all);
  });
  return got;
}

// The first parameter whose gradient is another one when it is delayed; "" where there is none.
std::string different_gradient(const Subject& subject, int64_t bytes_max) {
  const Gradients wanted = train(subject, 0), got = train(subject, bytes_max);
  if (wanted.size() != got.size()) return "there are others";
  for (const auto& [parameter, gradient] : wanted)
    if (!same_bits(got.at(parameter), gradient)) return parameter;
  return "";
}

}  // namespace

RC_GTEST_PROP(DelayedGradients, have_the_bits_of_those_that_are_made_at_once, ()) {
  Subject subject;
  subject.sizes = {.layers = *rc::gen::inRange<int64_t>(1, 5),
                   .width = *rc::gen::inRange<int64_t>(1, 12),
                   .uses = {.of_b = *rc::gen::element<int64_t>(1, 1, 1, 2, 3),
                            .by_autograd = *rc::gen::element(false, false, true),
                            .of_weights = *rc::gen::element(false, false, true)},
                   .calls = *rc::gen::element<int64_t>(1, 1, 2),
                   .tied = *rc::gen::arbitrary<bool>()};
  ShardOptions& options = subject.options = options_of(*rc::gen::element("ddp", "zero1", "zero2", "zero3"), 0);
  if (*rc::gen::element(false, false, false, true)) options.units = {};
  if (*rc::gen::element(false, false, true)) options.recompute = by_type<BlockImpl>();
  options.prefetch_backward = *rc::gen::inRange<int64_t>(0, 3);
  options.bucket_count = *rc::gen::inRange<int64_t>(0, 3);
  subject.ranks = *rc::gen::inRange<int64_t>(1, 4), subject.microbatches = *rc::gen::inRange<int64_t>(1, 4);
  const int64_t bytes_max = *rc::gen::element<int64_t>(1, 500, kUnlimited, kUnlimited);
  subject.keeps_losses = *rc::gen::element(false, false, true);
  subject.syncs_at_last = *rc::gen::element(false, false, true);
  if (const std::string parameter = different_gradient(subject, bytes_max); !parameter.empty()) RC_FAIL(parameter);
}

// Drawn subjects have such products too, but not in every run in enough ways.
TEST(DelayedGradients, have_the_bits_where_both_factors_are_weights) {
  for (const int64_t prefetch : {0, 1, 2})
    for (const bool keeps_losses : {false, true}) {
      Subject subject;
      subject.sizes.uses.of_weights = true;
      subject.options.prefetch_backward = prefetch;
      subject.keeps_losses = keeps_losses;
      EXPECT_EQ(different_gradient(subject, kUnlimited), "") << prefetch << " " << keeps_losses;
    }
}

TEST(DelayedGradients, are_made_and_reduced_when_the_next_gather_has_started) {
  for (const auto& [bytes_max, order] :
       {std::pair{int64_t{0}, "gxwr gxwr gxwr gwr"}, {kUnlimited, "gx gwrx gwrx gwrwr"}, {int64_t{1}, "gxw grxw grxw grwr"}})
    with_equal_units(equal_units(bytes_max), [&](Mlp&, Sharded&, const at::Tensor& loss) {
      const NotedProducts noted;
      loss.backward();
      std::string wanted = order;
      std::erase(wanted, ' ');
      EXPECT_EQ(done, wanted) << bytes_max;
    });
}

TEST(DelayedGradients, keep_at_most_as_many_bytes_as_they_may_and_are_counted) {
  const auto expect_peak = [](bool are_units, int64_t bytes_max, int64_t products) {
    ShardOptions options = equal_units(bytes_max);
    if (!are_units) options.units = {};
    with_equal_units(options, [&](Mlp&, Sharded& sharded, const at::Tensor& loss) {
      sharded.reset_peak_memory();
      loss.backward();
      EXPECT_EQ(sharded.memory().peak(MemoryKind::activation), products * kProductBytes) << are_units << " " << bytes_max;
      EXPECT_EQ(sharded.memory().now(MemoryKind::activation), 0) << are_units << " " << bytes_max;
    });
  };
  expect_peak(true, kUnlimited, 1);  // each is made before that of the next unit is kept
  expect_peak(true, kProductBytes, 1);
  expect_peak(true, kProductBytes - 1, 0);
  expect_peak(false, kUnlimited, kUnits);
  expect_peak(false, 3 * kProductBytes + 5, 3);
  expect_peak(false, 0, 0);
}

TEST(DelayedGradients, take_no_further_memory_of_parameters_and_gradients) {
  std::map<MemoryKind, std::set<int64_t>> peaks;
  std::mutex mutex;
  for (const int64_t bytes_max : {int64_t{0}, kUnlimited})
    with_equal_units(equal_units(bytes_max), [&](Mlp&, Sharded& sharded, const at::Tensor& loss) {
      sharded.reset_peak_memory();
      loss.backward();
      const std::lock_guard lock(mutex);
      for (const MemoryKind kind : {MemoryKind::gathered, MemoryKind::gradient, MemoryKind::communication})
        peaks[kind].insert(sharded.memory().peak(kind));
    });
  for (const auto& [kind, bytes] : peaks) EXPECT_EQ(bytes.size(), 1U) << to_string(kind);
}

TEST(DelayedGradients, are_forgotten_after_a_backward_that_ended_in_an_exception) {
  const auto gradients = [](bool fails_first) {
    Gradients got;
    toy::on_ranks(1, [&](std::shared_ptr<MeshComm> comms) {
      Stack model(StackImpl::Sizes{});
      Sharded sharded = fully_shard(model.ptr(), comms, options_of("zero3", kUnlimited));
      if (fails_first) {
        model->blocks[1]->after_b = [&](const at::Tensor&) {
          EXPECT_GT(sharded.memory().now(MemoryKind::activation), 0);
          throw std::runtime_error("on purpose");
        };
        EXPECT_ANY_THROW(call(model, tokens_of(7, 1)).sum().backward());
        model->blocks[1]->after_b = nullptr;
        sharded.zero_gradients();
        EXPECT_EQ(sharded.memory().now(MemoryKind::activation), 0);
      }
      call(model, tokens_of(7, 2)).square().sum().backward();
      got = sharded.gather_gradients();
    });
    return got;
  };
  expect_same(gradients(true), gradients(false));
}

TEST(DelayedGradients, of_what_was_written_in_place_meanwhile_are_an_error_that_names_the_parameter) {
  for (const int64_t bytes_max : {int64_t{0}, kUnlimited})
    toy::on_ranks(1, [&](std::shared_ptr<MeshComm> comms) {
      Stack model(StackImpl::Sizes{});
      Sharded sharded = fully_shard(model.ptr(), comms, options_of("zero3", bytes_max));
      model->blocks[1]->after_b = [](at::Tensor input) { input.add_(1); };
      const at::Tensor loss = call(model, tokens_of(7, 1)).sum();
      if (bytes_max == 0)
        EXPECT_NO_THROW(loss.backward());
      else
        expect_error([&] { loss.backward(); }, {"the gradient of 1.b was delayed", "x.clone()"});
      sharded.zero_gradients();
    });
}

TEST(DelayedGradients, that_hooks_or_a_caller_ask_for_are_made_at_once) {
  toy::on_ranks(1, [](std::shared_ptr<MeshComm> comms) {
    Stack plain(StackImpl::Sizes{}), model(StackImpl::Sizes{});
    call(plain, tokens_of(7, 1)).square().sum().backward();
    Sharded sharded = fully_shard(model.ptr(), comms, options_of("ddp", kUnlimited));
    at::Tensor seen;
    const unsigned hook = model->blocks[2]->b.register_hook([&](const at::Tensor& gradient) { seen = gradient.clone(); });
    const at::Tensor loss = call(model, tokens_of(7, 1)).square().sum();
    sharded.set_last_microbatch(false);
    for (const bool with_graph : {false, true}) {
      const auto own = torch::autograd::grad({loss}, {model->blocks[1]->b}, {}, /*retain_graph=*/true, with_graph);
      EXPECT_TRUE(same_bits(own.at(0).detach(), plain->blocks[1]->b.grad())) << with_graph;
      sharded.zero_gradients();
    }
    sharded.set_last_microbatch(true);
    loss.backward();
    EXPECT_TRUE(same_bits(seen, plain->blocks[2]->b.grad()));
    for (const auto& [name, gradient] : sharded.gather_gradients())
      EXPECT_TRUE(same_bits(gradient, plain->named_parameters()[name].grad())) << name;
    model->blocks[2]->b.remove_hook(hook);
  });
}

TEST(DelayedGradients, that_come_in_parts_are_added_in_the_order_of_the_backward) {
  std::vector<Gradients> got;
  for (const int64_t bytes_max : {int64_t{0}, kUnlimited})
    toy::on_ranks(1, [&](std::shared_ptr<MeshComm> comms) {
      Recomputing model;
      ShardOptions options = options_of("zero3", bytes_max);
      options.recompute = by_type<BlockImpl>();
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      call(model, toy::data({3, 5}, 7).requires_grad_()).square().sum().backward();
      got.push_back(sharded.gather_gradients());
    });
  expect_same(got.at(0), got.at(1));
}

TEST(DelayedGradients, of_random_cases_have_the_golden_runs_bits_on_a_device) {
  for (int64_t i = 0; i < 40; ++i) {
    harness::Case c = harness::generate(20261123, i, {.world_max = 4});
    if (c.options.arithmetic != 0) continue;  // the CPU's
    c.options.set("delayed_gradient_bytes_max", i % 4 == 0 ? "500" : std::to_string(kUnlimited));
    harness::expect_held_or_diverged(c, fake_device::ranks());
  }
}

TEST(DelayedGradients, of_layers_with_a_stream_of_their_own_are_there_when_they_are_summed) {
  fake_device::install();
  std::vector<Gradients> got;
  for (const int64_t bytes_max : {int64_t{0}, kUnlimited}) {
    const auto body = [&](std::shared_ptr<MeshComm> comms) {
      Stack model(StackImpl::Sizes{});
      harness::move_to(*model, fake_device::device());
      for (Block block : model->blocks) block->stream_of_b = streams().getStreamFromGlobalPool(fake_device::device());
      ShardOptions options = options_of("zero3", bytes_max);
      options.alignment_bytes = 512;
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      call(model, tokens_of(7, 1).to(fake_device::device())).square().sum().backward();
      got.emplace_back();
      for (const auto& [name, gradient] : sharded.gather_gradients()) got.back()[name] = gradient.cpu();
    };
    toy::on_ranks(1, body, {.device = fake_device::device()});
  }
  expect_same(got.at(0), got.at(1));
}

TEST(DelayedGradients, of_fewer_than_no_bytes_are_refused) {
  toy::on_ranks(1, [](std::shared_ptr<MeshComm> comms) {
    Stack model(StackImpl::Sizes{});
    expect_error([&] { fully_shard(model.ptr(), comms, options_of("zero3", -1)); }, {"delayed_gradient_bytes_max", "-1"});
  });
}
