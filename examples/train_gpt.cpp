// Trains a small GPT on the bytes of a text, on one mesh of data, context and tensor parallelism, with low precision,
// recomputation, a schedule and checkpoints. Run again, it goes on from the last checkpoint, on any other mesh.
//
//   train_gpt TEXT_FILE 'dp_shard=2,tp=2' DIRECTORY                   ranks are threads
//   mpirun -n 4 train_gpt TEXT_FILE 'dp_shard=2,cp=2' DIRECTORY       ranks are processes
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <shardproof/checkpoint/manager.h>
#include <shardproof/launch/launch.h>
#include <shardproof/comm/mpi/mpi.h>
#include <shardproof/shardproof.h>

#include <exception>
#include <fstream>
#include <iterator>

using namespace shardproof;

namespace {

constexpr int64_t kLength = 64, kBatch = 4, kSteps = 60;
const GptOptions kModel{.layers = 2, .hidden = 64, .heads = 4, .vocab = 256, .positions = kLength, .tied = true};

// Sequences drawn by (step, data_rank), with one byte more than inputs.
at::Tensor batch(const std::string& text, int64_t step, int64_t data_rank) {
  at::Tensor tokens = at::empty({kBatch, kLength + 1}, at::kLong);
  for (int64_t i = 0; i < kBatch; ++i) {
    const auto begin = (step * 131 + data_rank * 37 + i * 17) * 11 % static_cast<int64_t>(text.size() - kLength - 1);
    for (int64_t t = 0; t <= kLength; ++t)
      tokens.index_put_({at::tensor(i), at::tensor(t)}, int64_t{static_cast<uint8_t>(text[begin + t])});
  }
  return tokens;
}

void train(const std::shared_ptr<Comm>& comm, const Mesh& mesh, const std::string& text, const std::string& directory) {
  const auto comms = std::make_shared<MeshComm>(comm, mesh);
  const auto ranks_along = [&](const char* axis) { return mesh.has(axis) ? mesh.size(axis) : 1; };
  const int64_t tp = ranks_along("tp"), cp = ranks_along("cp");

  Gpt model(kModel);
  initialize_parameters(*model, /*seed=*/1);
  // Tensor parallelism first, then the data-parallel strategy over what is left.
  std::optional<TensorParallel> tensor;
  std::optional<ContextParallel> context;
  if (tp > 1) tensor = parallelize(model.ptr(), comms, gpt_plan(kModel, /*sequence_parallel=*/true));
  if (cp > 1) context = context_parallel(model.ptr(), comms);
  Sharded sharded = fully_shard(model.ptr(), comms,
                                {.strategy = strategy("zero3"),
                                 .units = by_type<GptBlockImpl>(),
                                 .recompute = by_type<GptBlockImpl>(),
                                 .precision = {.main = at::kFloat, .compute = at::kBFloat16, .reduce = at::kFloat}});
  Optimizer optimizer = adamw(sharded, {.lr = 3e-3});
  checkpoint::Manager manager(directory, {.keep = 2, .async = true});
  const auto resumed = manager.load_latest(sharded, &optimizer);

  for (int64_t step = resumed ? resumed->trainer.step : 0; step < kSteps; ++step) {
    const at::Tensor tokens = batch(text, step, comms->data_rank());
    at::Tensor input = tokens.narrow(1, 0, kLength), target = tokens.narrow(1, 1, kLength);
    if (context) input = context->cut(input), target = context->cut(target);
    const at::Tensor logits = call(model, input).to(at::kFloat);
    const at::Tensor loss = tp > 1 ? vocab_parallel_cross_entropy(logits, target, kModel.vocab, comms->along({"tp"}))
                                   : at::cross_entropy_loss(logits.flatten(0, 1), target.flatten());
    loss.backward();
    sharded.clip_gradients(1.0);
    optimizer.set_lr_factor(warmup_cosine(step, /*warmup=*/5, kSteps));
    optimizer.step();
    manager.poll();
    if ((step + 1) % 20 == 0) manager.save(sharded, &optimizer, {.step = step + 1});
    if (comm->rank() == 0 && (step + 1) % 20 == 0) fmt::print("step {:3}  loss {:.2f}\n", step + 1, loss.item<float>());
  }
  manager.wait();
}

}  // namespace

int main(int argc, char** argv) try {
  SHARD_REQUIRE(argc == 4, "train_gpt", "usage: {} TEXT_FILE MESH DIRECTORY, e.g. README.md dp_shard=2 run", argv[0]);
  at::set_num_threads(1);
  std::ifstream file(argv[1]);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  SHARD_REQUIRE(text.size() > kLength + 1, "train_gpt", "{} cannot be read, or has at most {} bytes", argv[1], kLength + 1);
  const Mesh mesh = Mesh::parse(argv[2]);
  const auto body = [&](std::shared_ptr<Comm> comm) { train(comm, mesh, text, argv[3]); };
  if (read_launch(process_environment()).launcher == Launcher::none) {
    run_threads(mesh.size(), body);
    return 0;
  }
  MpiWorld world({.timeout_seconds = 60});
  require_joined(world.rank(), world.size());
  world.run(body);
} catch (const std::exception& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 2;
}
