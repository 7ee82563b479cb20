// Scenarios of Megatron-LM's test_param_and_grad_buffer.py, test_finalize_model_grads.py and
// mfsdp_v2/test_dbuffer.py. See docs/parity.md.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <set>

#include "properties/kit/of_set_up.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::block_units;
using parity::expect_near;
using parity::expect_trains_like_plain;
using parity::grid;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

namespace {

MakeTrainee make_blocks(int64_t count, int64_t width) {
  return [=] { return parity::trainee(parity::blocks(count, width), {3, width}); };
}

}  // namespace

TEST(MegatronParity, buckets_are_cut_by_bytes_and_reduced_in_reverse_order_of_use) {
  // Ten linear layers: weights of 100 bytes and biases of 20, in one unit.
  for (const auto& [bytes_max, buckets] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {100, 20}, {120, 10}, {240, 5}, {100000, 1}})
    for (const char* name : {"ddp", "zero1", "zero3"}) {
      auto trace = std::make_shared<Trace>();
      on_mesh(
          ranks(2),
          [&, bytes_max = bytes_max](std::shared_ptr<MeshComm> comms) {
            auto model = parity::stack(std::vector<int64_t>(11, 5));
            ShardOptions options = toy::options(name);
            options.units = {};
            options.bucket_bytes_max = bytes_max;
            options.broadcast_initial_values = false;
            Sharded sharded = fully_shard(model.ptr(), comms, options);
            call(model, toy::data({2, 5}, 1)).sum().backward();
            EXPECT_GT(sharded.gradients().size(), 0u);
          },
          {}, trace);
      std::vector<int64_t> bytes;
      for (const TraceRecord& record : trace->of_rank(0))
        if ((record.op == "reduce_scatter" || record.op == "all_reduce") && !of_set_up(record)) bytes.push_back(record.bytes);
      EXPECT_EQ(static_cast<int64_t>(bytes.size()), buckets) << name << " " << bytes_max;
      if (bytes_max == 100) {
        EXPECT_LT(bytes[0], bytes[1]) << "the last bias, then the last weight";
      }
    }
  for (const int64_t count : {1, 3})
    for (const char* name : {"ddp", "zero2", "zero3"}) {
      parity::Plan plan{.mesh = ranks(3), .options = block_units(name), .microbatches = 2};
      plan.options.bucket_count = count == 1 ? 0 : count;
      plan.options.bucket_bytes_max = count == 1 ? 64 : 0;
      expect_trains_like_plain(make_blocks(2, 5), plan);
    }
}

TEST(MegatronParity, buckets_are_padded_to_a_multiple_that_is_asked_for_and_no_bit_changes) {
  constexpr int64_t kBuckets = 2;  // of one size, because each is smaller than the multiple
  for (const int64_t world : {2, 3})
    for (const char* name : {"ddp", "zero1", "zero3"})
      for (const int64_t multiple : {1000, 4096}) {
        parity::Plan plan{.mesh = ranks(world), .options = block_units(name), .microbatches = 2};
        plan.options.bucket_multiple = multiple;
        plan.shard = [&](const parity::Trainee& own, std::shared_ptr<MeshComm> comms) {
          Sharded sharded = fully_shard(own.module, comms, plan.options);
          const int64_t here = sharded.memory().now(MemoryKind::parameter) / static_cast<int64_t>(sizeof(float)) / kBuckets;
          const int64_t whole = std::string(name) == "zero3" ? here * world : here;
          EXPECT_TRUE(whole % multiple == 0 && whole % world == 0 && whole >= multiple)
              << name << ": " << whole << " elements on " << world << " ranks, multiple " << multiple;
          return sharded;
        };
        expect_trains_like_plain(make_blocks(kBuckets, 5), plan);
      }
}

