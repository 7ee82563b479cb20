// Work on streams of a device that the library did not choose: the user's own, inside of a unit, and the caller's.
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <vector>

#include "properties/doubles/echo_comm.h"
#include "properties/doubles/fake_device.h"
#include "properties/kit/bits.h"
#include "properties/kit/piece_values.h"
#include "shardproof/device/device_graph.h"
#include "shardproof/shardproof.h"
#include "internal/device/host_transfers.h"
#include "internal/device/streams.h"

using namespace shardproof;

namespace {

c10::Stream new_stream() {
  return c10::impl::VirtualGuardImpl(fake_device::device().type()).getStreamFromGlobalPool(fake_device::device());
}

// A layer, of which a branch is computed on a stream of its own, where it has one.
struct BranchedImpl : torch::nn::Module {
  explicit BranchedImpl(bool aside, c10::Device device) : device(device) {
    b = register_parameter("b", at::arange(36, at::kFloat).view({6, 6}).div(50).to(device));
    a = register_parameter("a", at::ones({6, 6}).div(7).to(device));
    if (aside) side = new_stream();
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y;
    {
      const OnStream on(side.value_or(current_stream(device)));
      y = at::linear(x, b);
      x.record_stream(current_stream(device));  // as LibTorch asks of a program with several streams
    }
    y.record_stream(current_stream(device));
    return at::linear(x, a).tanh() + y;
  }
  const c10::Device device;
  std::optional<c10::Stream> side;
  at::Tensor a, b;
};
TORCH_MODULE(Branched);

struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(bool aside, c10::Device device = fake_device::device()) {
    first = register_parameter("first", at::eye(6).to(device));
    const at::NoGradGuard no_grad;
    for (int64_t i = 0; i < 6; ++i) {
      layers.push_back(register_module(std::to_string(i), Branched(aside, device)));
      layers.back()->a.mul_(1.0 - 0.125 * static_cast<double>(i));  // no two alike
    }
  }
  at::Tensor forward(at::Tensor x) {
    x = at::linear(x, first);
    for (Branched& layer : layers) x = call(layer, x);
    return x;
  }
  at::Tensor first;
  std::vector<Branched> layers;
};
TORCH_MODULE(Branches);

Sharded sharded_over_two(Branches& model, ShardOptions options = {}) {
  options.strategy = strategy("zero3");
  options.units = by_type<BranchedImpl>();
  options.check_gradients = false;
  return fully_shard(model.ptr(), std::make_shared<MeshComm>(echo_comm(0, 2), Mesh({{"dp_shard", 2}})), options);
}

at::Tensor input_on(c10::Device device) { return at::arange(12, at::kFloat).view({2, 6}).div(9).to(device); }

}  // namespace

TEST(SideStreams, a_branch_on_a_stream_of_its_own_has_its_gradient_in_the_sum) {
  fake_device::install();
  for (const bool units : {false, true}) {
    std::vector<std::vector<at::Tensor>> gradients;
    for (const bool aside : {false, true}) {
      Branches model(aside);
      const Mesh mesh({{"dp_shard", 2}});
      ShardOptions options;
      options.strategy = strategy("zero3");
      if (units) options.units = by_type<BranchedImpl>();
      options.check_gradients = false;
      Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(echo_comm(0, 2), mesh), options);
      const at::Tensor x = at::arange(12, at::kFloat).view({2, 6}).div(9).to(fake_device::device());
      call(model, x).square().sum().backward();
      gradients.push_back(kit::values_of(sharded.gradients()));
    }
    EXPECT_TRUE(kit::same_bits(gradients[0], gradients[1]));
  }
}

