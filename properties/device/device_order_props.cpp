// Rank-threads that share a device: each queues on a stream of its own, and collectives order the streams.
#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "properties/doubles/fake_device.h"
#include "properties/kit/expect_error.h"
#include "shardproof/comm/data_group.h"
#include "shardproof/comm/threads/threads.h"

using namespace shardproof;

namespace {

constexpr int64_t kNumel = 6;

void run(int64_t world, const std::function<void(std::shared_ptr<Comm>)>& body) {
  fake_device::install();
  fake_device::hesitate(true);
  run_threads(world, body, {.device = fake_device::device()});
}

void queue_fill(const at::Tensor& tensor, float value) {
  auto* data = fake_device::on_host<float>(tensor);
  fake_device::queue([=, kept = tensor, count = tensor.numel()] { std::fill(data, data + count, value); });
}

void expect_all(const at::Tensor& tensor, int64_t begin, int64_t end, float value) {
  const auto* data = fake_device::on_host<float>(tensor);
  for (int64_t i = begin; i < end; ++i) EXPECT_EQ(data[i], value) << "element " << i;
}

at::Tensor filled(int64_t numel, float value) {
  const at::Tensor tensor = at::empty({numel}, fake_device::options(at::kFloat));
  queue_fill(tensor, value);
  return tensor;
}

// Each rank's inputs are written by work that is only queued when it calls, and overwritten by work that it queues right after
// the wait. `call` returns what it is to wait for; outputs are copied on the stream after it, then looked at.
struct Outcome {
  at::Tensor seen;
};
Outcome after(Work work, const at::Tensor& output, const at::Tensor& input) {
  work.wait();
  const at::Tensor seen = at::empty({output.numel()}, fake_device::options(at::kFloat));
  auto* to = fake_device::on_host<float>(seen);
  const auto* from = fake_device::on_host<float>(output);
  fake_device::queue([=, count = output.numel(), keep = std::make_pair(output, seen)] { std::copy(from, from + count, to); });
  queue_fill(input, -100);
  queue_fill(output, -200);
  return {seen};
}

}  // namespace

TEST(DeviceOrder, all_reduce_reads_what_ranks_had_queued_and_later_work_waits_for_it) {
  for (const int64_t world : {2, 3, 5})
    run(world, [&](std::shared_ptr<Comm> comm) {
      const at::Tensor values = filled(kNumel, static_cast<float>(1 + comm->rank()));
      const Outcome outcome = after(comm->all_reduce(values), values, values);
      fake_device::synchronize();
      expect_all(outcome.seen, 0, kNumel, static_cast<float>(world * (world + 1) / 2));
    });
}

TEST(DeviceOrder, gathered_parts_are_there_and_inputs_are_not_overwritten_too_early) {
  for (const int64_t world : {2, 4})
    run(world, [&](std::shared_ptr<Comm> comm) {
      const at::Tensor mine = filled(kNumel, static_cast<float>(comm->rank())), all = filled(world * kNumel, -1);
      const Outcome outcome = after(comm->all_gather(all, mine), all, mine);
      // One rank is far ahead: its stream runs at once, with all that it overwrites.
      if (comm->rank() == 0) fake_device::synchronize();
      comm->barrier().wait();
      fake_device::synchronize();
      for (int64_t r = 0; r < world; ++r) expect_all(outcome.seen, r * kNumel, (r + 1) * kNumel, static_cast<float>(r));
    });
}

TEST(DeviceOrder, reduced_slices_and_exchanged_ones_are_those_of_the_calls) {
  run(3, [&](std::shared_ptr<Comm> comm) {
    const at::Tensor terms = filled(3 * kNumel, static_cast<float>(1 << comm->rank())), slice = filled(kNumel, -1);
    const Outcome summed = after(comm->reduce_scatter(slice, terms), slice, terms);
    const at::Tensor out = filled(3, static_cast<float>(10 + comm->rank())), in = filled(3, -1);
    const Outcome moved = after(comm->all_to_all(in, out, {1, 1, 1}, {1, 1, 1}), in, out);
    const at::Tensor sent = filled(2, static_cast<float>(comm->rank() + 5));
    const Outcome root = after(comm->broadcast(sent, 1), sent, sent);
    if (comm->rank() == 2) fake_device::synchronize();
    comm->barrier().wait();
    fake_device::synchronize();
    expect_all(summed.seen, 0, kNumel, 7);
    for (int64_t r = 0; r < 3; ++r) expect_all(moved.seen, r, r + 1, static_cast<float>(10 + r));
    expect_all(root.seen, 0, 2, 6);
  });
}

