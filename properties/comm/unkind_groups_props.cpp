// Process groups of PyTorch on a device, whose backend is as unkind as NCCL's: what is read before it may be has the wrong
// value, and a host that is stopped stays so.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "harness/case/generate.h"
#include "harness/case/network.h"
#include "properties/doubles/fake_device_env.h"
#include "properties/doubles/unkind_groups.h"
#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/held_cases.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

const c10::Device kDevice(c10::kPrivateUse1, 0);

// Ranks that take turns: those that wait for each other for ever are told so.
void on_ranks(int64_t world, const std::function<void(std::shared_ptr<Comm>)>& body) {
  fake_device::install();
  run_threads(world, [&](std::shared_ptr<Comm> comm) { body(unkind::world_over(std::move(comm))); },
              {.schedule = ThreadsOptions::Schedule::serial, .device = kDevice});
}

at::Tensor there(const at::Tensor& tensor) {
  return tensor.to(kDevice);
}

}  // namespace

TEST(UnkindGroups, random_cases_have_the_golden_runs_bits) {
  const char* asked = std::getenv("SHARDPROOF_DEVICE_CASES");
  const int64_t cases = asked ? std::atoll(asked) : 40;
  int64_t held = 0;
  for (int64_t i = 0; i < cases; ++i)
    held += harness::expect_held_or_diverged(harness::generate(49, i, {.world_max = 4}), *unkind::ranks());
  EXPECT_GT(held, cases / 2);
}

TEST(UnkindGroups, rings_of_two_ranks_and_more_go_round) {
  for (const char* ranks : {"2", "3"})
    harness::expect_held(std::string("llama(layers=2,hidden=16,heads=4,kv_heads=2,intermediate=24,vocab=29,positions=8) "
                                     "mesh(dp_shard=1,cp=") +
                             ranks + ") zero3(loss=sum,attention=ring) adamw(lr=0.01) fast seed=7 : step*2",
                         *unkind::ranks());
}

TEST(UnkindGroups, groups_that_are_made_and_ranks_alone_may_be_split_without_end) {
  constexpr int64_t kMore = 4200;  // than numbers that tags can tell apart
  on_ranks(1, [](std::shared_ptr<Comm> comm) {
    for (int64_t i = 0; i < kMore; ++i) comm->split(0, 0, "alone");
  });
  on_ranks(2, [](std::shared_ptr<Comm> comm) {
    for (int64_t i = 0; i < kMore; ++i) comm->split(0, 0, "both");
    at::Tensor value = there(at::ones({1}));
    comm->split(0, 0, "both")->all_reduce(value).wait();
    EXPECT_EQ(value.cpu().item<double>(), 2);
  });
}

TEST(UnkindGroups, a_gather_in_place_takes_no_memory) {
  on_ranks(3, [](std::shared_ptr<Comm> comm) {
    at::Tensor all = there(at::zeros({3 * 4096}));
    at::Tensor own = all.narrow(0, comm->rank() * 4096, 4096);
    own.fill_(comm->rank() + 1);
    comm->all_gather(all, own).wait();
    EXPECT_TRUE(all.cpu().equal(at::arange(1, 4, at::kFloat).repeat_interleave(4096)));
    comm->barrier().wait();
    if (comm->rank() == 0) fake_device::most_bytes_in_use(/*forget=*/true);
    comm->barrier().wait();
    const int64_t before = fake_device::most_bytes_in_use(false);
    comm->all_gather(all, own).wait();
    comm->barrier().wait();
    EXPECT_LT(fake_device::most_bytes_in_use(false) - before, 4096 * 4);
  });
}

