// What units keep for their backward: computed again within units, or in the host's memory meanwhile. No bit changes, on the
// CPU or on a device that is as late as it may be, and the memory is that of the formula.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include <thread>

#include "harness/case/generate.h"
#include "harness/case/network.h"
#include "properties/doubles/fake_device_env.h"
#include "properties/doubles/fake_ranks.h"
#include "properties/kit/bits.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/held_cases.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;

namespace {

// With 8 rows of float32 every multiple of 16 features fills whole pieces of 512 bytes, to which memory is rounded up.
constexpr int64_t kRows = 8, kFeature = kRows * 4;

// Saves its input and what the product gives: kFeature bytes for each feature of the two.
class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl(int64_t in, int64_t out) {
    linear_ = register_module("linear", torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  }
  at::Tensor forward(at::Tensor x) { return at::gelu(linear_->forward(x)); }

 private:
  torch::nn::Linear linear_{nullptr};
};
TORCH_MODULE(Layer);

class ChainImpl : public torch::nn::Module {
 public:
  explicit ChainImpl(std::vector<int64_t> widths) : widths(std::move(widths)) {
    for (size_t i = 0; i + 1 < this->widths.size(); ++i)
      layers.push_back(register_module(std::to_string(i), Layer(this->widths[i], this->widths[i + 1])));
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) {
      x = call(layers[i], x);
      after_forward(i);
      if (x.requires_grad()) x.register_hook([this, i](const at::Tensor&) { before_backward(i); });
    }
    return x;
  }
  // What layer i saves.
  int64_t bytes(size_t i) const { return kFeature * (widths[i] + widths[i + 1]); }

  std::vector<int64_t> widths;
  std::vector<Layer> layers;
  std::function<void(size_t)> after_forward = [](size_t) {}, before_backward = [](size_t) {};
};
TORCH_MODULE(Chain);

std::vector<c10::Device> machines() {
  fake_device::install();
  return {at::kCPU, fake_device::device()};
}

ShardOptions chain_options(bool away) {
  ShardOptions options;
  options.units = by_type<LayerImpl>();
  if (away) options.offload_activations = options.units;
  return options;
}

struct Trained {
  Chain chain;
  Sharded sharded;
  at::Tensor input;

  double step(bool keeps_graph = false) {
    const at::Tensor loss = call(chain, input).square().sum();
    loss.backward({}, keeps_graph);
    return loss.item<double>();
  }
};

// On every one of `ranks` ranks.
void on(c10::Device device, int64_t ranks, const std::vector<int64_t>& widths, const ShardOptions& options,
        const std::function<void(Trained&)>& body) {
  ThreadsOptions threads;
  threads.device = device;
  const auto on_rank = [&](std::shared_ptr<Comm> comm) {
    torch::manual_seed(5);
    Chain chain(widths);
    initialize_parameters(*chain, 5);
    harness::move_to(*chain, device);
    Sharded sharded = fully_shard(chain.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", ranks}})), options);
    Trained run{chain, std::move(sharded), toy::data({kRows, widths.front()}, comm->rank()).to(device)};
    body(run);
  };
  run_threads(ranks, on_rank, threads);
}

std::map<std::string, at::Tensor> gradients_of(Sharded& sharded) {
  std::map<std::string, at::Tensor> values = sharded.gather_gradients();
  for (auto& [name, value] : values) value = value.cpu();
  return values;
}

void expect_same(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b,
                 const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, value] : a) EXPECT_TRUE(kit::same_bits(value, b.at(name))) << name << " " << what;
}

}  // namespace

