// `checked` turns mismatches into errors on every rank, over any backend; `traced` writes down what was called; and what a
// decorator does not change is passed on.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <mutex>

#include "golden/collectives.h"
#include "properties/doubles/comm_worlds.h"
#include "properties/kit/bits.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/checked.h"
#include "shardproof/comm/counted.h"
#include "shardproof/comm/decorated.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;

namespace {

// What each rank's own call throws; the world is then ended by rank 0's.
std::vector<std::string> errors_on_ranks(int64_t world, const std::function<void(Comm&)>& body) {
  std::vector<std::string> messages(world);
  run_threads(world, [&](std::shared_ptr<Comm> comm) {
    const auto guarded = checked(comm);
    try {
      body(*guarded);
    } catch (const Error& error) {
      messages[comm->rank()] = error.what();
    }
  });
  return messages;
}

void expect_all_say(const std::vector<std::string>& messages, std::initializer_list<const char*> parts) {
  for (const std::string& message : messages)
    for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' in: " << message;
}

// A backend that has everything that a backend may have, and knows of each group what asked for it.
class Rich final : public Comm {
 public:
  explicit Rich(std::string name) : name_(std::move(name)) {}
  int64_t rank() const override { return 3; }
  int64_t size() const override { return 5; }
  const std::string& name() const override { return name_; }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    return color < 0 ? nullptr : std::make_shared<Rich>(fmt::format("{} by color {} and key {}", name, color, key));
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    return std::make_shared<Rich>(fmt::format("{} of ranks {}", name, fmt::join(ranks, ",")));
  }
  at::Tensor shared_memory(int64_t bytes) override { return at::full({bytes}, 7, at::kByte); }
  c10::DataPtr allocate(Op, int64_t bytes, c10::Device device) override { return {new char[bytes], device}; }
  bool premultiplies() const override { return true; }
  bool finishes_sums() const override { return true; }

 private:
  Work start(Call call) override {
    call.output.fill_(11);
    return Work();
  }
  std::string name_;
};

// Changes nothing, and knows how often it was asked to decorate a group.
class Plain final : public DecoratedComm {
 public:
  explicit Plain(std::shared_ptr<Comm> inner, int depth = 0) : DecoratedComm(std::move(inner)), depth(depth) {}
  const int depth;

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override {
    return std::make_shared<Plain>(std::move(group), depth + 1);
  }
};

int depth_of(const std::shared_ptr<Comm>& comm) {
  const auto* const plain = dynamic_cast<const Plain*>(comm.get());
  return plain ? plain->depth : -1;
}

}  // namespace

TEST(Decorated, whatever_a_decorator_does_not_change_is_that_of_the_communicator_behind_it) {
  const auto comm = std::make_shared<Plain>(std::make_shared<Rich>("world"));
  EXPECT_EQ(comm->rank(), 3);
  EXPECT_EQ(comm->size(), 5);
  EXPECT_EQ(comm->name(), "world");
  EXPECT_TRUE(comm->premultiplies());
  EXPECT_TRUE(comm->finishes_sums());
  EXPECT_TRUE(comm->shared_memory(4).equal(at::full({4}, 7, at::kByte)));
  const c10::DataPtr memory = comm->allocate(Op::all_gather, 16, c10::kCPU);
  EXPECT_TRUE(memory) << "the backend has memory for such calls";
  delete[] static_cast<char*>(memory.get());
  at::Tensor sum = at::zeros({2});
  comm->scaled_all_reduce(sum, 0.5).wait();
  EXPECT_TRUE(sum.equal(at::full({2}, 11)));
}

TEST(Decorated, groups_that_are_split_off_are_decorated_and_the_backend_splits_them_as_it_was_asked) {
  const auto comm = std::make_shared<Plain>(std::make_shared<Rich>("world"));
  const std::shared_ptr<Comm> by_color = comm->split(2, 1, "part"), by_list = comm->split_ranks({3, 4}, "pair");
  EXPECT_EQ(by_color->name(), "part by color 2 and key 1");
  EXPECT_EQ(depth_of(by_color), 1);
  EXPECT_EQ(by_list->name(), "pair of ranks 3,4");
  EXPECT_EQ(depth_of(by_list), 1);
  EXPECT_EQ(depth_of(by_list->split(0, 0, "inner")), 2);
  EXPECT_EQ(comm->split(-1, 0, "none"), nullptr);
}

