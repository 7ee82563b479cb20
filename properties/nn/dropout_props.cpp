// Dropout by global position: whatever part of a tensor a rank has, its mask is that part of the mask of the whole. And data of
// ranks that share a batch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_models.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using parallel_models::expect_equal_on_meshes;

namespace {

// A module with a Dropout under a name, and with Positions, which make it one that context_parallel knows.
struct DroppingImpl : torch::nn::Module {
  DroppingImpl() {
    register_module("drop", drop);
    register_module("positions", positions);
  }
  at::Tensor forward(at::Tensor x) { return call(drop, x); }
  Dropout drop{0.5};
  Positions positions;
};
TORCH_MODULE(Dropping);

at::Tensor mask_of_whole(std::vector<int64_t> sizes) {
  random_stream() = {.seed = 9};
  return shardproof::dropout(at::ones(sizes), 0.5, true);
}

constexpr int64_t kBatch = 4, kWidth = 6;

}  // namespace

TEST(Dropout, masks_on_a_mesh_are_parts_of_the_mask_of_the_whole) {
  for (const auto& [dp, cp, tp] : std::vector<std::array<int64_t, 3>>{{1, 1, 2}, {2, 2, 1}, {1, 3, 2}, {2, 2, 2}, {4, 1, 3}})
    for (const bool sequence : {false, true})
      for (const ContextSplit split : {ContextSplit::balanced, ContextSplit::contiguous}) {
        // Of a length that tp does not divide a module without an embedding knows nothing.
        const at::Tensor whole = mask_of_whole({kBatch, sequence ? 12 : 13, kWidth});
        EXPECT_GT(whole.std().item<float>(), 0.5f);
        const Mesh mesh({{"dp_shard", dp}, {"cp", cp}, {"tp", tp}});
        run_threads(mesh.size(), [&, dp = dp, tp = tp](std::shared_ptr<Comm> comm) {
          auto comms = std::make_shared<MeshComm>(comm, mesh);
          Dropping module;
          ParallelPlan plan;
          if (sequence) {
            plan.sequence_dim = 1;
            plan.styles = {{"drop", SequenceParallel{}}};
          } else {
            plan.styles = {{"drop", CutDropout{2, {{4, 2}, {2}}}}};
          }
          const TensorParallel parallel = parallelize(module.ptr(), comms, plan);
          ContextParallel context = context_parallel(module.ptr(), comms, {.split = split});
          const int64_t samples = kBatch / dp, sample = mesh.coordinate(comm->rank(), "dp_shard") * samples;
          const auto part = [&](at::Tensor x) {
            x = context.cut(x.narrow(0, sample, samples));
            const int64_t tp_rank = mesh.coordinate(comm->rank(), "tp");
            const auto cut = [&](const at::Tensor& t, int64_t dim, int64_t granule) {
              const Interval own = piece({}, t.size(dim) / granule, tp, tp_rank);
              return t.narrow(dim, own.begin * granule, own.size() * granule);
            };
            if (sequence) return cut(x, 1, 1);
            return at::cat({cut(x.narrow(2, 0, 4), 2, 2), cut(x.narrow(2, 4, 2), 2, 1)}, 2);
          };
          random_stream() = {.seed = 9, .first_sample = sample};
          const at::Tensor expected = part(whole);
          EXPECT_TRUE(at::equal(call(module, at::ones_like(expected)), expected)) << mesh.str() << " sequence " << sequence;
        });
      }
}

TEST(Dropout, sites_and_seeds_have_masks_of_their_own_and_evaluation_none) {
  const at::Tensor x = at::ones({8, 64});
  random_stream() = {.seed = 3};
  const at::Tensor first = shardproof::dropout(x, 0.3, true), second = shardproof::dropout(x, 0.3, true);
  EXPECT_FALSE(at::equal(first, second));
  random_stream() = {.seed = 3};
  EXPECT_TRUE(at::equal(shardproof::dropout(x, 0.3, true), first));
  random_stream() = {.seed = 4};
  EXPECT_FALSE(at::equal(shardproof::dropout(x, 0.3, true), first));
  Dropout module(0.3);
  random_stream() = {.seed = 3};
  EXPECT_TRUE(at::equal(module->forward(x), first));
  module->eval();
  EXPECT_TRUE(at::equal(module->forward(x), x));
  EXPECT_TRUE(shardproof::dropout(x, 0.3, /*training=*/false).is_same(x));
  EXPECT_TRUE(shardproof::dropout(x, 0, /*training=*/true).is_same(x));
}

