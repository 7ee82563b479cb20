// What the commands do with --device, on the fake device: training from its data to its checkpoints, and which cases are drawn.
#include <gtest/gtest.h>

#include <set>

#include "harness/case/generate.h"
#include "harness/run/run_case.h"
#include "harness/train/train.h"
#include "properties/doubles/fake_device.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"

using namespace harness;

namespace {

std::string text_in(const shardproof::checkpoint::Scratch& scratch) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += "all work and no play, " + std::to_string(i * i) + "\n";
  shardproof::checkpoint::spill(scratch / "text", text);
  return scratch / "text";
}

TrainOptions options_on_device(const std::string& directory) {
  fake_device::install();
  TrainOptions options;
  options.model = parse_model("gpt(layers=1,hidden=16,heads=2,vocab=256,positions=16,tied)");
  options.optimizer = {.kind = golden::Optimizer::Kind::adamw, .lr = 1e-3};
  options.global_batch = 4;
  options.microbatch = 1;
  options.steps = 2;
  options.check = true;
  options.checkpoints.directory = directory;
  options.device = fake_device::device();
  return options;
}

std::vector<double> losses_of(const TrainOptions& options, const TrainingData& text) {
  std::vector<double> losses;
  const TrainResult result = train(options, text, [&](const TrainStep& step) { losses.push_back(step.loss); });
  EXPECT_FALSE(result.difference) << result.difference->str();
  EXPECT_GT(result.values_compared, 0);
  return losses;
}

}  // namespace

TEST(DeviceCommands, training_equals_the_golden_run_on_the_device_and_goes_on_from_its_checkpoint_on_another_mesh_and_device) {
  const shardproof::checkpoint::Scratch scratch;
  const TrainingData text({.paths = {text_in(scratch)}, .sequence_length = 16});
  TrainOptions options = options_on_device(scratch / "run");
  std::vector<double> losses = losses_of(options, text);
  options.steps = 4;
  options.mesh = shardproof::Mesh({{"dp_replicate", 2}, {"dp_shard", 2}});
  options.strategy = "hsdp";
  options.checkpoints.resume = true;
  for (const double loss : losses_of(options, text)) losses.push_back(loss);
  options.steps = 5;
  options.device = at::kCPU;
  for (const double loss : losses_of(options, text)) losses.push_back(loss);
  EXPECT_EQ(losses.size(), 5u);
  EXPECT_LT(losses[1], losses[0]);
}
