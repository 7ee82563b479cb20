// The NCCL backend on its double: what is asynchronous, what fails, and what is left of it. (That its collectives are right is
// said by comm_props.cpp and comm_programs_props.cpp, which run over it as well.)
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "golden/collectives.h"
#include "properties/doubles/comm_worlds.h"
#include "properties/doubles/nccl_worlds.h"
#include "properties/kit/bits.h"
#include "properties/kit/cpu_graphs.h"
#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/capturable.h"
#include "shardproof/device/device_graph.h"
#include "internal/base/call_label.h"

using namespace shardproof;
using nccl_worlds::Arrangement;
using kit::same_bits;

namespace {

golden::Ranks inputs_of(int64_t world, int64_t numel) {
  golden::Ranks inputs;
  for (int64_t rank = 0; rank < world; ++rank) inputs.push_back(worlds::values(numel, at::kFloat, rank, 3));
  return inputs;
}

Arrangement hasty(double timeout_seconds) {
  Arrangement arrangement;
  arrangement.plan.host_tensors = true;
  arrangement.options.timeout_seconds = timeout_seconds;
  return arrangement;
}

void all_reduce_ones(Comm& comm) {
  const CallLabel label("unit 'h.3'");
  at::Tensor tensor = at::ones({8});
  comm.all_reduce(tensor).wait();
}

}  // namespace

TEST(Nccl, waiting_makes_the_callers_stream_wait_and_not_the_host) {
  std::atomic<bool> waited{false}, host_waited{false};
  nccl_worlds::run(2, {}, [&](std::shared_ptr<Comm> comm) {
    static thread_local at::Tensor gathered;
    gathered = at::empty({8});
    const at::Tensor own = at::ones({4});
    comm->all_gather(gathered, own).wait();  // the first call of all connects the ranks, for which the host waits
    if (comm->rank() == 1) {  // the other has been through its wait before this one calls
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!waited && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      host_waited = !waited;
    }
    comm->all_gather(gathered, own).wait();
    waited = true;
    comm->barrier().wait();
  });
  EXPECT_FALSE(host_waited) << "the wait of rank 0 lasted until rank 1 called as well";
}

TEST(Nccl, ordered_sums_without_kernels_are_refused_at_start_and_native_ones_are_not) {
  const nccl_double::Plan plan{.no_kernels = true};
  const auto world_with = [&](NcclOptions::Sum sum) {
    const auto api = std::make_shared<nccl_double::Api>(std::make_shared<nccl_double::Cluster>(plan), 0);
    NcclWorld world(0, 1, std::make_shared<nccl_double::MemoryStore>(), api, {.sum = sum, .timeout_seconds = 20});
    world.run([](std::shared_ptr<Comm> comm) { all_reduce_ones(*comm); });
  };
  world_with(NcclOptions::Sum::native);
  try {
    world_with(NcclOptions::Sum::rank_order);
    ADD_FAILURE() << "it began";
  } catch (const Error& error) {
    expect_says(error.what(), {"[nccl]", "no kernels"});
  }
}

TEST(Nccl, native_sums_are_the_same_numbers_in_nccls_order) {
  Arrangement arrangement;
  arrangement.presses = true;
  arrangement.options.sum = NcclOptions::Sum::native;
  nccl_worlds::run(4, arrangement, [](std::shared_ptr<Comm> comm) {
    const golden::Ranks inputs = inputs_of(4, 4 * 100);
    at::Tensor slice = at::empty({100}), whole = inputs[comm->rank()].clone();
    comm->reduce_scatter(slice, inputs[comm->rank()].clone()).wait();
    comm->all_reduce(whole).wait();
    EXPECT_TRUE(at::allclose(slice, golden::reduce_scatter(inputs)[comm->rank()], 1e-4, 1e-2));
    EXPECT_TRUE(at::allclose(whole, golden::all_reduce(inputs)[0], 1e-4, 1e-2));
    EXPECT_FALSE(same_bits(whole, golden::all_reduce(inputs)[0])) << "with such data the order shows";
  });
}

