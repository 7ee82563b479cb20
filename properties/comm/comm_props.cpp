// Every collective equals its specification, a loop over the ranks' tensors. On each backend: see comm_worlds.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>

#include "golden/collectives.h"
#include "properties/doubles/comm_worlds.h"
#include "properties/kit/bits.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/threads/schedule_policy.h"

using namespace shardproof;
using kit::same_bits;

namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong};

golden::Ranks inputs_of(int64_t world, int64_t numel, at::ScalarType dtype, int64_t salt) {
  golden::Ranks inputs;
  for (int64_t rank = 0; rank < world; ++rank) inputs.push_back(worlds::values(numel, dtype, rank, salt));
  return inputs;
}

// Runs the check on worlds of 1 to 8 ranks, where there are so many, under every schedule and completion, with sizes from
// nothing to many.
void everywhere(const std::function<void(Comm&, int64_t numel, int64_t salt)>& check) {
  int64_t salt = 0;
  for (const ThreadsOptions& options : worlds::all_options())
    for (int64_t world = 1; world <= std::min<int64_t>(8, worlds::ranks_max()); ++world) {
      SCOPED_TRACE(fmt::format("world {}, {}", world, worlds::name(options)));
      worlds::run(
          world,
          [&, salt](std::shared_ptr<Comm> comm) {
            for (const int64_t numel : {0, 1, 5, 64, 257, 2100}) check(*comm, numel, salt);
          },
          options);
      ++salt;
    }
}

}  // namespace

TEST(Comm, all_gather_puts_the_ranks_inputs_side_by_side) {
  everywhere([](Comm& comm, int64_t numel, int64_t salt) {
    const golden::Ranks inputs = inputs_of(comm.size(), numel, at::kFloat, salt);
    at::Tensor output = at::empty({comm.size() * numel});
    comm.all_gather(output, inputs[comm.rank()]).wait();
    EXPECT_TRUE(same_bits(output, golden::all_gather(inputs)[comm.rank()]));
  });
}

TEST(Comm, all_gather_may_take_its_input_from_its_own_place_in_the_output) {
  everywhere([](Comm& comm, int64_t numel, int64_t salt) {
    const golden::Ranks inputs = inputs_of(comm.size(), numel, at::kFloat, salt);
    at::Tensor output = at::empty({comm.size() * numel});
    at::Tensor own = output.narrow(0, comm.rank() * numel, numel);
    own.copy_(inputs[comm.rank()]);
    comm.all_gather(output, own).wait();
    EXPECT_TRUE(same_bits(output, golden::all_gather(inputs)[comm.rank()]));
  });
}

TEST(Comm, reductions_add_in_rank_order_in_every_dtype) {
  for (const at::ScalarType dtype : kDtypes)
    everywhere([dtype](Comm& comm, int64_t numel, int64_t salt) {
      const golden::Ranks inputs = inputs_of(comm.size(), numel * comm.size(), dtype, salt);
      at::Tensor slice = at::empty({numel}, dtype);
      comm.reduce_scatter(slice, inputs[comm.rank()]).wait();
      EXPECT_TRUE(same_bits(slice, golden::reduce_scatter(inputs)[comm.rank()])) << c10::toString(dtype);
      at::Tensor whole = inputs[comm.rank()].clone();
      comm.all_reduce(whole).wait();
      EXPECT_TRUE(same_bits(whole, golden::all_reduce(inputs)[comm.rank()])) << c10::toString(dtype);
    });
}

TEST(Comm, maximum_and_minimum_pass_nan_on) {
  everywhere([](Comm& comm, int64_t numel, int64_t salt) {
    golden::Ranks inputs = inputs_of(comm.size(), numel, at::kFloat, salt);
    if (numel > 1) inputs[comm.size() / 2][1] = NAN;
    for (const auto& [op, spec] : {std::pair{Reduce::max, golden::Combine::max}, {Reduce::min, golden::Combine::min}}) {
      at::Tensor tensor = inputs[comm.rank()].clone();
      comm.all_reduce(tensor, op).wait();
      EXPECT_TRUE(tensor.equal(golden::all_reduce(inputs, spec)[0]) || (numel > 1 && tensor[1].isnan().item<bool>()));
    }
  });
}

