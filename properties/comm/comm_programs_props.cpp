// Random programs of collectives, over random groups, with calls in flight that are awaited in a random order, on random
// schedules: every result equals the loop over ranks bit for bit, and a serial run repeats exactly.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <mutex>
#include <numeric>
#include <optional>
#include <ostream>
#include <set>

#include "golden/collectives.h"
#include "properties/doubles/comm_worlds.h"
#include "properties/kit/bits.h"

using namespace shardproof;

namespace {

struct Step {
  Op op;
  at::ScalarType dtype;
  Reduce reduce;
  int64_t numel;
  int64_t salt;
  bool in_group;  // on the group of the split, else on the world
};

struct Program {
  int64_t world;
  std::vector<int64_t> colors, keys;  // by rank
  std::vector<Step> steps;
  int64_t in_flight_max;
  ThreadsOptions options;
};

std::ostream& operator<<(std::ostream& os, const Program& p) {
  os << fmt::format("world {}, colors [{}], keys [{}], in flight {}, {}", p.world, fmt::join(p.colors, ","),
                    fmt::join(p.keys, ","), p.in_flight_max, worlds::name(p.options));
  for (const Step& s : p.steps)
    os << fmt::format("\n  {}({}, {} x {}){}", to_string(s.op), to_string(s.reduce), c10::toString(s.dtype), s.numel,
                      s.in_group ? " in the group" : "");
  return os;
}

rc::Gen<Step> steps() {
  return rc::gen::construct<Step>(
      rc::gen::element(Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::all_to_all, Op::broadcast, Op::barrier),
      rc::gen::element(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong, at::kByte),
      rc::gen::element(Reduce::sum, Reduce::max, Reduce::min),
      rc::gen::weightedOneOf<int64_t>({{8, rc::gen::inRange<int64_t>(0, 40)}, {1, rc::gen::inRange<int64_t>(1000, 3000)}}),
      rc::gen::inRange<int64_t>(0, 1000), rc::gen::arbitrary<bool>());
}

rc::Gen<Program> programs() {
  return rc::gen::exec([] {
    Program p;
    p.world = *rc::gen::inRange<int64_t>(1, std::min<int64_t>(8, worlds::ranks_max()) + 1);
    p.colors = *rc::gen::container<std::vector<int64_t>>(p.world, rc::gen::inRange<int64_t>(0, 3));
    p.keys = *rc::gen::container<std::vector<int64_t>>(p.world, rc::gen::inRange<int64_t>(-2, 3));
    p.steps = *rc::gen::container<std::vector<Step>>(steps());
    p.in_flight_max = *rc::gen::inRange<int64_t>(1, 5);
    p.options.schedule = *rc::gen::element(ThreadsOptions::Schedule::parallel, ThreadsOptions::Schedule::serial);
    p.options.completion = *rc::gen::element(ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late,
                                             ThreadsOptions::Completion::random);
    p.options.seed = *rc::gen::arbitrary<uint64_t>();
    return p;
  });
}

// The members of a rank's group, by the definition of split.
std::vector<int64_t> members(const Program& p, int64_t rank) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < p.world; ++r)
    if (p.colors[r] == p.colors[rank]) ranks.push_back(r);
  std::stable_sort(ranks.begin(), ranks.end(), [&](int64_t a, int64_t b) { return p.keys[a] < p.keys[b]; });
  return ranks;
}

golden::Combine combine(Reduce op) {
  if (op == Reduce::sum) return golden::Combine::sum;
  return op == Reduce::max ? golden::Combine::max : golden::Combine::min;
}

// What a rank's step gives, and the step itself on its way.
struct Running {
  at::Tensor output, expected;
  Work work;
};

int64_t exchanged(const Step& step, int64_t from, int64_t to) { return (step.salt + from * 5 + to * 3) % 7; }

Running start_all_to_all(const Step& step, Comm& comm, const std::vector<int64_t>& ranks) {
  std::vector<std::vector<int64_t>> sizes(ranks.size(), std::vector<int64_t>(ranks.size()));
  golden::Ranks inputs;
  std::vector<int64_t> takes;
  for (int64_t from = 0; from < comm.size(); ++from) {
    for (int64_t to = 0; to < comm.size(); ++to) sizes[from][to] = exchanged(step, from, to);
    inputs.push_back(worlds::values(std::accumulate(sizes[from].begin(), sizes[from].end(), int64_t{0}), step.dtype,
                                    ranks[from], step.salt));
    takes.push_back(sizes[from][comm.rank()]);
  }
  const at::Tensor expected = golden::all_to_all(inputs, sizes)[comm.rank()];
  at::Tensor output = at::empty_like(expected);
  return {output, expected, comm.all_to_all(output, inputs[comm.rank()], takes, sizes[comm.rank()])};
}

