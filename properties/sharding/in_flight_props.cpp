// What is under way at a time: sums over replicas beside the backward, gathers of updated parameters beside the update and
// beyond it, and small parameters that need none.
#include <gtest/gtest.h>

#include <array>

#include "properties/kit/expect_error.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::block_units;
using parity::expect_trains_like_plain;
using parity::grid;
using parity::MakeTrainee;
using parity::ranks;

namespace {

// Of one rank: how many calls of each kind nobody has waited for, and how many there were at most.
struct Open {
  std::array<int64_t, 16> now{}, most{};
  int64_t together = 0, most_together = 0;
  int64_t now_of(Op op) const { return now[static_cast<size_t>(op)]; }
  int64_t take_most_together() { return std::exchange(most_together, 0); }
  int64_t take_most(Op op) { return std::exchange(most[static_cast<size_t>(op)], 0); }
};

class OpenWork final : public Work::State {
 public:
  OpenWork(Work inner, std::shared_ptr<Open> open, Op op) : inner_(std::move(inner)), open_(std::move(open)), op_(op) {}
  void wait() override {
    inner_.wait();
    --open_->now[static_cast<size_t>(op_)];
    --open_->together;
  }

 private:
  Work inner_;
  std::shared_ptr<Open> open_;
  Op op_;
};

class Watched final : public Comm {
 public:
  Watched(std::shared_ptr<Comm> inner, std::shared_ptr<Open> open) : inner_(std::move(inner)), open_(std::move(open)) {}
  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    auto part = inner_->split(color, key, std::move(name));
    return part ? std::make_shared<Watched>(part, open_) : nullptr;
  }

 private:
  Work start(Call call) override {
    const auto op = static_cast<size_t>(call.op);
    Work inner = inner_->issue(std::move(call));
    open_->most[op] = std::max(open_->most[op], ++open_->now[op]);
    open_->most_together = std::max(open_->most_together, ++open_->together);
    return Work(std::make_shared<OpenWork>(std::move(inner), open_, static_cast<Op>(op)));
  }
  std::shared_ptr<Comm> inner_;
  std::shared_ptr<Open> open_;
};

using Body = std::function<void(const std::shared_ptr<MeshComm>&, Open&)>;

void watched(const Mesh& mesh, const Body& body) {
  run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
    auto open = std::make_shared<Open>();
    body(std::make_shared<MeshComm>(std::make_shared<Watched>(comm, open), mesh), *open);
  });
}

// Equal units, each of one matrix, and nothing in the root.
constexpr int64_t kUnits = 5, kWidth = 6;
Mlp equal_units() { return Mlp(MlpOptions{.widths = std::vector<int64_t>(kUnits + 1, kWidth), .bias = false}); }

ShardOptions options_of(const char* name) {
  ShardOptions options = toy::options(name);
  options.broadcast_initial_values = false;
  return options;
}

at::Tensor loss_of(Mlp& model) { return call(model, toy::data({2, kWidth}, 1)).square().sum(); }

}  // namespace

TEST(InFlight, updated_parameters_are_gathered_while_later_ones_are_updated) {
  for (const char* name : {"zero1", "zero2"})
    watched(ranks(2), [&](const std::shared_ptr<MeshComm>& comms, Open& open) {
      Mlp model = equal_units();
      Sharded sharded = fully_shard(model.ptr(), comms, options_of(name));
      Optimizer optimizer = sgd(sharded, {.lr = 0.1});
      loss_of(model).backward();
      open.take_most(Op::all_gather);
      optimizer.step();
      EXPECT_EQ(open.take_most(Op::all_gather), kUnits) << name;
      EXPECT_EQ(open.now_of(Op::all_gather), 0) << "the step returns when they are there";
    });
}

TEST(InFlight, sums_over_replicas_are_not_waited_for_by_the_next_buckets) {
  watched(grid(2, 2), [&](const std::shared_ptr<MeshComm>& comms, Open& open) {
    Mlp model = equal_units();
    Sharded sharded = fully_shard(model.ptr(), comms, options_of("hsdp"));
    const at::Tensor loss = loss_of(model);
    open.take_most_together();
    loss.backward();
    EXPECT_EQ(open.take_most(Op::reduce_scatter), 2) << "as two of the largest";
    EXPECT_GE(open.take_most(Op::all_reduce), 1);
    EXPECT_GE(open.take_most_together(), 3) << "a sum over replicas beside the two";
    EXPECT_EQ(open.now_of(Op::all_reduce), 0);
    EXPECT_EQ(sharded.gather_gradients().size(), static_cast<size_t>(kUnits));
  });
}

TEST(InFlight, sums_are_limited_in_bytes_and_not_in_their_number) {
  watched(ranks(2), [&](const std::shared_ptr<MeshComm>& comms, Open& open) {
    // The first layer is last in the backward; the sums of the others together are no larger than it.
    Mlp model(MlpOptions{.widths = {40 * kWidth, kWidth, kWidth, kWidth, kWidth}, .bias = false});
    Sharded sharded = fully_shard(model.ptr(), comms, options_of("zero3"));
    call(model, toy::data({2, 40 * kWidth}, 1).requires_grad_()).square().sum().backward();
    EXPECT_GE(open.take_most(Op::reduce_scatter), 3);
  });
}
