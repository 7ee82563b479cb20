// A model of one's own, sharded, and a check that it trains the same on every mesh. docs/howto/shard_my_model.md explains it.
#include <ATen/ATen.h>
#include <shardproof/shardproof.h>

#include <map>
#include <memory>
#include <string>

using namespace shardproof;

namespace {

// Modules as anybody writes them for LibTorch. Parts are entered through `call`.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  at::Tensor forward(at::Tensor x) { return x + call(down, call(up, x).tanh()); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width)
      : in(register_module("in", torch::nn::Linear(1, width))),
        first(register_module("first", Block(width))),
        second(register_module("second", Block(width))),
        out(register_module("out", torch::nn::Linear(width, 1))) {}
  at::Tensor forward(at::Tensor x) { return call(out, call(second, call(first, call(in, x)))); }
  torch::nn::Linear in;
  Block first, second;
  torch::nn::Linear out;
};
TORCH_MODULE(Net);

constexpr int64_t kMicrobatches = 4, kSamples = 16, kSteps = 20;

// Trains on all microbatches in every step, however many ranks share them, and returns the whole parameters.
std::map<std::string, at::Tensor> train(const Mesh& mesh, const std::string& strategy_name) {
  std::map<std::string, at::Tensor> trained;
  run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
    Net model(32);
    initialize_parameters(*model, /*seed=*/1, /*standard_deviation=*/0.3);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, mesh),
                                  {.strategy = strategy(strategy_name),
                                   .units = by_type<BlockImpl>(),
                                   .numerics = Numerics::canonical,
                                   .gradient_divide = 1});
    Optimizer optimizer = adamw(sharded, {.lr = 0.01});
    const int64_t rounds = kMicrobatches / mesh.size();
    for (int64_t step = 0; step < kSteps; ++step) {
      for (int64_t round = 0; round < rounds; ++round) {
        const int64_t begin = comm->rank() * rounds + round;
        const at::Tensor x = at::linspace(begin, begin + 1, kSamples).unsqueeze(1);
        sharded.set_last_microbatch(round + 1 == rounds);
        ((call(model, x) - x.mul(2).sin()).square().sum() / (kMicrobatches * kSamples)).backward();
      }
      sharded.clip_gradients(1.0);
      optimizer.step();
    }
    const auto whole = sharded.gather_main_parameters();
    if (comm->rank() == 0) trained = whole;
  });
  return trained;
}

}  // namespace

int main() {
  const auto alone = train(Mesh({{"dp_shard", 1}}), "zero3");
  const auto same = [&](const Mesh& mesh, const std::string& strategy_name) {
    for (const auto& [name, value] : train(mesh, strategy_name))
      if (!value.equal(alone.at(name))) {
        fmt::print("{} on {}: {} differs\n", strategy_name, mesh.str(), name);
        return false;
      }
    fmt::print("{} on {}: every bit of {} parameters is the same\n", strategy_name, mesh.str(), alone.size());
    return true;
  };
  const bool held = same(Mesh({{"dp_shard", 4}}), "zero3") && same(Mesh({{"dp_shard", 2}}), "zero1") &&
                    same(Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}), "hsdp");
  return held ? 0 : 1;
}