TEST(Nccl, registered_and_symmetric_buffers_change_no_bit_and_are_registered_once) {
  for (const auto kind : {NcclApi::Memory::registered, NcclApi::Memory::symmetric}) {
    Arrangement arrangement;
    arrangement.presses = true;
    arrangement.options.buffers = kind;
    nccl_worlds::World world(3, arrangement);
    for (int64_t body = 0; body < 3; ++body)
      for (const auto& thrown : world.run([](std::shared_ptr<Comm> comm) {
             const golden::Ranks inputs = inputs_of(3, 3 * 50'000);
             at::Tensor slice = at::empty({50'000}), whole = inputs[comm->rank()].clone();
             comm->reduce_scatter(slice, inputs[comm->rank()].clone()).wait();
             comm->all_reduce(whole).wait();
             EXPECT_TRUE(same_bits(slice, golden::reduce_scatter(inputs)[comm->rank()]));
             EXPECT_TRUE(same_bits(whole, golden::all_reduce(inputs)[0]));
           }))
        EXPECT_EQ(thrown, nullptr);
    EXPECT_EQ(world.api(0).registrations(), 1);
  }
}

TEST(Nccl, messages_of_one_exchange_meet_by_tag_and_equal_tags_in_order) {
  Arrangement arrangement;
  arrangement.presses = true;
  nccl_worlds::run(2, arrangement, [](std::shared_ptr<Comm> comm) {
    const int64_t other = 1 - comm->rank();
    const auto value = [](int64_t rank, int64_t what) { return at::full({5}, static_cast<double>(10 * rank + what)); };
    at::Tensor a = at::empty({5}), b = at::empty({5}), c = at::empty({5});
    std::vector<Work> works;
    for (const auto& [tag, what] : {std::pair{7, 1}, {2, 2}, {2, 3}})
      works.push_back(comm->send(value(comm->rank(), what), other, tag));
    works.push_back(comm->recv(a, other, 2));
    works.push_back(comm->recv(b, other, 7));
    works.push_back(comm->recv(c, other, 2));
    for (Work& work : works) work.wait();
    EXPECT_TRUE(a.equal(value(other, 2)) && b.equal(value(other, 1)) && c.equal(value(other, 3)));
  });
}

TEST(Nccl, first_messages_between_two_ranks_may_be_grouped_differently_at_both_ends) {
  for (const int64_t ranks : {2, 3})
    nccl_worlds::run(ranks, hasty(3), [](std::shared_ptr<Comm> comm) {
      const int64_t other = 1 - comm->rank();
      at::Tensor got = at::empty({4}), own = at::full({4}, static_cast<double>(comm->rank()));
      if (comm->rank() == 0) {
        comm->send(own, other).wait();
        comm->recv(got, other).wait();
      } else if (comm->rank() == 1) {
        Work received = comm->recv(got, other), sent = comm->send(own, other);
        received.wait(), sent.wait();
      }
      EXPECT_TRUE(comm->rank() == 2 || got.eq(static_cast<double>(other)).all().item<bool>());
    });
}

TEST(Nccl, groups_that_are_first_used_in_another_order_end_after_the_time_out) {
  for (const std::string& error : nccl_worlds::errors_of(2, hasty(0.5), [](std::shared_ptr<Comm> comm) {
         const std::vector<std::shared_ptr<Comm>> groups = {comm->split(0, comm->rank(), "first"),
                                                            comm->split(0, comm->rank(), "second")};
         std::vector<at::Tensor> sums;
         std::vector<Work> works;
         for (const int64_t i : {0, 1})
           works.push_back(groups[static_cast<size_t>(i ^ comm->rank())]->all_reduce(sums.emplace_back(at::ones({8}))));
         for (Work& work : works) work.wait();
       }))
    expect_says(error, {"all_reduce(sum, float32 x 8), call 0", "is not over after 0.5 s"});
}

TEST(Nccl, later_bodies_find_the_groups_of_earlier_ones_and_a_failed_body_makes_new_ones) {
  Arrangement arrangement;
  arrangement.plan.host_tensors = true;
  nccl_worlds::World world(4, arrangement);
  const auto body = [](std::shared_ptr<Comm> comm) {
    const auto first = comm->split(comm->rank() % 2, 0, "first"), second = comm->split(comm->rank() % 2, 0, "second");
    const auto third = first->split(0, -first->rank(), "third");
    for (const auto& group : {first, second, third}) all_reduce_ones(*group);
  };
  const auto expect_well = [&] {
    for (const auto& thrown : world.run(body)) EXPECT_EQ(thrown, nullptr);
    for (const auto& thrown : world.run([](std::shared_ptr<Comm> comm) { all_reduce_ones(*comm); }, 3))
      EXPECT_EQ(thrown, nullptr);
  };
  expect_well();
  const int64_t made = world.api(0).communicators_made();
  EXPECT_EQ(made, 3 * 5) << "three lanes each of the world, three groups of it, and the first three ranks";
  for (int64_t round = 0; round < 3; ++round) expect_well();
  EXPECT_EQ(world.api(0).communicators_made(), made);
  // Several times, since a watch that still acts on the body before comes late only where processors are busy.
  for (int64_t round = 1; round <= 20; ++round) {
    for (const auto& thrown : world.run([](std::shared_ptr<Comm> comm) {
           if (comm->rank() == 2) throw Error("no more paper");
           all_reduce_ones(*comm);
         }))
      EXPECT_NE(thrown, nullptr);
    expect_well();
    EXPECT_EQ(world.api(0).communicators_made(), made + round * 3 * 5);
  }
  EXPECT_LE(world.store().size(), 4 * 2 + 4 + 2 * 20u) << "endings of old bodies are forgotten";
}

TEST(Nccl, a_barrier_that_an_abort_ended_is_not_passed) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    std::atomic<int64_t> passed = 0;
    // Who looks so slowly finds the barrier ended, and has not seen why. No pace makes a right engine fail.
    nccl_worlds::World world(3, {.plan = {.seed = seed, .look_us = 20000}});
    for (const auto& thrown : world.run([&](std::shared_ptr<Comm> comm) {
           comm->barrier().wait();  // the first one waits for the communicator as well
           if (comm->rank() == 2) throw Error("no more paper");
           comm->barrier().wait();
           ++passed;
         }))
      EXPECT_NE(thrown, nullptr);
    EXPECT_EQ(passed, 0);
  }
}

TEST(Nccl, an_asynchronous_error_ends_every_rank_naming_rank_call_number_and_unit) {
  for (int64_t guilty = 0; guilty < 3; ++guilty) {
    Arrangement arrangement = hasty(30);
    arrangement.plan.fails_rank = guilty;
    arrangement.plan.at_call = 2;
    const auto errors = nccl_worlds::errors_of(3, arrangement, [](std::shared_ptr<Comm> comm) {
      for (int64_t i = 0; i < 5; ++i) all_reduce_ones(*comm);
    });
    const std::string rank = fmt::format("rank {}: NCCL failed", guilty);
    for (const std::string& error : errors)
      expect_says(error, {rank.c_str(), "all_reduce(sum, float32 x 8), call 2 on 'world', for unit 'h.3'", "a peer is gone"});
  }
}

TEST(Nccl, a_call_that_hangs_ends_every_rank_after_the_time_out_and_leaves_records) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("shardproof_nccl_{}", ::getpid());
  Arrangement arrangement = hasty(0.5);
  arrangement.plan.hangs_rank = 1;
  arrangement.plan.at_call = 1;
  arrangement.options.flight_directory = folder.string();
  const auto errors = nccl_worlds::errors_of(3, arrangement, [](std::shared_ptr<Comm> comm) {
    for (int64_t i = 0; i < 3; ++i) all_reduce_ones(*comm);
  });
  for (const std::string& error : errors)
    expect_says(error, {"all_reduce(sum, float32 x 8), call 1 on 'world', for unit 'h.3' is not over after 0.5 s"});
  for (int64_t rank = 0; rank < 3; ++rank) {
    std::ifstream file(folder / fmt::format("rank_{}.jsonl", rank));
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    expect_says(text, {"is not over", "\"state\":\"done\"", "\"state\":\"failed\"", "unit 'h.3'"});
  }
  std::filesystem::remove_all(folder);
}

