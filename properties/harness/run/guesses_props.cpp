// What the optimizer, the norm, the loss scale and collectives may have done wrong: planted in what healthy ranks say, each
// mistake is named.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "harness/case/problem.h"
#include "harness/run/awaited_ranks.h"
#include "harness/run/explain.h"
#include "harness/run/property.h"
#include "harness/run/run_case.h"
#include "harness/run/suspects.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/lying_ranks.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/threads/threads.h"

using namespace harness;

namespace {

using Steps = LyingRanks::Steps;

void expect_guess(const std::string& guess, const char* text, const LyingRanks::Plant& plant) {
  LyingRanks ranks(plant);
  const Explanation found = explain(Case::parse(text), Verdict::Outcome::values, ranks);
  EXPECT_NE(found.guess.find(guess), std::string::npos) << text << "\n" << found.where << "\n guess " << found.guess;
}

const at::Tensor& named(const golden::Named& tensors, const std::string& name) {
  const auto found = std::ranges::find(tensors, name, &golden::Named::value_type::first);
  if (found == tensors.end()) throw std::out_of_range(name);
  return found->second;
}

void replace(std::vector<shardproof::Piece>& pieces, const golden::Named& tensors) {
  for (shardproof::Piece& piece : pieces)
    piece.data =
        named(tensors, piece.name).contiguous().view({-1}).narrow(0, piece.run.begin, piece.run.size()).to(at::kFloat).clone();
}

// Replaces what the optimizer left by what it leaves in a run that is changed.
LyingRanks::Plant trained_as(const char* text, const std::function<void(golden::Run&)>& change) {
  return [=](Steps& steps) {
    golden::Run run = make_run(Case::parse(text));
    change(run);
    const golden::Trace trace = golden::train(run);
    for (size_t step = 0; step < steps.size(); ++step)
      for (RankStep& rank : steps[step]) {
        replace(rank.parameters, trace[step].parameters);
        for (auto& [name, pieces] : rank.state)
          for (const auto& [slot, values] : trace[step].state)
            if (slot == name) replace(pieces, values);
      }
  };
}

double norm_of_parts(const RankStep& rank) {
  double square = 0;
  for (const shardproof::Piece& piece : rank.gradients) square += piece.data.to(at::kDouble).square().sum().item<double>();
  return std::sqrt(square);
}

}  // namespace

TEST(Guesses, name_another_rule_of_the_optimizer) {
  const char* const adamw =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum) adamw(lr=0.01,beta1=0.5,beta2=0.9,decay=0.1) "
      "ordered seed=3 : step*2";
  using Kind = golden::Optimizer::Kind;
  expect_guess("weight decay was added to the gradient, as Adam does", adamw,
               trained_as(adamw, [](golden::Run& run) { run.optimizer.kind = Kind::adam; }));
}

TEST(Guesses, name_factors_that_belong_to_another_group) {
  const char* const text =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum) sgd(lr=0.1,decay=0.1,groups=2) ordered "
      "seed=3 : step";
  expect_guess("parameters have no group", text, trained_as(text, [](golden::Run& run) { run.optimizer.groups.clear(); }));
  expect_guess("the last group that takes a parameter decides", text,
               trained_as(text, [](golden::Run& run) { std::ranges::reverse(run.optimizer.groups); }));
  expect_guess("all parameters have the factors of the first group", text, trained_as(text, [](golden::Run& run) {
                 run.optimizer.groups.resize(1);
                 run.optimizer.groups[0].pattern = "";
               }));
  expect_guess("groups for the decay were left out", text, trained_as(text, [](golden::Run& run) {
                 for (auto& group : run.optimizer.groups) group.decay_factor = 1;
               }));
  expect_guess("groups for the learning rate were left out", text, trained_as(text, [](golden::Run& run) {
                 for (auto& group : run.optimizer.groups) group.lr_factor = 1;
               }));
}

TEST(Guesses, name_the_rate_of_another_step) {
  const char* const text =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum,schedule=cosine) adamw(lr=0.01) ordered seed=3 : step*4";
  expect_guess("or the learning rate is zero", text, trained_as(text, [](golden::Run& run) { run.steps[0].lr_factor = 0; }));
  const char* const lower =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum) adamw(lr=0.01) ordered seed=3 : lr(50) step lr(25) step";
  expect_guess("the learning rate is that of the next step", lower,
               trained_as(lower, [](golden::Run& run) { run.steps[0].lr_factor = 0.25; }));
  expect_guess("the learning rate is that of the step before", lower,
               trained_as(lower, [](golden::Run& run) { run.steps[1].lr_factor = 0.5; }));
  expect_guess("the factors of steps for the learning rate were left out", lower,
               trained_as(lower, [](golden::Run& run) { run.steps[0].lr_factor = 1; }));
}