// While a layer computes, forwards or backwards, its neighbour's activations are there too, and no others.
TEST(Activations, the_device_holds_those_of_two_units_and_the_host_those_of_all) {
  for (const c10::Device device : machines())
    for (const int64_t layers : {1, 2, 3, 6}) {
      const std::vector<int64_t> widths(static_cast<size_t>(layers) + 1, 32);
      on(device, 2, widths, chain_options(true), [&](Trained& run) {
        const int64_t one = run.chain->bytes(0);
        for (int step = 0; step < 2; ++step) {
          run.sharded.reset_peak_memory();
          run.step();
          const MemoryUse use = run.sharded.memory();
          EXPECT_EQ(use.peak(MemoryKind::activation), std::min<int64_t>(2, layers) * one) << device << " " << layers;
          EXPECT_EQ(use.host.peak(MemoryKind::activation), layers * one) << device << " " << layers;
          EXPECT_EQ(use.now(MemoryKind::activation) + use.host.now(MemoryKind::activation), 0) << device << " " << layers;
          run.sharded.zero_gradients();
        }
      });
    }
}

TEST(Activations, of_the_unit_before_come_back_while_a_unit_runs_backwards) {
  for (const c10::Device device : machines())
    on(device, 1, {16, 48, 32, 80, 16, 64, 128}, chain_options(true), [&](Trained& run) {
      const auto now = [&] { return run.sharded.memory().now(MemoryKind::activation); };
      const auto peak = [&] { return run.sharded.memory().peak(MemoryKind::activation); };
      const auto bytes = [&](size_t i) { return run.chain->bytes(i); };
      std::vector<size_t> backwards;
      run.chain->after_forward = [&](size_t i) {
        EXPECT_EQ(now(), bytes(i)) << "after layer " << i << " on " << device;
        EXPECT_EQ(peak(), i == 0 ? bytes(0) : bytes(i - 1) + bytes(i)) << "after layer " << i << " on " << device;
        run.sharded.reset_peak_memory();
      };
      run.chain->before_backward = [&](size_t i) {
        EXPECT_EQ(now(), bytes(i)) << "before the backward of layer " << i << " on " << device;
        if (!backwards.empty()) {
          EXPECT_EQ(peak(), bytes(i + 1) + bytes(i)) << "in that of layer " << i + 1 << " on " << device;
        }
        run.sharded.reset_peak_memory();
        backwards.push_back(i);
      };
      run.step();
      EXPECT_EQ(peak(), bytes(0));
      EXPECT_EQ(backwards, (std::vector<size_t>{5, 4, 3, 2, 1, 0}));
    });
}

// Besides the ledger, the device itself: each further layer needs memory for its activations only where they stay.
TEST(Activations, the_memory_of_a_device_falls_by_those_of_all_units_but_two) {
  fake_device::install();
  constexpr int64_t kMany = 256, kLayer = kMany * kFeature * (16 + 16);
  const auto most = [](int64_t layers, bool away) {
    int64_t bytes = 0;
    const std::vector<int64_t> widths(static_cast<size_t>(layers) + 1, 16);
    on(fake_device::device(), 1, widths, chain_options(away), [&](Trained& run) {
      run.input = toy::data({kMany * kRows, 16}, 1).to(fake_device::device());  // so many that parameters are small beside
      const auto measure = [&] {
        fake_device::most_bytes_in_use(/*forget=*/true);
        const int64_t at_rest = fake_device::most_bytes_in_use(/*forget=*/false);
        run.step();
        run.sharded.zero_gradients();
        return fake_device::most_bytes_in_use(/*forget=*/false) - at_rest;
      };
      measure();
      bytes = measure();
    });
    return bytes;
  };
  const auto saved = [&](int64_t layers) { return most(layers, false) - most(layers, true); };
  const int64_t few = saved(4);
  EXPECT_EQ(saved(7) - few, 3 * (kLayer - 1024)) << "each layer leaves a gradient of its weight";
  EXPECT_EQ(saved(12) - few, 8 * (kLayer - 1024));
  EXPECT_GE(few, kLayer);
}

