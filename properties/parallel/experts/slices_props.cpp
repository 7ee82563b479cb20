// Experts of which the ranks along a plan's axis hold slices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "properties/kit/bits.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/parity_training.h"
#include "shardproof/checkpoint/saved_state.h"

using namespace shardproof;
using kit::same_bits;
using parity::on_mesh;
using parity::Tensors;

namespace {

LlamaOptions options_of(int64_t width, int64_t experts = 4) {
  LlamaOptions options{.hidden = 8, .heads = 4, .kv_heads = 4, .vocab = 11, .expert_intermediate = width, .dense_layers = 1};
  options.router = {.experts = experts};
  return options;
}

Llama model_of(const LlamaOptions& options, bool canonical = false) {
  Llama model(options);
  initialize_parameters(*model, 5, 0.2);
  if (canonical) use_canonical_arithmetic(*model);
  return model;
}

struct Cut {
  Mesh mesh;
  int64_t sharing = 1;
  bool sequence_parallel = false;

  std::string str() const { return fmt::format("{} ep={} sp={}", mesh.str(), sharing, sequence_parallel); }
};

ParallelPlan plan_of(const LlamaOptions& options, const Cut& cut) {
  ParallelPlan plan = llama_plan(options, cut.mesh.size("tp"), cut.sequence_parallel);
  plan.styles.emplace_back("model.layers.*.mlp.experts", ExpertParallel{.ranks = cut.sharing, .cut_inside = true});
  return plan;
}

const std::vector<Cut>& cuts() {
  static const std::vector<Cut> all = {{Mesh({{"tp", 2}})},
                                       {Mesh({{"tp", 4}}), 1, true},
                                       {Mesh({{"dp_shard", 2}, {"tp", 2}}), 2, true},
                                       {Mesh({{"tp", 2}, {"dp_shard", 2}}), 2},
                                       {Mesh({{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}}), 2},
                                       {Mesh({{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}}), 4, true}};
  return all;
}

at::Tensor tokens() {
  return at::arange(32).view({4, 8}).remainder(11);
}

// This rank's sequences.
at::Tensor own_tokens(MeshComm& comms) {
  int64_t part = 0, parts = 1;
  for (const char* axis : {"dp_replicate", "dp_shard"})
    if (comms.mesh().has(axis)) {
      parts *= comms.mesh().size(axis);
      part = part * comms.mesh().size(axis) + comms.along({axis}).rank();
    }
  return tokens().chunk(parts)[static_cast<size_t>(part)];
}

std::vector<std::pair<std::string, at::Tensor>> values_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> values;
  for (const auto& item : module.named_parameters()) values.emplace_back(item.key(), item.value().detach().clone());
  return values;
}

}  // namespace

// The norm, too: it counts each slice once. Where there are more ranks than there is width, some have empty slices.
TEST(Slices, of_experts_have_the_gradients_and_the_norm_of_the_whole_model) {
  const auto loss_of = [](const at::Tensor& logits) { return logits.square().sum(); };
  for (const int64_t width : {6, 5, 1}) {
    const LlamaOptions options = options_of(width);
    Llama plain = model_of(options);
    loss_of(call(plain, tokens())).backward();
    double squares = 0;
    Tensors expected;
    for (const auto& item : plain->named_parameters()) {
      expected[item.key()] = item.value().grad();
      squares += item.value().grad().to(at::kDouble).square().sum().item<double>();
    }
    for (const Cut& cut : cuts())
      on_mesh(cut.mesh, [&](const std::shared_ptr<MeshComm>& comms) {
        Llama model = model_of(options);
        const TensorParallel parallel = parallelize(model.ptr(), comms, plan_of(options, cut));
        Sharded sharded = fully_shard(model.ptr(), comms, {.gradient_divide = 1});
        loss_of(call(model, own_tokens(*comms))).backward();
        EXPECT_NEAR(sharded.gradient_norm() / std::sqrt(squares), 1, 1e-5) << cut.str();
        for (const auto& [name, gradient] : sharded.gather_gradients())
          EXPECT_LE((gradient - expected.at(name)).abs().max().item<double>(),
                    1e-5 * expected.at(name).abs().max().item<double>() + 1e-9)
              << cut.str() << ' ' << name;
      });
  }
}

TEST(Slices, of_experts_are_what_chunk_gives_of_gate_and_up_and_down) {
  const LlamaOptions options = options_of(/*width=*/5);
  for (const Cut& cut : cuts())
    on_mesh(cut.mesh, [&](const std::shared_ptr<MeshComm>& comms) {
      Llama model = model_of(options);
      const auto whole = values_of(*model);
      const TensorParallel parallel = parallelize(model.ptr(), comms, plan_of(options, cut));
      const int64_t tp = cut.mesh.size("tp"), rank = comms->along({"tp"}).rank();
      const Interval own = piece({}, 5, tp, rank);
      const auto held = model->named_parameters();
      const at::Tensor first = held["model.layers.1.mlp.experts.gate_up_proj"];
      const at::Tensor last = held["model.layers.1.mlp.experts.down_proj"];
      EXPECT_EQ(first.sizes(), at::IntArrayRef({4 / cut.sharing, 2 * own.size(), 8})) << cut.str();
      EXPECT_EQ(last.sizes(), at::IntArrayRef({4 / cut.sharing, 8, own.size()})) << cut.str();
      const auto gathered = parallel.gather_parameters();
      ASSERT_EQ(gathered.size(), whole.size());
      for (size_t i = 0; i < whole.size(); ++i) {
        EXPECT_EQ(gathered[i].first, whole[i].first);
        EXPECT_TRUE(same_bits(gathered[i].second, whole[i].second)) << cut.str() << ' ' << whole[i].first;
      }
      if (cut.sharing > 1) return;
      const std::map<std::string, at::Tensor> named(whole.begin(), whole.end());
      const at::Tensor of_first = named.at("model.layers.1.mlp.experts.gate_up_proj");
      const at::Tensor gate = of_first.narrow(1, own.begin, own.size()), up = of_first.narrow(1, 5 + own.begin, own.size());
      EXPECT_TRUE(same_bits(first.detach(), at::cat({gate, up}, 1))) << cut.str();
      EXPECT_TRUE(same_bits(last.detach(),
                            named.at("model.layers.1.mlp.experts.down_proj").narrow(2, own.begin, own.size())))
          << cut.str();
    });
}

