#include "properties/kit/toy_modules.h"

#include <gtest/gtest.h>

namespace toy {

NetImpl::NetImpl(Options options) : options_(options) {
  first = register_module("first", torch::nn::Linear(7, 7));
  second = register_module("second", torch::nn::Linear(7, 3));
  if (options.unused) unused = register_parameter("unused", data({5}, 99));
  if (options.freeze_second)
    for (at::Tensor& parameter : second->parameters()) parameter.requires_grad_(false);
  shardproof::initialize_parameters(*this, 3, 0.5);
}

at::Tensor NetImpl::forward(at::Tensor x) {
  for (int64_t i = 0; i < options_.calls_of_first; ++i) x = at::tanh(shardproof::call(first, x));
  between();
  return shardproof::call(second, x);
}

AdapterImpl::AdapterImpl(int64_t in, int64_t out) {
  frozen = register_parameter("frozen", data({in, out}, 1), /*requires_grad=*/false);
  down = register_parameter("down", data({in, 2}, 2));
  up = register_parameter("up", data({2, out}, 3));
}

at::Tensor AdapterImpl::forward(at::Tensor x) { return at::mm(x, frozen) + at::mm(at::mm(x, down), up); }

void on_ranks(int64_t world, const std::function<void(std::shared_ptr<shardproof::MeshComm>)>& body,
              const shardproof::ThreadsOptions& options) {
  shardproof::run_threads(
      world,
      [&](std::shared_ptr<shardproof::Comm> comm) {
        body(std::make_shared<shardproof::MeshComm>(comm, shardproof::Mesh({{"dp_replicate", 1}, {"dp_shard", world}})));
      },
      options);
}

bool has_memory(const at::Tensor& tensor) {
  try {
    return tensor.const_data_ptr() != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

at::Tensor data(std::vector<int64_t> sizes, int64_t salt) {
  at::Tensor tensor = at::empty(sizes);
  float* values = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const uint32_t mixed = static_cast<uint32_t>(i * 2654435761u + salt * 40503u + 12345u);
    values[i] = static_cast<float>((mixed ^ (mixed >> 15)) % 2001) / 1000.0f - 1.0f;
  }
  return tensor;
}

shardproof::ShardOptions options(const std::string& strategy) {
  shardproof::ShardOptions options;
  options.strategy = shardproof::strategy(strategy);
  options.units = shardproof::by_type<torch::nn::LinearImpl, AdapterImpl>();
  options.alignment_bytes = 64;
  return options;
}

}  // namespace toy
