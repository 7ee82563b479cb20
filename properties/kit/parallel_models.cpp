#include "properties/kit/parallel_models.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <optional>

namespace parallel_models {

using namespace shardproof;

namespace {

constexpr int64_t kBatch = 4;

struct Data {
  at::Tensor tokens, targets;
};

// Targets that do not count are not spread evenly over samples and positions.
Data data_of(int64_t step, int64_t length) {
  const at::Tensor tokens = (at::arange(kBatch * length, at::kLong) * 5 + step * 3).remainder(kVocab).view({kBatch, length});
  const at::Tensor dropped = at::arange(kBatch * length, at::kLong).view({kBatch, length}).remainder(7) == step;
  return {tokens, tokens.roll(1, 1).masked_fill(dropped, -100)};
}

}  // namespace

std::string MeshSetting::str() const {
  static constexpr const char* kAttentions[] = {"ring", "gathered", "ulysses"};
  return fmt::format("replicate {} dp {} cp {} tp {} sequence {} {} {} {} recompute {} pieces {}", replicate, dp, cp, tp,
                     sequence_parallel, strategy, kAttentions[static_cast<size_t>(context.attention)],
                     context.split == ContextSplit::balanced ? "balanced" : "contiguous", recompute, overlap_pieces);
}

GptOptions gpt_options(bool tied, double dropout) {
  return {.layers = 2, .hidden = 12, .heads = 6, .vocab = kVocab, .positions = 8, .tied = tied, .dropout = dropout};
}

MakeModel gpt(bool tied, double dropout) {
  return [=](const MeshSetting& setting) {
    const GptOptions options = gpt_options(tied, dropout);
    Gpt gpt(options);
    return Model{gpt.ptr(), [gpt](at::Tensor tokens) mutable { return call(gpt, tokens); },
                 gpt_plan(options, setting.sequence_parallel)};
  };
}

MakeModel llama(bool tied, int64_t kv_heads, double attention_dropout, bool qk_norm, bool qkv_bias) {
  return [=](const MeshSetting& setting) {
    const LlamaOptions options{.layers = 2,
                               .hidden = 24,
                               .heads = 6,
                               .kv_heads = kv_heads,
                               .intermediate = 10,
                               .vocab = kVocab,
                               .tied = tied,
                               .attention_dropout = attention_dropout,
                               .qk_norm = qk_norm,
                               .qkv_bias = qkv_bias};
    Llama llama(options);
    return Model{llama.ptr(), [llama](at::Tensor tokens) mutable { return call(llama, tokens); },
                 llama_plan(options, setting.tp, setting.sequence_parallel)};
  };
}

Trained train(const MakeModel& make, const MeshSetting& setting, int64_t length) {
  Trained run;
  const Mesh mesh({{"dp_replicate", setting.replicate}, {"dp_shard", setting.dp}, {"cp", setting.cp}, {"tp", setting.tp}});
  run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, mesh);
    Model model = make(setting);
    initialize_parameters(*model.module, 3, 0.3);
    model.module->to(at::kDouble);
    std::optional<ContextParallel> early;
    if (setting.recompute) early = context_parallel(model.module, comms, setting.context);
    model.plan.overlap_pieces = setting.overlap_pieces;
    const TensorParallel parallel = parallelize(model.module, comms, model.plan);
    ContextParallel context = early ? std::move(*early) : context_parallel(model.module, comms, setting.context);
    const auto blocks = by_type<GptBlockImpl, LlamaLayerImpl>();
    Sharded sharded = fully_shard(model.module, comms,
                                  {.strategy = strategy(setting.strategy),
                                   .units = blocks,
                                   .recompute = setting.recompute ? blocks : UnitSelector(),
                                   .divide_by_tokens = true});
    Optimizer optimizer = adamw(sharded, {.lr = 0.01});
    // Two microbatches, or one where a rank has one sample.
    const int64_t own = kBatch / (setting.replicate * setting.dp), count = std::max<int64_t>(1, own / 2);
    const int64_t first = comm->rank() / (setting.cp * setting.tp) * own;
    for (int64_t step = 0; step < 3; ++step) {
      const Data data = data_of(step, length);
      at::Tensor sum = at::zeros({1}, at::kDouble);
      for (int64_t begin = first, end = first + own; begin < end; begin += count) {
        sharded.set_last_microbatch(begin + count == end);
        random_stream() = {.seed = static_cast<uint64_t>(step), .first_sample = begin};
        const at::Tensor tokens = context.cut(data.tokens.narrow(0, begin, count));
        const at::Tensor targets = context.cut(data.targets.narrow(0, begin, count));
        const at::Tensor loss =
            vocab_parallel_cross_entropy(model.forward(tokens), targets, kVocab, comms->along({"tp"}), {.mean = false});
        sharded.add_tokens((targets >= 0).sum().item<int64_t>());
        loss.backward();
        sum += loss.detach();
      }
      comms->along({"dp_replicate", "dp_shard", "cp"}).all_reduce(sum).wait();
      const double norm = sharded.clip_gradients(0.5);
      optimizer.step();
      if (comm->rank() == 0) run.losses.push_back(sum.item<double>()), run.norms.push_back(norm);
    }
    const auto whole = sharded.gather_parameters();
    if (comm->rank() == 0) run.parameters = whole;
  });
  return run;
}

// In double another order of sums moves the 15th digit; a term left out, or taken twice, moves the first. Adam's first steps
// make a tiny gradient a whole step, so that parameters are compared more coarsely than norms.
void expect_same(const Trained& golden, const Trained& run, const std::string& where, double loss_distance) {
  for (size_t i = 0; i < golden.losses.size(); ++i) {
    EXPECT_NEAR(run.losses[i], golden.losses[i], loss_distance) << where;
    EXPECT_NEAR(run.norms[i], golden.norms[i], 1e-11 * golden.norms[i]) << where;
  }
  ASSERT_EQ(run.parameters.size(), golden.parameters.size());
  for (size_t i = 0; i < golden.parameters.size(); ++i) {
    EXPECT_EQ(golden.parameters[i].first, run.parameters[i].first);
    const at::Tensor difference = golden.parameters[i].second - run.parameters[i].second;
    EXPECT_LT(difference.abs().max().item<double>(), 1e-8) << where << " " << golden.parameters[i].first;
  }
}

void expect_equal_on_meshes(const MakeModel& make, const std::vector<MeshSetting>& settings,
                            const std::vector<int64_t>& lengths) {
  for (const int64_t length : lengths) {
    const Trained golden = train(make, {}, length);
    EXPECT_NE(golden.losses[0], golden.losses[2]);
    for (const MeshSetting& setting : settings)
      expect_same(golden, train(make, setting, length), fmt::format("{} length {}", setting.str(), length));
  }
}

}  // namespace parallel_models