// Trained on one mesh, saved, and trained on with another number of slices and of ranks that share experts.
TEST(Slices, of_experts_load_under_any_cut_and_leave_no_trace_in_canonical_arithmetic) {
  const LlamaOptions options = options_of(/*width=*/5);
  const checkpoint::Scratch scratch;
  const auto trained = [&](const Cut& cut, bool loads, const std::string& saved) {
    std::vector<std::pair<std::string, at::Tensor>> result;
    on_mesh(cut.mesh, [&](const std::shared_ptr<MeshComm>& comms) {
      Llama model = model_of(options, /*canonical=*/true);
      const TensorParallel parallel = parallelize(model.ptr(), comms, plan_of(options, cut));
      Sharded sharded = fully_shard(model.ptr(), comms,
                                    {.strategy = strategy("zero3"),
                                     .units = by_type<LlamaLayerImpl>(),
                                     .recompute = by_type<LlamaLayerImpl>(),
                                     .precision = {.main = at::kFloat, .compute = at::kDouble},
                                     .numerics = Numerics::canonical,
                                     .gradient_divide = 1});
      Optimizer optimizer = adamw(sharded, {.lr = 0.01});
      if (loads) checkpoint::load(scratch / saved, sharded, &optimizer);
      const at::Tensor own = own_tokens(*comms), logits = call(model, own);
      canonical_ops::cross_entropy(logits, own.roll(1, 1), options.vocab, &comms->along({"tp"})).backward();
      optimizer.step();
      if (!loads) checkpoint::save(scratch / saved, sharded, &optimizer);
      auto gathered = sharded.gather_parameters();
      if (comms->rank() == 0) result = std::move(gathered);
    });
    return result;
  };
  const Cut whole{Mesh({{"dp_shard", 2}, {"tp", 1}})};
  (void)trained(whole, false, "0");
  const auto expected = trained(whole, true, "0");
  ASSERT_FALSE(expected.empty());
  for (size_t i = 0; i < cuts().size(); ++i) {
    const std::string folder = std::to_string(i + 1);
    (void)trained(cuts()[i], false, folder);
    const auto there = trained(cuts()[(i + 1) % cuts().size()], true, folder), back = trained(whole, true, folder);
    ASSERT_EQ(there.size(), expected.size());
    for (size_t p = 0; p < expected.size(); ++p) {
      EXPECT_TRUE(same_bits(there[p].second, expected[p].second)) << cuts()[i].str() << ' ' << expected[p].first;
      EXPECT_TRUE(same_bits(back[p].second, expected[p].second)) << cuts()[i].str() << ' ' << expected[p].first;
    }
  }
}

TEST(Slices, of_what_is_no_expert_are_refused_by_name) {
  on_mesh(Mesh({{"dp_shard", 2}, {"tp", 2}}), [](const std::shared_ptr<MeshComm>& comms) {
    using Sizes = std::map<std::string, std::vector<int64_t>>;
    const auto refuse = [&](const Sizes& parameters, std::initializer_list<std::string> says) {
      auto module = std::make_shared<torch::nn::Module>("Own");
      for (const auto& [name, sizes] : parameters) module->register_parameter(name, at::ones(sizes));
      expect_error(
          [&] {
            (void)parallelize(module, comms, {.styles = {{"", ExpertParallel{.ranks = 2, .cut_inside = true}}}});
          },
          says);
    };
    refuse({{"weight", {4, 6, 6}}}, {"cut_inside", "gate_up_proj", "weight [4, 6, 6]"});
    refuse({{"gate_up_proj", {4, 6, 6}}}, {"module '' has gate_up_proj [4, 6, 6]. Leave cut_inside out"});
    refuse({{"gate_up_proj", {4, 5, 6}}, {"down_proj", {4, 6, 2}}}, {"2 * intermediate", "gate_up_proj [4, 5, 6]"});
    refuse({{"gate_up_proj", {4, 6, 6}}, {"down_proj", {4, 6, 4}}}, {"down_proj [4, 6, 4]"});
    refuse({{"gate_up_proj", {4, 6, 6}}, {"down_proj", {4, 5, 3}}}, {"down_proj [4, 5, 3]"});
  });
  on_mesh(parity::ranks(2), [](const std::shared_ptr<MeshComm>& comms) {
    Experts experts(4, 6, 4);
    expect_error(
        [&] {
          (void)parallelize(experts.ptr(), comms, {.styles = {{"", ExpertParallel{.ranks = 2, .cut_inside = true}}}});
        },
        {"no axis tp"});
  });
}
