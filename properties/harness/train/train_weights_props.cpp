// Training runs that start from the weights of a Hugging Face folder.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "golden/train.h"
#include "harness/case/case.h"
#include "harness/case/network.h"
#include "harness/commands/checkpoint_command.h"
#include "harness/train/train.h"
#include "harness/train/train_rank.h"
#include "harness/train/train_weights.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/threads/threads.h"

using namespace shardproof;
using checkpoint::Scratch;
using harness::TrainingData;
using harness::TrainOptions;
using harness::TrainStep;

namespace {

constexpr int64_t kGlobalBatch = 4, kMicrobatch = 2;

struct Family {
  const char* name;
  const char* model;  // as `train` knows it
};
const std::vector<Family> kFamilies = {
    {"gpt2", "gpt(layers=2,hidden=8,heads=2,vocab=256,positions=12,tied)"},
    {"llama",
     "llama(layers=1,hidden=8,heads=2,kv_heads=1,intermediate=10,vocab=256,positions=12,theta=5e5,rope_factor=4,"
     "rope_positions=40)"},
    {"mistral", "llama(layers=1,hidden=8,heads=2,kv_heads=2,intermediate=6,vocab=256,positions=12,eps=1e-6)"},
    {"qwen2", "llama(layers=2,hidden=8,heads=4,kv_heads=2,intermediate=6,vocab=256,positions=12,tied,qkv_bias,eps=1e-6)"},
    {"qwen3",
     "llama(layers=1,hidden=8,heads=2,kv_heads=1,intermediate=6,vocab=256,positions=12,qk_norm,head_size=6,theta=1e6)"}};

TrainingData text_in(const Scratch& scratch) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += static_cast<char>(1 + (i * i + 7 * i) % 251);
  checkpoint::spill(scratch / "text", text);
  return TrainingData({.paths = {scratch / "text"}, .sequence_length = 7, .vocab = 256});
}

TrainOptions options_of(const golden::Model& model, const std::string& mesh) {
  TrainOptions options;
  options.model = model;
  options.model.canonical = options.canonical = true;
  options.mesh = Mesh::parse(mesh);
  options.optimizer = {.kind = golden::Optimizer::Kind::adamw, .lr = 0.02, .weight_decay = 0.01};
  options.global_batch = kGlobalBatch;
  options.microbatch = kMicrobatch;
  return options;
}

std::vector<TrainStep> steps_of(const TrainOptions& options, const TrainingData& data) {
  std::vector<TrainStep> steps;
  harness::train(options, data, [&](const TrainStep& step) { steps.push_back(step); });
  return steps;
}

// What a run of some steps leaves in run/step_N, and the folder of weights that `checkpoint convert` makes of that.
struct Converted {
  std::string checkpoint, weights;
};

Converted converted_run(const Scratch& scratch, const Family& family, const TrainingData& data, int64_t steps, uint64_t seed) {
  TrainOptions options = options_of(harness::parse_model(family.model), "dp_shard=2");
  options.steps = steps;
  options.seed = seed;
  options.checkpoints.directory = scratch / fmt::format("run{}", seed);
  steps_of(options, data);
  Converted result{fmt::format("{}/step_{}", options.checkpoints.directory, steps), scratch / fmt::format("weights{}", seed)};
  EXPECT_EQ(harness::checkpoint_convert(
                {.one = result.checkpoint, .two = result.weights, .to = "safetensors", .family = family.name}),
            0);
  return result;
}

golden::Named parameters_in(const std::string& folder, const golden::Model& model) {
  golden::Named parameters;
  run_threads(1, [&](const std::shared_ptr<Comm>& comm) {
    const harness::Network network = harness::make_network(model);
    Sharded sharded =
        fully_shard(network.module, std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 1}})), {.strategy = strategy("ddp")});
    checkpoint::load(folder, sharded, nullptr);
    const auto values = sharded.gather_main_parameters();
    for (const auto& [name, shape] : golden::parameter_shapes(model)) parameters.emplace_back(name, values.at(name).clone());
  });
  return parameters;
}