TEST(Activations, graphs_that_are_kept_are_walked_again_with_the_same_gradients) {
  for (const c10::Device device : machines()) {
    std::map<bool, std::map<std::string, at::Tensor>> gradients;
    for (const bool away : {false, true})
      on(device, 2, {16, 48, 32, 16}, chain_options(away), [&](Trained& run) {
        const at::Tensor loss = call(run.chain, run.input).square().sum();
        run.sharded.set_last_microbatch(false);
        loss.backward({}, /*retain_graph=*/true);
        if (away) {
          EXPECT_EQ(run.sharded.memory().now(MemoryKind::activation), 0);
          EXPECT_GT(run.sharded.memory().host.now(MemoryKind::activation), 0);
        }
        run.sharded.set_last_microbatch(true);
        loss.backward();
        const auto values = gradients_of(run.sharded);
        if (run.sharded.rank() == 0) gradients[away] = values;
      });
    expect_same(gradients[false], gradients[true], "kept graph");
  }
}

// Forwards whose backwards come in another order than usual, or not at all.
TEST(Activations, two_forwards_and_their_backwards_in_any_order_give_the_same_gradients) {
  for (const c10::Device device : machines())
    for (const bool first_goes_first : {false, true}) {
      std::map<bool, std::map<std::string, at::Tensor>> gradients;
      for (const bool away : {false, true})
        on(device, 2, {16, 48, 32, 16}, chain_options(away), [&](Trained& run) {
          run.sharded.set_last_microbatch(false);
          at::Tensor first = call(run.chain, run.input).square().sum(), second = call(run.chain, run.input * 2).square().sum();
          { const at::Tensor unused = call(run.chain, run.input * 3).square().sum(); }
          (first_goes_first ? first : second).backward();
          run.sharded.set_last_microbatch(true);
          (first_goes_first ? second : first).backward();
          first.reset(), second.reset();
          if (away) {
            EXPECT_EQ(run.sharded.memory().host.now(MemoryKind::activation), 0);
          }
          const auto values = gradients_of(run.sharded);
          if (run.sharded.rank() == 0) gradients[away] = values;
        });
      expect_same(gradients[false], gradients[true], first_goes_first ? "first forward first" : "last forward first");
    }
}

namespace {

// Its middle saves what grows with its depth, and shares the weight with the rest of the block.
class MiddleImpl : public torch::nn::Module {
 public:
  MiddleImpl(int64_t depth, bool has_weight) : depth_(depth) {
    if (has_weight) weight = register_parameter("weight", at::full({32}, 1.25));
  }
  at::Tensor forward(at::Tensor x) {
    if (weight.defined()) x = x * weight;
    for (int64_t i = 0; i < depth_; ++i) x = at::exp(x * 0.5);
    return x;
  }
  at::Tensor weight;

 private:
  int64_t depth_;
};
TORCH_MODULE(Middle);

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t depth, bool has_weight) {
    first_ = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(32, 32).bias(false)));
    middle = register_module("middle", Middle(depth, has_weight));
    last_ = register_module("last", torch::nn::Linear(torch::nn::LinearOptions(32, 32).bias(false)));
  }
  at::Tensor forward(at::Tensor x) {
    x = first_->forward(x);
    // Its gradient is complete after that of the middle.
    if (middle->weight.defined()) x = x * middle->weight;
    return last_->forward(call(middle, x));
  }
  Middle middle{nullptr};

 private:
  torch::nn::Linear first_{nullptr}, last_{nullptr};
};
TORCH_MODULE(Block);

struct Measured {
  std::map<std::string, at::Tensor> gradients;
  int64_t away_bytes = 0, calls = 0;
};