TEST(MegatronParity, shards_of_the_optimizer_cover_every_parameter_once) {
  for (const Mesh& mesh : {ranks(1), ranks(3), grid(2, 2), grid(3, 1)})
    for (const Strategy& row : strategies())
      for (const Granularity granularity : {Granularity::element, Granularity::tensor, Granularity::row}) {
        if (row.axes.size() == 2 && !mesh.has("dp_replicate")) continue;
        std::vector<std::vector<Piece>> held(mesh.size());
        on_mesh(mesh, [&](std::shared_ptr<MeshComm> comms) {
          auto model = parity::blocks(2, 5);
          ShardOptions options = block_units(row.name);
          options.granularity = granularity;
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          Optimizer optimizer = sgd(sharded, {.lr = 0.1, .momentum = 0.5});
          held[comms->rank()] = optimizer.state("momentum_buffer");
        });
        const Layout state = on_mesh(row, mesh).state;
        int64_t copies = mesh.size();
        for (const Split& split : state.flat) copies /= mesh.size(split.axis);
        std::map<std::string, std::vector<int64_t>> times;
        for (const auto& of_rank : held)
          for (const Piece& piece : of_rank) {
            auto& count = times[piece.name];
            count.resize(numel(piece.shape));
            for (int64_t i = piece.run.begin; i < piece.run.end; ++i) ++count[i];
            if (granularity == Granularity::tensor) {
              EXPECT_EQ(piece.run.size(), numel(piece.shape))
                  << row.name << " on '" << mesh.str() << "': " << piece.name << " whole";
            } else if (granularity == Granularity::row) {
              const int64_t elements = numel(piece.shape) / piece.shape[0];
              EXPECT_TRUE(piece.run.begin % elements == 0 && piece.run.end % elements == 0)
                  << row.name << " on '" << mesh.str() << "': " << piece.name << " by rows";
            }
          }
        EXPECT_EQ(times.size(), 8u);
        for (const auto& [name, count] : times)
          for (const int64_t n : count) ASSERT_EQ(n, copies) << row.name << " on '" << mesh.str() << "' " << name;
      }
}

TEST(MegatronParity, whole_parameters_stay_whole_on_any_number_of_ranks) {
  for (const int64_t world : {3, 5, 6, 7})
    for (const Granularity granularity : {Granularity::tensor, Granularity::element}) {
      std::mutex mutex;
      std::map<std::string, int> whole, cut;  // pieces of each parameter, over all ranks
      parity::on_mesh(Mesh({{"dp_shard", world}}), [&](std::shared_ptr<MeshComm> comms) {
        auto model = parity::blocks(2, 12);  // matrices larger than a rank's even share
        ShardOptions options = block_units("zero3");
        options.granularity = granularity;
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        const std::lock_guard lock(mutex);
        for (const Piece& piece : sharded.parameters()) ++(piece.run.size() == numel(piece.shape) ? whole : cut)[piece.name];
      });
      if (granularity == Granularity::element) {
        EXPECT_FALSE(cut.empty()) << world << " ranks: even shares cut nothing here, so this test says nothing";
        continue;
      }
      EXPECT_TRUE(cut.empty()) << world << " ranks: a rank has a part of " << cut.begin()->first;
      EXPECT_EQ(whole.size(), parity::blocks(2, 12)->parameters().size());
      for (const auto& [name, ranks] : whole) EXPECT_EQ(ranks, 1) << world << " ranks hold " << name;
    }
}

TEST(MegatronParity, pooled_buffers_change_no_bit) {
  for (const char* name : {"zero3", "hsdp"})
    for (const int64_t ahead : {0, 1, 3})
      for (const auto completion : {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::random}) {
        parity::Plan plan{.mesh = grid(2, 2), .options = block_units(name), .microbatches = 2};
        plan.options.buffers = Buffers::pooled;
        plan.options.prefetch_forward = ahead;
        plan.options.prefetch_backward = ahead;
        plan.threads = {ThreadsOptions::Schedule::serial, completion, {}, 4};
        expect_trains_like_plain(make_blocks(4, 4), plan);
      }
}

TEST(MegatronParity, pooled_buffers_are_two) {
  for (const Buffers buffers : {Buffers::freed, Buffers::pooled})
    on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::blocks(5, 4);
      ShardOptions options = block_units("zero3");
      options.buffers = buffers;
      options.prefetch_forward = 3;
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      sharded.unit("0").unshard();
      const int64_t one = sharded.memory().now(MemoryKind::gathered);
      sharded.unit("0").reshard();
      sharded.reset_peak_memory();
      call(model, toy::data({2, 4}, 1)).sum().backward();
      EXPECT_EQ(sharded.memory().peak(MemoryKind::gathered), one * (buffers == Buffers::pooled ? 2 : 4));
    });
}

