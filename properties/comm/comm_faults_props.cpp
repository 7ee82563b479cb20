// Faults of programs that communicate, shape by shape: each is found on every schedule and completion, at once, and told so
// that it can be mended. (That correct programs raise no alarm is said in comm_programs_props.cpp.)
#include <gtest/gtest.h>

#include "properties/doubles/comm_worlds.h"
#include "shardproof/base/check.h"

using namespace shardproof;
using Completion = ThreadsOptions::Completion;
using Schedule = ThreadsOptions::Schedule;

namespace {

using Texts = std::vector<std::string>;

void expect_everywhere(int64_t world, const worlds::Body& body, const Texts& parts) {
  for (const ThreadsOptions& options : worlds::all_options()) {
    const std::string message = worlds::error_of(world, body, options);
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos)
          << worlds::name(options) << ": expected '" << part << "' in: " << message;
  }
}

// One call of an op that has an input and an output, on tensors that `start` makes.
struct Flight {
  at::Tensor input, output;
  Work work;
};
struct Kind {
  const char* name;
  std::function<Flight(Comm&)> start;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"all_gather",
       [](Comm& comm) {
         at::Tensor input = at::ones({4}), output = at::zeros({4 * comm.size()});
         return Flight{input, output, comm.all_gather(output, input)};
       }},
      {"all_gather",  // in place
       [](Comm& comm) {
         at::Tensor output = at::ones({4 * comm.size()}), input = output.narrow(0, 4 * comm.rank(), 4);
         const int64_t other = (comm.rank() + 1) % comm.size();
         return Flight{input, output.narrow(0, 4 * other, 4), comm.all_gather(output, input)};
       }},
      {"reduce_scatter",
       [](Comm& comm) {
         at::Tensor input = at::ones({4 * comm.size()}), output = at::zeros({4});
         return Flight{input, output, comm.reduce_scatter(output, input)};
       }},
      {"all_to_all",
       [](Comm& comm) {
         at::Tensor input = at::ones({4 * comm.size()}), output = at::zeros({4 * comm.size()});
         const std::vector<int64_t> sizes(comm.size(), 4);
         return Flight{input, output, comm.all_to_all(output, input, sizes, sizes)};
       }},
  };
  return all;
}

ThreadsOptions late(Schedule schedule) { return {.schedule = schedule, .completion = Completion::late}; }

}  // namespace

TEST(CommFaults, groups_in_a_ring_that_each_wait_for_the_next_are_a_deadlock) {
  // Ranks 0, 1, 2 and pairs 01, 12, 20: each rank waits first in the pair with its successor.
  expect_everywhere(
      3,
      [](std::shared_ptr<Comm> comm) {
        std::vector<std::shared_ptr<Comm>> pairs;
        for (int64_t p = 0; p < 3; ++p)
          pairs.push_back(comm->split(comm->rank() == (p + 2) % 3 ? -1 : 0, 0, fmt::format("pair{}", p)));
        pairs[comm->rank()]->barrier().wait();
        pairs[(comm->rank() + 2) % 3]->barrier().wait();
      },
      {"deadlock", "rank 0 waits in barrier(), call 0 on 'pair0': called by 0, not by 1",
       "rank 1 waits in barrier(), call 0 on 'pair1': called by 1, not by 2",
       "rank 2 waits in barrier(), call 0 on 'pair2': called by 2, not by 0"});
}

TEST(CommFaults, sends_that_wait_for_receives_not_yet_called_are_a_deadlock) {
  expect_everywhere(
      2,
      [](std::shared_ptr<Comm> comm) {
        const int64_t other = 1 - comm->rank();
        at::Tensor given = at::ones({3}), taken = at::zeros({3});
        comm->send(given, other, 7).wait();
        comm->recv(taken, other, 7).wait();
      },
      {"deadlock", "send(float32 x 3, to 1, tag 7)", "send(float32 x 3, to 0, tag 7)"});
}

