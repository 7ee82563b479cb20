// Which ranks agree with each other, and what their check says of it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "harness/case/generate.h"
#include "harness/case/problem.h"
#include "harness/run/explain.h"
#include "harness/run/replicas.h"
#include "properties/kit/harness_env.h"

using namespace harness;

namespace {

using Steps = std::vector<std::vector<RankStep>>;

Steps trained(const char* text) {
  const Case c = Case::parse(text);
  return thread_ranks().train(c, make_run(c));
}

constexpr const char* kReplicas =
    "mlp(widths=5-7-3) mesh(dp_replicate=2,dp_shard=2) hsdp(units=leaf) sgd(lr=0.1,momentum=0.9) ordered seed=3 : step*3";

// Adds 1 to the first element of the first piece.
void move_first(std::vector<shardproof::Piece>& pieces) {
  pieces.front().data.view({-1})[0] += 1;
}

// Ranks whose check has complained in a step of its own.
class Complaining final : public Ranks {
 public:
  Steps train(const Case& c, const golden::Run& run) override {
    Steps steps = thread_ranks().train(c, run);
    move_first(steps[1][2].parameters);
    if (c.options.fingerprint) steps[1][0].complaints.push_back({"fingerprint", "planted"});
    return steps;
  }
};

}  // namespace

TEST(Replicas, of_healthy_runs_agree_after_every_step) {
  for (int64_t i = 0; i < 40; ++i) {
    const Case c = generate(5, i, {});
    const Replicas replicas = replicas_of(c);
    EXPECT_EQ(replicas.step, -1) << c.str();
    EXPECT_EQ(replicas.found, -1) << c.str();
    EXPECT_EQ(in_words(replicas, true), "");
  }
}

TEST(Replicas, that_differ_are_named_with_the_step_the_tensor_and_who_agrees) {
  Steps steps = trained(kReplicas);
  const std::string name = steps[1][2].parameters.front().name;
  move_first(steps[1][2].parameters);
  move_first(steps[2][1].parameters);
  const Replicas replicas = first_disagreement(steps);
  EXPECT_EQ(replicas.step, 1);
  EXPECT_EQ(replicas.tensor, name);
  EXPECT_EQ(replicas.groups, (std::vector<std::vector<int64_t>>{{0}, {2}})) << "ranks 1 and 3 hold other elements";
  EXPECT_EQ(replicas.found, -1);
  EXPECT_EQ(in_words(replicas, false), "after step 2 rank 0 and rank 2 hold different bits of " + name);
}

TEST(Replicas, of_optimizer_state_count_and_shards_are_none) {
  Steps steps = trained(kReplicas);
  move_first(steps[0][3].state.front().second);
  const Replicas replicas = first_disagreement(steps);
  EXPECT_EQ(replicas.step, 0);
  EXPECT_EQ(replicas.tensor.find("momentum_buffer of "), 0u) << replicas.tensor;
  Steps shards = trained("mlp(widths=5-7-3) mesh(dp_shard=4) zero3 sgd(lr=0.1) ordered seed=3 : step");
  move_first(shards[0][1].parameters);
  EXPECT_EQ(first_disagreement(shards).step, -1);
}

TEST(Replicas, ranks_that_agree_stand_together) {
  Steps steps = trained("mlp(widths=3-2) mesh(dp_replicate=4) ddp sgd(lr=0.1) ordered seed=3 : step");
  move_first(steps[0][1].parameters);
  move_first(steps[0][3].parameters);
  EXPECT_EQ(first_disagreement(steps).groups, (std::vector<std::vector<int64_t>>{{0, 2}, {1, 3}}));
}

TEST(Replicas, are_told_with_a_failure_and_with_what_their_check_says) {
  Complaining ranks;
  const Explanation found = explain(Case::parse(kReplicas), Verdict::Outcome::values, ranks);
  EXPECT_NE(found.replicas.find("after step 2 rank 0 and rank 2 hold different bits of"), std::string::npos) << found.replicas;
  EXPECT_NE(found.replicas.find("--check=fingerprint finds it in step 2"), std::string::npos) << found.replicas;
  EXPECT_NE(in_lines(found).find("\n  replicas after step 2"), std::string::npos) << in_lines(found);
}

TEST(Replicas, of_a_run_that_ends_in_an_error_are_not_compared) {
  class Throwing final : public Ranks {
    Steps train(const Case&, const golden::Run&) override { throw std::runtime_error("planted"); }
  } ranks;
  EXPECT_EQ(replicas_of(Case::parse(kReplicas), ranks).step, -1);
}
