// Values that matter only beside certain others.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "harness/case/generate.h"
#include "harness/case/limits.h"
#include "harness/case/together.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/parallel/context/context_parallel.h"

using namespace harness;

namespace {

bool in_some_step(const Case& c, const std::function<bool(const StepPlan&)>& has) {
  return std::ranges::any_of(c.steps, has);
}

bool splits_parameters(const Case& c) {
  return c.shards() * c.context_ranks() > 1 && shardproof::strategy(c.strategy).parameter.splits("dp_shard");
}

bool exchanges_heads(const Case& c) {
  return c.context_ranks() > 1 && c.options.context_attention == static_cast<int64_t>(shardproof::ContextAttention::ulysses);
}

struct Group {
  std::string name;
  int64_t least;  // of 200 cases
  std::function<bool(const Case&)> has;
  std::optional<std::string> strategy = {};  // a run of this one alone, as ctest has one of each
};

const std::vector<Group>& groups() {
  static const std::vector<Group> all = {
      {"a checkpoint of adapters beside cut layers", 3,
       [](const Case& c) {
         return c.options.lora > 0 && c.tensor_ranks() > 1 && in_some_step(c, [](const StepPlan& s) { return s.save; });
       }},
      {"a square layer as wide as the rank of its adapter, cut and saved", 1,
       [](const Case& c) {
         const std::vector<int64_t>& widths = c.model.mlp.widths;
         return c.model.kind == golden::Model::Kind::mlp && c.options.lora > 0 && c.tensor_ranks() > 1 &&
                widths.back() == c.options.lora && widths[widths.size() - 2] == c.options.lora &&
                in_some_step(c, [](const StepPlan& s) { return s.save; });
       }},
      {"a model with buffers that is built without memory", 5,
       [](const Case& c) {
         return c.options.meta == 1 &&
                (c.model.kind == golden::Model::Kind::odd || (c.model.kind == golden::Model::Kind::conv && c.model.conv.norm));
       }},
      {"updated parameters that are gathered beside neighbours", 8,
       [](const Case& c) {
         return c.options.has("gather", "side_by_side") && c.options.has("publish", "at_first_use") && c.steps.size() > 1 &&
                c.replicas() > 1 && c.shards() > 1;
       },
       "hfsdp"},
      {"a frozen parameter in a root that is freed, beside other units", 8,
       [](const Case& c) {
         return splits_parameters(c) && (c.options.units == units_some || c.options.units == units_listed) &&
                c.options.of("reshard_after_backward") == 1 && in_some_step(c, [](const StepPlan& s) { return s.frozen != 0; });
       }},
      {"adapters in a transformer whose units are listed and freed", 3,
       [](const Case& c) {
         return splits_parameters(c) && c.model.of_tokens() && c.options.lora > 0 && c.options.units == units_listed &&
                c.options.of("reshard_after_backward") == 1;
       }},
      {"norms of cut heads without sequence parallelism", 3,
       [](const Case& c) {
         return c.model.kind == golden::Model::Kind::llama && c.model.llama.qk_norm && c.tensor_ranks() > 1 &&
                c.options.sequence_parallel == 0;
       }},
      {"a collective that averages over ranks", 3,
       [](const Case& c) { return c.options.divide == divide_collective && c.data_ranks() > 1; }},
      {"a rate of zero under the check of fingerprints", 11,
       [](const Case& c) {
         return c.options.fingerprint == 1 && in_some_step(c, [](const StepPlan& s) { return s.lr_percent == 0; });
       }},
      {"a least scale at which float16 overflows", 5,
       [](const Case& c) {
         return c.steps.size() > 1 && c.options.scale_min >= 16'384 && c.options.loss_scale == c.options.scale_min &&
                (c.options.reduce == fp16 || c.options.compute == fp16);
       }},
      {"a narrow wire of terms that are widened before they are added", 5,
       [](const Case& c) { return c.options.reduce != fp32 && c.options.float32_sums == 1; }},
      {"frozen parameters beside a narrow wire", 8,
       [](const Case& c) {
         return c.options.reduce != fp32 && in_some_step(c, [](const StepPlan& s) { return s.frozen != 0; });
       }},
      {"a second step of units that keep a part", 6,
       [](const Case& c) { return c.steps.size() > 1 && c.options.reshard > 1 && c.shards() > 1; }},
      {"sums that wait beside a narrow wire", 8,
       [](const Case& c) {
         return c.options.reduce != fp32 && in_some_step(c, [](const StepPlan& s) { return s.sync_every > 1 && s.rounds > 1; });
       }},
      {"documents over several ranks", 5,
       [](const Case& c) { return c.context_ranks() > 1 && c.model.llama.document_end >= 0; }},
      {"exchanged heads beside a balanced cut", 6,
       [](const Case& c) { return exchanges_heads(c) && c.options.context_contiguous == 0; }},
      {"exchanged heads that drop out", 4, [](const Case& c) { return exchanges_heads(c) && c.model.dropout() > 0; }},
      {"a balance of experts over parts of sequences", 2,
       [](const Case& c) { return c.context_ranks() > 1 && c.model.llama.experts > 1 && c.model.llama.expert_balance != 0; }},
      {"experts that several ranks share", 9, [](const Case& c) { return expert_ranks(c) > 1; }},
      {"a load of experts that several ranks share", 3,
       [](const Case& c) { return expert_ranks(c) > 1 && in_some_step(c, [](const StepPlan& s) { return s.loads(); }); }},
      {"experts that several ranks share, in units that keep a part", 1,
       [](const Case& c) { return expert_ranks(c) > 1 && c.options.reshard > 1; }},
      {"a collective that averages over the ranks of experts", 1,
       [](const Case& c) { return expert_ranks(c) > 1 && c.options.divide == divide_collective; }},
  };
  return all;
}

}  // namespace