// Of the unsharded run that starts from these parameters.
std::vector<golden::StepTrace> golden_steps(const TrainOptions& options, const golden::Named& parameters,
                                            const TrainingData& data) {
  golden::Trainer trainer(options.model, options.optimizer, parameters, {.canonical = true});
  const harness::BatchRule rule(kGlobalBatch, kMicrobatch, 1);
  std::vector<golden::StepTrace> traces;
  for (int64_t s = 0; s < options.steps; ++s) {
    golden::Step step;
    for (int64_t round = 0; round < rule.rounds(); ++round)
      step.microbatches.push_back({harness::training_microbatch(data, rule, s, round, 0)});
    step.clip_norm = options.clip_norm;
    traces.push_back(trainer.step(step));
  }
  return traces;
}

void expect_same_losses(const std::vector<TrainStep>& one, const std::vector<TrainStep>& two, const std::string& what) {
  ASSERT_EQ(one.size(), two.size()) << what;
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].loss, two[i].loss) << what << ", step " << one[i].step;
    EXPECT_EQ(one[i].gradient_norm, two[i].gradient_norm) << what << ", step " << one[i].step;
  }
}

class TrainWeights : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

}  // namespace

TEST_F(TrainWeights, a_run_from_them_has_the_bits_of_one_from_the_parameters_that_were_converted) {
  for (const Family& family : kFamilies) {
    const Scratch scratch;
    const TrainingData data = text_in(scratch);
    const Converted there = converted_run(scratch, family, data, 2, 3);
    const golden::Model model = harness::model_of_weights(there.weights);
    EXPECT_EQ(harness::str(model), harness::str(harness::parse_model(family.model)));
    for (const char* mesh : {"dp_shard=1", "dp_shard=2", "tp=2", "dp_shard=2,tp=2"}) {
      TrainOptions options = options_of(model, mesh);
      options.weights = there.weights;
      options.steps = 3;
      const auto expected = golden_steps(options, parameters_in(there.checkpoint, options.model), data);
      const auto found = steps_of(options, data);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t s = 0; s < found.size(); ++s) {
        double loss = 0;
        for (const auto& round : expected[s].losses) loss += round[0];
        EXPECT_EQ(found[s].loss, loss) << family.name << " on " << mesh << ", step " << s;
        EXPECT_EQ(found[s].gradient_norm, expected[s].gradient_norm) << family.name << " on " << mesh << ", step " << s;
      }
    }
  }
}

TEST_F(TrainWeights, a_checkpoint_wins_over_them) {
  const Scratch scratch;
  const TrainingData data = text_in(scratch);
  const Converted one = converted_run(scratch, kFamilies[3], data, 1, 3),
                  other = converted_run(scratch, kFamilies[3], data, 1, 4);
  TrainOptions options = options_of(harness::model_of_weights(one.weights), "dp_shard=2");
  options.weights = one.weights;
  options.steps = 4;
  const auto whole = steps_of(options, data);
  options.checkpoints.directory = scratch / "resumed";
  options.steps = 2;
  steps_of(options, data);
  options.checkpoints.resume = true;
  options.steps = 4;
  const std::vector<TrainStep> last(whole.begin() + 2, whole.end());
  const auto copied = [&](const char* name) {
    std::filesystem::copy(scratch / "resumed", scratch / name, std::filesystem::copy_options::recursive);
    options.checkpoints.directory = scratch / name;
  };
  copied("with_others");
  options.weights = other.weights;
  expect_same_losses(steps_of(options, data), last, "with other weights beside it");
  copied("elsewhere");
  options.mesh = Mesh::parse("tp=2");
  expect_same_losses(steps_of(options, data), last, "on another mesh");
  copied("without");
  options.weights.clear();
  std::filesystem::remove_all(one.weights);
  expect_same_losses(steps_of(options, data), last, "without any");
}

TEST_F(TrainWeights, the_golden_run_starts_from_them_before_and_after_a_resume) {
  const Scratch scratch;
  const TrainingData data = text_in(scratch);
  const Converted there = converted_run(scratch, kFamilies[0], data, 1, 3);
  TrainOptions options = options_of(harness::model_of_weights(there.weights), "dp_shard=2");
  options.weights = there.weights;
  options.check = true;
  options.steps = 2;
  options.checkpoints.directory = scratch / "checked";
  const auto ignore = [](const TrainStep&) {};
  const harness::TrainResult first = harness::train(options, data, ignore);
  EXPECT_FALSE(first.difference) << first.difference->str();
  EXPECT_GT(first.values_compared, 0);
  options.steps = 3;
  options.weights.clear();
  options.checkpoints.resume = true;
  EXPECT_FALSE(harness::train(options, data, ignore).difference);
  std::filesystem::remove_all(there.weights);
  options.steps = 4;
  expect_error([&] { harness::train(options, data, ignore); }, {"began with the weights", there.weights, "leave out --check"});
}

