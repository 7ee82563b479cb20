// Small programs on the fake device in every order that its streams may legally take.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "properties/doubles/fake_device.h"
#include "shardproof/comm/threads/threads.h"
#include "internal/device/host_transfers.h"

using namespace shardproof;

namespace {

constexpr int64_t kNumel = 2;

c10::Stream new_stream() {
  return c10::impl::VirtualGuardImpl(fake_device::device().type()).getStreamFromGlobalPool(fake_device::device());
}
c10::Stream current_stream() {
  return c10::impl::VirtualGuardImpl(fake_device::device().type()).getStream(fake_device::device());
}
at::Tensor on_device() {
  return at::empty({kNumel}, fake_device::options(at::kFloat));
}
// As a kernel would.
void write(const at::Tensor& tensor, float value) {
  auto* data = fake_device::on_host<float>(tensor);
  fake_device::queue([=, kept = tensor] { std::fill(data, data + kNumel, value); });
}
void add_up(const at::Tensor& to, const at::Tensor& from) {
  auto* target = fake_device::on_host<float>(to);
  const auto* source = fake_device::on_host<float>(from);
  fake_device::queue([=, kept = std::make_pair(to, from)] {
    for (int64_t i = 0; i < kNumel; ++i) target[i] += source[i];
  });
}
bool all_are(const float* data, float value) {
  return std::all_of(data, data + kNumel, [&](float x) { return x == value; });
}
bool all_are(const at::Tensor& host, float value) { return all_are(host.const_data_ptr<float>(), value); }

// Queues steps on two streams; step `after` of the first comes before step `before` of the second, if any.
int64_t orders_of(fake_device::When when, int64_t first, int64_t second, int64_t after = -1, int64_t before = -1) {
  return fake_device::every_order([&] {
           const c10::Stream a = new_stream(), b = new_stream();
           c10::Event event(fake_device::device().type());
           for (int64_t i = 0; i < first; ++i) {
             const c10::StreamGuard guard(a);
             fake_device::queue([] {});
             if (i == after) event.record(a);
           }
           for (int64_t i = 0; i < second; ++i) {
             const c10::StreamGuard guard(b);
             if (i == before) event.block(b);
             fake_device::queue([] {});
           }
           return true;
         }, when)
      .distinct;
}

// The same number, by trying all sequences.
int64_t counted(int64_t first, int64_t second, int64_t after, int64_t before) {
  std::string steps = std::string(static_cast<size_t>(first), 'a') + std::string(static_cast<size_t>(second), 'b');
  int64_t count = 0;
  do {
    int64_t a = 0, b = 0;
    bool legal = true;
    for (const char step : steps) {
      if (step == 'b' && b == before && a <= after) legal = false;
      ++(step == 'a' ? a : b);
    }
    count += legal;
  } while (std::next_permutation(steps.begin(), steps.end()));
  return count;
}

class EveryOrder : public testing::Test {
 protected:
  void SetUp() override { fake_device::install(); }
  static void expect_held(const std::function<bool()>& program, fake_device::When when = fake_device::When::between_calls) {
    const fake_device::Orders orders = fake_device::every_order(program, when);
    EXPECT_EQ(orders.failed, 0) << "of " << orders.runs << " runs";
    EXPECT_GT(orders.runs, 1);
  }
};

}  // namespace

TEST_F(EveryOrder, of_two_streams_is_tried_and_no_other) {
  for (const auto when : {fake_device::When::between_calls, fake_device::When::at_synchronization})
    for (int64_t first = 1; first <= 3; ++first)
      for (int64_t second = 1; second <= 3; ++second) {
        EXPECT_EQ(orders_of(when, first, second), counted(first, second, -1, -1)) << first << " and " << second;
        for (int64_t after = 0; after < first; ++after)
          for (int64_t before = 0; before < second; ++before)
            EXPECT_EQ(orders_of(when, first, second, after, before), counted(first, second, after, before))
                << first << " and " << second << ", " << after << " before " << before;
      }
}

TEST_F(EveryOrder, finds_an_event_that_is_missing) {
  for (const bool ordered : {false, true}) {
    const at::Tensor sum = on_device(), term = on_device();
    const fake_device::Orders orders = fake_device::every_order([&] {
      const c10::Stream other = new_stream();
      write(sum, 1);
      write(term, 2);
      c10::Event ready(fake_device::device().type());
      ready.record(current_stream());
      {
        const c10::StreamGuard guard(other);
        if (ordered) ready.block(other);
        add_up(sum, term);
        fake_device::synchronize();
      }
      return all_are(fake_device::on_host<float>(sum), 3);
    });
    EXPECT_EQ(orders.failed > 0, !ordered);
    EXPECT_GT(orders.runs, orders.failed) << "some order is right by chance";
  }
}

TEST_F(EveryOrder, of_a_download_brings_what_was_queued_before_it) {
  const at::Tensor there = on_device(), host = at::empty({kNumel});
  expect_held([&] {
    HostTransfers transfers(fake_device::device());
    host.fill_(-1);
    write(there, 5);
    const HostTransfer transfer = transfers.download(host, there);
    transfer.wait();
    write(there, 6);  // behind the wait
    return all_are(host, 5);
  });
}

TEST_F(EveryOrder, of_several_downloads_brings_each_its_own_and_keeps_memory_that_was_let_go) {
  std::vector<at::Tensor> hosts;
  for (int64_t k = 0; k < 3; ++k) hosts.push_back(at::empty({kNumel}));
  expect_held([&] {
    HostTransfers transfers(fake_device::device());
    std::vector<HostTransfer> flights;
    for (int64_t k = 0; k < 3; ++k) {
      at::Tensor there = on_device();
      write(there, static_cast<float>(10 + k));
      flights.push_back(transfers.download(hosts[static_cast<size_t>(k)], std::move(there)));
    }
    bool held = true;
    for (size_t k = 0; k < 3; ++k) {
      flights[k].wait();
      held &= all_are(hosts[k], static_cast<float>(10 + k));
    }
    return held;
  }, fake_device::When::at_synchronization);
}

TEST_F(EveryOrder, of_an_upload_leaves_the_host_its_memory_after_the_wait) {
  const at::Tensor there = on_device(), host = at::empty({kNumel}), seen = at::empty({kNumel});
  expect_held([&] {
    HostTransfers transfers(fake_device::device());
    host.fill_(3);
    const HostTransfer up = transfers.upload(there, host);
    up.wait();
    host.fill_(9);
    add_up(there, there);
    transfers.download(seen, there).wait();
    return all_are(seen, 6);
  });
}

TEST_F(EveryOrder, of_a_collective_sums_what_the_ranks_had_queued) {
  const ThreadsOptions options{.schedule = ThreadsOptions::Schedule::serial, .device = fake_device::device()};
  for (const uint64_t seed : {0, 1, 2}) {
    ThreadsOptions drawn = options;
    drawn.seed = seed;
    const at::Tensor values[] = {on_device(), on_device()}, outputs[] = {on_device(), on_device()};
    expect_held([&] {
      bool held = true;
      const auto body = [&](std::shared_ptr<Comm> comm) {
        const at::Tensor &mine = values[comm->rank()], &sum = outputs[comm->rank()];
        write(mine, comm->rank() == 0 ? 1.0f : 2.0f);
        write(sum, 0);
        comm->all_reduce(mine).wait();
        add_up(sum, mine);
        fake_device::synchronize();
        held &= all_are(fake_device::on_host<float>(sum), 3);
      };
      run_threads(2, body, drawn);
      return held;
    }, fake_device::When::at_synchronization);
  }
}
