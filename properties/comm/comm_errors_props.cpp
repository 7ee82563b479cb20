// What goes wrong among ranks ends every rank at once, with one error that says what happened where.
#include <gtest/gtest.h>

#include <stdexcept>

#include "properties/doubles/comm_worlds.h"
#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"
#include "shardproof/base/failed_check.h"
#include "shardproof/comm/counted.h"
#include "shardproof/comm/mesh_comm.h"

using namespace shardproof;

TEST(CommErrors, the_error_of_one_rank_ends_all_and_is_the_one_shown) {
  for (const ThreadsOptions& options : worlds::all_options()) {
    const std::string message = worlds::error_of(
        4,
        [](std::shared_ptr<Comm> comm) {
          if (comm->rank() == 2) throw Error("the disk of rank two is full");
          at::Tensor tensor = at::ones({3});
          comm->all_reduce(tensor).wait();
        },
        options);
    expect_says(message, {"rank 2", "the disk of rank two is full"});
  }
}

TEST(CommErrors, the_type_of_the_first_error_is_kept) {
  const auto run = [](const std::function<void()>& fail) {
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      if (comm->rank() == 1) fail();
      comm->barrier().wait();
    });
  };
  EXPECT_THROW(run([] { throw NonFiniteError("nan"); }), NonFiniteError);
  EXPECT_THROW(run([] { throw FailedCheck("replicas"); }), FailedCheck);
  EXPECT_THROW(run([] { throw BrokenInvariant("broken"); }), BrokenInvariant);
  EXPECT_THROW(run([] { throw std::out_of_range("outside"); }), std::out_of_range);
}

