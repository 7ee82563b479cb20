// Several microbatches between their forward and their backward at a time, as schedules of pipelines have them.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/functional.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/timeline.h"

using namespace shardproof;

namespace {

// Whether a backward makes all gradients, or one behind the forward makes that of the input and keeps the graph, so that the
// backward whose turn it is makes those of the weights: it goes everywhere again, or to the weights alone.
enum class Parts { one, then_all, then_weights };

// In which order backwards run, and how many forwards wait for theirs at most: with two of them a forward runs between two
// backwards of others (1F1B).
struct Order {
  std::vector<size_t> backwards;
  size_t open_max;
  Parts parts = Parts::one;
};

// Blocks that are units, between modules that are not. The first block may run a second time, behind the others.
torch::nn::Sequential blocks(bool repeats = false) {
  torch::nn::Sequential model = parity::blocks(2, 5);
  model->push_back(torch::nn::Linear(5, 3));
  model->push_back(torch::nn::Linear(3, 5));
  if (repeats)
    model->push_back(torch::nn::Functional(
        [first = parity::Block(model->ptr<parity::BlockImpl>(0))](at::Tensor x) mutable { return call(first, x); }));
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

std::string name_of_input(int64_t step, int64_t microbatch) {
  return fmt::format("input {} of step {}", microbatch, step);
}

// Parameters after two steps, and the gradients of rank 0's inputs where they come first. Then units lie in each other, and one
// of them runs twice.
std::map<std::string, at::Tensor> trained(const std::string& strategy, bool recompute, const Order& order,
                                          Backwards* seen = nullptr) {
  std::map<std::string, at::Tensor> whole;
  const bool is_split = order.parts != Parts::one;
  const auto timeline = std::make_shared<Timeline>();
  run_threads(2, [&](const std::shared_ptr<Comm>& comm) {
    const auto comms = std::make_shared<MeshComm>(traced(comm, std::make_shared<Trace>(), timeline), parity::ranks(2));
    auto model = blocks(is_split);
    ShardOptions options = parity::block_units(strategy);
    if (is_split) options.units = by_type<parity::BlockImpl, torch::nn::LinearImpl>();
    if (recompute) options.recompute = by_type<torch::nn::LinearImpl>();
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    Optimizer optimizer = sgd(sharded, {.lr = 0.1, .momentum = 0.9});
    for (int64_t step = 0; step < 2; ++step) {
      std::vector<at::Tensor> losses;
      size_t done = 0;
      const auto go_back = [&] {
        sharded.set_last_microbatch(done + 1 == order.backwards.size());
        const size_t before = timeline->of_rank(0).size();
        const at::Tensor loss = std::exchange(losses[order.backwards[done++]], at::Tensor());
        if (order.parts == Parts::then_weights)
          torch::autograd::backward({loss}, {}, {}, false, model->parameters());
        else
          loss.backward();
        if (seen && step == 0 && comms->rank() == 0) seen->push_back(backward_of(*timeline, before));
      };
      for (int64_t m = 0; m < static_cast<int64_t>(order.backwards.size()); ++m) {
        const at::Tensor x = toy::data({3 + m, 5}, 10 * step + 2 * m + comms->rank()).requires_grad_(is_split);
        losses.push_back(call(model, x).square().sum());
        if (is_split) {
          const at::Tensor gradient = torch::autograd::grad({losses.back()}, {x}, {}, /*retain_graph=*/true).at(0);
          if (comms->rank() == 0) whole[name_of_input(step, m)] = gradient;
        }
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
std::map<std::string, at::Tensor> plainly(const Strategy& row, const std::vector<size_t>& order, bool is_split = false) {
  auto model = blocks(is_split);
  std::map<std::string, at::Tensor> momenta, result;
  for (int64_t step = 0; step < 2; ++step) {
    std::map<std::string, std::vector<std::vector<at::Tensor>>> terms;
    for (int64_t rank = 0; rank < 2; ++rank) {
      for (auto& item : model->named_parameters()) terms[item.key()].emplace_back();
      for (const size_t m : order) {
        model->zero_grad();
        const auto number = static_cast<int64_t>(m);
        const at::Tensor x = toy::data({3 + number, 5}, 10 * step + 2 * number + rank).requires_grad_(is_split);
        model->forward(x).square().sum().backward();
        if (is_split && rank == 0) result[name_of_input(step, number)] = x.grad();
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

// As pipelines without bubbles do: what the stage before waits for comes first, and weights when there is time.
TEST(Passes, gradients_of_inputs_first_and_of_weights_behind_others_are_those_of_the_plain_loop) {
  for (const char* strategy_name : {"ddp", "zero1", "zero2", "zero3"})
    for (const bool recompute : {false, true})
      for (const Parts parts : {Parts::then_all, Parts::then_weights})
        for (const Order& order : {Order{{0, 1, 2}, 3, parts}, {{2, 0, 1}, 3, parts}, {{0, 1, 2}, 2, parts}}) {
          const auto ours = trained(strategy_name, recompute, order);
          for (const auto& [name, value] : plainly(strategy(strategy_name), order.backwards, /*is_split=*/true))
            EXPECT_TRUE(at::equal(ours.at(name), value))
                << strategy_name << ", recomputed " << recompute << ", weights alone " << (parts == Parts::then_weights) << ", "
                << order.open_max << " open: " << name;
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

namespace {

// Four blocks of which each is a unit, on two ranks, run one by one.
struct Steps {
  explicit Steps(const std::shared_ptr<Comm>& comm)
      : comms(std::make_shared<MeshComm>(traced(comm, std::make_shared<Trace>(), timeline), parity::ranks(2))) {}

  at::Tensor run(size_t first, size_t last, at::Tensor x) {
    for (size_t i = first; i < last; ++i) x = call(blocks.at(i), x);
    return x;
  }
  bool is_gathered(size_t i) const { return parity::has_memory(blocks.at(i)->inner->weight); }

  std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();
  std::shared_ptr<MeshComm> comms;
  torch::nn::Sequential model = parity::blocks(4, 5);
  std::vector<parity::Block> blocks = [this] {
    std::vector<parity::Block> made;
    for (size_t i = 0; i < model->size(); ++i) made.emplace_back(model->ptr<parity::BlockImpl>(i));
    return made;
  }();
  Sharded sharded = fully_shard(model.ptr(), comms, parity::block_units("zero3"));
};

}  // namespace

TEST(Passes, a_gradient_of_inputs_reduces_nothing_keeps_nothing_and_leaves_the_next_backward_as_it_is) {
  const auto backwards = [](bool split) {
    std::vector<std::string> first, second;
    run_threads(2, [&](const std::shared_ptr<Comm>& comm) {
      Steps own(comm);
      const at::Tensor x = toy::data({3, 5}, 1).requires_grad_(), loss = own.run(0, 4, x).square().sum();
      const auto spans = [&](const auto& go_back) {
        const size_t before = own.timeline->of_rank(0).size();
        go_back();
        for (size_t i = 0; i < 4; ++i) EXPECT_FALSE(own.is_gathered(i)) << i;
        return backward_of(*own.timeline, before);
      };
      std::vector<std::string> of_inputs, of_all;
      if (split) of_inputs = spans([&] { torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true); });
      of_all = spans([&] { loss.backward(); });
      if (comm->rank() == 0) first = of_inputs, second = of_all;
    });
    return std::pair(first, second);
  };
  const auto [none, whole] = backwards(false);
  const auto [of_inputs, behind] = backwards(true);
  EXPECT_EQ(behind, whole);
  EXPECT_EQ(of_inputs, (std::vector<std::string>{"backward of unit '3'", "backward of unit '2'", "backward of unit '1'",
                                                 "backward of unit '0'"}));
}

// A backward for what a block has returned stops there, and the one behind it comes to the blocks before.
TEST(Passes, a_backward_that_stops_in_the_middle_leaves_the_units_below_to_the_next_one) {
  run_threads(2, [](const std::shared_ptr<Comm>& comm) {
    Steps own(comm);
    const at::Tensor first = own.run(0, 1, toy::data({3, 5}, 1)), middle = own.run(1, 2, first);
    const at::Tensor loss = own.run(2, 4, middle).square().sum();
    bool was_freed = false;
    first.register_hook([&](const at::Tensor&) { was_freed = !own.is_gathered(1); });
    const at::Tensor gradient = torch::autograd::grad({loss}, {middle}).at(0);
    middle.backward(gradient);
    EXPECT_TRUE(was_freed) << "when the backward has left it";
  });
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
