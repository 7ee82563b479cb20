#include "harness/train.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <exception>
#include <set>
#include <thread>

#include "golden/train.h"
#include "harness/problem.h"
#include "harness/step_difference.h"
#include "harness/step_exchange.h"
#include "harness/train_checkpoint.h"
#include "harness/train_rank.h"
#include "harness/train_world.h"
#include "shardproof/check.h"
#include "shardproof/checkpoint/durable.h"
#include "shardproof/models.h"
#include "shardproof/strategy.h"
#include "shardproof/threads.h"

namespace harness {
namespace {

void require_valid(const TrainOptions& options, const TextData& data) {
  for (const shardproof::Axis& axis : options.mesh.axes())
    SHARD_REQUIRE(axis.name == "dp_shard" || (axis.name == "dp_replicate" && &axis == &options.mesh.axes().front()), "train",
                  "--mesh must have the axes dp_replicate and dp_shard, in that order, or one of them, got '{}'",
                  options.mesh.str());
  shardproof::on_mesh(shardproof::strategy(options.strategy), options.mesh);
  SHARD_REQUIRE(options.mesh.size() <= shardproof::kThreadsWorldMax, "train",
                "--mesh {} has more ranks than can be run as threads; use at most {}", options.mesh.str(),
                shardproof::kThreadsWorldMax);
  SHARD_REQUIRE(options.steps >= 1, "train", "--steps must be at least 1, got {}", options.steps);
  SHARD_REQUIRE(options.clip_norm >= 0, "train", "--clip must not be negative, got {}; 0 does not clip",
                options.clip_norm);
  SHARD_REQUIRE(options.model.vocab >= 256, "train", "a byte-level model needs vocab=256 or more, got {}",
                options.model.vocab);
  SHARD_REQUIRE(options.model.positions >= data.sequence_length(), "train",
                "the model has {} positions, too few for sequences of {}; raise positions or lower --seq",
                options.model.positions, data.sequence_length());
}

golden::Named initial_parameters(const TrainOptions& options) {
  const shardproof::Gpt model = make_model(options);
  golden::Named parameters;
  std::set<const c10::TensorImpl*> seen;  // a tied parameter counts under its first name
  for (const auto& item : model->named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      parameters.emplace_back(item.key(), item.value().detach().clone());
  return parameters;
}

// What decides who holds what, and how sums are taken.
Case as_case(const Stretch& stretch) {
  Case c;
  c.mesh = stretch.mesh;
  c.strategy = stretch.strategy;
  return c;
}

golden::Model golden_model(const TrainOptions& options) {
  golden::Model model;
  model.kind = golden::Model::Kind::gpt;
  model.gpt = options.model;
  return model;
}

uint64_t checksum(const TextData& data, const BatchRule& rule, int64_t step) {
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t rank = 0; rank < rule.ranks(); ++rank)
    for (int64_t round = 0; round < rule.rounds(); ++round) {
      const SequenceRange range = rule.sequences(step, round, rank);
      for (int64_t i = range.begin; i < range.end; ++i)
        for (const uint8_t byte : data.sequence(i)) hash = (hash ^ byte) * 0x100000001b3;
    }
  return hash;
}

golden::Step training_step(const TrainOptions& options, const TextData& data, const Stretch& stretch, int64_t step) {
  const BatchRule rule(options.global_batch, stretch.microbatch, stretch.mesh.size());
  const Case plan = as_case(stretch);
  golden::Step result;
  result.clip_norm = options.clip_norm;
  result.order = {.shards = plan.shards(), .replicas = plan.replicas(), .canonical = stretch.canonical};
  result.reduce_after = reductions(plan, {.rounds = rule.rounds()});
  for (int64_t round = 0; round < rule.rounds(); ++round) {
    result.microbatches.emplace_back();
    for (int64_t rank = 0; rank < rule.ranks(); ++rank)
      result.microbatches.back().push_back(training_microbatch(data, rule, step, round, rank));
  }
  return result;
}

TrainStep summary(const std::vector<RankStep>& ranks, const BatchRule& rule, const TextData& data,
                  int64_t step) {
  TrainStep result{.step = step,
                   .gradient_norm = ranks[0].gradient_norm,
                   .tokens = rule.global_batch() * data.sequence_length(),
                   .data_checksum = checksum(data, rule, step)};
  for (int64_t round = 0; round < rule.rounds(); ++round)
    for (const RankStep& rank : ranks) result.loss += rank.losses[round];
  result.tokens_per_s = static_cast<double>(result.tokens) / ranks[0].seconds;
  return result;
}

}  // namespace

golden::Microbatch training_microbatch(const TextData& data, const BatchRule& rule, int64_t step,
                                       int64_t round, int64_t rank) {
  const int64_t length = data.sequence_length();
  at::Tensor bytes = at::empty({rule.microbatch(), length + 1}, at::kLong);
  int64_t* next = bytes.mutable_data_ptr<int64_t>();
  const SequenceRange range = rule.sequences(step, round, rank);
  for (int64_t i = range.begin; i < range.end; ++i)
    for (const uint8_t byte : data.sequence(i)) *next++ = byte;
  return {bytes.narrow(1, 0, length).contiguous(), bytes.narrow(1, 1, length).contiguous(),
          1.0 / static_cast<double>(rule.global_batch() * length)};
}

TrainResult train(const TrainOptions& options, const TextData& data, const std::function<void(const TrainStep&)>& report,
                  shardproof::ProcessWorld* processes) {
  require_valid(options, data);
  SHARD_REQUIRE(!processes || processes->size() == options.mesh.size(), "train",
                "--mesh {} has {} ranks, and there are {} processes", options.mesh.str(), options.mesh.size(),
                processes->size());
  const BatchRule rule(options.global_batch, options.microbatch, options.mesh.size());
  const TrainHistory history = read_history(options, data);
  at::set_num_threads(1);
  if (processes && processes->rank() != 0) {
    TrainWorld world(options, data, rule, history, processes);
    world.join();
    world.finish();
    return {.first_step = history.first_step};
  }
  // Whether it can be written to had better be known before the training.
  if (const std::string& directory = options.checkpoints.directory; !directory.empty())
    const shardproof::checkpoint::StagedFolder probe(shardproof::checkpoint::system_files(), directory + "/probe");
  std::optional<golden::Trainer> golden;
  if (options.check) golden.emplace(golden_model(options), options.optimizer, initial_parameters(options), golden::SumOrder{});
  const auto golden_step = [&](int64_t step) { return golden->step(training_step(options, data, history.of(step), step)); };

  const Copies copies = copies_of(as_case(history.stretches.back()));
  TrainResult result{.first_step = history.first_step};
  for (int64_t step = 0; golden && step < history.first_step; ++step) golden_step(step);
  TrainWorld world(options, data, rule, history, processes);
  for (int64_t step = history.first_step; step < options.steps && !result.difference; ++step) {
    // The golden step first: it computes while the ranks do.
    std::optional<golden::StepTrace> expected;
    if (golden) expected = golden_step(step);
    const auto ranks = world.take();
    if (!ranks) break;
    if (expected) result.difference = first_difference(*expected, *ranks, copies, &result.values_compared);
    report(summary(*ranks, rule, data, step));
    ++result.steps;
  }
  world.finish();
  return result;
}

}  // namespace harness