// Ranks that wait while the last one is still queueing must not take the work for theirs.
TEST(DeviceOrder, many_collectives_are_each_queued_once) {
  run(4, [&](std::shared_ptr<Comm> comm) {
    const at::Tensor values = at::empty({kNumel}, fake_device::options(at::kFloat));
    for (int64_t i = 0; i < 60; ++i) {
      queue_fill(values, static_cast<float>(comm->rank() + i % 7));
      Work work = comm->all_reduce(values);
      for (int64_t k = (i * 31 + comm->rank() * 17) % 4; k > 0; --k) std::this_thread::yield();
      work.wait();
      const auto* data = fake_device::on_host<float>(values);
      fake_device::queue([=] { ASSERT_EQ(data[kNumel - 1], static_cast<float>(6 + 4 * (i % 7))) << "collective " << i; });
      if (i % 20 == 0) fake_device::synchronize();
    }
    fake_device::synchronize();
  });
}

TEST(DeviceOrder, ranks_have_streams_of_their_own_and_keep_backwards_on_their_threads) {
  run(3, [&](std::shared_ptr<Comm> comm) {
    const c10::impl::VirtualGuardImpl guard(fake_device::device().type());
    const at::Tensor mine = at::full({1}, guard.getStream(fake_device::device()).id(), at::kLong),
                     all = at::empty({3}, at::kLong);
    comm->all_gather(all, mine).wait();
    EXPECT_FALSE(all[0].equal(all[1]) || all[0].equal(all[2]) || all[1].equal(all[2])) << all;
    bool ran = false;
    fake_device::queue([&] { ran = true; });
    comm->barrier().wait();
    EXPECT_FALSE(ran);
    fake_device::synchronize();
    EXPECT_TRUE(ran);
    EXPECT_FALSE(c10::AutogradState::get_tls_state().get_multithreading_enabled());
  });
}

TEST(DeviceOrder, tensors_of_two_devices_in_one_collective_are_refused) {
  expect_error(
      [] {
        run(2, [&](std::shared_ptr<Comm> comm) {
          const auto there = fake_device::options(at::kFloat);
          comm->all_reduce(at::zeros({kNumel}, comm->rank() == 0 ? at::TensorOptions() : there)).wait();
        });
      },
      {"ranks must use one device", "rank 1", "fake:0"});
}