TEST(SideStreams, activations_that_come_back_are_there_on_each_stream_that_reads_them) {
  fake_device::install();
  std::vector<std::vector<at::Tensor>> gradients;
  for (const bool aside : {false, true}) {
    Branches model(aside);
    ShardOptions options;
    options.offload_activations = by_type<BranchedImpl>();
    Sharded sharded = sharded_over_two(model, options);
    call(model, input_on(fake_device::device())).square().sum().backward();
    gradients.push_back(kit::values_of(sharded.gradients()));
  }
  EXPECT_TRUE(kit::same_bits(gradients[0], gradients[1]));
}

TEST(SideStreams, what_is_on_its_way_to_the_host_stays_where_another_stream_lets_go_of_it) {
  fake_device::install();
  HostTransfers transfers(fake_device::device());
  const at::Tensor host = at::zeros({4});
  at::Tensor source = at::full({4}, 5.0).to(fake_device::device());
  const HostTransfer transfer = transfers.download_all({{host, std::exchange(source, at::Tensor())}});
  const c10::Stream there = new_stream();
  {
    const c10::StreamGuard on(there);
    transfer.order();
  }
  fake_device::synchronize();  // what the memory is allocated for next
  const c10::StreamGuard on(there);
  fake_device::synchronize();
  EXPECT_EQ(host[0].item<float>(), 5);
}

TEST(SideStreams, a_unit_that_is_whole_has_its_values_on_every_stream_that_enters_it) {
  fake_device::install();
  std::vector<std::vector<at::Tensor>> seen;
  for (const bool aside : {false, true}) {
    Branches model(false);
    Sharded sharded = sharded_over_two(model);
    const at::Tensor x = input_on(fake_device::device());
    fake_device::synchronize();
    {
      const c10::StreamGuard on(aside ? new_stream() : current_stream(x.device()));
      sharded.unit("0").unshard();
    }
    const at::NoGradGuard no_grad;
    seen.push_back({call(model->layers[0], x).to(at::kCPU)});
  }
  EXPECT_TRUE(kit::same_bits(seen[0], seen[1]));
}

TEST(SideStreams, a_model_trains_on_a_device_that_is_not_current) {
  fake_device::install();
  std::vector<std::vector<at::Tensor>> trained;
  for (const c10::Device device : {fake_device::device(), fake_device::second_device()}) {
    Branches model(false, device);
    ShardOptions options;
    options.check_gradients = true;
    options.precision = {.main = at::kFloat, .compute = at::kBFloat16};
    Sharded sharded = sharded_over_two(model, options);
    Optimizer optimizer = adamw(sharded, {});
    for (int step = 0; step < 2; ++step) {
      call(model, input_on(device).to(at::kBFloat16)).square().sum().backward();
      sharded.clip_gradients(0.5);
      optimizer.step();
    }
    for (const Piece& piece : sharded.parameters()) EXPECT_EQ(piece.data.device(), device);
    trained.push_back(kit::values_of(sharded.main_parameters()));
  }
  EXPECT_TRUE(kit::same_bits(trained[0], trained[1]));
}

TEST(SideStreams, a_graph_is_captured_and_replayed_on_a_device_that_is_not_current) {
  fake_device::install();
  const at::Tensor x = at::ones({4}).to(fake_device::second_device());
  at::Tensor y;
  const auto graph = capture_graph(x.device(), [&] { y = x * 2; });
  at::Tensor(x).fill_(3);
  {
    const c10::DeviceGuard on(x.device());
    graph->replay();
  }
  EXPECT_EQ(y.to(at::kCPU)[0].item<float>(), 6);
}

TEST(SideStreams, what_the_caller_of_rank_threads_has_queued_is_there_in_the_body) {
  fake_device::install();
  const at::Tensor x = at::empty({4}, fake_device::options(at::kFloat));
  auto* data = fake_device::on_host<float>(x);
  fake_device::queue([=] { std::fill(data, data + 4, 3.0f); });
  run_threads(2, [&](std::shared_ptr<Comm>) { EXPECT_EQ((x * 1).to(at::kCPU)[0].item<float>(), 3); },
              {.device = fake_device::device()});
}
