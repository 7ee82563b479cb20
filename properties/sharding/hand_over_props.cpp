// Gradients that the caller takes after each backward, as `.grad` of PyTorch's tensors holds them.
#include <gtest/gtest.h>

#include <set>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/sharding/hand_over.h"

using namespace shardproof;
using parity::on_mesh;

namespace {

using Held = std::map<std::pair<std::string, int64_t>, at::Tensor>;  // by name and first element

void add(Held& sums, const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    at::Tensor& sum = sums[{piece.name, piece.run.begin}];
    sum = sum.defined() ? sum + piece.data : piece.data.clone();
  }
}

at::Tensor loss_of(torch::nn::Sequential& model, int64_t number) {
  return call(model, toy::data({3, 5}, number)).square().sum();
}

}  // namespace

TEST(HandOver, gradients_that_the_caller_adds_are_those_that_the_library_accumulates) {
  for (const char* name : {"zero2", "zero3"})
    for (const Granularity granularity : {Granularity::element, Granularity::row, Granularity::tensor})
      on_mesh(parity::ranks(3), [&](std::shared_ptr<MeshComm> comms) {
        ShardOptions options = toy::options(name);
        options.granularity = granularity;
        auto model = parity::blocks(2, 5), other = parity::blocks(2, 5);
        Sharded accumulates = fully_shard(model.ptr(), comms, options), hands_over = fully_shard(other.ptr(), comms, options);
        Held added, accumulated;
        for (int64_t m = 0; m < 3; ++m) {
          accumulates.set_last_microbatch(m == 2);
          loss_of(model, 3 * m + comms->rank()).backward();
          loss_of(other, 3 * m + comms->rank()).backward();
          const HandedGradients handed = hand_over_gradients(hands_over);
          EXPECT_EQ(handed.used.size(), other->parameters().size());
          std::vector<Piece> pieces;
          for (const Shard& shard : handed.shards) append_pieces(shard, comms->rank(), pieces);
          add(added, pieces);
        }
        add(accumulated, accumulates.gradients());
        ASSERT_EQ(added.size(), accumulated.size());
        // Each reduction divides here, and there the sum of all is divided.
        for (const auto& [place, value] : accumulated)
          EXPECT_TRUE(at::allclose(added.at(place), value, 1e-5, 1e-6)) << name << ": " << place.first;
        EXPECT_TRUE(hand_over_gradients(hands_over).used.empty());
        EXPECT_ANY_THROW(hands_over.gradient_norm());
      });
}

TEST(HandOver, a_parameter_is_used_where_any_rank_has_reached_it) {
  on_mesh(parity::ranks(2), [](std::shared_ptr<MeshComm> comms) {
    for (const bool some_rank_does : {false, true}) {
      parity::DoubleLinear model(/*run_second=*/some_rank_does && comms->rank() == 1);
      Sharded sharded = fully_shard(model.ptr(), comms, toy::options("zero2"));  // whose gathers all ranks would have to share
      for (int64_t step = 0; step < 2; ++step) {
        const auto [first, second] = call(model, toy::data({3, 5}, comms->rank()));
        (first + second).square().sum().backward();
        std::set<std::string> used;
        for (const std::string& name : hand_over_gradients(sharded).used) used.insert(name);
        EXPECT_TRUE(used.contains("lin1.weight") && used.contains("lin1.bias"));
        EXPECT_EQ(used.contains("lin2.weight"), some_rank_does);
        EXPECT_EQ(used.size(), some_rank_does ? 4U : 2U);
      }
    }
  });
}

TEST(HandOver, who_watches_is_told_of_each_backward_once_and_not_of_the_end_of_one_that_fails) {
  on_mesh(parity::ranks(2), [&](std::shared_ptr<MeshComm> comms) {
    auto model = parity::blocks(2, 5);
    Sharded sharded = fully_shard(model.ptr(), comms, toy::options("zero3"));
    std::vector<bool> told;
    watch_backwards(sharded, [&](bool begins) { told.push_back(begins); });
    loss_of(model, comms->rank()).backward();
    EXPECT_EQ(told, (std::vector<bool>{true, false}));
    sharded.zero_gradients();
    const at::Tensor result = call(model, toy::data({3, 5}, comms->rank()));
    result.register_hook([](const at::Tensor&) -> void { throw std::runtime_error("on purpose"); });
    EXPECT_ANY_THROW((call(model, result).square().sum().backward()));
    EXPECT_EQ(told, (std::vector<bool>{true, false, true}));
    sharded.zero_gradients();
  });
}