TEST(Nccl, tensors_of_the_host_let_nobody_wait_behind_a_call_that_hangs) {
  Arrangement arrangement = hasty(0.5);
  arrangement.plan.hangs_rank = 1;
  arrangement.plan.at_call = 1;
  for (const std::string& error : nccl_worlds::errors_of(2, arrangement, [](std::shared_ptr<Comm> comm) {
         std::vector<at::Tensor> sums;
         std::vector<Work> works;
         for (int64_t i = 0; i < 4; ++i) works.push_back(comm->all_reduce(sums.emplace_back(at::ones({8}))));
         for (Work& work : works) work.wait();
       }))
    expect_says(error, {"call 1 on 'world'", "is not over after 0.5 s"});
}

TEST(Nccl, who_holds_a_graph_hears_of_the_end_while_an_abort_waits_for_the_graph) {
  Arrangement arrangement;
  arrangement.options.timeout_seconds = 0.5;
  arrangement.plan.hangs_rank = 1;
  arrangement.plan.at_call = 1;
  const std::vector<at::Tensor> sums = {at::ones({8}), at::ones({8})};  // longer than what is behind the call that hangs
  nccl_worlds::World world(2, arrangement);
  for (const auto& thrown : world.run([&](std::shared_ptr<Comm> comm) {
         const std::shared_ptr<void> graph = world.api(comm->rank()).hold_graph();
         const at::Tensor& sum = sums[static_cast<size_t>(comm->rank())];
         for (int64_t i = 0; i < 2; ++i) comm->all_reduce(sum).wait();  // the host does not wait
         while (!world.api(comm->rank()).abort_waits()) std::this_thread::yield();
         comm->all_reduce(sum).wait();
       }))
    EXPECT_NE(thrown, nullptr);
}

