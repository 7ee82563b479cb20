// A block of one's own in canonical arithmetic: it trains to the same bits on one rank, on two along dp_shard and on two along
// tp. docs/canonical.md explains it.
#include <ATen/ATen.h>
#include <shardproof/shardproof.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

using namespace shardproof;

namespace {

// down(silu(gate(x)) up(x)) + x + shift
struct GatedImpl : torch::nn::Module, CanonicalPart {
  GatedImpl(int64_t width, int64_t inner)
      : gate(register_module("gate", Linear(width, inner))),
        up(register_module("up", Linear(width, inner))),
        down(register_module("down", Linear(inner, width))),
        shift(register_parameter("shift", at::zeros({width}))) {}

  at::Tensor forward(at::Tensor x) {
    const at::Tensor open = call(gate, x), inside = call(up, x);
    if (!is_canonical()) return call(down, at::silu(open) * inside) + x + shift;
    const at::Tensor out = call(down, canonical_ops::silu(open) * inside) + x;
    return canonical_ops::add_bias(out, shift, canonical_name());  // the gradient of `shift` is a sum over samples
  }

  Linear gate, up, down;  // those of models.h are parts already
  at::Tensor shift;
};
TORCH_MODULE(Gated);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : in(register_module("in", Linear(1, 8))),
        block(register_module("block", Gated(8, 24))),
        out(register_module("out", Linear(8, 1))) {}
  at::Tensor forward(at::Tensor x) { return call(out, call(block, call(in, x))); }
  Linear in;
  Gated block;
  Linear out;
};
TORCH_MODULE(Net);

const ParallelPlan kPlan{
    .styles = {{"block.gate", ColumnParallel{}}, {"block.up", ColumnParallel{}}, {"block.down", RowParallel{}}}};

// Fits a sine on 32 samples, which the ranks along dp_shard share, and returns the whole parameters.
std::map<std::string, at::Tensor> train(int64_t data_ranks, int64_t tensor_ranks) {
  const Mesh mesh({{"dp_shard", data_ranks}, {"tp", tensor_ranks}});
  std::map<std::string, at::Tensor> trained;
  run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, mesh);
    Net model;
    initialize_parameters(*model, /*seed=*/1, /*standard_deviation=*/0.3);
    use_canonical_arithmetic(*model);  // first
    std::optional<TensorParallel> parallel;
    if (tensor_ranks > 1) parallel = parallelize(model.ptr(), comms, kPlan);
    Sharded sharded = fully_shard(model.ptr(), comms,
                                  {.units = by_type<GatedImpl>(),
                                   .precision = {.main = at::kFloat, .compute = at::kDouble},
                                   .numerics = Numerics::canonical,
                                   .gradient_divide = 1});
    Optimizer optimizer = adamw(sharded, {.lr = 0.01});
    const at::Tensor samples = (at::arange(32, at::kDouble) / 8 - 2).unsqueeze(1);
    const int64_t each = 32 / data_ranks;
    const at::Tensor x = samples.narrow(0, comms->along({"dp_shard"}).rank() * each, each);
    for (int step = 1; step <= 50; ++step) {
      const at::Tensor loss = canonical_ops::squared_error(call(model, x), x.mul(2).sin());
      loss.backward();
      optimizer.step();
    }
    const auto whole = sharded.gather_main_parameters();
    if (comm->rank() == 0) trained = whole;
  });
  return trained;
}

}  // namespace

int main() {
  const auto alone = train(1, 1);
  for (const auto& [data_ranks, tensor_ranks] : {std::pair(2, 1), std::pair(1, 2), std::pair(2, 2)}) {
    for (const auto& [name, value] : train(data_ranks, tensor_ranks))
      if (!value.equal(alone.at(name))) {
        fmt::print("dp_shard={},tp={}: {} differs\n", data_ranks, tensor_ranks, name);
        return 1;
      }
    fmt::print("dp_shard={},tp={}: every bit of {} parameters is the same\n", data_ranks, tensor_ranks, alone.size());
  }
}