TEST(Decorated, nothing_to_pass_calls_on_to_is_an_error) {
  EXPECT_THROW(Plain(nullptr), Error);
}

TEST(Checked, every_rank_gets_the_same_error_for_a_mismatch) {
  expect_all_say(errors_on_ranks(3,
                                 [](Comm& comm) {
                                   at::Tensor tensor = at::ones({comm.rank() == 2 ? 5 : 4});
                                   comm.all_reduce(tensor).wait();
                                 }),
                 {"ranks 0 and 2", "x 4", "x 5"});
  expect_all_say(errors_on_ranks(2,
                                 [](Comm& comm) {
                                   at::Tensor tensor = at::ones({4}, comm.rank() == 0 ? at::kFloat : at::kDouble);
                                   comm.all_reduce(tensor).wait();
                                 }),
                 {"Float", "Double"});
  expect_all_say(errors_on_ranks(2,
                                 [](Comm& comm) {
                                   at::Tensor tensor = at::ones({4});
                                   comm.all_reduce(tensor, comm.rank() == 0 ? Reduce::sum : Reduce::max).wait();
                                 }),
                 {"sum", "max"});
  expect_all_say(errors_on_ranks(2,
                                 [](Comm& comm) {
                                   at::Tensor tensor = at::ones({4});
                                   comm.finished_all_reduce(tensor, {.factor = comm.rank() == 0 ? 0.5 : 0.25}).wait();
                                 }),
                 {"sum then times 0.5", "sum then times 0.25"});
  expect_all_say(errors_on_ranks(2,
                                 [](Comm& comm) {
                                   at::Tensor tensor = at::ones({4});
                                   if (comm.rank() == 0)
                                     comm.barrier().wait();
                                   else
                                     comm.all_reduce(tensor).wait();
                                 }),
                 {"barrier", "all_reduce", "call 0"});
  expect_all_say(errors_on_ranks(2,
                                 [](Comm& comm) {
                                   at::Tensor input = at::ones({4}), output = at::ones({4});
                                   const int64_t own = comm.rank() == 0 ? 3 : 2;
                                   comm.all_to_all(output, input, {2, 2}, {4 - own, own}).wait();
                                 }),
                 {"all_to_all", "1+3"});
}

TEST(Checked, an_error_says_of_each_call_what_it_has_and_no_more) {
  // Each call of rank 0 meets a barrier of rank 1.
  const auto told = [](const std::function<Work(Comm&, at::Tensor)>& call) {
    const std::vector<std::string> messages = errors_on_ranks(2, [&](Comm& comm) {
      comm.barrier().wait();
      (comm.rank() == 0 ? call(comm, at::ones({4})) : comm.barrier()).wait();
    });
    EXPECT_EQ(messages[0], messages[1]);
    const size_t begin = messages[0].find("rank 0 calls ") + 13;
    return messages[0].substr(begin, messages[0].find(", rank 1 calls") - begin);
  };
  using at::Tensor;
  EXPECT_EQ(told([](Comm& c, Tensor x) { return c.all_gather(at::empty({8}), x); }), "all_gather(Float x 4) as call 1");
  EXPECT_EQ(told([](Comm& c, Tensor x) { return c.reduce_scatter(at::empty({2}), x, Reduce::min); }),
            "reduce_scatter(Float x 2, min) as call 1");
  EXPECT_EQ(told([](Comm& c, Tensor x) { return c.all_reduce(x, Reduce::max); }), "all_reduce(Float x 4, max) as call 1");
  EXPECT_EQ(told([](Comm& c, Tensor x) { return c.broadcast(x, 1); }), "broadcast(Float x 4, root 1) as call 1");
  EXPECT_EQ(told([](Comm& c, Tensor x) {
              return c.all_to_all(at::empty({5}), x, {3, 2}, {1, 3});
            }),
            "all_to_all(Float x 0, sends 1+3, receives 3+2) as call 1");
}

TEST(Checked, matching_calls_pass_unchanged_in_groups_too) {
  run_threads(4, [](std::shared_ptr<Comm> comm) {
    const auto guarded = checked(comm);
    const auto half = guarded->split(comm->rank() % 2, comm->rank(), "half");
    golden::Ranks inputs{worlds::values(9, at::kFloat, comm->rank() % 2, 1),
                         worlds::values(9, at::kFloat, comm->rank() % 2 + 2, 1)};
    at::Tensor tensor = inputs[half->rank()].clone();
    half->all_reduce(tensor).wait();
    EXPECT_TRUE(kit::same_bits(tensor, golden::all_reduce(inputs)[0]));
  });
}