TEST_F(TrainWeights, what_is_no_such_folder_is_refused) {
  const Scratch scratch;
  const TrainingData data = text_in(scratch);
  const Converted there = converted_run(scratch, kFamilies[1], data, 1, 3);
  const golden::Model model = harness::model_of_weights(there.weights);
  expect_error([&] { harness::model_of_weights(scratch / "nowhere"); }, {"there is no such folder", "nowhere"});
  expect_error([&] { harness::model_of_weights(scratch.path()); }, {"config.json"});
  const auto said = [&](const std::string& text) { harness::require_same_model(text, model, there.weights + "/config.json"); };
  expect_error([&] { said("gpt(layers=1)"); }, {"--model is a gpt", "config.json is of a llama"});
  expect_error([&] { said("llama(layers=1,hidden=16)"); }, {"--model has hidden=16", "config.json has hidden=8"});
  expect_error([&] { said("llama(layers=1,tied)"); }, {"--model has tied", "config.json has the usual tied"});
  EXPECT_NO_THROW(said("llama(layers=1,rope_factor=4)"));
  TrainOptions options = options_of(model, "dp_shard=2");
  options.weights = there.weights;
  options.steps = 1;
  options.model.llama.intermediate = 11;  // as if the weights were not those of their config.json
  expect_error([&] { steps_of(options, data); }, {"down_proj.weight", "11", "10"});
  std::filesystem::remove(there.weights + "/model.safetensors");
  options.model.llama.intermediate = 10;
  expect_error([&] { steps_of(options, data); }, {there.weights});
}

TEST(Weights, of_experts_get_what_keeps_them_busy_from_the_model_that_is_given) {
  const golden::Model there = harness::parse_model("llama(layers=2,experts=4,top_k=1)");
  const std::string more = "expert_balance=0.5,expert_balance_over=step,expert_z=0.25,expert_capacity=2";
  const std::string text = "llama(experts=4," + more + ")";
  const golden::Model busy = harness::with_busy_experts(there, text);
  harness::require_same_model(text, busy, "config.json");
  EXPECT_EQ(busy.llama.experts_per_token, 1);
  EXPECT_EQ(busy.llama.expert_balance, 0.5);
  EXPECT_EQ(busy.llama.balance_over, golden::Llama::BalanceOver::step);
  EXPECT_EQ(busy.llama.expert_z, 0.25);
  EXPECT_EQ(busy.llama.expert_capacity, 2);
  const std::string rate = "llama(experts=4,expert_bias=0.125)";
  expect_error([&] { harness::require_same_model(rate, harness::with_busy_experts(there, rate), "config.json"); },
               {"--model has expert_bias=0.125", "config.json has the usual expert_bias"});
  golden::Model biased = there;
  biased.llama.expert_lean = 1;
  EXPECT_EQ(harness::with_busy_experts(biased, rate).llama.expert_bias, 0.125);
}

TEST_F(TrainWeights, text_is_not_given_to_a_model_of_more_tokens_than_bytes) {
  const Scratch scratch;
  golden::Model model = harness::parse_model("gpt(layers=1,hidden=8,heads=2,vocab=300,positions=12)");
  TrainOptions options = options_of(model, "dp_shard=1");
  options.weights = scratch.path();
  checkpoint::spill(scratch / "config.json",
                    R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 300, "n_positions": 12})");
  const TrainingData data = text_in(scratch);
  expect_error([&] { harness::validate(options, data); }, {"300 tokens", "text has bytes", "--token-type", "there is no"});
  checkpoint::spill(scratch / "tokenizer.json", "{}");
  expect_error([&] { harness::validate(options, data); },
               {"--token-type, which " + (scratch / "tokenizer.json") + " makes of text"});
}
