#include "harness/train/sample.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "harness/case/network.h"
#include "harness/case/random.h"
#include "harness/train/train_weights.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/threads/threads.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/meta_init.h"
#include "shardproof/sharding/fully_shard.h"

namespace harness {
namespace {

void require_valid_sample(const SampleOptions& options) {
  const golden::Model& model = options.saved.model;
  SHARD_REQUIRE(!options.prompt.empty(), "sample", "the prompt must have at least one token");
  for (const int64_t token : options.prompt)
    SHARD_REQUIRE(token >= 0 && token < model.vocab(), "sample", "token {} of the prompt is none of the model's {}", token,
                  model.vocab());
  SHARD_REQUIRE(options.length >= 0, "sample", "--length must not be negative, got {}", options.length);
  const int64_t seen = std::ssize(options.prompt) + options.length - 1;
  SHARD_REQUIRE(!options.saved.are_weights || seen <= model.positions(), "sample",
                "the prompt and --length {} come to {} tokens of context, and the model of {} attends within {}: beyond them "
                "each token would be drawn from other tokens than its package draws it from. Ask for fewer",
                options.length, seen, options.saved.folder, model.positions());
  SHARD_REQUIRE(options.temperature >= 0 && std::isfinite(options.temperature), "sample",
                "--temperature must be 0 or above, got {}", options.temperature);
  SHARD_REQUIRE(options.top_k >= 0, "sample", "--top-k must be at least 1, or 0 for all, got {}", options.top_k);
  for (const shardproof::Axis& axis : options.mesh.axes())
    SHARD_REQUIRE(axis.name.starts_with("dp_") || axis.size == 1, "sample",
                  "--mesh {}: parameters are cut along dp_replicate and dp_shard here, whatever mesh they were trained on",
                  options.mesh.str());
}

std::vector<double> last_logits(const Network& network, const SampleOptions& options, const std::vector<int64_t>& tokens) {
  const auto seen = std::min(std::ssize(tokens), options.saved.model.positions());
  const at::Tensor input =
      at::tensor(at::IntArrayRef(tokens).slice(tokens.size() - static_cast<size_t>(seen)), at::kLong).reshape({1, seen});
  golden::Microbatch data{input.to(options.device), input.to(options.device)};
  const at::Tensor logits = network.output(data)[0][-1].to(at::kCPU, at::kDouble).contiguous();
  return {logits.const_data_ptr<double>(), logits.const_data_ptr<double>() + logits.numel()};
}

void sample_rank(const SampleOptions& options, const std::shared_ptr<shardproof::Comm>& comm,
                 const std::function<void(int64_t token)>& put) {
  const auto comms = std::make_shared<shardproof::MeshComm>(comm, options.mesh);
  const Network network = [&] {
    const shardproof::MetaInit meta;
    return make_network(options.saved.model);
  }();
  shardproof::ShardOptions shard{.strategy = shardproof::strategy(options.strategy),
                                 .units = shardproof::by_type<shardproof::GptBlockImpl, shardproof::LlamaLayerImpl>()};
  fill_shards_later(shard, options.device);
  shardproof::Sharded sharded = fully_shard(network.module, comms, shard);
  if (options.saved.are_weights)
    load_weights_of(options.saved.folder, sharded);
  else
    shardproof::checkpoint::load(options.saved.folder, sharded, nullptr);
  const at::NoGradGuard no_grad;
  std::vector<int64_t> tokens = options.prompt;
  for (int64_t i = 0; i < options.length; ++i) {
    const double unit = Draws(options.seed, "sample").unit(i);
    at::Tensor token =
        at::tensor({drawn_token(last_logits(network, options, tokens), options.temperature, options.top_k, unit)}, at::kLong);
    comm->broadcast(token, 0).wait();
    tokens.push_back(token.item<int64_t>());
    if (comm->rank() == 0) put(tokens.back());
  }
}

}  // namespace

int64_t drawn_token(const std::vector<double>& logits, double temperature, int64_t top_k, double unit) {
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  if (temperature == 0) return order.front();
  if (top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(top_k)));
  std::vector<double> sums;
  double sum = 0;
  for (const int64_t token : order) sums.push_back(sum += std::exp((logits[token] - logits[order.front()]) / temperature));
  const auto found = std::ranges::find_if(sums, [&](double up_to) { return up_to > unit * sum; });
  return order[std::min(static_cast<size_t>(found - sums.begin()), order.size() - 1)];
}

void sample(const SampleOptions& options, const std::function<void(int64_t token)>& put, shardproof::ProcessWorld* processes) {
  require_valid_sample(options);
  SHARD_REQUIRE(!processes || processes->size() == options.mesh.size(), "sample",
                "--mesh {} has {} ranks, and there are {} processes", options.mesh.str(), options.mesh.size(),
                processes->size());
  const auto on_a_rank = [&](const std::shared_ptr<shardproof::Comm>& comm) {
    at::set_num_threads(1);
    sample_rank(options, comm, put);
  };
  if (processes)
    processes->run(on_a_rank);
  else
    shardproof::run_threads(options.mesh.size(), on_a_rank, {.device = options.device});
}

}  // namespace harness
