// Strategies that are registered, and units whose gradients are summed when they say so.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;

namespace {

// The example of docs/howto/add_a_strategy.md.
void add_my_zero2() {
  // Parameters whole; sums over dp_shard after every microbatch, over dp_replicate after the last.
  const Layout whole = replicated();
  const Layout shard = split_flat(whole, {"dp_shard", {}});
  Strategy row;
  row.name = "my_zero2";
  row.parameter = row.compute = whole;
  row.produced = add_partial(add_partial(whole, "dp_replicate"), "dp_shard");
  row.accumulated = add_partial(shard, "dp_replicate");
  row.state = split_flat(shard, {"dp_replicate", {}});
  register_strategy(row);
}

void add_once() {
  static const bool added = [] {
    add_my_zero2();
    return true;
  }();
  EXPECT_TRUE(added);
}

Strategy named(const std::string& name, const Layout& parameter, const Layout& state) {
  Strategy row = strategy("zero2");
  row.name = name;
  row.parameter = parameter;
  row.state = state;
  return row;
}

void backward(toy::Net& net, int64_t salt) { (call(net, toy::data({4, 7}, salt)).square().sum() / 4).backward(); }

const Mesh kGrid({{"dp_replicate", 2}, {"dp_shard", 2}});

void on_grid(const std::function<void(std::shared_ptr<MeshComm>)>& body) {
  run_threads(kGrid.size(), [&](std::shared_ptr<Comm> comm) { body(std::make_shared<MeshComm>(comm, kGrid)); });
}

// Parameters after two steps of two microbatches, by name.
std::map<std::string, at::Tensor> trained(const std::string& name) {
  std::map<std::string, at::Tensor> found;
  on_grid([&](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    Sharded sharded = fully_shard(net.ptr(), comms, toy::options(name));
    Optimizer optimizer = adamw(sharded, {});
    for (int64_t step = 0; step < 2; ++step) {
      for (int64_t round = 0; round < 2; ++round) {
        sharded.set_last_microbatch(round == 1);
        backward(net, 10 * step + 4 * round + comms->rank());
      }
      optimizer.step();
    }
    const auto whole = sharded.gather_parameters();
    if (comms->rank() == 3) found.insert(whole.begin(), whole.end());
  });
  return found;
}

// Reductions of each unit in one microbatch that is the last, or not, with the unit "second" kept out of it.
int64_t sums_without_second(bool last) {
  auto trace = std::make_shared<Trace>();
  int64_t sums = 0;
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    toy::Net net(toy::NetImpl::Options{});
    auto comms = std::make_shared<MeshComm>(traced(comm, trace), Mesh({{"dp_shard", 2}}));
    Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero2"));
    sharded.set_last_microbatch(last);
    const UnitNoSync none(sharded.unit("second"));
    backward(net, comm->rank());
    if (comm->rank() > 0) return;
    for (const auto& record : trace->of_rank(0)) sums += record.op == "reduce_scatter";
  });
  return sums;
}

}  // namespace

TEST(Strategies, a_registered_row_trains_to_the_bits_of_the_row_that_sums_in_the_same_order) {
  add_once();
  const auto mine = trained("my_zero2"), theirs = trained("hfsdp");
  ASSERT_FALSE(mine.empty());
  for (const auto& [name, values] : theirs) EXPECT_TRUE(kit::same_bits(mine.at(name), values)) << name;
}

TEST(Strategies, a_registered_row_is_in_the_table_with_the_others) {
  add_once();
  EXPECT_EQ(strategies().back().name, "my_zero2");
  EXPECT_EQ(strategy("my_zero2").state.flat.size(), 2u);
}

TEST(Strategies, a_row_that_cannot_be_is_refused_when_it_is_registered) {
  const Layout whole = replicated(), shard = split_flat(whole, {"dp_shard", {}});
  expect_error([&] { register_strategy(named("zero3", whole, shard)); }, {"zero3", "already"});
  expect_error([&] { register_strategy(named("row_b_t_sr", whole, shard)); }, {"row_b_t_sr", "already"});
  expect_error([&] { register_strategy(named("two words", whole, shard)); }, {"two words", "word"});
  expect_error([&] { register_strategy(named("narrow", split_flat(whole, {"dp_replicate", {}}), shard)); },
               {"narrow", "publish", "all_gather"});
  Strategy alone = named("alone", whole, whole);
  alone.produced = whole;
  expect_error([&] { register_strategy(alone); }, {"alone", "produced"});
}

