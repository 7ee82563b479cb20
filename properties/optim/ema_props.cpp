// Averages of parameters: what they are, on any mesh; that they can stand in for the parameters and leave no trace; and that
// checkpoints carry them.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <optional>

#include "properties/kit/bits.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/drawn_sharding.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/optim/ema.h"

using namespace shardproof;
using Values = std::map<std::string, at::Tensor>;

namespace {

void expect_equal(const Values& found, const Values& wanted, const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size()) << where;
  for (const auto& [name, value] : wanted) EXPECT_TRUE(kit::same_bits(found.at(name), value)) << where << " " << name;
}

Values copies(Values values) {
  for (auto& [name, value] : values) value = value.clone();
  return values;
}

void train(const kit::DrawnModel& model, Optimizer& optimizer, int64_t step) {
  const at::Tensor tokens = (at::arange(16, at::kLong) * (step + 1)).remainder(13).view({2, 8});
  model.forward(tokens).to(at::kFloat).square().mean().backward();
  optimizer.step();
}

// What ranks hold, in place: of the parameters that they compute with, and of the main ones.
std::vector<at::Tensor> held_by(const Sharded& sharded) {
  std::vector<at::Tensor> all;
  for (const auto& pieces : {sharded.parameters(), sharded.main_parameters()})
    for (const Piece& piece : pieces) all.push_back(piece.data.clone());
  return all;
}

void expect_held(const Sharded& sharded, const std::vector<at::Tensor>& before, const std::string& where) {
  const std::vector<at::Tensor> now = held_by(sharded);
  ASSERT_EQ(now.size(), before.size()) << where;
  for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(kit::same_bits(now[i], before[i])) << where << ": piece " << i;
}

void expect_averages(const kit::DrawnSharding& d) {
  run_threads(d.mesh.size(), [&](std::shared_ptr<Comm> world) {
    const auto comms = std::make_shared<MeshComm>(std::move(world), d.mesh);
    const kit::DrawnModel model = d.make();
    const auto parallel = d.cut(model, comms);
    Sharded sharded = fully_shard(model.module, comms, d.options());
    Optimizer optimizer = sgd(sharded, {.lr = 0.5});
    Ema ema(sharded, {.decay = 0.75});
    Values expected = copies(sharded.gather_main_parameters());
    expect_equal(ema.gather(), expected, d.str() + " at first");
    for (int64_t step = 0; step < 2; ++step) {
      train(model, optimizer, step);
      ema.update();
      for (const auto& [name, value] : sharded.gather_main_parameters()) expected[name] = expected[name] * 0.75 + value * 0.25;
    }
    expect_equal(ema.gather(), expected, d.str());

    const std::vector<at::Tensor> before = held_by(sharded);
    ema.with_averages([&] {
      const at::NoGradGuard no_grad;
      for (const auto& [name, value] : sharded.gather_parameters())
        if (const auto found = expected.find(name); found != expected.end()) {
          EXPECT_TRUE(kit::same_bits(value, found->second.to(at::kBFloat16))) << d.str() << " " << name;
        }
      model.forward(at::arange(8, at::kLong).view({1, 8}));
    });
    expect_held(sharded, before, d.str());
    train(model, optimizer, 2);
    expect_equal(ema.gather(), expected, d.str() + " after another step");
  });
}

