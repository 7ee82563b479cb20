#include "harness/train/train.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <thread>

#include "golden/train.h"
#include "harness/case/mesh_order.h"
#include "harness/case/model_fields.h"
#include "harness/case/parallel.h"
#include "harness/case/problem.h"
#include "harness/compare/step_difference.h"
#include "harness/compare/step_exchange.h"
#include "harness/train/stop_request.h"
#include "harness/train/train_case.h"
#include "harness/train/train_checkpoint.h"
#include "harness/train/train_rank.h"
#include "harness/train/train_weights.h"
#include "harness/train/train_world.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/threads/threads.h"
#include "shardproof/sharding/fully_shard.h"

namespace harness {
namespace {

void require_axes(const shardproof::Mesh& mesh) {
  for (const shardproof::Axis& axis : mesh.axes())
    SHARD_REQUIRE(std::ranges::find(mesh_axes(), axis.name) != mesh_axes().end(), "train",
                  "--mesh must have axes out of {}, got '{}'", fmt::join(mesh_axes(), ", "), mesh.str());
}

void require_model(const golden::Model& model, const TrainingData& data) {
  SHARD_REQUIRE(model.of_tokens() && model.dropout() == 0, "train",
                "--model must be gpt(...) or llama(...), without dropout, got {}", str(model));
  SHARD_REQUIRE(model.vocab() >= 256 || data.files().type() != TokenType::uint8, "train",
                "a byte-level model needs vocab=256 or more, got {}", model.vocab());
  SHARD_REQUIRE(model.positions() >= data.sequence_length(), "train",
                "the model has {} positions, too few for sequences of {}; raise positions or lower --seq", model.positions(),
                data.sequence_length());
}

void require_valid(const TrainOptions& options, const Case& c, const TrainingData& data) {
  require_axes(options.mesh);
  shardproof::on_mesh(shardproof::strategy(options.strategy), shardproof::data_parallel_mesh(options.mesh));
  SHARD_REQUIRE(options.mesh.size() <= shardproof::kThreadsWorldMax, "train",
                "--mesh {} has more ranks than can be run as threads; use at most {}", options.mesh.str(),
                shardproof::kThreadsWorldMax);
  SHARD_REQUIRE(options.steps >= 1, "train", "--steps must be at least 1, got {}", options.steps);
  SHARD_REQUIRE(options.clip_norm >= 0, "train", "--clip must not be negative, got {}; 0 does not clip", options.clip_norm);
  validate(options.schedule);
  for (const std::string& text : options.sharding)
    for (const char* own : {"numerics", "gradient_divide", "divide", "divide_by_tokens", "reduce_replicas_every_microbatch"})
      SHARD_REQUIRE(text.substr(0, text.find('=')) != own, "train",
                    "--set {}: train decides how sums are taken and divided; --canonical is its choice", text);
  SHARD_REQUIRE(options.validate_every >= 0 && options.validation_sequences_max >= 0, "train",
                "--validate-every and --validation-sequences must not be negative, got {} and {}", options.validate_every,
                options.validation_sequences_max);
  const bool wants_validation = options.validate_every > 0 || options.validation_sequences_max > 0;
  SHARD_REQUIRE(!wants_validation || data.validation_sequences() > 0, "train",
                "--validate-every and --validation-sequences need --validation-part or --validation-data");
  if (!options.weights.empty() && data.files().type() == TokenType::uint8)
    require_bytes(options.model, options.weights, "train", "Give --data token files, with --token-type");
  require_model(options.model, data);
  SHARD_REQUIRE(options.canonical || !options.model.canonical, "train", "--arithmetic canonical needs --canonical");
  SHARD_REQUIRE(!options.bf16 || !options.model.canonical, "train",
                "--arithmetic canonical computes in float64: leave out --precision bf16");
  SHARD_REQUIRE(!options.check || c.microbatch_ranks() == 1 || options.model.canonical, "train",
                "--mesh {} cuts sums inside of the model, and the golden run adds whole ones: add --arithmetic canonical, or "
                "leave --check out",
                options.mesh.str());
}

// The golden run begins with the first step, also where the ranks go on from a checkpoint.
void require_golden_can_repeat(const TrainOptions& options, const TrainHistory& history) {
  if (!options.check || options.model.canonical) return;
  for (const Stretch& stretch : history.stretches)
    SHARD_REQUIRE(train_case(options, stretch).microbatch_ranks() == 1, "train",
                  "steps up to {} were trained on --mesh {} without --arithmetic canonical. That mesh cuts sums inside of the "
                  "model, so the golden run cannot repeat these steps: leave --check out",
                  stretch.end, stretch.mesh.str());
}

uint64_t checksum(const TrainingData& data, const BatchRule& rule, int64_t step) {
  const int64_t bits = 8 * bytes_of_token(data.files().type());
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t rank = 0; rank < rule.ranks(); ++rank)
    for (int64_t round = 0; round < rule.rounds(); ++round) {
      const SampleRange range = rule.positions(step, round, rank);
      for (int64_t i = range.begin; i < range.end; ++i)
        for (const uint32_t token : data.sequence(i))
          for (int64_t shift = 0; shift < bits; shift += 8) hash = (hash ^ ((token >> shift) & 0xff)) * 0x100000001b3;
    }
  return hash;
}

golden::Step training_step(const TrainOptions& options, const TrainingData& data, const Stretch& stretch, int64_t step) {
  const Case plan = train_case(options, stretch);
  const BatchRule rule(options.global_batch, stretch.microbatch, plan.data_ranks());
  golden::Step result;
  result.clip_norm = options.clip_norm;
  result.lr_factor = lr_factor(options.schedule, step);
  result.order = {.shards = plan.shards(), .replicas = plan.replicas(), .canonical = stretch.canonical};
  result.reduce_after = reductions(plan, {.rounds = rule.rounds()});
  for (int64_t round = 0; round < rule.rounds(); ++round) {
    result.microbatches.emplace_back();
    for (int64_t rank = 0; rank < rule.ranks(); ++rank)
      result.microbatches.back().push_back(training_microbatch(data, rule, step, round, rank));
  }
  return result;
}

// Of the ranks that train on the same microbatches the first, in the order of the microbatches.
std::vector<const RankStep*> one_of_each(const std::vector<RankStep>& ranks, const Copies& copies, int64_t data_ranks) {
  std::vector<const RankStep*> ones(static_cast<size_t>(data_ranks));
  for (size_t rank = ranks.size(); rank-- > 0;) ones[copies.data_rank(rank)] = &ranks[rank];
  return ones;
}

// The sum of one number of each microbatch, in their order.
template <class Losses>
double sum_of(const std::vector<const RankStep*>& ranks, int64_t rounds, Losses losses_of) {
  double sum = 0;
  for (int64_t round = 0; round < rounds; ++round)
    for (const RankStep* rank : ranks)
      if (const std::vector<double>& losses = losses_of(*rank); round < std::ssize(losses)) sum += losses[round];
  return sum;
}

TrainStep summary(const std::vector<RankStep>& ranks, const Copies& copies, const BatchRule& rule, const TrainOptions& options,
                  const TrainingData& data, int64_t step) {
  TrainStep result{.step = step,
                   .learning_rate = options.optimizer.lr * lr_factor(options.schedule, step),
                   .gradient_norm = ranks[0].gradient_norm,
                   .parameter_norm = ranks[0].parameter_norm,
                   .zero_gradients = ranks[0].zero_gradients,
                   .tokens = rule.global_batch() * data.sequence_length(),
                   .stopped = ranks[0].stopped,
                   .data_checksum = checksum(data, rule, step)};
  const auto trained = [](const RankStep& rank) -> const auto& {
    return rank.losses;
  };
  const auto validated = [](const RankStep& rank) -> const auto& {
    return rank.validation_losses;
  };
  const std::vector<const RankStep*> ones = one_of_each(ranks, copies, rule.ranks());
  result.loss = sum_of(ones, rule.rounds(), trained);
  if (!ranks[0].validation_losses.empty())
    result.validation_loss = sum_of(ones, validation_rule(options, data, rule.ranks()).rounds(), validated);
  for (const RankStep& rank : ranks) result.held_bytes = std::max(result.held_bytes, rank.held_bytes);
  result.tokens_per_s = static_cast<double>(result.tokens) / ranks[0].seconds;
  return result;
}

// Between the losses of held-out microbatches and the golden run's, in every bit; of those before a request to stop.
FoundDifference validation_difference(const golden::Trainer& golden, const std::vector<RankStep>& ranks, const Copies& copies,
                                      const ValidationRule& rule, const TrainingData& data, int64_t* compared) {
  for (int64_t round = 0; round < rule.rounds(); ++round)
    for (int64_t data_rank = 0; data_rank < rule.ranks(); ++data_rank) {
      const SampleRange samples = rule.samples(round, data_rank);
      if (samples.begin == samples.end || stop_requested()) continue;
      const double expected = golden.loss(validation_microbatch(data, rule, samples));
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        if (copies.data_rank(rank) != static_cast<size_t>(data_rank)) continue;
        ++*compared;
        if (const double got = ranks[rank].validation_losses.at(round); got != expected)
          return number_on(rank, fmt::format("validation loss of sequences {} to {}", samples.begin, samples.end - 1),
                           fmt::format("golden {:.17g}, sharded {:.17g}", expected, got));
      }
    }
  return {};
}

