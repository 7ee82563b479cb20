// Rank-threads outlive their worlds: a world starts clean whatever an earlier one left behind, many run at once, and an
// error finds its way out of a backward pass.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "properties/doubles/comm_worlds.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/agree.h"
#include "shardproof/comm/checked.h"
#include "shardproof/comm/decorated.h"
#include "shardproof/comm/require_same.h"
#include "shardproof/sharding/fully_shard.h"

using namespace shardproof;

TEST(CommThreads, a_body_starts_with_gradients_on_whatever_ran_before) {
  run_threads(4, [](std::shared_ptr<Comm>) { at::GradMode::set_enabled(false); });
  const at::NoGradGuard callers_state_is_not_inherited;
  run_threads(4, [](std::shared_ptr<Comm>) { EXPECT_TRUE(at::GradMode::is_enabled()); });
}

TEST(CommThreads, ranks_use_as_many_torch_threads_as_their_caller) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 1}) {
    at::set_num_threads(threads);
    run_threads(3, [&](std::shared_ptr<Comm>) { EXPECT_EQ(at::get_num_threads(), threads); });
  }
  at::set_num_threads(before);
}

// A rank looks for what it waits for during some tens of microseconds, and sleeps afterwards. The limit is on its processor
// time, which does not depend on how busy the machine is.
TEST(CommThreads, a_rank_that_waits_for_long_takes_hardly_any_processor_time) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    const auto processor_seconds = [] {
      timespec now{};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
      return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
    };
    const double before = processor_seconds();
    if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
    comm->barrier().wait();
    EXPECT_LT(processor_seconds() - before, 0.1) << "rank " << comm->rank();
  });
}

TEST(CommThreads, of_a_process_that_was_forked_are_its_own) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "under ThreadSanitizer a process that was forked beside other threads must not start threads";
#endif
  run_threads(3, [](std::shared_ptr<Comm> comm) { comm->barrier().wait(); });
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(60);  // instead of waiting forever for threads of the parent
    std::atomic<int64_t> ran{0};
    run_threads(3, [&](std::shared_ptr<Comm>) { ++ran; });
    ::_exit(ran == 3 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

// Also in groups of the world, and when the rank that allocated it lets go first.
TEST(CommThreads, shared_memory_is_zero_aligned_and_written_for_all) {
  run_threads(4, [](std::shared_ptr<Comm> world) {
    const auto pair = world->split(world->rank() / 2, world->rank(), "pair");
    for (const auto& group : {world, pair})
      for (const int64_t bytes : {0, 5, 1 << 16}) {
        at::Tensor memory = group->shared_memory(bytes);
        ASSERT_EQ(memory.numel(), bytes);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % 64, 0u);
        EXPECT_EQ(memory.count_nonzero().item<int64_t>(), 0);
        group->barrier().wait();
        const auto own = [&](int64_t rank) {
          return memory.slice(0, bytes * rank / group->size(), bytes * (rank + 1) / group->size());
        };
        own(group->rank()).fill_(world->rank() + 1);
        group->barrier().wait();
        const int64_t first = world->rank() - group->rank();
        for (int64_t r = 0; r < group->size(); ++r) EXPECT_TRUE((own(r) == first + r + 1).all().item<bool>());
        group->barrier().wait();
        if (group->rank() == 0) memory.reset();
        group->barrier().wait();
        if (group->rank() > 0 && bytes > 0) {
          EXPECT_EQ(memory[bytes - 1].item<int64_t>(), first + group->size());
        }
      }
  });
}

TEST(CommThreads, worlds_run_side_by_side_and_inside_each_other) {
  const auto run_one = [](int64_t world) {
    for (int64_t i = 0; i < 20; ++i)
      run_threads(world, [&](std::shared_ptr<Comm> comm) {
        at::Tensor tensor = at::full({1}, comm->rank());
        comm->all_reduce(tensor).wait();
        EXPECT_EQ(tensor.item<int64_t>(), world * (world - 1) / 2);
      });
  };
  std::vector<std::thread> callers;
  for (int64_t world = 2; world < 6; ++world) callers.emplace_back(run_one, world);
  for (std::thread& caller : callers) caller.join();

  run_threads(2, [&](std::shared_ptr<Comm> outer) {
    run_one(3);
    outer->barrier().wait();
  });
}

TEST(CommThreads, tensors_may_be_freed_after_the_own_wait_although_others_have_not_waited) {
  for (const ThreadsOptions& options : worlds::all_options())
    run_threads(
        2,
        [](std::shared_ptr<Comm> comm) {
          at::Tensor tensor = at::ones({8});
          Work work = comm->all_reduce(tensor);
          if (comm->rank() == 1) comm->barrier().wait();
          work.wait();
          EXPECT_EQ(tensor.use_count(), 1) << "the call holds it no longer";
          if (comm->rank() == 0) comm->barrier().wait();
        },
        options);
}