// A small model of float32 on two ranks, with averages that differ from the parameters.
struct Small {
  explicit Small(const std::shared_ptr<Comm>& world, const std::string& row = "zero1") {
    initialize_parameters(*linear, 7, 0.3);
    sharded.emplace(fully_shard(linear.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", 2}})), toy::options(row)));
    optimizer.emplace(sgd(*sharded, {.lr = 0.5}));
    ema.emplace(*sharded);
    step();
  }
  void step() {
    call(linear, at::ones({2, 3})).square().sum().backward();
    optimizer->step();
  }
  torch::nn::Linear linear{3, 5};
  std::optional<Sharded> sharded;
  std::optional<Optimizer> optimizer;
  std::optional<Ema> ema;
};

}  // namespace

RC_GTEST_PROP(Ema, averages_are_those_of_whole_parameters_and_leave_no_trace_when_they_stand_in, ()) {
  const kit::DrawnSharding d = kit::drawn_sharding();
  expect_averages(d);
  if (::testing::Test::HasFailure()) RC_FAIL(d.str());
}

// One rank alone fails. It puts its parameters back without the other one, which goes on.
TEST(Ema, parameters_are_back_after_an_exception_of_one_rank) {
  for (const char* row : {"ddp", "zero1", "zero3"})
    run_threads(2, [&](std::shared_ptr<Comm> world) {
      Small small(world, row);
      const std::vector<at::Tensor> before = held_by(*small.sharded);
      const bool fails = world->rank() == 1;
      try {
        small.ema->with_averages([&] {
          if (fails) throw std::runtime_error("of this rank alone");
        });
        EXPECT_FALSE(fails) << row;
      } catch (const std::runtime_error& error) {
        EXPECT_TRUE(fails) << row << ": " << error.what();
      }
      EXPECT_FALSE(small.ema->is_swapped_in()) << row;
      expect_held(*small.sharded, before, row);
      small.step();
    });
}

TEST(Ema, what_the_body_returns_is_returned) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    Small small(world);
    EXPECT_EQ(small.ema->with_averages([] { return 7; }), 7);
  });
}

TEST(Ema, that_stand_in_for_parameters_refuse_what_would_change_or_save_them) {
  const checkpoint::Scratch scratch;
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Small small(world);
    Sharded& sharded = *small.sharded;
    call(small.linear, at::ones({2, 3})).square().sum().backward();
    small.ema->swap_in();
    const auto refused = [&](const std::string& what, const std::function<void()>& act) {
      expect_error(act, {what, "while the averages 'ema' are in the place of the parameters", "swap_out"});
    };
    refused("Optimizer::step", [&] { small.optimizer->step(); });
    refused("Ema::update", [&] { small.ema->update(); });
    refused("Ema::swap_in", [&] { small.ema->swap_in(); });
    refused("Ema::write", [&] { small.ema->write({}); });
    refused("main_parameters_will_change", [&] { sharded.main_parameters_will_change(); });
    refused("write_parameters", [&] { sharded.write_parameters({}); });
    refused("checkpoint::save", [&] { checkpoint::save(scratch / "here", sharded, nullptr); });
    refused("checkpoint::load", [&] { checkpoint::load(scratch / "here", sharded, nullptr); });
    small.ema->swap_out();
    expect_error([&] { small.ema->swap_out(); }, {"swap_out", "'ema' are not in the place"});
    small.optimizer->step();
  });
}

TEST(Ema, with_a_decay_or_a_name_that_cannot_be_is_refused) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    Small small(world);
    expect_error([&] { Ema(*small.sharded, {.decay = 1}); }, {"the decay must be in [0, 1), got 1"});
    expect_error([&] { Ema(*small.sharded); }, {"averages called 'ema' already"});
    expect_error([&] { Ema(*small.sharded, {.name = "model"}); }, {"'model' cannot be"});
    Ema second(*small.sharded, {.name = "slow"});
    small.sharded.reset();
    expect_error([&] { second.update(); }, {"the Sharded whose parameters 'slow' averages is gone"});
  });
}

TEST(Ema, that_dies_while_it_stands_in_puts_the_parameters_back) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    Small small(world);
    const std::vector<at::Tensor> before = held_by(*small.sharded);
    small.ema->swap_in();
    small.ema.reset();
    expect_held(*small.sharded, before, "after the Ema is gone");
  });
}

