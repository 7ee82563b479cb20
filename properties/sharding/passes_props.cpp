// Several microbatches between their forward and their backward at a time, as schedules of pipelines have them.
#include <gtest/gtest.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/timeline.h"

using namespace shardproof;
using parity::on_mesh;

namespace {

// In which order backwards run, and how many forwards wait for theirs at most: with two of them a forward runs between two
// backwards of others (1F1B).
struct Order {
  std::vector<size_t> backwards;
  size_t open_max;
};

// Blocks that are units, between modules that are not.
torch::nn::Sequential blocks() {
  torch::nn::Sequential model = parity::blocks(2, 5);
  model->push_back(torch::nn::Linear(5, 3));
  model->push_back(torch::nn::Linear(3, 5));
  initialize_parameters(*model, 5, 0.5);
  return model;
}

// Backwards of units and reductions in the backwards of the first step on rank 0. What is gathered depends on what the forward
// before has left.
using Backwards = std::vector<std::vector<std::string>>;

// Parameters after two steps.
std::map<std::string, at::Tensor> trained(const std::string& strategy, bool recompute, const Order& order,
                                          Backwards* seen = nullptr) {
  std::map<std::string, at::Tensor> whole;
  const auto timeline = std::make_shared<Timeline>();
  run_threads(2, [&](const std::shared_ptr<Comm>& comm) {
    const auto comms = std::make_shared<MeshComm>(traced(comm, std::make_shared<Trace>(), timeline), parity::ranks(2));
    auto model = blocks();
    ShardOptions options = parity::block_units(strategy);
    if (recompute) options.recompute = by_type<torch::nn::LinearImpl>();
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    Optimizer optimizer = sgd(sharded, {.lr = 0.1, .momentum = 0.9});
    for (int64_t step = 0; step < 2; ++step) {
      std::vector<at::Tensor> losses;
      size_t done = 0;
      const auto go_back = [&] {
        sharded.set_last_microbatch(done + 1 == order.backwards.size());
        const size_t before = timeline->of_rank(0).size();
        losses[order.backwards[done++]].backward();
        if (!seen || step > 0 || comms->rank() > 0) return;
        seen->emplace_back();
        const std::vector<Span> spans = timeline->of_rank(0);
        for (size_t i = before; i < spans.size(); ++i)
          if (spans[i].name != "all_gather" && spans[i].kind != Span::Kind::wait)
            seen->back().push_back(spans[i].name + " of " + spans[i].unit);
      };
      for (int64_t m = 0; m < static_cast<int64_t>(order.backwards.size()); ++m) {
        losses.push_back(call(model, toy::data({3 + m, 5}, 10 * step + 2 * m + comms->rank())).square().sum());
        if (losses.size() - done == order.open_max) go_back();
      }
      while (done < order.backwards.size()) go_back();
      optimizer.step();
    }
    for (const auto& [name, value] : sharded.gather_parameters())
      if (comms->rank() == 0) whole[name] = value;
  });
  return whole;
}

// The same without a library, whose sums are in the order of the strategy: of ranks in each reduction, of backwards before it.
std::map<std::string, at::Tensor> plainly(const Strategy& row, const std::vector<size_t>& order) {
  auto model = blocks();
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

TEST(Passes, backwards_in_any_order_behind_forwards_of_others_train_like_the_plain_loop) {
  for (const char* strategy_name : {"ddp", "zero1", "zero2", "zero3"})
    for (const bool recompute : {false, true})
      for (const Order& order : {Order{{0, 1, 2}, 3}, {{2, 1, 0}, 3}, {{1, 2, 0}, 3}, {{0, 1, 2}, 2}, {{1, 0, 2}, 2}}) {
        const auto ours = trained(strategy_name, recompute, order);
        for (const auto& [name, value] : plainly(strategy(strategy_name), order.backwards))
          EXPECT_TRUE(at::equal(ours.at(name), value))
              << strategy_name << ", recomputed " << recompute << ", " << order.open_max << " open: " << name;
      }
}

// The end of a unit's backward, where its gradients are sent and its parameters freed, is found beside younger forwards.
TEST(Passes, a_backward_reduces_where_it_does_without_other_forwards_that_wait) {
  for (const char* strategy_name : {"ddp", "zero1", "zero2", "zero3"})
    for (const bool recompute : {false, true}) {
      Backwards apart;
      trained(strategy_name, recompute, {{0, 1, 2}, 1}, &apart);
      for (const Order& order : {Order{{0, 1, 2}, 3}, {{0, 1, 2}, 2}}) {
        Backwards seen;
        trained(strategy_name, recompute, order, &seen);
        EXPECT_EQ(seen, apart) << strategy_name << ", recomputed " << recompute << ", " << order.open_max << " open";
      }
    }
}