TEST(CommErrors, an_error_of_the_standard_library_keeps_its_type_and_names_its_rank) {
  const auto message_of = [](const auto& thrown) -> std::string {
    try {
      run_threads(2, [&](std::shared_ptr<Comm> comm) {
        if (comm->rank() == 1) throw thrown;
        comm->barrier().wait();
      });
    } catch (const std::decay_t<decltype(thrown)>& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  expect_says(message_of(std::runtime_error("no more paper")), {"rank 1", "no more paper"});
  expect_says(message_of(std::invalid_argument("a blank page")), {"rank 1", "a blank page"});
}

TEST(CommErrors, one_rank_that_counts_for_many_cannot_know_who_joins_a_group_by_color) {
  const auto comm = counted(4, 2);
  expect_error([&] { comm->split(0, 0, "pairs"); }, {"[comm]", "cannot know who else joins group 'pairs'", "split_ranks"});
  EXPECT_EQ(comm->split_ranks({0, 2}, "pairs")->rank(), 1);
}

TEST(CommErrors, ranks_in_groups_that_wait_for_each_other_are_a_deadlock_that_lists_their_calls) {
  for (const ThreadsOptions& options : worlds::all_options()) {
    const std::string message = worlds::error_of(
        2,
        [](std::shared_ptr<Comm> comm) {
          const auto a = comm->split(0, comm->rank(), "first"), b = comm->split(0, comm->rank(), "second");
          at::Tensor tensor = at::ones({5});
          (comm->rank() == 0 ? a : b)->all_reduce(tensor).wait();
        },
        options);
    expect_says(message, {"deadlock", "first", "second", "all_reduce"});
  }
}

TEST(CommErrors, waiting_for_a_rank_that_has_returned_is_an_error_at_once) {
  for (const ThreadsOptions& options : worlds::all_options()) {
    const std::string message = worlds::error_of(
        3,
        [](std::shared_ptr<Comm> comm) {
          if (comm->rank() != 1) comm->barrier().wait();
        },
        options);
    expect_says(message, {"barrier"});
  }
}

TEST(CommErrors, a_receive_that_nobody_sends_to_is_a_deadlock) {
  expect_says(worlds::error_of(2,
                               [](std::shared_ptr<Comm> comm) {
                                 at::Tensor tensor = at::ones({1});
                                 comm->recv(tensor, 1 - comm->rank(), 7).wait();
                               }),
              {"deadlock", "recv", "tag 7"});
}

TEST(CommErrors, different_calls_at_one_place_name_both) {
  for (const ThreadsOptions& options : worlds::all_options()) {
    const std::string sizes = worlds::error_of(
        2,
        [](std::shared_ptr<Comm> comm) {
          at::Tensor tensor = at::ones({3 + comm->rank()});
          comm->all_reduce(tensor).wait();
        },
        options);
    expect_says(sizes, {"all_reduce", "x 3", "x 4"});
    const std::string ops = worlds::error_of(
        2,
        [](std::shared_ptr<Comm> comm) {
          at::Tensor tensor = at::ones({4});
          if (comm->rank() == 0) comm->all_reduce(tensor).wait();
          else comm->broadcast(tensor, 0).wait();
        },
        options);
    expect_says(ops, {"all_reduce", "broadcast"});
  }
}

TEST(CommErrors, an_output_read_before_its_wait_is_garbage_under_late_completion) {
  ThreadsOptions late;
  late.schedule = ThreadsOptions::Schedule::serial;
  late.completion = ThreadsOptions::Completion::late;
  run_threads(
      2,
      [](std::shared_ptr<Comm> comm) {
        at::Tensor gathered = at::zeros({8});
        Work work = comm->all_gather(gathered, at::ones({4}));
        EXPECT_TRUE(gathered.isnan().all().item<bool>()) << "poisoned until the wait";
        work.wait();
        EXPECT_EQ(gathered.sum().item<float>(), 8);
      },
      late);
}

TEST(CommErrors, an_input_changed_in_flight_names_rank_and_call) {
  ThreadsOptions late;
  late.schedule = ThreadsOptions::Schedule::serial;
  late.completion = ThreadsOptions::Completion::late;
  const std::string message = worlds::error_of(
      2,
      [](std::shared_ptr<Comm> comm) {
        at::Tensor input = at::ones({4}), gathered = at::zeros({8});
        Work work = comm->all_gather(gathered, input);
        if (comm->rank() == 1) input[2] = 5;
        work.wait();
      },
      late);
  expect_says(message, {"rank 1", "all_gather"});
}

TEST(CommErrors, work_that_is_never_awaited_is_an_error) {
  const std::string message = worlds::error_of(2, [](std::shared_ptr<Comm> comm) {
    at::Tensor tensor = at::ones({4});
    Work work = comm->all_reduce(tensor);
    if (comm->rank() == 0) work.wait();
  });
  expect_says(message, {"all_reduce", "never"});
}

TEST(CommErrors, worlds_that_cannot_be_are_refused_with_the_limit) {
  expect_says(worlds::error_of(kThreadsWorldMax + 1, [](std::shared_ptr<Comm>) {}), {"1025", "1024"});
  expect_says(worlds::error_of(0, [](std::shared_ptr<Comm>) {}), {"0"});
}

TEST(CommErrors, a_mesh_that_does_not_fit_the_world_names_both) {
  expect_says(worlds::error_of(3, [](std::shared_ptr<Comm> comm) { MeshComm(comm, Mesh::parse("dp_shard=2,tp=2")); }),
              {"dp_shard=2,tp=2", "4 ranks", "3"});
}

TEST(CommErrors, tensors_that_do_not_fit_the_call_are_refused) {
  expect_says(worlds::error_of(2,
                               [](std::shared_ptr<Comm> comm) {
                                 comm->all_gather(at::empty({7}), at::empty({4})).wait();
                               }),
              {"all_gather", "2 times"});
  expect_says(worlds::error_of(2,
                               [](std::shared_ptr<Comm> comm) {
                                 comm->all_reduce(at::empty({4, 4}).t().narrow(0, 0, 2)).wait();
                               }),
              {"all_reduce", "contiguous"});
}

TEST(CommErrors, a_peer_that_the_group_does_not_have_is_refused) {
  for (const int64_t world : {1, 3})
    for (const int64_t peer : {int64_t{-1}, world, world + 1})
      for (const char* op : {"broadcast", "send", "recv"})
        worlds::run(world, [&](std::shared_ptr<Comm> comm) {
          at::Tensor tensor = at::ones({2});
          expect_error(
              [&] {
                if (op == std::string("broadcast")) comm->broadcast(tensor, peer).wait();
                if (op == std::string("send")) comm->send(tensor, peer).wait();
                if (op == std::string("recv")) comm->recv(tensor, peer).wait();
              },
              {op, fmt::format("there is no rank {}", peer), fmt::format("ranks are 0 to {}", world - 1)});
        });
}

TEST(CommErrors, a_sum_that_cannot_be_finished_says_why) {
  const auto error = [](at::ScalarType dtype, double factor, const ThreadsOptions& options = {}) {
    return worlds::error_of(
        2, [&](std::shared_ptr<Comm> comm) { comm->finished_all_reduce(at::ones({3}, dtype), {.factor = factor}).wait(); },
        options);
  };
  expect_says(error(at::kFloat, 0.3), {"power of two", "0.3"});
  expect_says(error(at::kFloat, 2), {"2^-15 to 1", "got 2"});
  expect_says(error(at::kDouble, 0.5), {"float32 on the CPU", "do it after all_reduce(sum then times 0.5, float64 x 3)"});
  ThreadsOptions late;
  late.completion = ThreadsOptions::Completion::late;
  expect_says(error(at::kFloat, 0.5, late), {"Comm::finishes_sums"});
}

TEST(CommErrors, ranks_that_finish_a_sum_with_different_factors_are_told) {
  const std::string message = worlds::error_of(2, [](std::shared_ptr<Comm> comm) {
    comm->finished_all_reduce(at::ones({3}), {.factor = comm->rank() == 0 ? 0.5 : 0.25}).wait();
  });
  expect_says(message, {"ranks disagree", "then times 0.5", "then times 0.25"});
}
