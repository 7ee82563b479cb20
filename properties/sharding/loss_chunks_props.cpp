// Scenarios of PyTorch's test_fully_shard_training.py: a loss in chunks, each with a backward of its own. See docs/parity.md.
#include <gtest/gtest.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::calls_of;
using parity::on_mesh;
using parity::ranks;

namespace {

constexpr int64_t kWorld = 4;

// A forward without the head; then the head on the output in chunks, each with a backward of its own; then the rest.
void chunked_backward(parity::ChunkedHead& model, int64_t salt) {
  const at::Tensor hidden = call(model, parity::tokens(salt));
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& part : hidden.detach().chunk(3, 1)) {
    const at::Tensor chunk = part.contiguous().detach().requires_grad_(true);
    call(model->head, chunk).square().sum().backward();
    gradients.push_back(chunk.grad());
  }
  hidden.backward(at::cat(gradients, 1));
}

}  // namespace

TEST(Fsdp2Parity, a_unit_of_two_modules_of_which_one_runs_later_in_chunks_trains_like_plain) {
  for (const bool tied : {false, true})
    for (const Reshard& reshard : {Reshard::always(), Reshard::never(), Reshard::within(2)})
      on_mesh(ranks(kWorld), [&](std::shared_ptr<MeshComm> comms) {
        parity::ChunkedHead model(tied), plain(tied);
        ShardOptions options = toy::options("zero3");
        options.units = {};
        options.reshard_after_forward = reshard;
        Sharding sharding(comms, options);
        sharding.unit(model->body.ptr());
        Sharding::Modules together{model->norm.ptr(), model->head.ptr()};
        if (tied) together.push_back(model->embed.ptr());
        Sharded sharded = sharding.unit(together).shard(model.ptr());
        for (int64_t step = 0; step < 2; ++step) {
          std::vector<parity::Tensors> of_rank;
          for (int64_t rank = 0; rank < 4; ++rank) {
            plain->zero_grad();
            for (int64_t k = 0; k < 2; ++k) chunked_backward(plain, 10 * k + rank + 100 * step);
            for (const auto& item : plain->named_parameters())
              if (rank == 0)
                of_rank.resize(4), of_rank[0][item.key()] = item.value().grad().clone();
              else
                of_rank[rank][item.key()] = item.value().grad().clone();
          }
          // Each chunk is a backward: none but the whole's is the last.
          sharded.set_last_microbatch(false);
          chunked_backward(model, comms->rank() + 100 * step);
          const at::Tensor hidden = call(model, parity::tokens(10 + comms->rank() + 100 * step));
          std::vector<at::Tensor> gradients;
          for (const at::Tensor& part : hidden.detach().chunk(3, 1)) {
            const at::Tensor chunk = part.contiguous().detach().requires_grad_(true);
            call(model->head, chunk).square().sum().backward();
            gradients.push_back(chunk.grad());
          }
          sharded.set_last_microbatch(true);
          hidden.backward(at::cat(gradients, 1));
          parity::Tensors wanted;
          for (const auto& [name, gradient] : of_rank[0])
            if (!tied || name != "head.weight")
              wanted[name] = (of_rank[0].at(name) + of_rank[1].at(name) + of_rank[2].at(name) + of_rank[3].at(name)) / 4.0;
          for (const auto& [name, gradient] : parity::whole(sharded.gradients(), wanted, *comms))
            parity::expect_near(gradient, wanted.at(name), 1e-6, name);
          sharded.skip_step();
        }
      });
}

TEST(Fsdp2Parity, a_unit_kept_whole_over_chunks_is_gathered_once) {
  for (const bool initially : {false, true}) {
    auto trace = std::make_shared<Trace>();
    on_mesh(
        ranks(2),
        [&](std::shared_ptr<MeshComm> comms) {
          parity::ChunkedHead model;
          ShardOptions options = toy::options("zero3");
          options.units = by_name("head");
          options.reshard_after_forward = initially;
          options.broadcast_initial_values = false;
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          UnitHandle head = sharded.unit("head");
          for (int64_t step = 0; step < 3; ++step) {
            sharded.set_last_microbatch(false);
            head.set_reshard_after_forward(Reshard::never());
            head.set_reshard_after_backward(false);
            const at::Tensor hidden = call(model, parity::tokens(comms->rank()));
            const size_t before = trace->of_rank(comms->rank()).size();
            std::vector<at::Tensor> gradients;
            for (const at::Tensor& part : hidden.detach().chunk(3, 1)) {
              const at::Tensor chunk = part.contiguous().detach().requires_grad_(true);
              call(model->head, chunk).square().sum().backward();
              gradients.push_back(chunk.grad());
              EXPECT_TRUE(head.is_unsharded());
            }
            EXPECT_EQ(calls_of(*trace, comms->rank(), before)["all_gather"], 1) << "the head, before the first chunk";
            head.set_reshard_after_forward(Reshard::always());
            head.set_reshard_after_backward(true);
            head.reshard();
            EXPECT_FALSE(head.is_unsharded());
            sharded.set_last_microbatch(true);
            hidden.backward(at::cat(gradients, 1));
            EXPECT_GT(sharded.gradient_norm(), 0);
            sharded.skip_step();
          }
        },
        {}, trace);
  }
}