void require_experts_can_be_shared(const TrainOptions& options, const Case& c) {
  require_expert_ranks(c, "train");
  if (options.expert_ranks == 1) return;
  const bool adds_rounds_first = shardproof::accumulates_before_reducing(shardproof::strategy(c.strategy)) &&
                                 options.global_batch > options.microbatch * c.data_ranks();
  SHARD_REQUIRE(!options.check || options.model.canonical || (expert_ranks(c) == c.shards() && !adds_rounds_first), "train",
                "--check adds gradients along dp_shard first and after every microbatch, as {} ranks that share experts do "
                "where they are "
                "all of dp_shard={} and the strategy is such as zero2 or zero3. With --arithmetic canonical no order matters",
                options.expert_ranks, c.shards());
}

}  // namespace

void validate(const TrainOptions& options, const TrainingData& data) {
  const TrainHistory history = read_history(options, data);
  const Case c = train_case(options, history.stretches.back());
  require_valid(options, c, data);
  require_experts_can_be_shared(options, c);
  require_golden_can_repeat(options, history);
  const BatchRule rule(options.global_batch, options.microbatch, c.data_ranks());
  require_rounds(options.model, rule.rounds(), "train",
                 fmt::format("set --microbatch {}, with which a step has one, or take the balance over sequences",
                             options.global_batch / c.data_ranks()));
}

