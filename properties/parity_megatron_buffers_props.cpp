// Scenarios of Megatron-LM's test_param_and_grad_buffer.py, test_reduce_scatter_with_fp32_accumulation.py,
// test_finalize_model_grads.py and mfsdp_v2/test_dbuffer.py. See docs/parity.md.
#include <gtest/gtest.h>

#include <set>

#include "parity_models.h"
#include "parity_training.h"
#include "shardproof/traced.h"

using namespace shardproof;
using parity::expect_near;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;
using parity::on_mesh;

namespace {

Mesh ranks(int64_t world) {
  return Mesh({{"dp_shard", world}});
}
Mesh grid(int64_t replicas, int64_t shards) {
  return Mesh({{"dp_replicate", replicas}, {"dp_shard", shards}});
}

ShardOptions block_units(const std::string& strategy) {
  ShardOptions options = toy::options(strategy);
  options.units = by_type<parity::BlockImpl>();
  return options;
}

MakeTrainee make_blocks(int64_t count, int64_t width) {
  return [=] { return parity::trainee(parity::blocks(count, width), {3, width}); };
}

// The gradient of one sharded backward over the data of all ranks.
parity::Tensors gradients_of(const Mesh& mesh, const ShardOptions& options, int64_t width = 6) {
  parity::Tensors result;
  on_mesh(mesh, [&](std::shared_ptr<MeshComm> comms) {
    auto model = parity::blocks(2, width);
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    call(model, toy::data({2, width}, comms->rank()).to(options.precision.compute.value_or(at::kFloat)))
        .to(at::kFloat)
        .square()
        .sum()
        .backward();
    const auto values = sharded.gather_parameters();
    const parity::Tensors like(values.begin(), values.end());
    const parity::Tensors whole = parity::whole(sharded.gradients(), like, *comms);
    if (comms->rank() == 0) result = whole;
  });
  return result;
}

void expect_same(const parity::Tensors& actual, const parity::Tensors& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), wanted.size());
  for (const auto& [name, tensor] : wanted) expect_near(actual.at(name), tensor, tolerance, what + " " + name);
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
        if (record.op == "reduce_scatter" || record.op == "all_reduce") bytes.push_back(record.bytes);
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

TEST(MegatronParity, shards_of_the_optimizer_cover_every_parameter_once) {
  for (const Mesh& mesh : {ranks(1), ranks(3), grid(2, 2), grid(3, 1)})
    for (const Strategy& row : strategies())
      for (const Granularity granularity : {Granularity::element, Granularity::tensor}) {
        if (row.axes.size() == 2 && !mesh.has("dp_replicate")) continue;
        if (granularity == Granularity::tensor && mesh.size() == 3) continue;
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
            }
          }
        EXPECT_EQ(times.size(), 8u);
        for (const auto& [name, count] : times)
          for (const int64_t n : count) ASSERT_EQ(n, copies) << row.name << " on '" << mesh.str() << "' " << name;
      }
}

TEST(MegatronParity, averages_before_after_and_in_the_collective_agree) {
  // Powers of two scale without rounding, so the three are one in every bit.
  for (const Mesh& mesh : {ranks(2), ranks(4), grid(2, 2), grid(2, 4)})
    for (const char* name : {"ddp", "zero1", "zero3"}) {
      ShardOptions options = block_units(name);
      const parity::Tensors after = gradients_of(mesh, options);
      for (const Divide divide : {Divide::before, Divide::split, Divide::in_collective}) {
        options.divide = divide;
        expect_same(gradients_of(mesh, options), after, 0, name);
      }
    }
  ShardOptions options = block_units("zero3");
  const parity::Tensors after = gradients_of(ranks(3), options);
  for (const Divide divide : {Divide::before, Divide::split, Divide::in_collective}) {
    options.divide = divide;
    expect_same(gradients_of(ranks(3), options), after, 1e-6, "thirds");
  }
}

