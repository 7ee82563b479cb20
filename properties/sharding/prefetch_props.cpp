// Scenarios of PyTorch's test_fully_shard_comm.py: gathers ahead of their unit. See docs/parity.md.
#include <gtest/gtest.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

namespace {

constexpr int64_t kLayers = 4;

// Layers that all differ in size, so that the bytes of a gather tell whose it is.
class WidthsImpl : public torch::nn::Module {
 public:
  WidthsImpl() {
    for (int64_t i = 0; i < kLayers; ++i)
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(3 + 2 * i, 5 + 2 * i)));
    initialize_parameters(*this, 3, 0.5);
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) {
      before(i);
      x = at::tanh(call(layers[i], x));
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  std::function<void(size_t)> before = [](size_t) {};
};
TORCH_MODULE(Widths);

// "|01|2|3|" says: layer 0 and 1 are gathered before layer 0 runs, layer 2 before layer 1 does, ...; | is where a layer is
// called, r a reduction.
struct Orders {
  std::string forward, backward;
};
Orders gather_orders(int64_t forward_ahead, int64_t backward_ahead, bool recompute = false, int64_t bytes_in_flight_max = 0) {
  auto trace = std::make_shared<Trace>();
  std::vector<size_t> marks;
  size_t forward_ends = 0;
  on_mesh(
      ranks(2),
      [&](std::shared_ptr<MeshComm> comms) {
        Widths model;
        ShardOptions options = toy::options("zero3");
        options.broadcast_initial_values = false;
        options.bytes_in_flight_max = bytes_in_flight_max;
        if (recompute) options.recompute = options.units;
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        for (int64_t i = 0; i < kLayers; ++i) {
          std::vector<UnitHandle> next, previous;
          for (int64_t j = 1; j <= forward_ahead && i + j < kLayers; ++j) next.push_back(sharded.unit(std::to_string(i + j)));
          for (int64_t j = 1; j <= backward_ahead && i - j >= 0; ++j) previous.push_back(sharded.unit(std::to_string(i - j)));
          sharded.unit(std::to_string(i)).set_forward_prefetch(next);
          sharded.unit(std::to_string(i)).set_backward_prefetch(previous);
        }
        bool in_forward = true;
        if (comms->rank() == 0)
          model->before = [&](size_t) {
            if (in_forward) marks.push_back(trace->of_rank(0).size());
          };
        const at::Tensor loss = call(model, toy::data({2, 3}, 1)).sum();
        in_forward = false;
        if (comms->rank() == 0) forward_ends = trace->of_rank(0).size();
        loss.backward();
        EXPECT_FALSE(sharded.units().back().is_unsharded());
      },
      {}, trace);
  std::map<int64_t, std::string> unit_of;
  Orders orders;
  const auto records = trace->of_rank(0);
  for (size_t i = 0; i < records.size(); ++i) {
    for (const size_t mark : marks)
      if (mark == i) orders.forward += "|";
    if (records[i].op == "reduce_scatter") orders.backward += "r";
    if (records[i].op != "all_gather") continue;
    if (!unit_of.contains(records[i].bytes)) unit_of[records[i].bytes] = std::to_string(unit_of.size());
    (i < forward_ends ? orders.forward : orders.backward) += unit_of[records[i].bytes];
  }
  return orders;
}

}  // namespace

TEST(Fsdp2Parity, gathers_ahead_start_in_the_order_asked_for) {
  for (const bool recompute : {false, true}) {
    EXPECT_EQ(gather_orders(0, 0, recompute).forward, "|0|1|2|3");
    EXPECT_EQ(gather_orders(1, 0, recompute).forward, "|01|2|3|") << "each block starts the next one's";
    EXPECT_EQ(gather_orders(2, 0, recompute).forward, "|012|3||");
    EXPECT_EQ(gather_orders(0, 0, recompute).backward, "3r2r1r0r");
    EXPECT_EQ(gather_orders(2, 0, recompute).backward, "3r2r1r0r") << "a recomputed forward gathers nothing ahead";
    EXPECT_EQ(gather_orders(0, 1, recompute).backward, "32r1r0rr");
    EXPECT_EQ(gather_orders(0, 2, recompute).backward, "321r0rrr");
  }
}

TEST(Fsdp2Parity, gathers_ahead_keep_to_the_limit_on_bytes_in_flight) {
  EXPECT_EQ(gather_orders(2, 2, false, 1).forward, "|0|1|2|3") << "less than any";
  EXPECT_EQ(gather_orders(2, 2, false, 1).backward, "3r2r1r0r");
  EXPECT_EQ(gather_orders(2, 2, false, 1000000).forward, "|012|3||") << "more than all";
}

TEST(Fsdp2Parity, a_gather_ahead_of_a_unit_that_does_not_come_changes_no_bit) {
  const MakeTrainee make = [] { return parity::trainee(parity::Block(8), {2, 8}); };
  for (const auto completion : {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late}) {
    parity::Plan plan{.mesh = ranks(2), .options = toy::options("zero3"), .steps = 3};
    plan.threads.completion = completion;
    plan.on_start = [](Sharded& sharded) {
      sharded.unit("inner").set_backward_prefetch({sharded.unit("outer")});
      sharded.unit("outer").set_forward_prefetch({sharded.unit("inner")});
    };
    plan.on_step = [](Sharded& sharded, torch::nn::Module&, int64_t) {
      for (UnitHandle unit : sharded.units()) EXPECT_FALSE(unit.is_unsharded()) << unit.name();
    };
    expect_trains_like_plain(make, plan);
  }
}