TEST(Checked, a_split_by_lists_of_ranks_is_compared_with_what_the_other_ranks_call) {
  expect_all_say(errors_on_ranks(2,
                                 [](Comm& comm) {
                                   if (comm.rank() == 0)
                                     comm.split_ranks({0, 1}, "both");
                                   else
                                     comm.barrier().wait();
                                 }),
                 {"rank 0 calls split", "rank 1 calls barrier"});
}

TEST(Traced, calls_are_written_down_by_rank_and_group_with_their_bytes) {
  auto trace = std::make_shared<Trace>();
  run_threads(4, [&](std::shared_ptr<Comm> comm) {
    const auto recorded = traced(comm, trace);
    at::Tensor tensor = at::ones({10}), gathered = at::empty({6});
    recorded->all_reduce(tensor).wait();
    const auto half = recorded->split(comm->rank() / 2, comm->rank(), "half");
    half->all_gather(gathered, at::ones({3})).wait();
  });
  for (int64_t rank = 0; rank < 4; ++rank) {
    const auto records = trace->of_rank(rank);
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[0].op, "all_reduce");
    EXPECT_EQ(records[0].bytes, 40);
    EXPECT_EQ(records[1].group, "half");
    EXPECT_EQ(records[1].bytes, 24);
  }
  EXPECT_EQ(trace->first_disagreement("world"), "");
  EXPECT_NE(trace->summary(0).find("all_gather"), std::string::npos);
}

TEST(Traced, the_first_disagreement_between_ranks_is_named) {
  Trace trace;
  trace.add(0, {"all_gather", "world", "all_gather(a)", 4});
  trace.add(1, {"all_gather", "world", "all_gather(a)", 4});
  trace.add(0, {"all_reduce", "world", "all_reduce(b)", 4});
  const std::string message = trace.first_disagreement("world");
  for (const char* part : {"call 1", "rank 0 all_reduce(b)", "rank 1 nothing"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(Counted, other_ranks_count_as_zeros) {
  const auto comm = counted(4, 2);
  at::Tensor own = at::arange(1, 4, at::kFloat), gathered = at::full({12}, 7.F), wide = at::arange(12, at::kFloat),
             slice = at::full({3}, 7.F), sum = own.clone(), exchanged = at::full({7}, 7.F), told = at::full({3}, 7.F);
  const auto version = gathered._version();
  comm->all_gather(gathered, own).wait();
  EXPECT_TRUE(gathered.equal(at::cat({at::zeros({6}), own, at::zeros({3})})));
  comm->all_gather(gathered, gathered.narrow(0, 6, 3)).wait();
  EXPECT_TRUE(gathered.narrow(0, 6, 3).equal(own));
  comm->reduce_scatter(slice, wide).wait();
  EXPECT_TRUE(slice.equal(wide.narrow(0, 6, 3)));
  comm->all_reduce(sum).wait();
  EXPECT_TRUE(sum.equal(own));
  comm->all_to_all(exchanged, wide, {1, 2, 3, 1}, {4, 2, 3, 3}).wait();
  EXPECT_TRUE(exchanged.equal(at::tensor({0.F, 0.F, 0.F, 6.F, 7.F, 8.F, 0.F})));
  comm->broadcast(told, 0).wait();
  EXPECT_TRUE(told.equal(at::zeros({3})));
  EXPECT_EQ(gathered._version(), version);
}

TEST(Checked, a_communicator_gives_the_memory_of_the_one_inside) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    const auto guarded = checked(comm);
    at::Tensor memory = guarded->shared_memory(8);
    ASSERT_EQ(memory.numel(), 8);
    if (comm->rank() == 0) memory.fill_(3);
    guarded->barrier().wait();
    EXPECT_TRUE(memory.eq(3).all().item<bool>()) << "both ranks have the same";
    guarded->barrier().wait();
    EXPECT_EQ(guarded->allocate(Op::all_gather, 64, at::kCPU).get(), nullptr) << "nothing is registered here";
  });
}

TEST(Counted, memory_is_shared_by_one_rank_with_itself_and_with_nobody_who_is_only_counted) {
  const at::Tensor own = counted(1, 0)->shared_memory(8);
  ASSERT_EQ(own.numel(), 8);
  EXPECT_EQ(own.count_nonzero().item<int64_t>(), 0);
  EXPECT_FALSE(counted(3, 1)->shared_memory(8).defined());
}