TEST(Guesses, name_averages_of_frozen_parameters_and_a_sum_in_the_place_of_a_mean) {
  const char* const frozen =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum,ema=90) sgd(lr=0.1) ordered seed=3 : step freeze(6) step";
  expect_guess("parameters that are frozen were averaged again", frozen, [&](Steps& steps) {
    const golden::Run run = make_run(Case::parse(frozen));
    for (RankStep& rank : steps[1])
      for (auto& [slot, averages] : rank.state)
        for (size_t i = 0; i < averages.size(); ++i)
          if (slot == "ema" && std::ranges::count(run.steps[1].frozen, averages[i].name))
            averages[i].data = averages[i].data * 0.9 + rank.parameters[i].data * 0.1;
  });
  const char* const muon = "mlp(widths=5-7-3,bias=0) mesh() zero3(loss=sum) muon(lr=0.01,momentum=0.75) ordered seed=3 : step";
  expect_guess("4 times what they should be: 1 / (1 - momentum)", muon, [](Steps& steps) {
    for (auto& [name, pieces] : steps[0][0].state)
      for (shardproof::Piece& piece : pieces)
        if (name == "momentum_buffer") piece.data = piece.data * 4;
  });
}

TEST(Guesses, take_nothing_for_near_to_what_is_not_finite) {
  EXPECT_TRUE(near(1 + 1e-6, 1));
  for (const double other : {std::nan(""), HUGE_VAL}) EXPECT_FALSE(near(1, other) || near(other, 1) || near(other, other));
}

TEST(Guesses, look_at_the_norm_of_every_rank) {
  const char* const text = "mlp(widths=5-7-3) mesh(dp_shard=4) zero2(units=leaf,loss=sum) sgd(lr=0.1) ordered seed=3 : step";
  expect_guess("it is the norm of each rank's own part", text, [](Steps& steps) {
    for (RankStep& rank : steps[0]) rank.gradient_norm = norm_of_parts(rank);
  });
  LyingRanks ranks([](Steps& steps) { steps[0][2].gradient_norm *= 3; });
  const Explanation found = explain(Case::parse(text), Verdict::Outcome::values, ranks);
  EXPECT_NE(found.where.find("the gradient norm is wrong on rank 2"), std::string::npos) << found.where;
}

TEST(Guesses, do_not_take_the_whole_norm_for_one_of_a_part) {
  const char* const whole = "mlp(widths=5-7-3) mesh(dp_shard=2) ddp(loss=sum) sgd(lr=0.1) fast seed=3 : step";
  // Every rank holds all gradients here, and their norm is as near to the one that is told as a rounding.
  LyingRanks off([](Steps& steps) {
    for (RankStep& rank : steps[0]) {
      for (shardproof::Piece& piece : rank.gradients) piece.data = piece.data * 1.00008;
      rank.gradient_norm *= 1.00015;
    }
  });
  EXPECT_EQ(explain(Case::parse(whole), Verdict::Outcome::values, off).guess.find("own part"), std::string::npos)
      << explain(Case::parse(whole), Verdict::Outcome::values, off).guess;
  // Gradients are told after clipping, which halves them and more.
  const char* const clips =
      "mlp(widths=5-7-3) mesh(dp_shard=4) zero2(units=leaf,loss=sum) sgd(lr=0.1,clip=0.125) ordered seed=3 : step";
  expect_guess("it is the norm of each rank's own part", clips, [&](Steps& steps) {
    const double norm = golden::train(make_run(Case::parse(clips)))[0].gradient_norm;
    ASSERT_GT(norm, 0.25);
    for (RankStep& rank : steps[0]) rank.gradient_norm = norm_of_parts(rank) * norm / 0.125;
  });
}

TEST(Guesses, tell_elements_that_count_once_for_each_of_their_holders_from_a_rounding) {
  const char* const text =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(units=leaf,loss=sum,unit_strategy=ddp) sgd(lr=0.1) fast seed=4 : step";
  expect_guess("elements count once for each rank that holds them", text, [](Steps& steps) {
    double square = 0;
    for (const RankStep& rank : steps[0]) square += std::pow(norm_of_parts(rank), 2);
    for (RankStep& rank : steps[0]) rank.gradient_norm = std::sqrt(square);
  });
}

TEST(Guesses, tell_a_norm_of_which_a_rank_knows_its_part_of_some_parameters_alone) {
  // Units in turn under ddp, which every rank holds whole, and under zero3: here the former count in full.
  const char* const text =
      "mlp(widths=16-16-3) mesh(dp_shard=2) zero3(units=leaf,loss=sum,unit_strategy=ddp) sgd(lr=0.1) fast seed=4 : step";
  expect_guess("it is the norm of each rank's own part of some parameters", text,
               [](Steps& steps) { steps[0][1].gradient_norm = norm_of_parts(steps[0][1]); });
}