TEST(CommThreads, waiting_twice_or_for_a_copy_changes_nothing) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    at::Tensor tensor = at::ones({1});
    Work work = comm->all_reduce(tensor), copy = work;
    work.wait();
    work.wait();
    tensor.zero_();
    copy.wait();
    EXPECT_EQ(tensor.item<float>(), 0);
  });
}

namespace {

// Runs `action` in the middle of a backward pass; returns the gradient of sum(3 * x).
at::Tensor backward_with(const std::function<void()>& action) {
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor product = x * 3;
  product.register_hook([&](const at::Tensor&) { action(); });
  torch::autograd::backward({product.sum()}, {});
  return x.grad();
}

}  // namespace

TEST(CommThreads, an_error_inside_one_ranks_backward_ends_the_others_backward_and_is_the_one_shown) {
  for (const ThreadsOptions& options : worlds::all_options()) {
    const std::string message = worlds::error_of(
        3,
        [](std::shared_ptr<Comm> comm) {
          at::Tensor tensor = at::ones({1});
          backward_with([&] {
            if (comm->rank() == 1) throw Error("a hook of rank one failed");
            comm->all_reduce(tensor).wait();
          });
        },
        options);
    EXPECT_NE(message.find("rank 1 of 3: a hook of rank one failed"), std::string::npos) << message;
    // The same threads, and their backward passes, work as before.
    run_threads(
        3,
        [](std::shared_ptr<Comm> comm) {
          at::Tensor tensor = at::ones({1});
          EXPECT_TRUE(backward_with([&] { comm->all_reduce(tensor).wait(); }).equal(at::full({2}, 3.f)));
          EXPECT_EQ(tensor.item<float>(), 3);
        },
        options);
  }
}

TEST(CommThreads, an_error_that_begins_with_its_rank_does_not_say_it_twice) {
  const std::vector<std::pair<std::string, std::string>> said_and_shown = {
      {"rank 1, step 3: the loss is nan", "rank 1, step 3: the loss is nan"},
      {"[gradient] rank 1, step 3: nan", "[gradient] rank 1, step 3: nan"},
      {"[gradient] in step 3: nan", "rank 1 of 3: [gradient] in step 3: nan"},
      {"rank 1 of 3: told by another", "rank 1 of 3: told by another"},
      {"[data] rank 1 of 'tp' gave no tensor", "rank 1 of 3: [data] rank 1 of 'tp' gave no tensor"},
      {"rank 10 is late", "rank 1 of 3: rank 10 is late"},
      {"rank 0 is late", "rank 1 of 3: rank 0 is late"},
      {"[open", "rank 1 of 3: [open"}};
  for (const auto& [said, shown] : said_and_shown) {
    const std::string message = worlds::error_of(3,
                                                 [&said = said](std::shared_ptr<Comm> comm) {
                                                   if (comm->rank() == 1) throw Error(said);
                                                 },
                                                 {});
    EXPECT_EQ(message, shown);
  }
}

TEST(CommThreads, an_error_that_is_caught_still_ends_the_world_at_the_next_call) {
  for (const ThreadsOptions& options : worlds::all_options()) {
    const std::string message = worlds::error_of(
        2,
        [](std::shared_ptr<Comm> comm) {
          at::Tensor tensor = at::ones({1});
          if (comm->rank() == 0) throw Error("first");
          for (int64_t attempt = 0; attempt < 3; ++attempt) try {
              comm->all_reduce(tensor).wait();
            } catch (const std::exception&) {
            }
          throw Error("second");
        },
        options);
    // Under the parallel schedule rank 1 cannot get to its own error before rank 0 has failed, as it needs rank 0.
    EXPECT_NE(message.find("rank 0 of 2: first"), std::string::npos) << message;
  }
}

TEST(CommThreads, an_error_of_torch_keeps_its_type_and_gains_the_rank) {
  try {
    run_threads(2, [](std::shared_ptr<Comm> comm) {
      if (comm->rank() == 1) at::ones({2}).view({3});
      comm->barrier().wait();
    });
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 of 2"), std::string::npos) << error.what();
  }
}

TEST(CommThreads, an_error_type_of_the_callers_own_passes_unchanged) {
  struct Own : Error {
    using Error::Error;
    int64_t code = 42;
  };
  try {
    run_threads(2, [](std::shared_ptr<Comm> comm) {
      if (comm->rank() == 0) throw Own("own");
      comm->barrier().wait();
    });
    FAIL() << "nothing was thrown";
  } catch (const Own& error) {
    EXPECT_EQ(error.code, 42);
  }
}