// Written by one mesh and strategy, read by another; a run without averages passes over them.
RC_GTEST_PROP(Ema, averages_come_back_from_a_checkpoint_on_any_mesh, ()) {
  const kit::DrawnSharding from = kit::drawn_sharding(), to = kit::drawn_elsewhere(from);
  const checkpoint::Scratch scratch;
  Values saved;
  const auto on = [&](const kit::DrawnSharding& d, const auto& body) {
    run_threads(d.mesh.size(), [&](std::shared_ptr<Comm> world) {
      const auto comms = std::make_shared<MeshComm>(world, d.mesh);
      const kit::DrawnModel model = d.make();
      const auto parallel = d.cut(model, comms);
      Sharded sharded = fully_shard(model.module, comms, d.options());
      body(model, sharded);
    });
  };
  on(from, [&](const kit::DrawnModel& model, Sharded& sharded) {
    Optimizer optimizer = sgd(sharded, {.lr = 0.5});
    Ema ema(sharded, {.decay = 0.5});
    train(model, optimizer, 0);
    ema.update();
    const Values averages = ema.gather();
    if (sharded.rank() == 0) saved = copies(averages);
    checkpoint::save(scratch / "at", sharded, nullptr);
  });
  on(to, [&](const kit::DrawnModel&, Sharded& sharded) {
    checkpoint::load(scratch / "at", sharded, nullptr);
    Ema ema(sharded);
    checkpoint::load(scratch / "at", sharded, nullptr);
    expect_equal(ema.gather(), saved, from.str() + " -> " + to.str());
  });
  if (::testing::Test::HasFailure()) RC_FAIL(from.str() + " -> " + to.str());
}

TEST(Ema, averages_that_a_checkpoint_lacks_begin_as_the_parameters_that_are_loaded) {
  const checkpoint::Scratch scratch;
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Small small(world);
    small.ema.reset();
    checkpoint::save(scratch / "without", *small.sharded, nullptr);
    const Values parameters = copies(small.sharded->gather_main_parameters());
    small.step();
    Ema late(*small.sharded);
    expect_error([&] { checkpoint::load(scratch / "without", *small.sharded, nullptr); },
                 {"ema.bias is missing from the checkpoint", "A program can load what fits, by `partial`"});
    const auto loaded = checkpoint::load(scratch / "without", *small.sharded, nullptr, {.partial = true});
    EXPECT_EQ(loaded.skipped.size(), 2U);
    expect_equal(late.gather(), parameters, "averages after the load");
  });
}

TEST(Ema, a_decay_that_is_set_holds_from_the_next_update) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    Small small(world);
    small.ema->set_decay(0.75);
    small.step();
    Values expected = copies(small.ema->gather());
    small.ema->update();
    for (const auto& [name, value] : small.sharded->gather_main_parameters())
      expected[name] = expected[name] * 0.75 + value * 0.25;
    expect_equal(small.ema->gather(), expected, "after the update");
    expect_error([&] { small.ema->set_decay(1); }, {"the decay must be in [0, 1), got 1"});
  });
}

TEST(Ema, that_was_moved_keeps_its_averages_and_its_name_until_the_last_owner_is_gone) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    Small small(world);
    const Values averages = copies(small.ema->gather());
    {
      const Ema moved = std::move(*small.ema);
      small.ema.reset();
      expect_equal(moved.gather(), averages, "after the move");
      expect_error([&] { Ema(*small.sharded); }, {"averages called 'ema' already"});
    }
    const Ema again(*small.sharded);
  });
}

// A gather needs the other rank, which is gone. What was swapped in is put back all the same.
TEST(Ema, parameters_are_back_after_a_gather_that_failed_with_another_rank) {
  for (const char* row : {"zero1", "zero2", "zero3"})
    expect_error(
        [&] {
          run_threads(2, [&](std::shared_ptr<Comm> world) {
            Small small(world, row);
            const std::vector<at::Tensor> before = held_by(*small.sharded);
            if (world->rank() == 1) throw Error("of this rank alone");
            EXPECT_THROW(small.ema->with_averages([&] { call(small.linear, at::ones({2, 3})); }), std::exception) << row;
            EXPECT_FALSE(small.ema->is_swapped_in()) << row;
            expect_held(*small.sharded, before, row);
          });
        },
        {"rank 1", "of this rank alone"});
}

TEST(Ema, takes_the_memory_of_the_main_parameters_once_more) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    Small small(world, "zero3");
    small.ema.reset();
    const int64_t before = small.sharded->memory().now(MemoryKind::optimizer);
    const Ema ema(*small.sharded);
    int64_t main = 0;
    for (const Piece& piece : small.sharded->main_parameters()) main += static_cast<int64_t>(piece.data.nbytes());
    const int64_t padding = 2 * 512;  // of two parameters, at most
    const int64_t added = small.sharded->memory().now(MemoryKind::optimizer) - before;
    EXPECT_GE(added, main);
    EXPECT_LE(added, main + padding);
  });
}