TEST(CommThreads, a_ring_adds_in_another_order_and_the_same_numbers) {
  ThreadsOptions ring;
  ring.sum = ThreadsOptions::Sum::ring;
  int64_t different = 0;
  worlds::run(
      5,
      [&](std::shared_ptr<Comm> comm) {
        const golden::Ranks inputs = inputs_of(5, 5 * 100, at::kFloat, 3);
        at::Tensor slice = at::empty({100});
        comm->reduce_scatter(slice, inputs[comm->rank()]).wait();
        const at::Tensor ordered = golden::reduce_scatter(inputs)[comm->rank()];
        if (comm->rank() == 2) different = (slice != ordered).sum().item<int64_t>();
        EXPECT_TRUE(at::allclose(slice, ordered, 1e-4, 1e-3));
      },
      ring);
  EXPECT_GT(different, 0) << "with such data the order shows";
}

TEST(Comm, all_to_all_delivers_unequal_slices_by_sender) {
  everywhere([](Comm& comm, int64_t numel, int64_t salt) {
    std::vector<std::vector<int64_t>> sizes(comm.size(), std::vector<int64_t>(comm.size()));
    for (int64_t from = 0; from < comm.size(); ++from)
      for (int64_t to = 0; to < comm.size(); ++to) sizes[from][to] = (from * 3 + to * 5 + numel) % 7;
    golden::Ranks inputs;
    for (int64_t rank = 0; rank < comm.size(); ++rank)
      inputs.push_back(
          worlds::values(std::accumulate(sizes[rank].begin(), sizes[rank].end(), int64_t{0}), at::kFloat, rank, salt));
    std::vector<int64_t> incoming;
    for (int64_t from = 0; from < comm.size(); ++from) incoming.push_back(sizes[from][comm.rank()]);
    at::Tensor output = at::empty({std::accumulate(incoming.begin(), incoming.end(), int64_t{0})});
    comm.all_to_all(output, inputs[comm.rank()], incoming, sizes[comm.rank()]).wait();
    EXPECT_TRUE(same_bits(output, golden::all_to_all(inputs, sizes)[comm.rank()]));
  });
}

TEST(Comm, broadcast_send_and_recv_deliver_what_was_given) {
  everywhere([](Comm& comm, int64_t numel, int64_t salt) {
    const golden::Ranks inputs = inputs_of(comm.size(), numel, at::kFloat, salt);
    const int64_t root = salt % comm.size();
    at::Tensor tensor = inputs[comm.rank()].clone();
    comm.broadcast(tensor, root).wait();
    EXPECT_TRUE(same_bits(tensor, inputs[root]));
    // Around the ring, twice, told apart by the tag.
    const int64_t next = (comm.rank() + 1) % comm.size(), previous = (comm.rank() + comm.size() - 1) % comm.size();
    at::Tensor first = at::empty({numel}), second = at::empty({numel});
    const at::Tensor doubled = inputs[comm.rank()] * 2;
    std::vector<Work> works;
    works.push_back(comm.send(doubled, next, 2));
    works.push_back(comm.send(inputs[comm.rank()], next, 1));
    works.push_back(comm.recv(first, previous, 1));
    works.push_back(comm.recv(second, previous, 2));
    for (Work& work : works) work.wait();
    EXPECT_TRUE(same_bits(first, inputs[previous]));
    EXPECT_TRUE(same_bits(second, inputs[previous] * 2));
  });
}

// Each rank sends to every other with the same tag, before it receives, and asks for the last one first.
TEST(Comm, a_message_reaches_the_rank_that_it_was_sent_to) {
  everywhere([](Comm& comm, int64_t numel, int64_t salt) {
    const auto message = [&](int64_t from, int64_t to) {
      return worlds::values(numel, at::kFloat, from, salt) + static_cast<double>(to);
    };
    std::vector<Work> works;
    for (int64_t to = 0; to < comm.size(); ++to)
      if (to != comm.rank()) works.push_back(comm.send(message(comm.rank(), to), to, 3));
    std::vector<at::Tensor> received(static_cast<size_t>(comm.size()));
    for (int64_t from = comm.size() - 1; from >= 0; --from)
      if (from != comm.rank()) works.push_back(comm.recv(received[from] = at::empty({numel}), from, 3));
    for (Work& work : works) work.wait();
    for (int64_t from = 0; from < comm.size(); ++from) {
      if (from == comm.rank()) continue;
      EXPECT_TRUE(same_bits(received[from], message(from, comm.rank()))) << "from " << from;
    }
  });
}