TEST(CommFaults, one_call_too_many_is_a_deadlock_that_names_the_ranks_that_have_returned) {
  expect_everywhere(
      3,
      [](std::shared_ptr<Comm> comm) {
        at::Tensor tensor = at::ones({2});
        for (int64_t i = 0; i < (comm->rank() == 1 ? 3 : 2); ++i) comm->all_reduce(tensor).wait();
      },
      {"deadlock", "rank 0 has returned", "rank 2 has returned",
       "rank 1 waits in all_reduce(sum, float32 x 2), call 2 on 'world': called by 1, not by 0,2"});
}

TEST(CommFaults, a_split_that_one_rank_leaves_out_is_a_deadlock) {
  expect_everywhere(
      2,
      [](std::shared_ptr<Comm> comm) {
        if (comm->rank() == 0) comm->split(0, 0, "half");
      },
      {"deadlock", "split()", "rank 1 has returned"});
}

TEST(CommFaults, tags_that_do_not_meet_are_a_deadlock) {
  expect_everywhere(
      2,
      [](std::shared_ptr<Comm> comm) {
        at::Tensor tensor = at::ones({1});
        (comm->rank() == 0 ? comm->send(tensor, 1, 3) : comm->recv(tensor, 0, 4)).wait();
      },
      {"deadlock", "tag 3", "tag 4"});
}

TEST(CommFaults, a_mismatch_of_any_part_of_a_call_names_both_ranks_and_calls) {
  const auto expect_mismatch = [](const std::function<Work(Comm&)>& on_rank_0, const std::function<Work(Comm&)>& on_rank_1,
                                  const Texts& parts) {
    Texts all = {"ranks disagree on call 1 of 'world'", "rank 0 calls", "rank 1 calls"};
    all.insert(all.end(), parts.begin(), parts.end());
    expect_everywhere(
        2,
        [&](std::shared_ptr<Comm> comm) {
          comm->barrier().wait();
          (comm->rank() == 0 ? on_rank_0 : on_rank_1)(*comm).wait();
        },
        all);
  };
  const auto reduce = [](int64_t numel, at::ScalarType dtype, Reduce op) {
    return [=](Comm& comm) { return comm.all_reduce(at::ones({numel}, dtype), op); };
  };
  const auto right = reduce(4, at::kFloat, Reduce::sum);
  expect_mismatch(right, reduce(5, at::kFloat, Reduce::sum), {"float32 x 4", "float32 x 5"});
  expect_mismatch(right, reduce(4, at::kBFloat16, Reduce::sum), {"float32 x 4", "bfloat16 x 4"});
  expect_mismatch(right, reduce(4, at::kFloat, Reduce::min), {"(sum, ", "(min, "});
  const auto cast = [](int64_t root) { return [=](Comm& comm) { return comm.broadcast(at::ones({4}), root); }; };
  expect_mismatch(right, cast(0), {"all_reduce", "broadcast"});
  expect_mismatch(cast(0), cast(1), {"root 0", "root 1"});
  const auto exchange = [](std::vector<int64_t> takes, std::vector<int64_t> gives) {
    return [=](Comm& comm) {
      return comm.all_to_all(at::ones({takes[0] + takes[1]}), at::ones({gives[0] + gives[1]}), takes, gives);
    };
  };
  expect_mismatch(exchange({1, 2}, {1, 4}), exchange({3, 1}, {2, 1}), {"sends 1+4", "receives 3+1"});
}

TEST(CommFaults, a_send_of_another_size_than_its_receive_names_both) {
  expect_everywhere(
      2,
      [](std::shared_ptr<Comm> comm) {
        (comm->rank() == 0 ? comm->send(at::ones({3}), 1, 0) : comm->recv(at::ones({4}), 0, 0)).wait();
      },
      {"ranks disagree", "send(float32 x 3", "recv(float32 x 4"});
}

