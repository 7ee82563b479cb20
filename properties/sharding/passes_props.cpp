// Several microbatches between their forward and their backward at a time, as schedules of pipelines have them.
#include <gtest/gtest.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::on_mesh;

namespace {

constexpr int64_t kMicrobatches = 3;

// Parameters after steps whose backwards run in this order, behind all forwards of the step.
std::map<std::string, at::Tensor> trained(const std::string& strategy, bool recompute, const std::vector<size_t>& order) {
  std::map<std::string, at::Tensor> whole;
  on_mesh(parity::ranks(2), [&](std::shared_ptr<MeshComm> comms) {
    auto model = parity::blocks(2, 5);
    ShardOptions options = toy::options(strategy);
    if (recompute) options.recompute = by_type<torch::nn::LinearImpl>();
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    Optimizer optimizer = sgd(sharded, {.lr = 0.1, .momentum = 0.9});
    for (int64_t step = 0; step < 2; ++step) {
      std::vector<at::Tensor> open;
      for (int64_t m = 0; m < kMicrobatches; ++m)
        open.push_back(call(model, toy::data({3 + m, 5}, 10 * step + 2 * m + comms->rank())).square().sum());
      for (size_t done = 0; done < order.size(); ++done) {
        sharded.set_last_microbatch(done + 1 == order.size());
        open[order[done]].backward();
      }
      optimizer.step();
    }
    for (const auto& [name, value] : sharded.gather_parameters())
      if (comms->rank() == 0) whole[name] = value;
  });
  return whole;
}

// The same without a library, whose sums are in the order of the strategy: of ranks in each reduction, of backwards before it.
std::map<std::string, at::Tensor> plainly(const Strategy& row, const std::vector<size_t>& order) {
  auto model = parity::blocks(2, 5);
  std::map<std::string, at::Tensor> momenta, result;
  for (int64_t step = 0; step < 2; ++step) {
    std::map<std::string, std::vector<std::vector<at::Tensor>>> terms;
    for (int64_t rank = 0; rank < 2; ++rank) {
      for (auto& item : model->named_parameters()) terms[item.key()].emplace_back();
      for (const size_t m : order) {
        model->zero_grad();
        const auto rows = 3 + static_cast<int64_t>(m);
        model->forward(toy::data({rows, 5}, 10 * step + 2 * static_cast<int64_t>(m) + rank)).square().sum().backward();
        for (auto& item : model->named_parameters()) terms[item.key()].back().push_back(item.value().grad().clone());
      }
    }
    const at::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) {
      const at::Tensor gradient = parity::combine(terms[item.key()], parity::ranks(2), row);
      at::Tensor& momentum = momenta[item.key()];
      momentum = momentum.defined() ? momentum * 0.9 + gradient : gradient;
      item.value().sub_(momentum * 0.1);
    }
  }
  for (auto& item : model->named_parameters()) result[item.key()] = item.value().detach();
  return result;
}

}  // namespace

TEST(Passes, backwards_in_any_order_behind_all_forwards_train_like_the_plain_loop) {
  for (const char* strategy_name : {"ddp", "zero1", "zero2", "zero3"})
    for (const bool recompute : {false, true})
      for (const std::vector<size_t>& order : {std::vector<size_t>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
        const auto ours = trained(strategy_name, recompute, order), plain = plainly(strategy(strategy_name), order);
        for (const auto& [name, value] : plain)
          EXPECT_TRUE(at::equal(ours.at(name), value)) << strategy_name << ", recomputed " << recompute << ": " << name;
      }
}
