// What the NCCL backend does for sharded training beyond collectives: memory that NCCL was told of, and sums that divide. On
// the double, with tensors on its device.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include "properties/doubles/comm_worlds.h"
#include "properties/doubles/nccl_worlds.h"
#include "properties/kit/bits.h"
#include "properties/kit/cpu_graphs.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device_graph.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using nccl_worlds::Arrangement;
using kit::same_bits;

namespace {

constexpr int64_t kRanks = 4;

Arrangement on_device(NcclOptions::Sum sum, NcclApi::Memory buffers = NcclApi::Memory::plain) {
  Arrangement arrangement;
  arrangement.plan.seed = 5;
  arrangement.options.sum = sum;
  arrangement.options.buffers = buffers;
  arrangement.presses = true;
  arrangement.late_inputs = false;  // training reads parameters while they are gathered
  return arrangement;
}

void expect_all_well(const std::vector<std::exception_ptr>& thrown) {
  for (const std::exception_ptr& each : thrown) {
    if (!each) continue;
    try {
      std::rethrow_exception(each);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

// Two steps of three layers, each a unit; what rank 0 has of the parameters and of the last gradients.
std::vector<at::Tensor> train(Comm& comm, ShardOptions options) {
  torch::nn::Linear first(6, 6), second(6, 6), third(6, 6);
  auto model = std::make_shared<torch::nn::Module>("three");
  model->register_module("first", first), model->register_module("second", second), model->register_module("third", third);
  for (at::Tensor& parameter : model->parameters()) {
    at::NoGradGuard no_grad;
    parameter.copy_((at::arange(parameter.numel()) * 7).sin().view_as(parameter) / 2);
  }
  options.units = [](const std::string& name, const torch::nn::Module&) { return !name.empty(); };
  Sharded sharded = fully_shard(model, std::make_shared<MeshComm>(comm.shared(), Mesh({{"dp_shard", comm.size()}})), options);
  Optimizer optimizer = adamw(sharded, {});
  std::vector<at::Tensor> seen;
  for (int64_t step = 0; step < 2; ++step) {
    const at::Tensor x = (at::arange(12, at::kFloat) + static_cast<double>(5 * comm.rank() + step)).sin().view({2, 6});
    call(third, call(second, call(first, x).relu()).relu()).square().mean().backward();
    for (const Piece& piece : sharded.gradients()) seen.push_back(piece.data.clone());
    optimizer.step();
  }
  for (const Piece& piece : sharded.parameters()) seen.push_back(piece.data.clone());
  return seen;
}

void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << i;
}

// By rank.
std::vector<std::vector<at::Tensor>> train_in(nccl_worlds::World& world, const ShardOptions& options) {
  std::vector<std::vector<at::Tensor>> seen(kRanks);
  expect_all_well(
      world.run([&](std::shared_ptr<Comm> comm) { seen[static_cast<size_t>(comm->rank())] = train(*comm, options); }));
  return seen;
}

std::string error_on_rank_0(nccl_worlds::World& world, const nccl_worlds::Body& body) {
  try {
    if (const auto thrown = world.run(body)[0]) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(NcclMemory, of_tensors_on_the_host_is_taken_again_by_the_next_collectives) {
  nccl_worlds::World world(kRanks, {.plan = {.host_tensors = true}});
  const auto body = [](std::shared_ptr<Comm> comm) {
    for (const int64_t numel : {10, 1000, 3000, 1000}) {
      at::Tensor sum = at::ones({numel}), gathered = at::empty({kRanks * numel});
      comm->all_reduce(sum).wait();
      comm->all_gather(gathered, sum).wait();
    }
  };
  expect_all_well(world.run(body));
  const int64_t once = world.api(0).pieces_of_memory();
  EXPECT_GT(once, 0);
  for (int repeats = 0; repeats < 5; ++repeats) expect_all_well(world.run(body));
  EXPECT_EQ(world.api(0).pieces_of_memory(), once);
}

TEST(NcclMemory, that_was_given_back_is_written_on_another_stream_once_its_reader_is_done) {
  nccl_worlds::World world(2, {.options = {.buffers = NcclApi::Memory::registered}});
  expect_all_well(world.run([&](std::shared_ptr<Comm> comm) {
    nccl_double::Api& api = world.api(comm->rank());
    c10::DataPtr buffer = comm->allocate(Op::all_gather, 512, at::kCPU);
    auto* const value = static_cast<int*>(buffer.get());
    *value = 1;
    const NcclApi::Stream here = api.current_stream(), there = api.make_stream();
    int seen = 0;
    api.run_on(here, [&seen, value] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      seen = *value;
    });
    buffer.clear();
    api.set_current_stream(there);
    buffer = comm->allocate(Op::all_gather, 512, at::kCPU);
    EXPECT_EQ(buffer.get(), value);
    api.run_on(there, [value] { *value = 2; });
    api.synchronize(here), api.synchronize(there);
    api.set_current_stream(here);
    api.destroy_stream(there);
    EXPECT_EQ(seen, 1);
  }));
}

TEST(NcclMemory, of_captured_steps_is_lent_to_such_steps_only) {
  const kit::CpuGraphs graphs;
  std::barrier<> all(2);
  nccl_worlds::World world(2, {.options = {.buffers = NcclApi::Memory::registered}});
  expect_all_well(world.run([&](std::shared_ptr<Comm> comm) {
    std::vector<const void*> lent;
    for (const bool captured : {true, false, true, false}) {
      const auto take = [&] { lent.push_back(comm->allocate(Op::all_gather, 512, at::kCPU).get()); };
      all.arrive_and_wait();
      captured ? void(capture_graph(at::kCPU, [&] { take(), all.arrive_and_wait(); })) : (take(), all.arrive_and_wait());
    }
    EXPECT_EQ(lent[0], lent[2]);
    EXPECT_EQ(lent[1], lent[3]);
    EXPECT_NE(lent[0], lent[1]);
  }));
}

TEST(NcclMemory, is_freed_after_an_abort_once_kernels_of_the_caller_are_done) {
  nccl_worlds::World world(2, {.options = {.buffers = NcclApi::Memory::registered}});
  std::vector<c10::DataPtr> kept(2);
  const std::string error = error_on_rank_0(world, [&](std::shared_ptr<Comm> comm) {
    nccl_double::Api& api = world.api(comm->rank());
    const c10::DataPtr given_back = comm->allocate(Op::all_gather, 512, at::kCPU);
    kept[static_cast<size_t>(comm->rank())] = comm->allocate(Op::all_gather, 512, at::kCPU);
    api.run_on(api.current_stream(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(200)); });
    throw Error("the body fails");
  });
  EXPECT_NE(error.find("the body fails"), std::string::npos) << error;
  // Freed after the pool is closed.
  for (size_t rank = 0; rank < 2; ++rank) {
    nccl_double::Api& api = world.api(static_cast<int64_t>(rank));
    api.run_on(api.current_stream(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
    kept[rank].clear();
  }
}

TEST(NcclFactor, a_native_sum_with_a_factor_has_the_bits_of_terms_that_were_multiplied_before) {
  Arrangement arrangement = on_device(NcclOptions::Sum::native);
  arrangement.late_inputs = true;
  nccl_worlds::World world(kRanks, arrangement);
  expect_all_well(world.run([](std::shared_ptr<Comm> comm) {
    const auto alone = comm->split(comm->rank(), 0, "alone");
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
      for (const double factor : {0.5, 0.25, 0x1p-15}) {
        const at::Tensor terms = worlds::values(kRanks * 40, dtype, comm->rank(), 3);
        at::Tensor in_sum = terms.clone(), before = terms.mul(factor), slice = at::empty({40}, dtype), other = slice.clone();
        comm->scaled_reduce_scatter(slice, in_sum, factor).wait();
        comm->reduce_scatter(other, before).wait();
        EXPECT_TRUE(same_bits(slice, other)) << dtype << " " << factor;
        comm->scaled_all_reduce(in_sum, factor).wait();
        comm->all_reduce(before).wait();
        EXPECT_TRUE(same_bits(in_sum, before)) << dtype << " " << factor;
        at::Tensor own = terms.clone();
        alone->scaled_all_reduce(own, factor).wait();
        EXPECT_TRUE(same_bits(own, terms.mul(factor))) << "a group of one";
      }
  }));
  EXPECT_EQ(world.api(0).premultiplied_calls(), 4 * 3 * 2);
}

TEST(NcclFactor, a_factor_that_the_sum_cannot_take_is_refused_by_name) {
  const auto with = [](double factor, Reduce op, at::ScalarType dtype) {
    return [=](std::shared_ptr<Comm> comm) {
      const at::Tensor tensor = at::ones({4}, dtype);
      comm->issue({.op = Op::all_reduce, .output = tensor, .input = tensor, .reduce = op, .factor = factor}).wait();
    };
  };
  nccl_worlds::World native(2, on_device(NcclOptions::Sum::native)), ordered(2, on_device(NcclOptions::Sum::rank_order));
  const std::string third = error_on_rank_0(native, with(1.0 / 3, Reduce::sum, at::kFloat));
  EXPECT_NE(third.find("must be a power of two"), std::string::npos) << third;
  for (const std::string& error :
       {error_on_rank_0(native, with(0.5, Reduce::max, at::kFloat)), error_on_rank_0(native, with(0.5, Reduce::sum, at::kLong)),
        error_on_rank_0(ordered, with(0.5, Reduce::sum, at::kFloat))})
    EXPECT_NE(error.find("a factor of 0.5"), std::string::npos) << error;
}

TEST(NcclFactor, checked_ranks_that_pass_different_factors_are_told) {
  nccl_worlds::World world(2, on_device(NcclOptions::Sum::native));
  const std::string error = error_on_rank_0(world, [](std::shared_ptr<Comm> comm) {
    checked(comm)->scaled_all_reduce(at::ones({4}), comm->rank() == 0 ? 0.5 : 0.25).wait();
  });
  EXPECT_NE(error.find("sum times 0.5"), std::string::npos) << error;
  EXPECT_NE(error.find("sum times 0.25"), std::string::npos) << error;
}

TEST(NcclFactor, training_on_native_sums_divides_in_them_and_changes_no_bit) {
  for (const char* name : {"ddp", "zero2", "zero3"}) {
    nccl_worlds::World world(kRanks, on_device(NcclOptions::Sum::native));
    ShardOptions options{.strategy = strategy(name), .numerics = Numerics::fast};
    const auto after = train_in(world, options);
    EXPECT_EQ(world.api(0).premultiplied_calls(), 0);
    int64_t before = 0;
    for (const Divide divide : {Divide::before, Divide::split, Divide::in_collective}) {
      options.divide = divide;
      const auto seen = train_in(world, options);
      for (int64_t rank = 0; rank < kRanks; ++rank)
        expect_same(seen[static_cast<size_t>(rank)], after[static_cast<size_t>(rank)]);
      EXPECT_EQ(world.api(0).premultiplied_calls() - std::exchange(before, world.api(0).premultiplied_calls()), 2 * 3)
          << name << ": each unit, each step";
    }
  }
}

TEST(NcclFactor, terms_that_would_overflow_on_the_wire_are_divided_before_they_are_put_there) {
  nccl_worlds::World world(kRanks, on_device(NcclOptions::Sum::native));
  expect_all_well(world.run([](std::shared_ptr<Comm> comm) {
    torch::nn::Linear model(2, 2);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", comm->size()}})),
                                  {.precision = {.gradient = at::kFloat, .reduce = at::kHalf},
                                   .numerics = Numerics::fast,
                                   .gradient_divide = 1024,
                                   .divide = Divide::before});
    (call(model, at::ones({1, 2})).sum() * 1048576).backward();  // float16 ends at 65504
    for (const Piece& piece : sharded.gradients())
      EXPECT_TRUE(piece.data.eq(1024.0 * kRanks).all().item<bool>()) << piece.name << "\n" << piece.data;
  }));
}

TEST(NcclBuffers, lent_memory_is_registered_once_and_comes_back) {
  for (const auto kind : {NcclApi::Memory::registered, NcclApi::Memory::symmetric}) {
    nccl_worlds::World world(kRanks, on_device(NcclOptions::Sum::rank_order, kind));
    const auto body = [](std::shared_ptr<Comm> comm) {
      for (int64_t round = 0; round < 3; ++round) {
        const c10::DataPtr input = comm->allocate(Op::all_gather, 100 * 4, at::kCPU),
                           output = comm->allocate(Op::all_gather, kRanks * 100 * 4, at::kCPU);
        ASSERT_TRUE(input && output);
        at::Tensor own = at::from_blob(input.get(), {100}), all = at::from_blob(output.get(), {kRanks * 100});
        own.fill_(static_cast<double>(comm->rank()));
        comm->all_gather(all, own).wait();
        EXPECT_EQ(all[150].item<float>(), 1);
        EXPECT_FALSE(comm->allocate(Op::all_gather, 64, c10::Device(at::kMeta))) << "of another device";
      }
    };
    for (int64_t i = 0; i < 2; ++i) expect_all_well(world.run(body));
    EXPECT_EQ(world.api(0).registrations(), 2);
    EXPECT_EQ(world.api(0).calls_in_windows(), kind == NcclApi::Memory::symmetric ? 6 : 0);
  }
  expect_all_well(nccl_worlds::World(2, on_device(NcclOptions::Sum::rank_order)).run([](std::shared_ptr<Comm> comm) {
    EXPECT_FALSE(comm->allocate(Op::all_gather, 64, at::kCPU)) << "nobody asked for registered buffers";
  }));
}

TEST(NcclBuffers, ranks_that_give_back_in_another_order_use_the_same_windows_again) {
  nccl_worlds::World world(2, on_device(NcclOptions::Sum::rank_order, NcclApi::Memory::symmetric));
  expect_all_well(world.run([](std::shared_ptr<Comm> comm) {
    const auto lend = [&] { return comm->allocate(Op::all_gather, 2 * 64 * 4, at::kCPU); };
    c10::DataPtr first = lend(), second = lend();
    (comm->rank() == 0 ? first : second).clear();
    (comm->rank() == 0 ? second : first).clear();
    const c10::DataPtr again = lend();
    const at::Tensor all = at::from_blob(again.get(), {128});
    comm->all_gather(all, at::ones({64})).wait();
    EXPECT_EQ(all.sum().item<float>(), 128);
  }));
}

TEST(NcclBuffers, memory_that_a_body_keeps_is_an_error_and_is_freed_when_it_comes_back) {
  std::vector<c10::DataPtr> kept(2);
  {
    nccl_worlds::World world(2, on_device(NcclOptions::Sum::rank_order, NcclApi::Memory::symmetric));
    const std::string error = error_on_rank_0(world, [&](std::shared_ptr<Comm> comm) {
      kept[static_cast<size_t>(comm->rank())] = comm->allocate(Op::all_gather, 64, at::kCPU);
    });
    EXPECT_NE(error.find("holds 1 registered buffers"), std::string::npos) << error;
    for (c10::DataPtr& each : kept) each.clear();
    // And the next body begins anew.
    expect_all_well(world.run([](std::shared_ptr<Comm> comm) { comm->allocate(Op::all_gather, 64, at::kCPU).clear(); }));
  }
}

TEST(NcclBuffers, units_gather_and_reduce_in_registered_memory_without_changing_a_bit) {
  for (const char* name : {"zero2", "zero3"})
    for (const auto sum : {NcclOptions::Sum::rank_order, NcclOptions::Sum::native}) {
      const ShardOptions options{.strategy = strategy(name),
                                 .buffers = Buffers::pooled,
                                 .prefetch_forward = 1,
                                 .prefetch_backward = 1,
                                 .numerics = Numerics::fast};
      nccl_worlds::World plain(kRanks, on_device(sum)), symmetric(kRanks, on_device(sum, NcclApi::Memory::symmetric));
      const auto wanted = train_in(plain, options), seen = train_in(symmetric, options);
      for (int64_t rank = 0; rank < kRanks; ++rank)
        expect_same(seen[static_cast<size_t>(rank)], wanted[static_cast<size_t>(rank)]);
      const int64_t registered = symmetric.api(0).registrations(), in_windows = symmetric.api(0).calls_in_windows();
      EXPECT_GT(registered, 0);
      if (std::string(name) == "zero3") {
        EXPECT_GE(in_windows, 2 * 3) << "gathers of three units in two steps";
      }
      train_in(symmetric, options);
      EXPECT_EQ(symmetric.api(0).registrations(), registered) << "buffers are found again";
    }
}

// With ddp and zero1 the whole gradient of every unit stays on the rank until it is summed.
TEST(NcclBuffers, gradients_that_stay_whole_are_produced_in_registered_memory_and_summed_from_there) {
  for (const char* name : {"ddp", "zero1"})
    for (const auto sum : {NcclOptions::Sum::rank_order, NcclOptions::Sum::native}) {
      const ShardOptions options{.strategy = strategy(name), .numerics = Numerics::fast};
      nccl_worlds::World plain(kRanks, on_device(sum)), symmetric(kRanks, on_device(sum, NcclApi::Memory::symmetric));
      const auto wanted = train_in(plain, options), seen = train_in(symmetric, options);
      for (int64_t rank = 0; rank < kRanks; ++rank)
        expect_same(seen[static_cast<size_t>(rank)], wanted[static_cast<size_t>(rank)]);
      if (sum == NcclOptions::Sum::rank_order) continue;  // its own buffers are in windows, too
      const int64_t arriving = std::string(name) == "zero1" ? 1 : 0;  // the memory in which sums of slices arrive
      EXPECT_EQ(symmetric.api(0).registrations(), 3 + arriving) << name << ": a buffer for each unit, and no other";
      if (std::string(name) == "ddp") {
        EXPECT_EQ(symmetric.api(0).calls_in_windows(), 2 * 3) << "units, in two steps";
      }
    }
}

TEST(NcclBuffers, gradients_that_stay_whole_need_no_memory_for_communication) {
  for (const char* name : {"ddp", "zero1"}) {
    nccl_worlds::World world(kRanks, on_device(NcclOptions::Sum::native, NcclApi::Memory::symmetric));
    expect_all_well(world.run([&](std::shared_ptr<Comm> comm) {
      torch::nn::Linear model(6, 6), frozen(6, 6);
      for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
      const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", comm->size()}}));
      const ShardOptions options{.strategy = strategy(name), .numerics = Numerics::fast};
      Sharded sharded = fully_shard(model.ptr(), comms, options), still = fully_shard(frozen.ptr(), comms, options);
      for (int64_t step = 0; step < 2; ++step) {
        call(model, at::ones({2, 6})).sum().backward();
        sharded.zero_gradients();
      }
      EXPECT_EQ(sharded.memory().peak(MemoryKind::communication), 0) << name << ": nothing was copied";
      EXPECT_EQ(still.memory().peak(MemoryKind::gradient), 0) << name << ": what is frozen has no gradient";
    }));
  }
}

TEST(NcclBuffers, native_sums_of_gradients_go_from_window_to_window_as_symmetric_kernels_need) {
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
    for (const Divide divide : {Divide::after, Divide::before, Divide::split, Divide::in_collective}) {
      const ShardOptions options{.strategy = strategy(name), .numerics = Numerics::fast, .divide = divide};
      nccl_worlds::World plain(kRanks, on_device(NcclOptions::Sum::native)),
          symmetric(kRanks, on_device(NcclOptions::Sum::native, NcclApi::Memory::symmetric));
      const auto wanted = train_in(plain, options), seen = train_in(symmetric, options);
      for (int64_t rank = 0; rank < kRanks; ++rank)
        expect_same(seen[static_cast<size_t>(rank)], wanted[static_cast<size_t>(rank)]);
      EXPECT_EQ(symmetric.api(0).symmetric_sums(), 2 * 3) << name << ": each unit, each step";
      EXPECT_EQ(symmetric.api(0).premultiplied_calls(), 0) << name << ": a factor has no symmetric kernel";
    }
}

TEST(NcclBuffers, sums_that_no_symmetric_kernel_takes_are_not_moved_into_windows) {
  nccl_worlds::World world(kRanks, on_device(NcclOptions::Sum::native, NcclApi::Memory::symmetric));
  expect_all_well(world.run([](std::shared_ptr<Comm> comm) {
    const int64_t count = 2 * kRanks;
    const c10::DataPtr memory = comm->allocate(Op::reduce_scatter, count * 8, at::kCPU);
    for (const auto dtype : {at::kDouble, at::kLong}) {
      const at::Tensor terms = at::from_blob(memory.get(), {count}, dtype).fill_(comm->rank() + 1);
      const at::Tensor slice = at::empty({2}, dtype);
      comm->reduce_scatter(slice, terms).wait();
      EXPECT_TRUE(slice.eq(1 + 2 + 3 + 4).all().item<bool>()) << dtype;
    }
    const at::Tensor terms = at::full({count}, 1.0F), slice = at::empty({2});
    comm->reduce_scatter(slice, terms).wait();
    EXPECT_TRUE(slice.eq(4).all().item<bool>()) << "from memory that nobody lent";
  }));
  EXPECT_EQ(world.api(0).registrations(), 1) << "what was lent, and no other";
  EXPECT_EQ(world.api(0).symmetric_sums(), 0);
}

TEST(NcclBuffers, without_windows_buffers_are_registered_one_by_one) {
  for (const auto sum : {NcclOptions::Sum::rank_order, NcclOptions::Sum::native}) {
    const ShardOptions options{.strategy = strategy("zero3"), .numerics = Numerics::fast};
    Arrangement old = on_device(sum, NcclApi::Memory::symmetric);
    old.plan.no_windows = true;
    nccl_worlds::World plain(kRanks, on_device(sum)), without(kRanks, old);
    const auto wanted = train_in(plain, options), seen = train_in(without, options);
    for (int64_t rank = 0; rank < kRanks; ++rank)
      expect_same(seen[static_cast<size_t>(rank)], wanted[static_cast<size_t>(rank)]);
    EXPECT_GT(without.api(0).registrations(), 0);
    EXPECT_EQ(without.api(0).calls_in_windows(), 0);
  }
}
