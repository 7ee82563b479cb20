// What is under way at a time: sums over replicas beside the backward, gathers of updated parameters beside the update and
// beyond it, and small parameters that need none.
#include <gtest/gtest.h>

#include <array>

#include "properties/kit/bits.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/decorated.h"
#include "shardproof/comm/traced.h"

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

class Watched final : public DecoratedComm {
 public:
  Watched(std::shared_ptr<Comm> inner, std::shared_ptr<Open> open) : DecoratedComm(std::move(inner)), open_(std::move(open)) {}

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { return std::make_shared<Watched>(group, open_); }
  Work start(Call call) override {
    const auto op = static_cast<size_t>(call.op);
    Work work = inner().issue(std::move(call));
    open_->most[op] = std::max(open_->most[op], ++open_->now[op]);
    open_->most_together = std::max(open_->most_together, ++open_->together);
    return Work(std::make_shared<OpenWork>(std::move(work), open_, static_cast<Op>(op)));
  }
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

TEST(InFlight, updated_parameters_may_be_awaited_by_whoever_uses_them_first) {
  for (const char* name : {"zero1", "hzero2", "hfsdp"})
    watched(grid(2, 2), [&](const std::shared_ptr<MeshComm>& comms, Open& open) {
      Mlp model = equal_units();
      {
        ShardOptions options = options_of(name);
        options.publish = Publish::at_first_use;
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        Optimizer optimizer = sgd(sharded, {.lr = 0.1});
        loss_of(model).backward();
        optimizer.step();
        EXPECT_EQ(open.now_of(Op::all_gather), kUnits) << name << ": the step does not wait";
        const std::string hidden = model->named_parameters().keys().back();
        EXPECT_FALSE(toy::has_memory(model->named_parameters()[hidden]));
        sharded.unit(hidden.substr(0, hidden.rfind('.'))).unshard();
        EXPECT_TRUE(toy::has_memory(model->named_parameters()[hidden])) << name;
        EXPECT_EQ(open.now_of(Op::all_gather), kUnits - 1) << name << ": of one unit";
        loss_of(model).backward();
        EXPECT_EQ(open.now_of(Op::all_gather), 0) << name << ": the next forward waits";
        optimizer.step();
      }
      EXPECT_EQ(open.now_of(Op::all_gather), 0) << name << ": nothing is left under way";
      if (std::string(name) != "hfsdp") {
        EXPECT_TRUE(toy::has_memory(model->parameters().back())) << "whole parameters stay readable";
      }
    });
}

TEST(InFlight, parameters_that_are_under_way_say_so) {
  watched(ranks(2), [&](const std::shared_ptr<MeshComm>& comms, Open& open) {
    Mlp model = equal_units();
    ShardOptions options = options_of("zero1");
    options.publish = Publish::at_first_use;
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    Optimizer optimizer = sgd(sharded, {.lr = 0.1});
    loss_of(model).backward();
    optimizer.step();
    std::string message;
    try {
      model->parameters()[1].sum();
    } catch (const std::exception& error) {
      message = error.what();
    }
    for (const char* part : {"layers.1.weight", "at_first_use", "unshard"})
      EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_EQ(sharded.parameters().size(), static_cast<size_t>(kUnits)) << "what the library reads waits";
    EXPECT_EQ(open.now_of(Op::all_gather), 0);
  });
}

TEST(InFlight, awaiting_parameters_at_their_first_use_changes_no_bit) {
  const MakeTrainee make = [] { return parity::trainee(parity::blocks(3, 5), {3, 5}); };
  for (const Mesh& mesh : {ranks(3), grid(2, 2)})
    for (const char* name : {"zero1", "zero2", "zero3", "hfsdp", "hzero2"})
      for (const auto completion : {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::random}) {
        if (!mesh.has("dp_replicate") && name[0] == 'h') continue;
        parity::Plan plan{.mesh = mesh, .options = block_units(name), .steps = 3, .microbatches = 2};
        plan.options.publish = Publish::at_first_use;
        plan.threads = {ThreadsOptions::Schedule::serial, completion, {}, 5};
        expect_trains_like_plain(make, plan);
      }
}

TEST(InFlight, parameters_that_are_kept_whole_need_no_gather_and_no_bit_changes) {
  for (const char* name : {"zero3", "hsdp", "hfsdp"}) {
    parity::Plan plan{.mesh = grid(2, 2), .options = block_units(name), .microbatches = 2};
    for (const int64_t kept : {5, 1000}) {
      plan.options.keep_whole_numel_max = kept;
      expect_trains_like_plain([] { return parity::trainee(parity::blocks(2, 5), {3, 5}); }, plan);
    }
    auto trace = std::make_shared<Trace>();
    parity::on_mesh(
        ranks(2),
        [&](std::shared_ptr<MeshComm> comms) {
          Mlp model(MlpOptions{.widths = {6, 6, 6}});
          ShardOptions options = options_of("zero3");
          options.keep_whole_numel_max = 6;
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          for (const auto& item : model->named_parameters())
            EXPECT_EQ(toy::has_memory(item.value()), item.key().ends_with("bias")) << item.key();
          call(model, toy::data({2, 6}, 1));
          for (const auto& [key, placement] : sharded.placements()) {
            EXPECT_EQ(placement.parameter.layout.flat.empty(), key.ends_with("bias")) << key;
            EXPECT_FALSE(placement.state.layout.flat.empty()) << key << ": what updates it is sharded";
          }
        },
        {}, trace);
    int64_t gathered = 0;
    for (const TraceRecord& record : trace->of_rank(0)) gathered += record.op == "all_gather";
    EXPECT_EQ(gathered, 2) << "of two weights, and no bias";
  }
}

TEST(InFlight, a_unit_whose_backward_reads_no_parameter_is_not_gathered_for_it) {
  std::vector<at::Tensor> wanted;
  for (const bool gathers : {true, false}) {
    auto trace = std::make_shared<Trace>();
    std::vector<at::Tensor> gradients;  // rank 0's, as the next
    int64_t gathered = 0;
    parity::on_mesh(
        ranks(2),
        [&](std::shared_ptr<MeshComm> comms) {
          Gpt model(GptOptions{.layers = 1, .hidden = 8, .heads = 2, .vocab = 11, .positions = 4, .tied = false});
          initialize_parameters(*model, 3, 0.5);
          ShardOptions options = options_of("zero3");
          options.units = by_type<EmbeddingImpl, GptBlockImpl>();
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          for (const char* unit : {"wte", "wpe"}) sharded.unit(unit).set_unshard_in_backward(gathers);
          const at::Tensor loss = call(model, at::arange(8).view({2, 4})).square().sum();
          const size_t before = trace->of_rank(comms->rank()).size();
          loss.backward();
          const auto records = trace->of_rank(comms->rank());
          const auto whole = sharded.gather_gradients();
          if (comms->rank() != 0) return;
          gradients = {whole.at("wte.weight"), whole.at("wpe.weight")};
          for (size_t i = before; i < records.size(); ++i) gathered += records[i].op == "all_gather";
        },
        {}, trace);
    if (gathers) wanted = gradients;
    EXPECT_TRUE(kit::same_bits(gradients, wanted));
    EXPECT_EQ(gathered, gathers ? 3 : 1) << "the block, and both embeddings or none";
  }
}