TEST(Dropout, a_tensor_of_no_elements_has_none_and_counts_as_a_site) {
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{0}, {0, 4}, {4, 0}, {2, 0, 3}}) {
    const at::Tensor x = at::ones({8, 64});
    random_stream() = {.seed = 3};
    shardproof::dropout(x, 0.3, true);
    const at::Tensor second = shardproof::dropout(x, 0.3, true);
    random_stream() = {.seed = 3};
    EXPECT_EQ(shardproof::dropout(at::ones(sizes), 0.3, true).sizes(), at::IntArrayRef(sizes));
    EXPECT_TRUE(at::equal(shardproof::dropout(x, 0.3, true), second));
  }
}

// Attention's probabilities, residuals and embeddings dropped, heads cut by tp, positions by cp and tp, samples by dp.
TEST(Dropout, a_gpt_with_dropout_on_any_mesh_trains_as_the_unsharded_one) {
  const ContextOptions gathered{.attention = ContextAttention::gathered}, contiguous{.split = ContextSplit::contiguous};
  expect_equal_on_meshes(parallel_models::gpt(true, 0.2),
                         {{2, 1, 1},
                          {1, 1, 2, true},
                          {1, 1, 3, false, "ddp"},
                          {1, 2, 1},
                          {2, 2, 1, false, "zero2", gathered},
                          {1, 2, 2, true, "zero3", contiguous},
                          {4, 1, 2, false, "zero3", {}, true},
                          {1, 2, 2, true, "zero3", {}, true}},
                         {8});
}

TEST(Dropout, a_llama_with_attention_dropout_on_any_mesh_trains_as_the_unsharded_one) {
  const ContextOptions gathered{.attention = ContextAttention::gathered};
  expect_equal_on_meshes(parallel_models::llama(false, 3, 0.3),
                         {{1, 1, 3}, {2, 2, 1, false, "zero3", gathered}, {1, 3, 3, true}, {1, 2, 6, false}}, {13});
}

TEST(Data, equal_batches_pass_and_a_rank_with_another_one_is_named_on_every_rank) {
  const at::Tensor batch = at::arange(21, at::kLong).view({3, 7});
  run_threads(4, [&](std::shared_ptr<Comm> comm) {
    check_same_data(batch, *comm);
    check_same_data(at::zeros({0, 5}), *comm);
    const auto refused = [&](const at::Tensor& mine, const std::string& values, const std::string& shapes) {
      expect_error([&] { check_same_data(mine, *comm); },
                   {"seen by rank " + std::to_string(comm->rank()), shapes + " another shape", values + " other values"});
    };
    at::Tensor other = batch.clone();
    if (comm->rank() == 2) other[1][3] += 1;
    refused(other, "[2]", "[]");
    refused(comm->rank() == 1 || comm->rank() == 3 ? batch.t().contiguous() : batch, "[]", "[1, 3]");
    refused(comm->rank() == 3 ? batch.to(at::kInt) : batch, "[]", "[3]");
    // Bits count: zeros of both signs, and elements that changed places.
    refused(comm->rank() == 3 ? at::full({2}, -0.0) : at::zeros({2}), "[3]", "[]");
    refused(comm->rank() == 1 ? batch.flip(0) : batch, "[1]", "[]");
  });
}

TEST(Data, a_broadcast_batch_is_that_of_the_root_whatever_the_others_have) {
  for (const at::ScalarType dtype : {at::kLong, at::kFloat, at::kBool})
    run_threads(3, [&](std::shared_ptr<Comm> comm) {
      const at::Tensor batch = at::arange(6, at::kLong).view({3, 1, 2}).to(dtype);
      const at::Tensor mine = comm->rank() == 1 ? batch : comm->rank() == 0 ? at::zeros({2}) : at::Tensor();
      const at::Tensor given = broadcast_data(mine, *comm, /*root=*/1);
      EXPECT_TRUE(at::equal(given, batch));
      check_same_data(given, *comm);
      EXPECT_EQ(broadcast_data(at::scalar_tensor(comm->rank()), *comm).item<int64_t>(), 0);
    });
  expect_error([] {
    run_threads(2, [](std::shared_ptr<Comm> comm) { broadcast_data(at::Tensor(), *comm, 1); });
  }, {"the root, gave no tensor"});
}