// A slice of each rank's tensor at a time, and not every rank's whole tensor.
TEST(UnkindGroups, a_sum_in_the_order_of_ranks_takes_memory_for_two_tensors_at_most) {
  constexpr int64_t kRanks = 6, kNumel = 30011;
  on_ranks(kRanks, [](std::shared_ptr<Comm> comm) {
    at::manual_seed(3);
    const at::Tensor values = at::randn({kRanks, kNumel}), mine = there(values[comm->rank()]);
    at::Tensor expected = values[0].clone();
    for (int64_t rank = 1; rank < kRanks; ++rank) expected.add_(values[rank]);
    comm->barrier().wait();
    if (comm->rank() == 0) fake_device::most_bytes_in_use(/*forget=*/true);
    comm->barrier().wait();
    const int64_t before = fake_device::most_bytes_in_use(false);
    comm->all_reduce(mine).wait();
    EXPECT_TRUE(kit::same_bits(mine.cpu(), expected));
    comm->barrier().wait();
    EXPECT_LE(fake_device::most_bytes_in_use(false) - before, kRanks * (2 * kNumel + 2 * kNumel / kRanks + 64) * 4);
  });
}

// What the caller's stream is given after the call does not wait for it, and comes before the call's output is read.
TEST(UnkindGroups, calls_leave_the_callers_stream_alone_until_somebody_waits) {
  on_ranks(2, [](std::shared_ptr<Comm> comm) {
    at::Tensor first = there(at::full({5}, comm->rank() + 1.0)), second = there(at::full({5}, 10.0 * (comm->rank() + 1)));
    Work one = comm->all_reduce(first), two = comm->all_reduce(second);
    const at::Tensor meanwhile = there(at::ones({5})).mul(3);
    fake_device::synchronize();  // what the caller's stream has, and no more
    EXPECT_EQ(*fake_device::on_host<float>(meanwhile), 3);
    EXPECT_EQ(*fake_device::on_host<float>(first), comm->rank() + 1);
    comm->barrier().wait();  // a rank that waits has the others' streams run, too
    two.wait();
    one.wait();
    EXPECT_TRUE(first.cpu().eq(3).all().item<bool>());
    EXPECT_TRUE(second.cpu().eq(30).all().item<bool>());
    EXPECT_TRUE(meanwhile.cpu().eq(3).all().item<bool>());
  });
}

TEST(UnkindGroups, messages_are_refused_along_axes_where_no_groups_are_made) {
  fake_device::install();
  const auto body = [](std::shared_ptr<Comm> ranks) {
    unkind::world_over(ranks, /*makes_groups=*/false)->split(0, ranks->rank(), "dp_shard");
  };
  expect_error([&] { run_threads(2, body, {.device = kDevice}); }, {"dp_shard", "make_group", "without tags"});
}

// The trainer's ranks send to those of a model elsewhere; the last rank has neither model.
TEST(UnkindGroups, a_transfer_passes_ranks_that_have_neither_model) {
  for (const bool to_the_cpu : {false, true}) {
    on_ranks(3, [&](std::shared_ptr<Comm> comm) {
      const auto made = [&](int64_t owner, c10::Device device, double value) {
        Mlp model(MlpOptions{.widths = {3, 5, 2}});
        for (at::Tensor& parameter : model->parameters()) parameter.data().fill_(value);
        harness::move_to(*model, device);
        const auto alone = comm->split(comm->rank() == owner ? 0 : comm->rank() + 1, 0, "alone");
        return std::pair(model, alone);
      };
      auto [from_model, from_comm] = made(0, kDevice, 7);
      auto [to_model, to_comm] = made(1, to_the_cpu ? c10::Device(c10::kCPU) : kDevice, 1);
      std::optional<Sharded> from, to;
      const auto mesh = [](const auto& one) { return std::make_shared<MeshComm>(one, Mesh({{"dp_shard", 1}})); };
      if (comm->rank() == 0) from = fully_shard(from_model.ptr(), mesh(from_comm), {});
      if (comm->rank() == 1) to = fully_shard(to_model.ptr(), mesh(to_comm), {});
      transfer(*comm, from ? &*from : nullptr, to ? &*to : nullptr);
      if (!to) return;
      for (const auto& [name, value] : to->gather_parameters()) EXPECT_TRUE(value.cpu().eq(7).all().item<bool>()) << name;
    });
  }
}