TEST(Guesses, say_what_is_wrong_with_a_loss_scale) {
  const char* const good =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum,reduce=fp16,scale=8,scale_min=2) sgd(lr=0.1) ordered seed=3 : step*3";
  const auto scaled = [](size_t step, double factor) {
    return [=](Steps& steps) {
      for (RankStep& rank : steps[step]) rank.loss_scale *= factor;
    };
  };
  expect_guess("it fell below its least value", good, scaled(1, 0.125));
  const char* const loads =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum,reduce=fp16,scale=8) sgd(lr=0.1) ordered seed=3 : "
      "step*2 save load@mesh(dp_shard=2) step";
  expect_guess("the load did not bring it back", loads, scaled(2, 0.5));
}

TEST(Guesses, know_the_unit_of_fixed_point) {
  const char* const text = "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum) sgd(lr=0.1) canonical seed=3 : step";
  expect_guess("the unit of sums in fixed point", text, [](Steps& steps) {
    for (RankStep& rank : steps[0])
      for (shardproof::Piece& piece : rank.gradients) piece.data = piece.data * 0x1p44;
  });
}

TEST(Guesses, of_fast_mode_know_roundings_of_a_lower_precision) {
  const char* const text = "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum,compute=bf16) sgd(lr=0.1) fast seed=3 : step";
  expect_guess("another rounding", text, [](Steps& steps) {
    for (RankStep& rank : steps[0])
      for (shardproof::Piece& piece : rank.parameters) piece.data = piece.data * 1.0005;
  });
}

TEST(Guesses, of_an_error_try_whether_the_case_holds_when_each_collective_is_waited_for) {
  // A property of one case alone, which looks at what it gathers before it waits.
  register_property({.name = "forgets",
                     .applies = [](const Case& c) { return c.seed == 424242; },
                     .live = [](const LiveRun& run) -> Complaint {
                       at::Tensor all = at::zeros({run.comms.mesh().size("dp_shard")});
                       shardproof::Work work = run.comms.along({"dp_shard"}).all_gather(all, at::ones({1}));
                       const bool is_there = at::all(all == 1).item<bool>();
                       work.wait();
                       if (!is_there) throw shardproof::Error("[test] what was gathered is not there");
                       return {};
                     }});
  const Case races = Case::parse(
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum) sgd(lr=0.1) ordered seed=424242 "
      "threads(latest) : step");
  EXPECT_EQ(run_case(races).outcome, Verdict::Outcome::error);
  const std::string guess = explain(races, Verdict::Outcome::error).guess;
  EXPECT_NE(guess.find("the case holds when each collective is waited for at once"), std::string::npos) << guess;
}

TEST(AwaitedRanks, train_to_the_same_bits) {
  for (const char* const text :
       {"gpt(layers=2,hidden=8,heads=2,vocab=9,positions=6) mesh(dp_replicate=2,dp_shard=2) "
        "hfsdp(prefetch_forward=2,prefetch_backward=2,publish=at_first_use) adamw(lr=0.01) ordered seed=3 : accumulate(2) "
        "step*2",
        "llama(layers=1,hidden=8,heads=4,kv_heads=2,intermediate=12,vocab=8,positions=8) mesh(cp=2,tp=2) "
        "zero3(loss=sum,arithmetic=canonical) sgd(lr=0.1) canonical seed=5 : step"}) {
    const Verdict verdict = run_case(Case::parse(text), awaited_ranks());
    EXPECT_TRUE(verdict.held()) << verdict.str();
  }
}

TEST(AwaitedRanks, have_what_they_forgot_to_wait_for) {
  shardproof::ThreadsOptions options;
  options.completion = shardproof::ThreadsOptions::Completion::late;
  shardproof::run_threads(
      2,
      [](std::shared_ptr<shardproof::Comm> comm) {
        const auto group = awaited(comm)->split_ranks({0, 1}, "both");
        at::Tensor all = at::zeros({2});
        shardproof::Work forgotten = group->all_gather(all, at::ones({1}));
        EXPECT_TRUE(at::all(all == 1).item<bool>());
        forgotten.wait();
        const bool sends = group->rank() == 0;
        at::Tensor message = at::full({1}, sends ? 7.0 : 0.0);
        (sends ? group->send(message, 1) : group->recv(message, 0)).wait();
        EXPECT_EQ(message.item<float>(), 7);
      },
      options);
}