namespace {

int64_t address_space_bytes() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

// In a process of its own: room for a few stacks of threads and not for a hundred.
[[noreturn]] void ask_for_more_threads_than_fit() {
  const auto room = static_cast<rlim_t>(address_space_bytes() + (256 << 20));
  const rlimit limit{room, room};
  setrlimit(RLIMIT_AS, &limit);
  try {
    run_threads(500, [](std::shared_ptr<Comm>) {});
  } catch (const Error& error) {
    fprintf(stderr, "%s\n", error.what());
    run_threads(2, [](std::shared_ptr<Comm> comm) { comm->barrier().wait(); });  // those that started serve the next world
    _exit(2);
  }
  _exit(0);
}

}  // namespace

TEST(CommThreadsDeathTest, threads_that_the_system_refuses_are_an_error_that_says_what_to_do) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(ask_for_more_threads_than_fit(), testing::ExitedWithCode(2), "of the 500 threads.*smaller world");
}

namespace {

// Looks at the tensors of each call of a world and of its groups.
class Owned final : public DecoratedComm {
 public:
  Owned(std::shared_ptr<Comm> inner, std::atomic<int64_t>& calls) : DecoratedComm(std::move(inner)), calls_(calls) {}

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { return std::make_shared<Owned>(group, calls_); }
  Work start(Call call) override {
    ++calls_;
    for (const at::Tensor* tensor : {&call.input, &call.output})  // memory without an owner has no context
      EXPECT_TRUE(!tensor->defined() || tensor->numel() == 0 || tensor->storage().data_ptr().get_context()) << describe(call);
    return inner().issue(std::move(call));
  }

  std::atomic<int64_t>& calls_;
};

}  // namespace

// When another rank fails, a rank leaves its call by an exception, and a third one may still be writing into what it gave.
TEST(CommThreads, what_the_library_gives_to_a_call_lives_as_long_as_its_tensor) {
  std::atomic<int64_t> calls = 0;
  run_threads(2, [&](std::shared_ptr<Comm> plain) {
    const auto world = std::make_shared<Owned>(plain, calls);
    EXPECT_EQ(broadcast_text(*world, world->rank() == 1 ? "told" : "", 1), "told");
    EXPECT_EQ(gather_texts(*world, "both").back(), "both");
    require_same(*world, {{"program", "this one"}});
    checked(world)->barrier().wait();
    torch::nn::Linear model(3, 2);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", 2}})), {});
    call(model, at::ones({1, 3})).sum().backward();
    for (const double order : {1.0, 2.0, static_cast<double>(INFINITY)}) sharded.gradient_norm(order);
    sharded.gather_parameters();
  });
  EXPECT_GE(calls, 20);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose shadows take more address space than any limit
namespace {

// In a process of its own, since its limit stays. The limit leaves address space for a few stacks of threads.
[[noreturn]] void ask_for_more_threads_than_there_are() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto limit = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE) + (int64_t{1} << 29));
  const rlimit space{limit, limit};
  ::setrlimit(RLIMIT_AS, &space);
  try {
    run_threads(1000, [](std::shared_ptr<Comm>) {});
  } catch (const Error& error) {
    fprintf(stderr, "%s\n", error.what());
    int64_t sum = 0;
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      at::Tensor ranks = at::full({1}, comm->rank() + 1);
      comm->all_reduce(ranks).wait();
      if (comm->rank() == 0) sum = ranks.item<int64_t>();
    });
    fprintf(stderr, "a smaller world adds to %d\n", static_cast<int>(sum));
    std::exit(0);
  }
  std::exit(1);
}

}  // namespace

TEST(CommThreadsDeathTest, a_world_of_more_ranks_than_the_system_gives_threads_is_refused_and_a_smaller_one_runs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ask_for_more_threads_than_there_are(), testing::ExitedWithCode(0),
              "the system gave [0-9]+ of the 1000 threads asked for(.|\n)*use a smaller world(.|\n)*adds to 3");
}
#endif

// Ranks send it to each other, and it may be printed for each of them.
TEST(CommThreads, what_libtorch_refuses_on_a_rank_is_told_to_the_others_without_the_stack_of_its_calls) {
  const std::string error = error_of([] { at::ones({2}).narrow(0, 1, 4); });
  EXPECT_NE(error.find("exceeds dimension size"), std::string::npos) << error;
  EXPECT_EQ(error.find("frame #"), std::string::npos) << error;
}