// A default run has 200 cases. Of values that three of them have on average, one run in twenty has none. The least numbers lie
// between those with and without `bring_together`, as of 2026-11-29.
TEST(Together, a_default_run_has_cases_with_each_group_of_values_that_matter_only_together) {
  constexpr int64_t kCases = 2000;
  std::map<std::optional<std::string>, std::vector<Case>> drawn;
  for (const Group& group : groups()) {
    std::vector<Case>& cases = drawn[group.strategy];
    for (int64_t i = std::ssize(cases); i < kCases; ++i)
      cases.push_back(generate(11, i, {.strategy = group.strategy, .above_ten = true}));
    const int64_t count = std::ranges::count_if(cases, group.has);
    EXPECT_GE(count * 200, group.least * kCases) << group.name << ": " << count << " of " << kCases;
  }
}

TEST(Together, a_case_stays_valid_and_keeps_its_mesh_and_strategy) {
  for (int64_t i = 0; i < 500; ++i) {
    const Case before = generate(12, i, {.above_ten = true});
    Case after = before;
    bring_together(Chooser(Draws(static_cast<uint64_t>(i), "test")), after);
    EXPECT_TRUE(is_valid(after)) << after.str();
    EXPECT_EQ(after.mesh, before.mesh);
    EXPECT_EQ(after.strategy, before.strategy);
  }
}

TEST(Together, worlds_above_ten_are_drawn_with_and_without_axes_inside_of_the_model) {
  int64_t plain = 0, tensor = 0, context = 0;
  for (int64_t i = 0; i < 4000; ++i) {
    const Case c = generate(7, i, {.above_ten = true});
    if (c.mesh.size() <= 10) continue;
    ++(c.context_ranks() > 1 ? context : c.tensor_ranks() > 1 ? tensor : plain);
    EXPECT_LE(c.mesh.size(), 14) << c.str();
  }
  EXPECT_GT(plain, 20);
  EXPECT_GT(tensor, 10);
  EXPECT_GT(context, 3);
}