TrainResult train(const TrainOptions& options, const TrainingData& data, const std::function<void(const TrainStep&)>& report,
                  shardproof::ProcessWorld* processes) {
  validate(options, data);
  const TrainHistory history = read_history(options, data);
  const Case c = train_case(options, history.stretches.back());
  SHARD_REQUIRE(!processes || processes->size() == options.mesh.size(), "train",
                "--mesh {} has {} ranks, and there are {} processes", options.mesh.str(), options.mesh.size(),
                processes->size());
  const BatchRule rule(options.global_batch, options.microbatch, c.data_ranks());
  at::set_num_threads(1);
  if (processes && processes->rank() != 0) {
    TrainWorld world(options, data, rule, history, processes);
    world.join();
    world.finish();
    return {.first_step = history.first_step};
  }
  std::optional<golden::Trainer> golden;
  if (options.check) {
    const InitialValues initial = initial_values(options, history);
    golden.emplace(options.model, options.optimizer, initial.parameters, golden::SumOrder{},
                   golden::Precision{.compute = options.bf16 ? at::kBFloat16 : at::kFloat}, golden::LossScaling{}, at::kFloat,
                   /*jitter=*/0, options.device, /*ema=*/0, initial.buffers);
  }
  const auto golden_step = [&](int64_t step) { return golden->step(training_step(options, data, history.of(step), step)); };

  const Copies copies = copies_of(c);
  TrainResult result{.first_step = history.first_step};
  for (int64_t step = 0; golden && step < history.first_step && !stop_requested(); ++step) golden_step(step);
  TrainWorld world(options, data, rule, history, processes);
  SlowRanks slow;
  for (int64_t step = history.first_step; step < options.steps && !result.difference && !result.stopped; ++step) {
    // The golden step first: it computes while the ranks do.
    std::optional<golden::StepTrace> expected;
    if (golden) expected = golden_step(step);
    const auto ranks = world.take();
    if (!ranks) {  // they ended before a step, as they were asked to, or `finish` throws what ended them
      result.stopped = true;
      break;
    }
    if (expected) result.difference = first_difference(*expected, *ranks, copies, &result.values_compared);
    if (expected && !result.difference && !ranks->front().validation_losses.empty())
      result.difference = validation_difference(*golden, *ranks, copies, validation_rule(options, data, rule.ranks()), data,
                                                &result.values_compared);
    TrainStep done = summary(*ranks, copies, rule, options, data, step);
    std::vector<double> computed;
    for (const RankStep& rank : *ranks) computed.push_back(rank.compute_seconds);
    done.slow_ranks = slow.add(computed);
    report(done);
    result.stopped = ranks->front().stopped;
    ++result.steps;
  }
  world.finish();
  return result;
}

}  // namespace harness