TEST(Comm, collectives_in_flight_may_be_awaited_in_any_order) {
  everywhere([](Comm& comm, int64_t numel, int64_t salt) {
    const golden::Ranks a = inputs_of(comm.size(), numel, at::kFloat, salt),
                        b = inputs_of(comm.size(), numel, at::kFloat, salt + 1);
    at::Tensor sum = a[comm.rank()].clone(), gathered = at::empty({comm.size() * numel});
    Work first = comm.all_reduce(sum), second = comm.all_gather(gathered, b[comm.rank()]);
    second.wait();
    first.wait();
    EXPECT_TRUE(same_bits(sum, golden::all_reduce(a)[0]));
    EXPECT_TRUE(same_bits(gathered, golden::all_gather(b)[0]));
  });
}

TEST(Comm, groups_of_a_split_are_ordered_by_key_and_separate) {
  const int64_t world = std::min<int64_t>(7, worlds::ranks_max()), colors = world > 4 ? 3 : 2, outside = world - 2;
  for (const ThreadsOptions& options : worlds::all_options())
    worlds::run(
        world,
        [=](std::shared_ptr<Comm> comm) {
          // Of 7 ranks: colors 0 1 2 0 1 2 0, in reverse; rank 5 joins none.
          const int64_t rank = comm->rank(), color = rank == outside ? -1 : rank % colors;
          const auto group = comm->split(color, -rank, "third");
          if (color < 0) {
            EXPECT_EQ(group, nullptr);
            return;
          }
          std::vector<int64_t> members;
          for (int64_t other = world - 1; other >= 0; --other)
            if (other != outside && other % colors == color) members.push_back(other);
          ASSERT_EQ(group->size(), static_cast<int64_t>(members.size()));
          EXPECT_EQ(members[group->rank()], rank);
          at::Tensor all = at::empty({group->size()}, at::kLong);
          group->all_gather(all, at::full({1}, rank, at::kLong)).wait();
          EXPECT_EQ(std::vector<int64_t>(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()), members);
        },
        options);
}

TEST(Comm, groups_along_mesh_axes_are_the_meshs_peers) {
  const int64_t ranks = worlds::ranks_max();
  const Mesh mesh = Mesh::parse(ranks >= 12  ? "dp_replicate=2,dp_shard=3,tp=2"
                                : ranks >= 4 ? "dp_replicate=2,dp_shard=1,tp=2"
                                             : "dp_replicate=1,dp_shard=2,tp=1");
  worlds::run(mesh.size(), [&](std::shared_ptr<Comm> comm) {
    MeshComm comms(comm, mesh);
    for (const std::vector<std::string>& axes :
         std::vector<std::vector<std::string>>{{"tp"}, {"dp_shard"}, {"dp_replicate"}, {"dp_replicate", "dp_shard"}, {}}) {
      Comm& group = comms.along(axes);
      at::Tensor all = at::empty({group.size()}, at::kLong);
      group.all_gather(all, at::full({1}, comm->rank(), at::kLong)).wait();
      EXPECT_EQ(std::vector<int64_t>(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()),
                mesh.peers(comm->rank(), axes));
    }
  });
}

TEST(Comm, large_collectives_are_shared_among_ranks_and_equal_the_loop) {
  const int64_t world = std::min<int64_t>(3, worlds::ranks_max());
  worlds::run(world, [=](std::shared_ptr<Comm> comm) {
    const int64_t numel = 300'001;
    golden::Ranks inputs;
    for (int64_t rank = 0; rank < world; ++rank)
      inputs.push_back(at::arange(world * numel, at::kFloat) * (0.1f + static_cast<float>(rank)));
    at::Tensor slice = at::empty({numel}), gathered = at::empty({world * world * numel});
    comm->reduce_scatter(slice, inputs[comm->rank()]).wait();
    EXPECT_TRUE(same_bits(slice, golden::reduce_scatter(inputs)[comm->rank()]));
    comm->all_gather(gathered, inputs[comm->rank()]).wait();
    EXPECT_TRUE(same_bits(gathered, golden::all_gather(inputs)[0]));
    at::Tensor whole = inputs[comm->rank()].clone();
    comm->all_reduce(whole).wait();
    EXPECT_TRUE(same_bits(whole, golden::all_reduce(inputs)[comm->rank()]));
    at::Tensor sent = inputs[comm->rank()].clone(), received = at::empty_like(sent);
    Work sending = comm->send(sent, (comm->rank() + 1) % world, 5);
    comm->recv(received, (comm->rank() + world - 1) % world, 5).wait();
    sending.wait();
    EXPECT_TRUE(same_bits(received, inputs[(comm->rank() + world - 1) % world]));
  });
}

