// One training run for the tests beside PyTorch:
// checkpoint_driver MESH STRATEGY BEGIN END [optimizer muon] [load DIR] [save DIR]
// It trains the model of ci/tests/checkpoint_training_peers.py from step BEGIN to END by AdamW, or its matrices by Muon, and
// prints the loss of each step, one a line. It loads before the first step and saves after the last.
//
// checkpoint_driver pickle PROTOCOL: prints a pickle of the values that ci/tests/checkpoint_test.py expects.
#include <ATen/ATen.h>

#include <cstdio>
#include <map>

#include "shardproof/checkpoint/format/pickle.h"
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

// One of each kind, and more strings than an index of one byte counts, each of them twice.
checkpoint::Value every_kind() {
  using checkpoint::Value;
  Value::Items numbers, texts;
  for (int64_t power = 0; power < 64; ++power)
    for (const int64_t near : {-1, 0, 1})
      numbers.push_back(Value::integer(static_cast<int64_t>((uint64_t{1} << power) + near)));
  for (const double real : {0.0, -0.5, 1e300, 5e-324}) numbers.push_back(Value::real(real));
  for (int64_t i = 0; i < 600; ++i) texts.push_back(Value::string(std::string(static_cast<size_t>(i % 300), 'x') + "\xc3\xa4"));
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  Value::Items nested{Value(),         Value::boolean(true), Value::boolean(false), Value::bytes(bytes),
                      Value::list({}), Value::dict({})};
  Value::Items items;
  for (int64_t i = 0; i <= 5; ++i) {
    nested.push_back(Value::tuple(items));
    items.push_back(Value::integer(i));
  }
  nested.push_back(Value::reduced("torch", "Size", {Value::tuple(items)}));
  for (int64_t i = 0; i < 2; ++i) nested.push_back(Value::global("torch", "float32"));
  return Value::dict({{Value::string("numbers"), Value::list(numbers)},
                      {Value::string("texts"), Value::tuple(texts)},
                      {Value::string("nested"), Value::list(nested)}});
}

}  // namespace

int main(int count, char** values) {
  if (count == 3 && values[1] == std::string("pickle")) {
    const std::string text = checkpoint::write_pickle(every_kind(), std::stoi(values[2]));
    return std::fwrite(text.data(), 1, text.size(), stdout) == text.size() ? 0 : 1;
  }
  if (count < 5 || count % 2 == 0) return 2;
  Arguments arguments{values[1], values[2], std::stoll(values[3]), std::stoll(values[4]), {}};
  for (int i = 5; i < count; i += 2) arguments.options[values[i]] = values[i + 1];
  run_threads(Mesh::parse(arguments.mesh).size(), [&](std::shared_ptr<Comm> comm) { run(arguments, comm); });
}
