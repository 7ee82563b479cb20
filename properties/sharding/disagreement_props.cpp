// Ranks that are in other steps, microbatches or states than the others get one error each, and no wrong sum.
#include <gtest/gtest.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/comm/agree.h"
#include "shardproof/comm/capturable.h"
#include "shardproof/comm/checked.h"
#include "shardproof/comm/comparing.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/sharding/note.h"
#include "internal/base/call_label.h"

using namespace shardproof;

namespace {

// A backend that hands over data alone, as process groups do.
class Mute : public Comm {
 public:
  explicit Mute(std::shared_ptr<Comm> inner) : inner_(std::move(inner)) {}
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    auto group = inner_->split(color, key, std::move(name));
    return group ? std::make_shared<Mute>(std::move(group)) : nullptr;
  }

 private:
  Work start(Call call) override {
    const CallLabel nothing("");
    return inner_->issue(std::move(call));
  }
  std::shared_ptr<Comm> inner_;
};

// One whose host would wait for a device to compare, as NCCL's.
class MuteOnDevice final : public Mute, public CapturableComm {
 public:
  using Mute::Mute;
  std::vector<std::string> open_calls() const override { return {}; }
};

using Change = std::function<void(Sharded&, Optimizer&)>;

// What ranks are told when rank 1 alone makes a change before the second step; "" where they are told nothing.
std::string told(const std::string& row, bool mute, const Change& change, int64_t microbatches = 2, int64_t of_rank_1 = 2) {
  return error_of([&] {
    run_threads(4, [&](std::shared_ptr<Comm> comm) {
      if (mute) comm = std::make_shared<Mute>(comm);
      toy::Net net(toy::NetImpl::Options{});
      Sharded sharded = fully_shard(
          net.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_replicate", 2}, {"dp_shard", 2}})), toy::options(row));
      Optimizer optimizer = sgd(sharded, {.lr = 0.1});
      for (int64_t step = 0; step < 3; ++step) {
        if (step == 1 && comm->rank() == 1 && change) change(sharded, optimizer);
        const int64_t count = comm->rank() == 1 && step == 1 ? of_rank_1 : microbatches;
        for (int64_t i = 0; i < count; ++i) {
          sharded.set_last_microbatch(i + 1 == count);
          call(net, toy::data({4, 7}, i)).square().sum().backward();
        }
        optimizer.step();
      }
    });
  });
}

}  // namespace

TEST(Disagreement, ranks_in_other_microbatches_are_told_where_each_is_whatever_the_strategy_and_the_backend) {
  std::vector<Strategy> rows = strategies();
  rows.insert(rows.end(), free_rows().begin(), free_rows().end());
  for (const Strategy& row : rows)
    for (const bool mute : {false, true})
      for (const int64_t of_rank_1 : {1, 3}) {
        SCOPED_TRACE(row.name + (mute ? ", mute" : ""));
        const std::string message = told(row.name, mute, {}, 2, of_rank_1);
        if (accumulates_before_reducing(row) && row.parameter == row.compute)
          EXPECT_EQ(message, "");  // one sum a step, of what is there
        else if (accumulates_before_reducing(row))
          EXPECT_NE(message, "");  // another number of gathers
        else
          expect_says(message, {"step 2", "reduction " + std::to_string(std::min<int64_t>(of_rank_1, 2)), "the last"});
      }
}

TEST(Disagreement, what_one_rank_did_in_a_step_is_told_in_the_next) {
  const Change slower = [](Sharded&, Optimizer& optimizer) { optimizer.set_lr_factor(0.5); };
  const Change noted = [](Sharded& sharded, Optimizer&) { note(sharded, "cast a spell"); };
  for (const std::string row : {"ddp", "zero1", "zero2", "zero3", "hfsdp"})
    for (const bool mute : {false, true}) {
      SCOPED_TRACE(row + (mute ? ", mute" : ""));
      expect_says(told(row, mute, slower), {"step 3", "lr_factor=1", "lr_factor=0.5"});
      expect_says(told(row, mute, noted), {"step 3", "cast a spell"});
      expect_says(told(row, mute, [](Sharded& sharded, Optimizer&) { sharded.skip_step(); }), {"step 2", "step 3"});
    }
}

TEST(Disagreement, a_parameter_that_one_rank_froze_is_named) {
  for (const std::string row : {"ddp", "zero2", "zero3"})
    for (const bool mute : {false, true})
      expect_says(refusal([&] {
                    run_threads(2, [&](std::shared_ptr<Comm> comm) {
                      if (mute) comm = std::make_shared<Mute>(comm);
                      toy::Net net(toy::NetImpl::Options{});
                      Sharded sharded = fully_shard(net.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})),
                                                    toy::options(row));
                      if (comm->rank() == 1) net->first->bias.set_requires_grad(false);
                      call(net, toy::data({4, 7}, 1)).square().sum().backward();
                    });
                  }),
                  {"first.bias", "rank 0", "rank 1"});
}

// The first, the second and the fourth backward, but not the third.
TEST(Disagreement, backwards_compare_seldom_where_the_host_waits_for_it) {
  for (const auto& [frozen_from, told_in] : {std::pair(1, 1), std::pair(2, 2), std::pair(3, 4)}) {
    int begun = 0;
    const std::string message = refusal([&, first = frozen_from] {
      run_threads(2, [&](std::shared_ptr<Comm> comm) {
        toy::Net net(toy::NetImpl::Options{});
        const auto comms = std::make_shared<MeshComm>(std::make_shared<MuteOnDevice>(comm), Mesh({{"dp_shard", 2}}));
        Sharded sharded = fully_shard(net.ptr(), comms, toy::options("ddp"));
        Optimizer optimizer = adamw(sharded, {});
        for (int step = 1; step <= 8; ++step) {
          if (comm->rank() == 0) begun = step;
          if (comm->rank() == 1 && step == first) net->first->bias.set_requires_grad(false);
          call(net, toy::data({4, 7}, 1)).square().sum().backward();
          optimizer.step();
        }
      });
    });
    expect_says(message, {"first.bias"});
    EXPECT_EQ(begun, told_in);
  }
}

TEST(Disagreement, a_decorator_compares_where_what_it_wraps_does) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    EXPECT_TRUE(compares_purposes(*comm));
    EXPECT_TRUE(compares_purposes(*checked(comm)));
    EXPECT_FALSE(compares_purposes(Mute(comm)));
    EXPECT_FALSE(compares_purposes(*checked(std::make_shared<Mute>(comm))));
    EXPECT_TRUE(compares_purposes(Mute(comm->split(comm->rank(), 0, "alone"))));
  });
}

TEST(Disagreement, no_sync_ends_well_when_an_exception_leaves_a_backward) {
  toy::on_ranks(2, [](std::shared_ptr<MeshComm> comms) {
    toy::Net net(toy::NetImpl::Options{});
    Sharded sharded = fully_shard(net.ptr(), comms, toy::options("zero3"));
    const auto broken = [&] {
      const NoSync no_sync(sharded);
      const UnitNoSync unit_no_sync(sharded.unit(""));
      const at::Tensor out = call(net, toy::data({4, 7}, 1));
      out.register_hook([](const at::Tensor&) { throw std::runtime_error("the caller's own"); });
      out.sum().backward();
    };
    EXPECT_THROW(broken(), std::exception);
    EXPECT_TRUE(sharded.gradient_sync());
    EXPECT_TRUE(sharded.unit("").gradient_sync());
    sharded.zero_gradients();
    call(net, toy::data({4, 7}, 1)).square().sum().backward();
    sharded.skip_step();
  });
}
