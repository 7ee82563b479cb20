// Who has to live how long: what is dropped or moved too early is kept, waited for, or an error.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_models.h"
#include "properties/kit/toy_modules.h"

using namespace shardproof;

namespace {

Sharded shard(const std::shared_ptr<torch::nn::Module>& module, const std::shared_ptr<MeshComm>& comms) {
  return fully_shard(module, comms, {.units = by_type<GptBlockImpl>(), .divide_by_tokens = true});
}

at::Tensor tokens() {
  return (at::arange(16, at::kLong) * 5 + 3).remainder(parallel_models::kVocab).view({2, 8});
}

// What a group of two looks like when the other rank does whatever it has to.
class Counting final : public Comm {
 public:
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 2; }
  const std::string& name() const override { return name_; }
  std::shared_ptr<Comm> split(int64_t, int64_t, std::string) override { return nullptr; }

  int waits = 0;

 private:
  struct State final : Work::State {
    explicit State(int& its_waits) : waits(its_waits) {}
    void wait() override { ++waits; }
    int& waits;
  };
  Work start(Call) override { return Work(std::make_shared<State>(waits)); }

  std::string name_ = "counting";
};

}  // namespace

TEST(Lifetimes, an_optimizer_goes_on_when_its_sharded_was_moved) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}}));
    std::vector<at::Tensor> results;
    for (const bool moves : {false, true}) {
      Gpt model(parallel_models::gpt_options(true));
      initialize_parameters(*model, 3, 0.3);
      std::optional<Sharded> sharded = shard(model.ptr(), comms);
      Optimizer optimizer = adamw(*sharded, {.lr = 0.01});
      std::optional<Sharded> other;
      if (moves) other.emplace(std::move(*sharded)), sharded.reset();
      Sharded& now = moves ? *other : *sharded;
      now.add_tokens(16);
      call(model, tokens()).square().sum().backward();
      optimizer.step();
      for (const auto& [name, value] : now.gather_parameters()) results.push_back(value);
    }
    const size_t half = results.size() / 2;
    for (size_t i = 0; i < half; ++i) EXPECT_TRUE(kit::same_bits(results[i], results[half + i]));
  });
}

TEST(Lifetimes, an_optimizer_whose_sharded_is_gone_says_so) {
  run_threads(1, [](std::shared_ptr<Comm> comm) {
    Gpt model(parallel_models::gpt_options(true));
    std::optional<Sharded> sharded = shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 1}})));
    Optimizer optimizer = adamw(*sharded, {.lr = 0.01});
    sharded.reset();
    expect_error([&] { optimizer.step(); }, {"[optimizer]", "is gone"});
    expect_error([&] { optimizer.state("exp_avg"); }, {"[optimizer]", "is gone"});
  });
}

// Nothing holds itself: neither the module, nor what parallelize, context_parallel and fully_shard put at it, nor a graph.
TEST(Lifetimes, a_trained_model_that_was_dropped_is_gone) {
  using parallel_models::MeshSetting;
  const std::vector<MeshSetting> settings = {{},
                                             {.dp = 2},
                                             {.tp = 2},
                                             {.tp = 2, .sequence_parallel = true},
                                             {.cp = 2},
                                             {.cp = 2, .context = {.attention = ContextAttention::gathered}},
                                             {.cp = 2, .context = {.attention = ContextAttention::ulysses}},
                                             {.dp = 2, .cp = 2, .tp = 2, .recompute = true}};
  for (const auto& make : {parallel_models::gpt(true), parallel_models::gpt(false, 0.1), parallel_models::llama(false, 1)})
    for (const MeshSetting& setting : settings) {
      std::mutex mutex;
      std::vector<std::weak_ptr<torch::nn::Module>> modules;
      std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> parameters;
      const auto watched = [&](const MeshSetting& s) {
        auto model = make(s);
        const std::lock_guard lock(mutex);
        for (const auto& module : model.module->modules()) modules.push_back(module);
        for (const auto& parameter : model.module->parameters()) parameters.emplace_back(parameter.getIntrusivePtr());
        return model;
      };
      parallel_models::train(watched, setting, 8);
      for (const auto& module : modules) EXPECT_TRUE(module.expired()) << setting.str();
      for (const auto& parameter : parameters) EXPECT_TRUE(parameter.expired()) << setting.str();
    }
}