Measured train_blocks(c10::Device device, const std::string& strategy_name, int64_t depth, bool has_weight,
                      const std::function<void(ShardOptions&)>& choose) {
  Measured measured;
  ThreadsOptions threads;
  threads.device = device;
  auto trace = std::make_shared<Trace>();
  run_threads(
      2,
      [&](std::shared_ptr<Comm> comm) {
        torch::nn::Sequential model(Block(depth, has_weight), Block(depth, has_weight), Block(depth, has_weight));
        initialize_parameters(*model, 5);
        harness::move_to(*model, device);
        ShardOptions options = toy::options(strategy_name);
        options.units = by_type<BlockImpl>();
        choose(options);
        auto comms = std::make_shared<MeshComm>(traced(comm, trace), Mesh({{"dp_shard", 2}}));
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        for (const bool last : {false, true}) {
          sharded.set_last_microbatch(last);
          call(model, toy::data({kRows, 32}, comm->rank()).to(device)).square().sum().backward();
        }
        const auto values = gradients_of(sharded);
        if (comm->rank() != 0) return;
        measured.gradients = values;
        measured.away_bytes = sharded.memory().host.peak(MemoryKind::activation);
        measured.calls = std::ssize(trace->of_rank(0));
      },
      threads);
  return measured;
}

}  // namespace

TEST(Activations, a_module_within_a_unit_is_recomputed_and_no_bit_and_no_collective_changes) {
  for (const c10::Device device : machines())
    for (const char* strategy : {"ddp", "zero2", "zero3"})
      for (const bool has_weight : {false, true}) {
        const auto plain = train_blocks(device, strategy, 2, has_weight, [](ShardOptions&) {});
        const auto again = train_blocks(device, strategy, 2, has_weight,
                                        [](ShardOptions& options) { options.recompute_modules = by_name("*.middle"); });
        const std::string what = fmt::format("{} on {}, weight {}", strategy, c10::DeviceTypeName(device.type()), has_weight);
        expect_same(plain.gradients, again.gradients, what);
        EXPECT_EQ(plain.calls, again.calls) << what;
      }
}

// Of the block without the middle's weight: the inputs of both products, and of the middle each exponential, or nothing else.
TEST(Activations, a_recomputed_module_keeps_its_inputs_only) {
  for (const c10::Device device : machines())
    for (const int64_t depth : {1, 3, 5}) {
      const auto bytes = [&](bool again) {
        return train_blocks(device, "zero3", depth, /*has_weight=*/false,
                            [&](ShardOptions& options) {
                              options.offload_activations = options.units;
                              if (again) options.recompute_modules = by_type<MiddleImpl>();
                            })
            .away_bytes;
      };
      const int64_t one = kFeature * 32, blocks = 3;
      EXPECT_EQ(bytes(false), blocks * (1 + depth) * one) << "the last exponential is what the product reads";
      EXPECT_EQ(bytes(true), blocks * 3 * one) << "the block's input, the middle's, and the last product's";
    }
}

TEST(Activations, modules_within_a_recomputed_unit_are_not_recomputed_twice) {
  for (const c10::Device device : machines()) {
    const auto once = [](ShardOptions& options) { options.recompute = options.units; };
    const auto twice = [](ShardOptions& options) {
      options.recompute = options.units;
      options.recompute_modules = by_name("**");
      options.offload_activations = options.units;
    };
    const auto a = train_blocks(device, "zero3", 2, true, once), b = train_blocks(device, "zero3", 2, true, twice);
    expect_same(a.gradients, b.gradients, "recomputed units");
    EXPECT_EQ(b.away_bytes, 3 * kFeature * 32) << "the blocks' inputs";
  }
}

// As Python's collector does, whenever it likes.
TEST(Activations, of_graphs_that_several_threads_drop_are_freed_once) {
  for (const c10::Device device : machines())
    on(device, 1, {16, 16, 16}, chain_options(true), [&](Trained& run) {
      for (int repeats = 0; repeats < 20; ++repeats) {
        std::vector<std::vector<at::Tensor>> graphs(4);
        for (size_t i = 0; i < 200; ++i) graphs[i % graphs.size()].push_back(call(run.chain, run.input));
        std::vector<std::thread> threads;
        for (auto& mine : graphs) threads.emplace_back([&] { mine.clear(); });
        for (std::thread& thread : threads) thread.join();
        run.step();
        run.sharded.zero_gradients();
      }
      const MemoryUse use = run.sharded.memory();
      EXPECT_EQ(use.now(MemoryKind::activation) + use.host.now(MemoryKind::activation), 0) << device;
    });
}