TEST(Nccl, what_is_being_split_when_the_world_ends_goes_with_it) {
  for (int64_t split = 0; split < 5; ++split) {
    Arrangement arrangement = hasty(30);
    arrangement.plan.refused_rank = 1;
    arrangement.plan.at_call = split;
    for (const std::string& error : nccl_worlds::errors_of(
             3, arrangement, [](std::shared_ptr<Comm> comm) { comm->split(comm->rank() % 2, 0, "some")->barrier().wait(); }))
      expect_says(error, {"rank 1: NCCL refuses ncclCommSplit"});
  }
}

TEST(Nccl, a_rank_that_never_makes_the_call_is_named_with_its_last_one) {
  std::atomic<bool> over{false};
  const auto errors = nccl_worlds::errors_of(3, hasty(0.5), [&](std::shared_ptr<Comm> comm) {
    all_reduce_ones(*comm);
    if (comm->rank() == 1)
      while (!over) std::this_thread::yield();
    try {
      all_reduce_ones(*comm);
    } catch (const Error&) {
      over = true;
      throw;
    }
  });
  for (const std::string& error : errors)
    expect_says(error,
                {"call 1 on 'world'", "rank 1 has not made it", "its last call is all_reduce(sum, float32 x 8), call 0"});
}

TEST(Nccl, calls_that_do_not_fit_end_every_rank) {
  for (const bool sums : {false, true}) {
    Arrangement arrangement = hasty(30);
    const auto errors = nccl_worlds::errors_of(2, arrangement, [&](std::shared_ptr<Comm> comm) {
      at::Tensor tensor = at::ones({4 + comm->rank()}), all = at::empty({2 * tensor.numel()});
      (sums ? comm->all_reduce(tensor) : comm->all_gather(all, tensor)).wait();
    });
    for (const std::string& error : errors) expect_says(error, {"NCCL failed", "rank"});
  }
}

TEST(Nccl, a_work_that_nobody_waits_for_is_an_error_that_names_it) {
  Arrangement arrangement;
  arrangement.plan.host_tensors = true;
  for (const std::string& error : nccl_worlds::errors_of(
           2, arrangement, [](std::shared_ptr<Comm> comm) { comm->all_gather(at::empty({6}), at::ones({3})); }))
    expect_says(error, {"never waited for all_gather(float32 x 3), call 0 on 'world'", "rank 0 of 2"});
}