// What is large is written past the caches. An input may be in its place already.
TEST(Comm, a_large_all_gather_writes_every_element_wherever_the_input_is) {
  for (const int64_t numel : {2'100'001, 2'097'152})
    worlds::run(2, [=](std::shared_ptr<Comm> comm) {
      const auto input_of = [&](int64_t rank) { return at::arange(numel, at::kInt) * (rank == 0 ? 1 : -1); };
      const at::Tensor wanted = at::cat({input_of(0), input_of(1)});
      at::Tensor apart = at::zeros({2 * numel}, at::kInt), within = at::zeros({2 * numel}, at::kInt);
      comm->all_gather(apart, input_of(comm->rank())).wait();
      EXPECT_TRUE(apart.equal(wanted));
      comm->all_gather(within, within.narrow(0, comm->rank() * numel, numel).copy_(input_of(comm->rank()))).wait();
      EXPECT_TRUE(within.equal(wanted));
    });
}

namespace {

// Sums of integers with a factor, so that the order of terms does not show. `extra` is added to a term of the slice of one
// rank. Every other rank asks whether all is finite.
void expect_finished(Comm& comm, int64_t numel, double factor, float extra, int64_t slice_of) {
  const int64_t world = comm.size(), rank = comm.rank();
  golden::Ranks inputs = inputs_of(world, numel * world, at::kInt, numel);
  for (at::Tensor& input : inputs) input = input.to(at::kFloat) - 3;
  if (numel > 0) inputs[world - 1][slice_of * numel + numel / 2] += extra;
  const golden::Ranks sums = golden::reduce_scatter(inputs);
  const bool finite = std::ranges::all_of(sums, [](const at::Tensor& sum) { return sum.isfinite().all().item<bool>(); });
  for (const bool scatters : {true, false}) {
    const auto answer = rank % 2 == 0 ? std::make_shared<bool>(!finite) : nullptr;
    at::Tensor slice = at::empty({numel}), whole = inputs[rank].clone();
    if (scatters)
      comm.finished_reduce_scatter(slice, inputs[rank], {.factor = factor, .all_finite = answer}).wait();
    else
      comm.finished_all_reduce(whole, {.factor = factor, .all_finite = answer}).wait();
    const at::Tensor wanted = (scatters ? sums[rank] : at::cat(sums)) * factor;
    EXPECT_TRUE(at::equal((scatters ? slice : whole).nan_to_num(7), wanted.nan_to_num(7))) << numel << " times " << factor;
    if (!answer) continue;
    EXPECT_EQ(*answer, finite) << "rank " << rank << " of " << world << ", " << extra << " in the slice of rank " << slice_of;
  }
}

}  // namespace

TEST(Comm, a_finished_sum_is_the_sum_times_its_factor_and_says_whether_it_is_finite_on_every_rank) {
  std::vector<ThreadsOptions> all = worlds::all_options();
  all.emplace_back().sum = ThreadsOptions::Sum::ring;
  for (const ThreadsOptions& options : all)
    for (const int64_t world : {int64_t{1}, int64_t{2}, std::min<int64_t>(3, worlds::ranks_max())})
      worlds::run(
          world,
          [&](std::shared_ptr<Comm> comm) {
            EXPECT_EQ(comm->finishes_sums(), worlds::finishes_sums(options));
            if (!comm->finishes_sums()) return;
            const std::array factors{1.0, 0.25, std::exp2(-15)};
            const std::array extras{0.0f, NAN, -INFINITY};
            for (const int64_t numel : {0, 1, 257, 2000, 70'001, 300'000})
              for (size_t f = 0; f < factors.size(); ++f)
                for (size_t e = 0; e < extras.size(); ++e)
                  for (int64_t slice_of = 0; slice_of < world; ++slice_of)
                    if (numel <= 2000 || e == f)  // each pair meets short sums, and each value long ones
                      expect_finished(*comm, numel, factors[f], extras[e], slice_of);
          },
          options);
}

