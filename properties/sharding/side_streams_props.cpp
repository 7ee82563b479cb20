// Work on streams of a device that the library did not choose: the user's own, inside of a unit, and the caller's.
#include <gtest/gtest.h>

#include <vector>

#include "properties/doubles/echo_comm.h"
#include "properties/doubles/fake_device.h"
#include "properties/kit/bits.h"
#include "properties/kit/piece_values.h"
#include "shardproof/shardproof.h"
#include "testing/device/streams.h"

using namespace shardproof;

namespace {

// A layer, of which a branch is computed on a stream of its own, where it has one.
struct BranchedImpl : torch::nn::Module {
  explicit BranchedImpl(bool aside) {
    b = register_parameter("b", at::arange(36, at::kFloat).view({6, 6}).div(50).to(fake_device::device()));
    a = register_parameter("a", at::ones({6, 6}).div(7).to(fake_device::device()));
    if (aside) side = c10::impl::VirtualGuardImpl(fake_device::device().type()).getStreamFromGlobalPool(fake_device::device());
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y;
    {
      const OnStream on(side.value_or(current_stream(fake_device::device())));
      y = at::linear(x, b);
    }
    return at::linear(x, a).tanh() + y;
  }
  std::optional<c10::Stream> side;
  at::Tensor a, b;
};
TORCH_MODULE(Branched);

struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(bool aside) {
    first = register_parameter("first", at::eye(6).to(fake_device::device()));
    for (int64_t i = 0; i < 6; ++i) layers.push_back(register_module(std::to_string(i), Branched(aside)));
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

TEST(SideStreams, what_the_caller_of_rank_threads_has_queued_is_there_in_the_body) {
  fake_device::install();
  const at::Tensor x = at::empty({4}, fake_device::options(at::kFloat));
  auto* data = fake_device::on_host<float>(x);
  fake_device::queue([=] { std::fill(data, data + 4, 3.0f); });
  run_threads(2, [&](std::shared_ptr<Comm>) { EXPECT_EQ((x * 1).to(at::kCPU)[0].item<float>(), 3); },
              {.device = fake_device::device()});
}