// For at most ten seconds.
void wait_until_asleep(pid_t thread) {
  for (int looks = 0; looks < 1000; ++looks) {
    std::ifstream stat(fmt::format("/proc/self/task/{}/stat", thread));
    std::string text;
    std::getline(stat, text);
    if (text.find(") S ") != std::string::npos) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// The rank whose call is refused still has its stack to unwind when the other one begins to wait.
TEST(DeviceOrder, a_rank_that_waits_for_a_refused_call_takes_nothing_for_its_exchange) {
  std::atomic<bool> has_called = false, unwinds = false;
  std::atomic<pid_t> waiting = 0;
  struct Unwinding {
    std::atomic<bool>& began;
    std::atomic<pid_t>& other;
    ~Unwinding() {
      began = true;
      began.notify_one();
      other.wait(0);
      wait_until_asleep(other);
    }
  };
  expect_error(
      [&] {
        run(2, [&](std::shared_ptr<Comm> comm) {
          const auto there = fake_device::options(at::kFloat);
          if (comm->rank() == 0) {
            Work work = comm->all_reduce(at::zeros({kNumel}));
            has_called = true;
            has_called.notify_one();
            unwinds.wait(false);
            waiting = ::gettid();
            waiting.notify_one();
            work.wait();
          } else {
            has_called.wait(false);
            const Unwinding slowly{unwinds, waiting};
            comm->all_reduce(at::zeros({kNumel}, there)).wait();
          }
        });
      },
      {"ranks must use one device", "rank 1", "fake:0"});
}

TEST(DeviceOrder, late_completions_are_refused) {
  fake_device::install();
  const auto body = [](std::shared_ptr<Comm> comm) {
    comm->all_reduce(at::empty({kNumel}, fake_device::options(at::kFloat))).wait();
  };
  const ThreadsOptions late{.completion = ThreadsOptions::Completion::late, .device = fake_device::device()};
  expect_error([&] { run_threads(2, body, late); }, {"completions other than eager"});
}

// What the device itself is trusted with.

TEST(FakeDevice, what_operators_write_is_there_when_the_stream_has_run) {
  run(1, [&](std::shared_ptr<Comm>) {
    const at::Tensor sum = filled(kNumel, 41) + filled(kNumel, 42);
    EXPECT_NE(fake_device::on_host<float>(sum)[0], 83);
    const at::Tensor base = filled(4, 5);
    base.narrow(0, 1, 2).mul_(3);
    EXPECT_NE(fake_device::on_host<float>(base)[1], 15);
    EXPECT_EQ(sum.sum().item<float>(), 83 * kNumel);  // which waits
    expect_all(sum, 0, kNumel, 83);
    expect_all(base, 1, 3, 15);
    expect_all(base, 3, 4, 5);
  });
}

TEST(DeviceOrder, batches_on_the_device_are_compared_and_told_by_the_hosts_memory) {
  run(2, [&](std::shared_ptr<Comm> comm) {
    const at::Tensor same = at::arange(kNumel).to(fake_device::device());
    check_same_data(same, *comm);
    expect_error([&] { check_same_data(same + comm->rank(), *comm); }, {"[1] other values than rank 0"});
    const at::Tensor told = broadcast_data(comm->rank() == 1 ? same : at::Tensor(), *comm, /*root=*/1);
    EXPECT_TRUE(told.to(at::kCPU).equal(at::arange(kNumel)));
  });
}

TEST(FakeDevice, a_copy_to_the_host_that_nobody_waits_for_has_not_happened) {
  run(1, [&](std::shared_ptr<Comm>) {
    const at::Tensor there = filled(kNumel, 4), late = at::zeros({kNumel}), now = there.to(at::kCPU);
    late.copy_(there, /*non_blocking=*/true);
    EXPECT_TRUE(now.equal(at::full({kNumel}, 4.0f)));
    EXPECT_TRUE(late.equal(at::zeros({kNumel})));
    fake_device::synchronize();
    EXPECT_TRUE(late.equal(now));
  });
}

TEST(FakeDevice, tensors_of_the_host_beside_those_of_the_device_are_refused_but_for_scalars_and_indices) {
  run(1, [&](std::shared_ptr<Comm>) {
    const at::Tensor here = at::ones({kNumel}), there = here.to(fake_device::device());
    const at::Tensor rows = at::zeros({1}, at::kLong);
    EXPECT_THROW((void)(there + here), c10::Error);
    EXPECT_THROW((void)there.index_select(0, rows), c10::Error);
    EXPECT_THROW((void)at::embedding(there.view({2, 3}), rows), c10::Error);
    EXPECT_THROW((void)there.masked_fill(here.to(at::kBool), 0), c10::Error);
    EXPECT_EQ((there * at::scalar_tensor(2)).sum().item<float>(), 2 * kNumel);
    EXPECT_EQ(there.index({rows}).item<float>(), 1);
  });
}

TEST(FakeDevice, the_host_cannot_touch_its_memory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  fake_device::install();
  const at::Tensor there = at::ones({kNumel}, fake_device::options(at::kFloat));
  EXPECT_DEATH((void)*static_cast<volatile float*>(there.mutable_data_ptr()), "the host touched memory of the device");
}
