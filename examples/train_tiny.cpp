// Fits a sine with ZeRO-3 on four ranks, which are threads of this process.
#include <ATen/ATen.h>
#include <shardproof/shardproof.h>

using namespace shardproof;

int main() {
  const Mesh mesh({{"dp_shard", 4}});
  run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
    Mlp model(MlpOptions{.widths = {1, 32, 1}});
    initialize_parameters(*model, /*seed=*/1, /*standard_deviation=*/0.5);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, mesh),
                                  {.strategy = strategy("zero3"), .units = by_type<torch::nn::LinearImpl>()});
    Optimizer optimizer = adamw(sharded, {.lr = 0.03});
    const at::Tensor x = at::linspace(comm->rank() - 2, comm->rank() - 1, 64).unsqueeze(1);  // a quarter each
    for (int step = 0; step <= 200; ++step) {
      const at::Tensor loss = (call(model, x) - x.mul(2).sin()).square().mean();
      loss.backward();
      sharded.clip_gradients(1.0);
      optimizer.step();
      if (comm->rank() == 0 && step % 100 == 0)
        fmt::print("step {:3}  loss {:.4f}\n", step, loss.item<float>());
    }
  });
}