TEST(Strategies, a_unit_that_is_not_synchronised_keeps_its_gradient_while_others_are_reduced) {
  for (const bool last : {false, true}) EXPECT_EQ(sums_without_second(last), 1) << last;  // of "first"
}

TEST(Strategies, gradients_of_a_unit_that_waited_are_those_of_one_that_did_not) {
  std::vector<std::vector<at::Tensor>> found(2);
  for (const bool waits : {false, true})
    toy::on_ranks(2, [&](std::shared_ptr<MeshComm> comms) {
      toy::Net net(toy::NetImpl::Options{});
      Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero2"));
      sharded.set_last_microbatch(false);
      sharded.unit("second").set_gradient_sync(!waits);
      backward(net, comms->rank());
      EXPECT_EQ(sharded.unit("second").gradient_sync(), !waits);
      EXPECT_TRUE(sharded.unit("first").gradient_sync());
      sharded.unit("").set_gradient_sync(true);  // of all below it as well
      EXPECT_TRUE(sharded.unit("second").gradient_sync());
      sharded.set_last_microbatch(true);
      backward(net, 7 + comms->rank());
      if (comms->rank() != 0) return;
      for (const Piece& piece : sharded.gradients()) found[waits].push_back(piece.data.clone());
    });
  ASSERT_EQ(found[0].size(), found[1].size());
  for (size_t i = 0; i < found[0].size(); ++i) EXPECT_TRUE(at::allclose(found[0][i], found[1][i], 1e-5, 1e-6)) << i;
}

TEST(Strategies, gradient_sync_of_a_block_is_that_of_the_units_within_it_and_of_no_others) {
  using torch::nn::Module;
  toy::on_ranks(1, [](std::shared_ptr<MeshComm> comms) {
    auto model = std::make_shared<Module>("model");
    const std::vector<std::string> names = {"a", "a.inner", "b", "b.inner"};
    for (const char* name : {"a", "b"}) {
      auto outer = std::make_shared<Module>("block"), inner = std::make_shared<Module>("block");
      outer->register_parameter("weight", at::ones({2}));
      inner->register_parameter("weight", at::ones({2}));
      outer->register_module("inner", inner);
      model->register_module(name, outer);
    }
    const auto is_unit = [&](const std::string& name, const Module&) { return std::ranges::find(names, name) != names.end(); };
    Sharded sharded = fully_shard(model, comms, {.strategy = strategy("zero3"), .units = is_unit});
    for (const std::string outer : {"a", "b"})
      for (const bool recurse : {true, false}) {
        sharded.unit(outer).set_gradient_sync(false, recurse);
        for (const std::string& name : names)
          EXPECT_EQ(sharded.unit(name).gradient_sync(), !(name == outer || (recurse && name == outer + ".inner")))
              << name << " after " << outer << (recurse ? " and what is within it" : " alone");
        sharded.unit("").set_gradient_sync(true);
      }
  });
}

TEST(Strategies, a_step_says_which_unit_was_left_out) {
  expect_error(
      [] {
        toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
          toy::Net net(toy::NetImpl::Options{});
          Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero3"));
          Optimizer optimizer = sgd(sharded, {});
          sharded.unit("second").set_gradient_sync(false);
          backward(net, comms->rank());
          optimizer.step();
        });
      },
      {"Optimizer::step", "second.", "of its unit"});
}

TEST(Strategies, a_gradient_out_of_turn_names_its_unit_and_parameter) {
  expect_error(
      [] {
        toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
          toy::Net net(toy::NetImpl::Options{});
          Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero3"));
          backward(net, 1);
          backward(net, 2);
        });
      },
      {"unit 'second'", "second.", "set_last_microbatch(false)"});
}