namespace {

// What this rank gives to one call and gets from it. What it gives depends on the rank and the round alone.
struct Exchanged {
  Op op;
  at::Tensor given, taken, expected;
};

Exchanged exchanged(Op op, const Comm& comm, int64_t numel, int64_t round) {
  const int64_t world = comm.size(), rank = comm.rank();
  const auto value = [&](int64_t r) { return static_cast<double>(10 * round + r + 1); };
  double sum = 0;
  std::vector<at::Tensor> all;
  for (int64_t r = 0; r < world; ++r) sum += value(r), all.push_back(at::full({numel}, value(r)));
  if (op == Op::all_gather) return {op, at::full({numel}, value(rank)), at::zeros({world * numel}), at::cat(all)};
  if (op == Op::reduce_scatter) return {op, at::full({world * numel}, value(rank)), at::zeros({numel}), at::full({numel}, sum)};
  if (op == Op::send || op == Op::broadcast) {  // from the last rank, to the first or to all
    const bool takes = op == Op::send ? rank == 0 : true;
    return {op, at::full({numel}, value(rank)), at::zeros({numel}), takes ? all.back() : at::zeros({numel})};
  }
  return {op, at::full({world * numel}, value(rank)), at::zeros({world * numel}), at::cat(all)};
}

Work start(Comm& comm, const Exchanged& e) {
  if (e.op == Op::all_gather) return comm.all_gather(e.taken, e.given);
  if (e.op == Op::reduce_scatter) return comm.reduce_scatter(e.taken, e.given);
  const bool is_last = comm.rank() == comm.size() - 1;
  if (e.op == Op::broadcast) return comm.broadcast(is_last ? e.taken.copy_(e.given) : e.taken, comm.size() - 1);
  if (e.op == Op::send) return is_last ? comm.send(e.given, 0) : comm.recv(e.taken, comm.size() - 1);
  const std::vector<int64_t> sizes(static_cast<size_t>(comm.size()), e.given.numel() / comm.size());
  return comm.all_to_all(e.taken, e.given, sizes, sizes);
}

void compute_for(std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  at::Tensor work = at::ones({1000});
  while (std::chrono::steady_clock::now() < end) work.mul_(1.0);
}

}  // namespace

// Ranks that read each other's memory, or send it piece by piece, must be through before the owner goes on. Large tensors take
// several pieces, and some rank is late to wait.
TEST(Comm, what_a_rank_gave_may_change_as_soon_as_its_call_is_done) {
  const int64_t world = std::min<int64_t>(3, worlds::ranks_max());
  worlds::run(world, [](std::shared_ptr<Comm> comm) {
    int64_t round = 0;
    for (const Op op : {Op::all_gather, Op::reduce_scatter, Op::all_to_all, Op::broadcast, Op::send})
      for (const int64_t numel : {int64_t{3000}, int64_t{5'000'000}})
        for (int64_t late = 0; late < comm->size(); ++late, ++round) {
          const bool is_last = comm->rank() == comm->size() - 1;
          if (op == Op::send && comm->rank() > 0 && !is_last) continue;
          const Exchanged e = exchanged(op, *comm, numel, round);
          Work work = start(*comm, e);
          if (comm->rank() == late) compute_for(std::chrono::milliseconds(5));
          work.wait();
          const bool gave_output = op == Op::broadcast && is_last;
          (gave_output ? e.taken : e.given).fill_(-1);
          if (gave_output) continue;
          EXPECT_TRUE(e.taken.equal(e.expected)) << to_string(op) << " of " << numel << ", rank " << late << " is late";
        }
  });
}