TEST(Nccl, nobody_waits_for_a_rank_that_never_comes) {
  const auto store = std::make_shared<nccl_double::MemoryStore>();
  const auto cluster = std::make_shared<nccl_double::Cluster>(nccl_double::Plan{});
  const auto api = std::make_shared<nccl_double::Api>(cluster, 0);
  NcclWorld world(0, 2, store, api, {.timeout_seconds = 0.3});
  try {
    world.run([](std::shared_ptr<Comm>) {});
    ADD_FAILURE() << "the world came about";
  } catch (const WorldLostError& error) {
    expect_says(error.what(), {"ncclCommInitRankConfig for 2 ranks", "0.3 s", "rank 1 gives no sign of life"});
  }
}

TEST(Nccl, the_tcp_store_holds_texts_and_counts_for_all_its_clients) {
  TcpStore server({.serves = true, .timeout_seconds = 20});
  TcpStore first({.port = server.port(), .timeout_seconds = 20}), second({.port = server.port(), .timeout_seconds = 20});
  EXPECT_EQ(first.get("name"), std::nullopt);
  const std::string text("with\0 any byte\xff", 15);
  first.set("name", text);
  EXPECT_EQ(second.get("name"), text);
  EXPECT_EQ(first.count("said"), 1);
  EXPECT_EQ(second.count("said"), 2);
  second.erase("name");
  EXPECT_EQ(first.get("name"), std::nullopt);
}

TEST(NcclMachine, a_machine_without_gpu_or_build_says_so) {
  if (nccl_devices() > 0) GTEST_SKIP() << "this machine has a GPU";
  try {
    nccl_api(0);
    ADD_FAILURE() << "there is an API";
  } catch (const Error& error) {
    expect_says(error.what(), {nccl_available() ? "this machine has no GPU" : "this build has no NCCL", "--backend mpi"});
  }
}

TEST(Nccl, what_a_capture_that_failed_has_left_is_waited_for_on_no_stream) {
  const kit::CpuGraphs graphs;
  std::barrier<> all(2);
  std::vector<at::Tensor> sums = {at::ones({4}), at::ones({4})};  // nobody knows when they are there
  nccl_worlds::run(2, {}, [&](std::shared_ptr<Comm> comm) {
    const at::Tensor sum = sums[static_cast<size_t>(comm->rank())];
    Work left;
    all.arrive_and_wait();
    capture_graph(at::kCPU, [&] {
      left = comm->all_reduce(sum);
      all.arrive_and_wait();
    });
    all.arrive_and_wait();  // nobody captures any longer
    left.wait();
    EXPECT_EQ(dynamic_cast<CapturableComm&>(*comm).open_calls(), std::vector<std::string>());
  });
}

TEST(Nccl, calls_are_open_until_somebody_waits_for_them) {
  nccl_worlds::run(2, {}, [&](std::shared_ptr<Comm> comm) {
    at::Tensor sum = at::ones({4});
    Work work = comm->split(0, comm->rank(), "other")->all_reduce(sum);
    const std::vector<std::string> open = dynamic_cast<CapturableComm&>(*comm).open_calls();
    ASSERT_EQ(open.size(), 1u);
    EXPECT_NE(open[0].find("all_reduce(sum, float32 x 4)"), std::string::npos) << open[0];
    work.wait();
    EXPECT_TRUE(dynamic_cast<CapturableComm&>(*comm).open_calls().empty());
    comm->barrier().wait();  // for which the host waits
  });
}

TEST(Nccl, inside_of_a_captured_step_calls_on_the_device_pass_and_those_that_let_the_host_wait_are_refused_by_name) {
  const kit::CpuGraphs graphs;
  std::barrier<> all_are_done(2);
  nccl_worlds::run(2, {}, [&](std::shared_ptr<Comm> comm) {
    at::Tensor sum = at::full({4}, 1.0 + static_cast<double>(comm->rank()));
    EXPECT_TRUE(can_be_captured(*comm));
    capture_graph(at::kCPU, [&] {
      comm->all_reduce(sum).wait();
      expect_error([&] { comm->barrier().wait(); }, {"inside of a captured step", "barrier"});
    });
    all_are_done.arrive_and_wait();  // the other rank captures no longer
    comm->barrier().wait();
    EXPECT_TRUE(at::equal(sum, at::full({4}, 3.0)));
  });
}