TEST(MegatronParity, float32_sums_over_a_low_precision_wire_are_sums_of_rounded_terms) {
  for (const char* name : {"ddp", "zero1", "zero3"})
    for (const auto completion : {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late}) {
      bool any_differs = false;
      on_mesh(ranks(4),
              [&](std::shared_ptr<MeshComm> comms) {
                auto wide = parity::blocks(2, 6), narrow = parity::blocks(2, 6), plain = parity::blocks(2, 6);
                ShardOptions options = block_units(name);
                options.precision = {.reduce = at::kBFloat16, .float32_sums = true};
                Sharded sharded = fully_shard(wide.ptr(), comms, options);
                options.precision.float32_sums = false;
                Sharded other = fully_shard(narrow.ptr(), comms, options);
                call(wide, toy::data({2, 6}, comms->rank())).square().sum().backward();
                call(narrow, toy::data({2, 6}, comms->rank())).square().sum().backward();
                parity::Tensors in_float, in_bfloat;
                for (int64_t rank = 0; rank < 4; ++rank)
                  for (const auto& [key, gradient] : parity::plain_gradients(parity::trainee(plain, {2, 6}), rank)) {
                    const at::Tensor term = gradient.to(at::kBFloat16), wider = term.to(at::kFloat);
                    in_float[key] = rank == 0 ? wider : in_float[key] + wider;
                    in_bfloat[key] = rank == 0 ? term : in_bfloat[key] + term;
                  }
                for (auto& [key, sum] : in_float) sum = sum.to(at::kBFloat16).to(at::kFloat) / 4.0;
                for (auto& [key, sum] : in_bfloat) sum = sum.to(at::kFloat) / 4.0;
                const auto first = parity::whole(sharded.gradients(), in_float, *comms),
                           second = parity::whole(other.gradients(), in_float, *comms);
                for (const auto& [key, sum] : in_float) {
                  expect_near(first.at(key), sum, 0, key);
                  expect_near(second.at(key), in_bfloat.at(key), 0, key);
                  if (comms->rank() == 0) any_differs |= !toy::same_bits(first.at(key), second.at(key));
                }
              },
              {{}, completion, {}, 2});
      EXPECT_TRUE(any_differs) << "the two sums are not the same thing";
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

TEST(MegatronParity, units_gathered_ahead_are_freed_by_resharding) {
  on_mesh(ranks(2),
          [](std::shared_ptr<MeshComm> comms) {
            auto model = parity::blocks(2, 4);
            Sharded sharded = fully_shard(model.ptr(), comms, block_units("zero3"));
            UnitHandle unit = sharded.unit("1");
            unit.reshard();  // nothing there: nothing happens
            unit.start_unshard();
            EXPECT_THROW(unit.reshard(), Error) << "in flight";
            unit.unshard();
            EXPECT_GT(sharded.memory().now(MemoryKind::gathered), 0);
            unit.reshard();
            EXPECT_EQ(sharded.memory().now(MemoryKind::gathered), 0);
            call(model, toy::data({2, 4}, 1)).sum().backward();
            EXPECT_GT(sharded.gradient_norm(), 0);
          },
          {ThreadsOptions::Schedule::serial, ThreadsOptions::Completion::late, {}, 1});
}

TEST(MegatronParity, units_chosen_by_name_add_gradients_in_float32) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = std::make_shared<torch::nn::Module>("two");
    const torch::nn::LinearOptions shape = torch::nn::LinearOptions(1, 2).bias(false);
    torch::nn::Linear wide(shape), narrow(shape);
    model->register_module("wide", wide);
    model->register_module("narrow", narrow);
    model->to(at::kBFloat16);
    ShardOptions options = toy::options("zero2");
    options.precision = {.main = at::kFloat, .gradient = at::kBFloat16};
    options.unit_precision = [](const std::string& unit) {
      return name_matches("w*", unit) ? std::optional(Precision{.main = at::kFloat, .gradient = at::kFloat}) : std::nullopt;
    };
    Sharded sharded = fully_shard(model, comms, options);
    for (int64_t k = 0; k < 5; ++k) {
      sharded.set_last_microbatch(k == 4);
      const at::Tensor x = at::full({1, 1}, k == 0 ? 256.0 : 1.0, at::kBFloat16);
      (call(wide, x).sum() + call(narrow, x).sum()).backward();
    }
    for (const Piece& piece : sharded.gradients()) {
      const double wanted = piece.name == "wide.weight" ? 260 : 256;  // ones vanish beside 256 in bfloat16
      expect_near(piece.data, at::full({piece.run.size()}, wanted), 0, piece.name);
    }
  });
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

TEST(MegatronParity, main_parameters_and_gradients_have_the_dtypes_asked_for) {
  for (const char* name : {"zero1", "zero2", "zero3", "hsdp", "hfsdp"})
    for (const bool wide : {false, true})
      for (const std::optional<at::ScalarType> wire : {std::optional<at::ScalarType>(), std::optional(at::kHalf)})
        on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
          auto model = parity::blocks(2, 8);
          ShardOptions options = block_units(name);
          options.precision.gradient = at::kFloat;
          options.precision.reduce = wire;
          if (wide) options.precision.main = at::kDouble;
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          Optimizer optimizer = adamw(sharded, {.lr = 1e-2});
          // Parameters of two dtypes are kept twice, of one dtype once, unless their layouts differ.
          const int64_t model_bytes = 2 * 2 * (64 + 16) * 4, shard = std::string(name) == "hfsdp" ? 4 : 2;
          const bool sharded_parameters = std::string(name) != "zero1" && std::string(name) != "zero2";
          int64_t bytes = model_bytes / (sharded_parameters ? 2 : 1);
          if (wide) bytes += 2 * model_bytes / shard;
          EXPECT_GE(sharded.memory().now(MemoryKind::parameter), bytes - model_bytes / 2) << name;
          for (int64_t step = 0; step < 2; ++step) {
            call(model, toy::data({2, 8}, comms->rank())).square().sum().backward();
            const at::ScalarType main = wide ? at::kDouble : at::kFloat;
            for (const Piece& piece : sharded.main_parameters()) EXPECT_EQ(piece.data.scalar_type(), main);
            for (const Piece& piece : sharded.gradients()) EXPECT_EQ(piece.data.scalar_type(), main);
            for (const Piece& piece : optimizer.state("exp_avg")) EXPECT_EQ(piece.data.scalar_type(), main);
            for (const Piece& piece : sharded.parameters()) EXPECT_EQ(piece.data.scalar_type(), at::kFloat);
            EXPECT_GT(sharded.gradient_norm(), 0);
            optimizer.step();
          }
        });
}