TEST(Comm, the_sum_of_an_all_reduce_may_change_as_soon_as_the_call_is_done) {
  const int64_t world = std::min<int64_t>(3, worlds::ranks_max());
  worlds::run(world, [](std::shared_ptr<Comm> comm) {
    for (int64_t round = 0; round < 12; ++round) {
      const at::Tensor tensor = at::full({8'000'000}, static_cast<double>(round + comm->rank() + 1));
      Work work = comm->all_reduce(tensor);
      if (comm->rank() == round % comm->size()) compute_for(std::chrono::milliseconds(5));
      work.wait();
      const at::Tensor found = tensor.clone();
      tensor.fill_(-1);
      const int64_t sum = comm->size() * (round + 1) + comm->size() * (comm->size() - 1) / 2;
      EXPECT_TRUE(found.eq(static_cast<double>(sum)).all().item<bool>()) << "round " << round;
    }
  });
}

// Each part takes effect when the policy says so, and what is in the others is not known yet.
TEST(CommThreads, sums_are_not_finished_under_a_policy) {
  struct InOrder : SchedulePolicy {
    size_t choose(std::span<const Choice>, int64_t running) override { return running < 0 ? 0 : static_cast<size_t>(running); }
  };
  ThreadsOptions options{.schedule = ThreadsOptions::Schedule::serial};
  options.policy = std::make_shared<InOrder>();
  run_threads(
      2, [](std::shared_ptr<Comm> comm) { EXPECT_FALSE(comm->finishes_sums()); }, options);
}

TEST(Comm, no_memory_is_shared_across_hosts) {
  if (worlds::one_host()) GTEST_SKIP() << "all ranks are on one host";
  worlds::run(worlds::ranks_max(), [](std::shared_ptr<Comm> comm) { EXPECT_FALSE(comm->shared_memory(100).defined()); });
}

TEST(Comm, shared_memory_is_written_by_one_rank_and_read_by_all) {
  if (!worlds::one_host()) GTEST_SKIP() << "the ranks are on several hosts";
  const int64_t world = std::min<int64_t>(4, worlds::ranks_max());
  worlds::run(world, [=](std::shared_ptr<Comm> comm) {
    at::Tensor memory = comm->shared_memory(4 * world * 1000);
    ASSERT_TRUE(memory.defined());
    EXPECT_EQ(memory.numel(), 4 * world * 1000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 64, 0u);
    EXPECT_EQ(memory.count_nonzero().item<int64_t>(), 0);
    comm->barrier().wait();
    at::Tensor values = memory.view(at::kFloat);
    for (int64_t round = 0; round < 20; ++round) {
      values.narrow(0, comm->rank() * 1000, 1000).fill_(static_cast<float>(round * world + comm->rank()));
      comm->barrier().wait();
      for (int64_t rank = 0; rank < world; ++rank)
        EXPECT_EQ(values.narrow(0, rank * 1000, 1000).eq(static_cast<float>(round * world + rank)).sum().item<int64_t>(), 1000);
      comm->barrier().wait();
    }
  });
}

TEST(Comm, the_error_of_one_rank_is_everybodys_and_another_world_may_follow) {
  const int64_t world = worlds::ranks_max();
  if (world < 2) GTEST_SKIP() << "needs 2 ranks";
  for (int64_t round = 0; round < 10; ++round) {
    const int64_t guilty = round % world;
    const std::string message = worlds::error_of(world, [=](std::shared_ptr<Comm> comm) {
      const auto pair = comm->split(comm->rank() / 2, 0, "pair");
      // Large ones are half on their way when the rank fails, and small ones not waited for.
      at::Tensor large = at::ones({200'000 + round}), small = at::ones({7}),
                 gathered = at::empty({large.numel() * comm->size()});
      const Work first = comm->all_reduce(large), second = comm->all_gather(gathered, large);
      if (comm->rank() == guilty) throw Error("the disk is full");
      const Work third = pair->all_reduce(small), fourth = comm->all_gather(at::empty({7 * comm->size()}), small);
      Work(fourth).wait();
    });
    EXPECT_NE(message.find(fmt::format("rank {} of", guilty)), std::string::npos) << message;
    EXPECT_NE(message.find("the disk is full"), std::string::npos) << message;
    worlds::run(world, [](std::shared_ptr<Comm> comm) {
      at::Tensor tensor = at::ones({3});
      comm->all_reduce(tensor).wait();
      EXPECT_EQ(tensor[0].item<float>(), static_cast<float>(comm->size()));
    });
  }
}