Running start(const Step& step, Comm& comm, const std::vector<int64_t>& ranks) {
  if (step.op == Op::barrier) return {at::empty({0}), at::empty({0}), comm.barrier()};
  if (step.op == Op::all_to_all) return start_all_to_all(step, comm, ranks);
  const int64_t numel = step.op == Op::reduce_scatter ? step.numel * comm.size() : step.numel;
  golden::Ranks inputs;
  for (const int64_t rank : ranks) inputs.push_back(worlds::values(numel, step.dtype, rank, step.salt));
  const at::Tensor own = inputs[comm.rank()].clone();
  const int64_t root = step.salt % comm.size();
  if (step.op == Op::broadcast) return {own, inputs[root], comm.broadcast(own, root)};
  if (step.op == Op::all_reduce)
    return {own, golden::all_reduce(inputs, combine(step.reduce))[comm.rank()], comm.all_reduce(own, step.reduce)};
  const bool gathers = step.op == Op::all_gather;
  at::Tensor output = at::empty({gathers ? numel * comm.size() : step.numel}, step.dtype);
  if (gathers) return {output, golden::all_gather(inputs)[comm.rank()], comm.all_gather(output, own)};
  return {output, golden::reduce_scatter(inputs, combine(step.reduce))[comm.rank()],
          comm.reduce_scatter(output, own, step.reduce)};
}

// Runs a rank's part. Which call is awaited next is the rank's own affair, so every rank awaits in another order. Returns
// the first step whose result differs from the loop, or none.
std::optional<size_t> first_wrong_step(const Program& p, const std::shared_ptr<Comm>& world) {
  const auto group = world->split(p.colors[world->rank()], p.keys[world->rank()], "group");
  const std::vector<int64_t> peers = members(p, world->rank());
  std::vector<int64_t> everyone(p.world);
  std::iota(everyone.begin(), everyone.end(), 0);
  std::vector<std::pair<size_t, Running>> flights;
  std::optional<size_t> wrong;
  const auto land = [&](size_t which) {
    auto [step, running] = std::move(flights[which]);
    flights.erase(flights.begin() + static_cast<int64_t>(which));
    running.work.wait();
    if (!kit::same_bits(running.output, running.expected) && !wrong) wrong = step;
  };
  for (size_t s = 0; s < p.steps.size(); ++s) {
    Comm& comm = p.steps[s].in_group ? *group : *world;
    flights.emplace_back(s, start(p.steps[s], comm, p.steps[s].in_group ? peers : everyone));
    if (static_cast<int64_t>(flights.size()) >= p.in_flight_max) land((s * 7 + world->rank()) % flights.size());
  }
  while (!flights.empty()) land(flights.size() - 1);
  return wrong;
}

}  // namespace

RC_GTEST_PROP(CommPrograms, every_result_equals_the_loop_over_ranks, ()) {
  const Program program = *programs();
  std::mutex mutex;
  std::string wrong;
  worlds::run(
      program.world,
      [&](std::shared_ptr<Comm> comm) {
        const auto step = first_wrong_step(program, comm);
        const std::lock_guard lock(mutex);
        if (step) wrong = fmt::format("rank {}, step {}", comm->rank(), *step);
      },
      program.options);
  RC_ASSERT(worlds::agree(wrong) == "");
}

namespace {

// The order in which ranks pass the points of a program, e.g. "0a 2a 1a ...".
std::string interleaving(uint64_t seed, ThreadsOptions::Completion completion) {
  std::string passed;
  run_threads(
      4,
      [&](std::shared_ptr<Comm> comm) {
        const auto half = comm->split(comm->rank() % 2, 0, "half");
        at::Tensor tensor = at::ones({3});
        for (char point = 'a'; point < 'h'; ++point) {
          passed += fmt::format("{}{} ", comm->rank(), point);  // serial: never two at once
          Work first = comm->all_reduce(tensor);
          half->barrier().wait();
          passed += fmt::format("{}{} ", comm->rank(), static_cast<char>(point - 32));
          first.wait();
        }
      },
      {.schedule = ThreadsOptions::Schedule::serial, .completion = completion, .seed = seed});
  return passed;
}

}  // namespace

TEST(CommThreads, a_serial_run_repeats_exactly_and_another_seed_runs_otherwise) {
  for (const auto completion :
       {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late, ThreadsOptions::Completion::random}) {
    std::set<std::string> different;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const std::string once = interleaving(seed, completion);
      EXPECT_EQ(once, interleaving(seed, completion));
      different.insert(once);
    }
    EXPECT_GT(different.size(), 10u) << "seeds that do not matter explore nothing";
  }
}

TEST(CommThreads, random_completion_depends_on_the_seed_alone_and_takes_both_ways) {
  // Which of 16 calls have taken effect before they are awaited, on every rank.
  const auto effective = [](ThreadsOptions::Schedule schedule, uint64_t seed) {
    std::vector<std::string> by_rank(3);
    run_threads(
        3,
        [&](std::shared_ptr<Comm> comm) {
          for (int64_t i = 0; i < 16; ++i) {
            at::Tensor tensor = at::ones({1});
            Work work = comm->all_reduce(tensor);
            comm->barrier().wait();
            comm->barrier().wait();
            by_rank[comm->rank()] += tensor.isnan().item<bool>() ? 'l' : 'e';
            work.wait();
          }
        },
        {.schedule = schedule, .completion = ThreadsOptions::Completion::random, .seed = seed});
    return by_rank;
  };
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const auto serial = effective(ThreadsOptions::Schedule::serial, seed);
    EXPECT_EQ(serial, effective(ThreadsOptions::Schedule::parallel, seed));
    EXPECT_NE(serial[0], serial[1]) << "ranks draw independently";
    for (const std::string& rank : serial) {
      EXPECT_NE(rank.find('e'), std::string::npos) << rank;
      EXPECT_NE(rank.find('l'), std::string::npos) << rank;
    }
  }
}
