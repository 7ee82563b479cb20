// One training run for the tests beside PyTorch:
// checkpoint_driver MESH STRATEGY BEGIN END [optimizer muon] [load DIR] [save DIR]
// It trains the model of ci/tests/checkpoint_training_peers.py from step BEGIN to END by AdamW, or its matrices by Muon, and
// prints the loss of each step, one a line. It loads before the first step and saves after the last.
#include <ATen/ATen.h>

#include <cstdio>
#include <map>

#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/shardproof.h"

namespace {

using namespace shardproof;

constexpr int64_t kSamples = 4;  // of a step

struct Arguments {
  std::string mesh, strategy;
  int64_t begin = 0, end = 0;
  std::map<std::string, std::string> options;
};

void run(const Arguments& arguments, std::shared_ptr<Comm> comm) {
  Mlp model(MlpOptions{.widths = {6, 12, 4}});
  initialize_parameters(*model, 3, 0.4);
  const bool by_muon = arguments.options.contains("optimizer");
  Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh::parse(arguments.mesh)),
                                {.strategy = strategy(arguments.strategy),
                                 .granularity = by_muon ? Granularity::tensor : Granularity::element});
  Optimizer optimizer = by_muon ? muon(sharded, {.lr = 0.02, .momentum = 0.9, .weight_decay = 0.1}, {.lr = 0.01})
                                : adamw(sharded, {.lr = 0.01});
  if (const auto from = arguments.options.find("load"); from != arguments.options.end())
    checkpoint::load(from->second, sharded, &optimizer);
  const int64_t per_rank = kSamples / comm->size();
  for (int64_t step = arguments.begin; step < arguments.end; ++step) {
    const at::Tensor first = at::arange(per_rank, at::kFloat) + static_cast<double>(step * kSamples + comm->rank() * per_rank);
    const at::Tensor x = (first.unsqueeze(1) + at::arange(6, at::kFloat)).cos();
    const at::Tensor loss = call(model, x).square().sum(1).mean();
    loss.backward();
    optimizer.step();
    at::Tensor sum = loss.detach().to(at::kDouble).view({1});
    comm->all_reduce(sum, Reduce::sum).wait();
    if (comm->rank() == 0) std::printf("%.17g\n", sum.item<double>() / static_cast<double>(comm->size()));
  }
  if (const auto to = arguments.options.find("save"); to != arguments.options.end())
    checkpoint::save(to->second, sharded, &optimizer, {.step = arguments.end});
}

}  // namespace

int main(int count, char** values) {
  if (count < 5 || count % 2 == 0) return 2;
  Arguments arguments{values[1], values[2], std::stoll(values[3]), std::stoll(values[4]), {}};
  for (int i = 5; i < count; i += 2) arguments.options[values[i]] = values[i + 1];
  run_threads(Mesh::parse(arguments.mesh).size(), [&](std::shared_ptr<Comm> comm) { run(arguments, comm); });
}
