// What canonical arithmetic costs: the step of one Llama with it and without, in turns. Usage: bench_canonical [ROUNDS]
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>

#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

constexpr int64_t kSequences = 2, kLength = 256, kSteps = 2;
constexpr LlamaOptions kModel{.layers = 4, .hidden = 256, .heads = 8, .kv_heads = 4, .intermediate = 688, .vocab = 2048};

struct Cost {
  double wall_ms = 0, cpu_ms = 0;  // of a step; processor time of all ranks together
};

Cost now() {
  const auto wall = std::chrono::steady_clock::now().time_since_epoch();
  return {std::chrono::duration<double, std::milli>(wall).count(), 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC};
}

ShardOptions options_of(bool canonical) {
  ShardOptions options{.strategy = strategy("zero3"), .units = by_type<LlamaLayerImpl>()};
  options.gradient_divide = 1;
  if (!canonical) return options;
  options.precision = {.main = at::kFloat, .compute = at::kDouble};
  options.numerics = Numerics::canonical;
  return options;
}

// The same batch, whatever the number of ranks that share it.
Cost step_cost(bool canonical, int64_t ranks) {
  Cost cost;
  run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", ranks}}));
    Llama model(kModel);
    initialize_parameters(*model, 1, 0.02);
    if (canonical) use_canonical_arithmetic(*model);
    Sharded sharded = fully_shard(model.ptr(), comms, options_of(canonical));
    Optimizer optimizer = adamw(sharded, {.lr = 1e-4});
    const at::Tensor tokens =
        (at::arange(kSequences / ranks * kLength, at::kLong) * 31 + comm->rank()).remainder(kModel.vocab).view({-1, kLength});
    const auto step = [&] {
      const at::Tensor logits = call(model, tokens);
      const at::Tensor loss =
          canonical ? canonical_ops::cross_entropy(logits, tokens, kModel.vocab)
                    : at::cross_entropy_loss(logits.view({-1, kModel.vocab}), tokens.view({-1}), {}, at::Reduction::Sum);
      (loss / (kSequences * kLength)).backward();
      optimizer.step();
    };
    step();
    comm->barrier().wait();
    const Cost before = now();
    for (int64_t i = 0; i < kSteps; ++i) step();
    comm->barrier().wait();
    const Cost after = now();
    if (comm->rank() == 0) cost = {(after.wall_ms - before.wall_ms) / kSteps, (after.cpu_ms - before.cpu_ms) / kSteps};
  });
  return cost;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t rounds = argc > 1 ? std::max<int64_t>(1, std::atoll(argv[1])) : 3;
  for (const int64_t ranks : {1, 2}) {
    std::vector<double> plain_cpu, cpu, cpu_ratio, wall_ratio;
    for (int64_t round = 0; round < rounds; ++round) {
      const Cost plain = step_cost(/*canonical=*/false, ranks), canonical = step_cost(/*canonical=*/true, ranks);
      plain_cpu.push_back(plain.cpu_ms);
      cpu.push_back(canonical.cpu_ms);
      cpu_ratio.push_back(canonical.cpu_ms / plain.cpu_ms);
      wall_ratio.push_back(canonical.wall_ms / plain.wall_ms);
    }
    fmt::print(
        "{} ranks: plain {:.0f} ms of processor time a step, canonical {:.0f} ms, {:.1f} times; {:.1f} times by the clock\n",
        ranks, median(plain_cpu), median(cpu), median(cpu_ratio), median(wall_ratio));
  }
}