TEST(Activations, of_modules_that_nobody_calls_recomputation_is_an_error) {
  try {
    train_blocks(at::kCPU, "zero3", 1, false, [](ShardOptions& options) { options.recompute_modules = by_name("*.first"); });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("recompute_modules chose 3 modules, the first being '0.first'"), std::string::npos)
        << error.what();
  }
}

namespace {

class WritesImpl : public torch::nn::Module {
 public:
  WritesImpl() { linear_ = register_module("linear", torch::nn::Linear(16, 16)); }
  at::Tensor forward(at::Tensor x) { return at::exp(linear_->forward(x)); }

 private:
  torch::nn::Linear linear_{nullptr};
};
TORCH_MODULE(Writes);

}  // namespace

TEST(Activations, that_are_written_in_place_after_they_were_saved_are_an_error_of_the_backward) {
  for (const int64_t more_forwards : {0, 2}) {
    try {
      run_threads(1, [&](std::shared_ptr<Comm> comm) {
        Writes model;
        ShardOptions options;
        options.offload_activations = [](const std::string&, const torch::nn::Module&) { return true; };
        Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 1}})), options);
        at::Tensor y = call(model, at::ones({8, 16}));
        y.detach().add_(1);
        std::vector<at::Tensor> others;
        for (int64_t i = 0; i < more_forwards; ++i) others.push_back(call(model, at::ones({8, 16})));
        y.sum().backward();
      });
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("written in place"), std::string::npos) << error.what();
    }
  }
}

TEST(Activations, random_cases_have_the_golden_runs_bits_on_the_cpu_and_on_a_device) {
  fake_device::install();  // before the first backward, which asks which devices there are
  for (int64_t i = 0; i < 40; ++i) {
    harness::Case c = harness::generate(20261124, i, {.world_max = 4});
    c.options.activations = 1 + i % 2;
    if (c.model.of_tokens()) c.options.within = 1 + i / 2 % 2;
    harness::expect_held_or_diverged(c);
    if (c.options.arithmetic == 0) harness::expect_held_or_diverged(c, fake_device::ranks());
  }
}

// What random cases draw seldom.
TEST(Activations, dropout_and_every_kind_of_parallelism_have_the_golden_runs_bits) {
  fake_device::install();
  const std::string gpt = "gpt(layers=2,hidden=16,heads=2,vocab=29,positions=8,dropout=0.25) ";
  const std::string llama = "llama(layers=2,hidden=16,heads=4,kv_heads=2,intermediate=12,vocab=20,positions=8,dropout=0.25) ";
  const std::string run = " seed=7 : accumulate(2) step*2";
  for (const std::string& model : {gpt, llama})
    for (const char* options :
         {"within=attention", "within=some", "activations=host", "recompute=2,activations=host",
          "within=attention,activations=host", "within=some,activations=some,prefetch_forward=1,prefetch_backward=1"}) {
      harness::expect_held(model + "mesh(dp_shard=2) zero3(" + options + ") adamw(lr=0.01,clip=1) ordered" + run);
      harness::expect_held(model + "mesh(dp_shard=2,tp=2) zero2(loss=sum,arithmetic=canonical,sp=1," + options +
                           ") adamw(lr=0.01) canonical" + run);
      harness::expect_held(model + "mesh(dp_shard=2,cp=2) zero3(loss=tokens,arithmetic=canonical," + options +
                           ") adamw(lr=0.01) canonical" + run);
      harness::expect_held(
          model + "mesh(dp_shard=2) zero3(compute=bf16,reduce=bf16," + options + ") adamw(lr=0.01) ordered" + run,
          fake_device::ranks());
    }
}