TEST(MegatronParity, units_gathered_ahead_are_freed_by_resharding) {
  on_mesh(ranks(2),
          [](std::shared_ptr<MeshComm> comms) {
            auto model = parity::blocks(2, 4);
            Sharded sharded = fully_shard(model.ptr(), comms, block_units("zero3"));
            UnitHandle unit = sharded.unit("1");
            unit.reshard();  // nothing there: nothing happens
            unit.start_unshard();
            unit.reshard();  // waits for the gather, which would write to freed memory
            EXPECT_EQ(sharded.memory().now(MemoryKind::gathered), 0);
            unit.unshard();
            EXPECT_GT(sharded.memory().now(MemoryKind::gathered), 0);
            unit.reshard();
            EXPECT_EQ(sharded.memory().now(MemoryKind::gathered), 0);
            call(model, toy::data({2, 4}, 1)).sum().backward();
            EXPECT_GT(sharded.gradient_norm(), 0);
          },
          {ThreadsOptions::Schedule::serial, ThreadsOptions::Completion::late, {}, 1});
}

TEST(MegatronParity, gradients_are_forgotten_by_a_step_and_by_hand) {
  for (const Strategy& row : strategies())
    on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::blocks(2, 4);
      Sharded sharded = fully_shard(model.ptr(), comms, block_units(row.name));
      const auto backward = [&](bool last) {
        sharded.set_last_microbatch(last);
        call(model, toy::data({2, 4}, comms->rank())).square().sum().backward();
      };
      backward(true);
      const double once = sharded.gradient_norm();
      sharded.divide_gradients(2);
      EXPECT_NEAR(sharded.gradient_norm(), once / 2, 1e-6 * once) << row.name;
      sharded.zero_gradients();
      backward(false);
      sharded.zero_gradients();
      backward(true);
      EXPECT_EQ(sharded.gradient_norm(), once) << row.name << ": nothing of before is left";
      sharded.skip_step();
      EXPECT_TRUE(sharded.gradients().empty());
      backward(true);
      EXPECT_EQ(sharded.gradient_norm(), once) << row.name;
    });
}

TEST(MegatronParity, finishing_steps_run_in_order_after_the_reduction) {
  for (const Strategy& row : strategies())
    on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
      torch::nn::Linear model(torch::nn::LinearOptions(1, 8).bias(false));
      ShardOptions options = toy::options(row.name);
      options.divide_by_tokens = true;
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      std::vector<std::string> ran;
      std::vector<float> saw;
      const auto step = [&](const std::string& name) {
        return [&, name](Sharded& finished) {
          ran.push_back(name);
          for (const Piece& piece : finished.gradients()) saw.push_back(piece.data[0].item<float>());
        };
      };
      sharded.add_finishing_step("late", 2000, step("late"));
      sharded.add_finishing_step("early", 10, step("early"));
      sharded.add_finishing_step("early too", 10, step("early too"));
      for (const bool last : {false, true}) {
        sharded.set_last_microbatch(last);
        sharded.add_tokens(comms->rank());  // 0 + 1 + 2 + 3, twice
        call(model, at::full({1, 1}, static_cast<double>(comms->rank() + 1))).sum().backward();
        EXPECT_EQ(ran.size(), last ? 3u : 0u) << "after the last backward alone";
      }
      EXPECT_EQ(ran, (std::vector<std::string>{"early", "early too", "late"})) << row.name;
      // Sums over ranks and microbatches: 20; over 12 tokens afterwards.
      ASSERT_EQ(saw.size(), 3u);
      EXPECT_EQ(saw[0], 20);
      EXPECT_EQ(saw[1], 20);
      EXPECT_EQ(saw[2], static_cast<float>(20.0 / 12)) << row.name;
    });
}

TEST(Tokens, of_a_step_that_was_skipped_are_not_counted_in_the_next_one) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    torch::nn::Linear model(torch::nn::LinearOptions(1, 8).bias(false));
    ShardOptions options = toy::options("zero2");
    options.divide_by_tokens = true;
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    for (const bool skipped : {true, false}) {
      sharded.set_last_microbatch(!skipped);
      sharded.add_tokens(skipped ? 100 : 2);
      call(model, at::full({1, 1}, 8.0)).sum().backward();
      if (skipped) sharded.skip_step();
    }
    EXPECT_EQ(sharded.gather_gradient("weight")[0][0].item<float>(), 16.0f / 4) << "over the tokens of two ranks";
  });
}