namespace {

// x [4, 4] of a rank through a collective, or through a module that parallelize put some around. The group that its backward
// needs is along tp; `copies` of 2 is that of key heads in copies.
struct GraphOp {
  const char* name;
  std::function<at::Tensor(const at::Tensor& x, const std::shared_ptr<MeshComm>& comms)> run;
  bool copies = false;
  Comm& group(MeshComm& comms) const { return copies ? comms.within("tp", 2) : comms.along({"tp"}); }
};

GraphOp plain_op(const char* name, std::function<at::Tensor(const at::Tensor&, Comm&)> op) {
  return {name, [op](const at::Tensor& x, const std::shared_ptr<MeshComm>& comms) { return op(x, comms->along({"tp"})); }};
}

GraphOp canonical_linear(const char* name, int64_t inputs, ParallelStyle style, std::optional<int64_t> sequence_dim) {
  return {name, [=](const at::Tensor& x, const std::shared_ptr<MeshComm>& comms) {
            Linear linear(torch::nn::LinearOptions(inputs, 4));
            linear->to(at::kDouble);
            use_canonical_arithmetic(*linear);
            const TensorParallel parallel =
                parallelize(linear.ptr(), comms, {.styles = {{"", style}}, .sequence_dim = sequence_dim});
            return call(linear, x);
          }};
}

// One key head for the queries of two ranks.
at::Tensor canonical_copied_keys(const at::Tensor& x, const std::shared_ptr<MeshComm>& comms) {
  Attention attention(/*causal=*/true, /*dropout=*/0);
  use_canonical_arithmetic(*attention);
  const CutAttention style{{{2, 1}}, {{1, 1, /*copied=*/true}}};
  const TensorParallel parallel = parallelize(attention.ptr(), comms, {.styles = {{"", style}}});
  const at::Tensor heads = x.view({1, 1, 4, 4});
  return attention->forward(heads, heads, heads);
}

const DimCut kContextCut = context_cut(ContextSplit::balanced, 8, 2);

using CanonicalAttention = decltype(&canonical_ring_attention);
GraphOp canonical_attention(const char* name, CanonicalAttention attention) {
  return plain_op(name, [attention](const at::Tensor& x, Comm& group) {
    const at::Tensor heads = x.view({1, 1, 4, 4});
    return attention(heads, heads, heads, kContextCut, true, {}, "attend", group);
  });
}

std::vector<GraphOp> graph_ops() {
  return {
      plain_op("copy", [](const at::Tensor& x, Comm& group) { return collective::copy(x, group); }),
      plain_op("all_gather", [](const at::Tensor& x, Comm& group) { return collective::all_gather(x, 0, 8, group); }),
      plain_op("scatter", [](const at::Tensor& x, Comm& group) { return collective::scatter(x, 0, group); }),
      plain_op("all_to_all", [](const at::Tensor& x, Comm& group) { return collective::all_to_all(x, 1, 0, 8, group); }),
      plain_op("column",
               [](const at::Tensor& x, Comm& group) {
                 return column_parallel_linear(x, at::ones({2, 4}, x.options()), {}, group);
               }),
      plain_op("context_gather", [](const at::Tensor& x, Comm& group) { return context_gather(x, 0, kContextCut, group); }),
      plain_op("ring",
               [](const at::Tensor& x, Comm& group) {
                 const at::Tensor heads = x.view({1, 1, 4, 4});
                 return ring_attention(heads, heads, heads, kContextCut, true, {}, group);
               }),
      canonical_linear("canonical column", 4, ColumnParallel{}, {}),
      canonical_linear("canonical column of a sequence", 4, ColumnParallel{}, 0),
      canonical_linear("canonical row of a sequence", 8, RowParallel{}, 0),
      {"canonical copied keys", canonical_copied_keys, /*copies=*/true},
      canonical_attention("canonical gathered attention", canonical_gathered_attention),
      canonical_attention("canonical ring", canonical_ring_attention),
      canonical_attention("canonical ulysses", canonical_ulysses_attention),
  };
}

}  // namespace

TEST(Lifetimes, a_graph_keeps_the_group_that_its_backward_needs) {
  for (const GraphOp& op : graph_ops())
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      const at::Tensor x = at::ones({4, 4}, at::kDouble).set_requires_grad(true);
      std::weak_ptr<Comm> group;
      at::Tensor y;
      {
        const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}}));
        group = op.group(*comms).weak_from_this();
        y = op.run(x, comms);
      }
      ASSERT_FALSE(group.expired()) << op.name << " does not keep its group, and its backward would use what is gone";
      y.sum().backward();
      EXPECT_TRUE(x.grad().defined()) << op.name;
      y.reset();
      EXPECT_TRUE(group.expired()) << op.name << " keeps its group for good";
    });
}

TEST(Lifetimes, a_collective_under_way_that_is_dropped_is_waited_for_once) {
  const auto comm = std::make_shared<Counting>();
  const at::Tensor x = at::ones({4});
  const auto waits = [&](const std::function<void()>& body) {
    comm->waits = 0;
    body();
    return comm->waits;
  };
  EXPECT_EQ(waits([&] { const collective::Pending dropped = collective::start_all_reduce(x, *comm); }), 1);
  EXPECT_EQ(waits([&] {
              collective::Pending first = collective::start_all_gather(x, 0, 8, *comm);
              const collective::Pending second = std::move(first);
            }),
            1);
  EXPECT_EQ(waits([&] {
              collective::Pending awaited = collective::start_reduce_scatter(x, 0, *comm);
              EXPECT_EQ(awaited.result().numel(), 2);
            }),
            1);
  // What throws ends the world, and the other ranks will not come.
  EXPECT_EQ(waits([&] {
              try {
                const collective::Pending dropped = collective::start_all_reduce(x, *comm);
                throw std::runtime_error("ends the world");
              } catch (const std::runtime_error&) {
              }
            }),
            0);
}

TEST(Lifetimes, a_sharded_keeps_the_parallelism_that_its_module_had) {
  run_threads(8, [](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}, {"cp", 2}, {"tp", 2}}));
    std::vector<at::Tensor> results;
    for (const bool drops : {false, true}) {
      const GptOptions options = parallel_models::gpt_options(true);
      Gpt model(options);
      initialize_parameters(*model, 3, 0.3);
      std::optional<TensorParallel> parallel = parallelize(model.ptr(), comms, gpt_plan(options, /*sequence_parallel=*/true));
      std::optional<ContextParallel> context = context_parallel(model.ptr(), comms);
      Sharded sharded = shard(model.ptr(), comms);
      Optimizer optimizer = adamw(sharded, {.lr = 0.01});
      const at::Tensor mine = context->cut(tokens());
      if (drops) parallel.reset(), context.reset();
      sharded.add_tokens(mine.numel());
      vocab_parallel_cross_entropy(call(model, mine), mine, options.vocab, comms->along({"tp"}), {.mean = false}).backward();
      optimizer.step();
      for (const auto& [name, value] : sharded.gather_parameters()) results.push_back(value);
    }
    const size_t half = results.size() / 2;
    for (size_t i = 0; i < half; ++i) EXPECT_TRUE(kit::same_bits(results[i], results[half + i]));
  });
}
