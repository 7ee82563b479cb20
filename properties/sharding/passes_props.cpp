// Several microbatches between their forward and their backward at a time, as schedules of pipelines have them.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/timeline.h"

using namespace shardproof;

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

// The backwards of units and the reductions, in their order, of each backward that rank 0 runs in the first step. Gathers are
// left out: which ones there are depends on what the forward before has kept.
using Backwards = std::vector<std::vector<std::string>>;

// What rank 0 has done since its first `from` spans.
std::vector<std::string> backward_of(const Timeline& timeline, size_t from) {
  std::vector<std::string> seen;
  const std::vector<Span> spans = timeline.of_rank(0);
  for (size_t i = from; i < spans.size(); ++i)
    if (spans[i].name != "all_gather" && spans[i].kind != Span::Kind::wait)
      seen.push_back(spans[i].name + " of " + spans[i].unit);
  return seen;
}

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
        if (seen && step == 0 && comms->rank() == 0) seen->push_back(backward_of(*timeline, before));
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

// A unit's backward ends, and its gradients are sent, at the same place whether or not younger forwards wait for theirs.
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

// A stage of a pipeline goes back from its output, whose node is the root of the graph.
TEST(Passes, a_backward_from_an_output_reduces_where_one_from_its_sum_does) {
  const auto reductions = [](bool from_sum) {
    std::vector<std::string> seen;
    const auto timeline = std::make_shared<Timeline>();
    run_threads(2, [&](const std::shared_ptr<Comm>& comm) {
      const auto comms = std::make_shared<MeshComm>(traced(comm, std::make_shared<Trace>(), timeline), parity::ranks(2));
      auto model = parity::blocks(3, 5);  // the output is that of the last unit, too
      Sharded sharded = fully_shard(model.ptr(), comms, parity::block_units("zero3"));
      const at::Tensor output = call(model, toy::data({3, 5}, 1));
      const size_t before = timeline->of_rank(0).size();
      if (from_sum)
        output.sum().backward();
      else
        output.backward(at::ones_like(output));
      if (comms->rank() == 0) seen = backward_of(*timeline, before);
    });
    return seen;
  };
  EXPECT_EQ(reductions(false), reductions(true));
}

// The second order goes through the inside of the older forward, and not through the node of its output.
TEST(Passes, a_penalty_of_the_gradient_and_a_loss_of_another_forward_train_like_the_plain_loop) {
  const auto loss_of = [](torch::nn::Sequential& model, int64_t rank) {
    const at::Tensor x = toy::data({3, 5}, rank).requires_grad_();
    const at::Tensor slope = torch::autograd::grad({call(model, x).sum()}, {x}, {}, {}, /*create_graph=*/true).at(0);
    return slope.square().sum() + call(model, toy::data({4, 5}, 7 + rank)).square().sum();
  };
  for (const char* strategy_name : {"ddp", "zero2", "zero3"}) {
    std::map<std::string, std::vector<std::vector<at::Tensor>>> terms;
    auto plain = blocks();
    for (int64_t rank = 0; rank < 2; ++rank) {
      plain->zero_grad();
      loss_of(plain, rank).backward();
      for (auto& item : plain->named_parameters()) terms[item.key()].push_back({item.value().grad().clone()});
    }
    parity::on_mesh(parity::ranks(2), [&](std::shared_ptr<MeshComm> comms) {
      auto model = blocks();
      ShardOptions options = parity::block_units(strategy_name);
      options.reshard_after_forward = Reshard::never();
      options.reshard_after_backward = false;
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      Optimizer optimizer = sgd(sharded, {.lr = 0.1});
      loss_of(model, comms->rank()).backward();
      optimizer.step();
      const auto gathered = sharded.gather_parameters();
      const std::map<std::string, at::Tensor> ours(gathered.begin(), gathered.end());
      for (auto& item : plain->named_parameters()) {
        const at::Tensor gradient = parity::combine(terms.at(item.key()), parity::ranks(2), strategy(strategy_name));
        EXPECT_TRUE(at::equal(ours.at(item.key()), item.value().detach() - gradient * 0.1)) << strategy_name << item.key();
      }
    });
  }
}