TEST(CommFaults, outputs_are_garbage_in_flight_and_right_after_the_wait) {
  for (const Schedule schedule : {Schedule::parallel, Schedule::serial})
    for (const Kind& kind : kinds())
      run_threads(
          3,
          [&](std::shared_ptr<Comm> comm) {
            Flight flight = kind.start(*comm);
            comm->barrier().wait();  // all have called it by now
            EXPECT_TRUE(flight.output.isnan().all().item<bool>()) << kind.name;
            EXPECT_TRUE((flight.input == 1).all().item<bool>()) << kind.name;
            flight.work.wait();
            EXPECT_FALSE(flight.output.isnan().any().item<bool>()) << kind.name;
          },
          late(schedule));
}

TEST(CommFaults, integers_in_flight_are_out_of_every_range) {
  run_threads(
      2,
      [](std::shared_ptr<Comm> comm) {
        at::Tensor output = at::zeros({2}, at::kLong);
        Work work = comm->all_gather(output, at::ones({1}, at::kLong));
        EXPECT_EQ(output.select(0, 1 - comm->rank()).item<int64_t>(), 0x7f7f7f7f7f7f7f7f);
        work.wait();
      },
      late(Schedule::serial));
}

TEST(CommFaults, an_input_changed_in_flight_is_found_for_every_collective) {
  for (const Completion completion : {Completion::late, Completion::random})
    for (const Kind& kind : kinds())
      for (uint64_t seed = 0; seed < 4; ++seed) {
        const std::string message = worlds::error_of(
            3,
            [&](std::shared_ptr<Comm> comm) {
              Flight flight = kind.start(*comm);
              if (comm->rank() == 1) flight.input[3] = 2;
              flight.work.wait();
            },
            {.schedule = Schedule::serial, .completion = completion, .seed = seed});
        EXPECT_NE(message.find("rank 1 of 3: "), std::string::npos) << message;
        EXPECT_NE(message.find(fmt::format("changed element 3 of its input of {}(", kind.name)), std::string::npos) << message;
      }
}

TEST(CommFaults, an_output_written_in_flight_is_found_for_every_collective) {
  for (const Kind& kind : kinds()) {
    const std::string message = worlds::error_of(
        3,
        [&](std::shared_ptr<Comm> comm) {
          Flight flight = kind.start(*comm);
          if (comm->rank() == 2) flight.output.zero_();
          flight.work.wait();
        },
        late(Schedule::parallel));
    EXPECT_NE(message.find("rank 2 of 3: "), std::string::npos) << message;
    EXPECT_NE(message.find(fmt::format("of its output of {}(", kind.name)), std::string::npos) << message;
  }
}

TEST(CommFaults, every_call_that_was_never_awaited_is_listed) {
  expect_everywhere(
      2,
      [](std::shared_ptr<Comm> comm) {
        at::Tensor a = at::ones({3}), b = at::ones({5});
        comm->all_reduce(a);
        comm->barrier().wait();
        comm->broadcast(b, 0);
      },
      {"never waited", "all_reduce(sum, float32 x 3), call 0", "broadcast(float32 x 5, root 0), call 2"});
}

TEST(CommFaults, released_storage_is_refused) {
  expect_everywhere(
      2,
      [](std::shared_ptr<Comm> comm) {
        at::Tensor tensor = at::ones({3});
        tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
        comm->all_reduce(tensor).wait();
      },
      {"no storage", "all_reduce on 'world'"});
}

TEST(CommFaults, a_communicator_is_refused_outside_of_its_body) {
  std::shared_ptr<Comm> leaked;
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    if (comm->rank() == 0) leaked = comm;
  });
  EXPECT_THROW(leaked->barrier(), Error);
  expect_everywhere(
      2,
      [&](std::shared_ptr<Comm> comm) {
        if (comm->rank() == 0) leaked = comm;
        comm->barrier().wait();
        if (comm->rank() == 1) leaked->barrier().wait();
        else comm->split(0, 0, "never");
      },
      {"the communicator of rank 0 is used by rank 1"});
}
