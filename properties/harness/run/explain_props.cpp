// What a failure looks like: planted in what healthy ranks say, each mistake is named.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "harness/case/problem.h"
#include "harness/run/explain.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/lying_ranks.h"

using namespace harness;

namespace {

using Plant = LyingRanks::Plant;
using Steps = LyingRanks::Steps;

const char* const kCase =
    "mlp(widths=5-7-3) mesh(dp_shard=4) zero2(units=leaf,alignment_bytes=64,loss=sum) sgd(lr=0.1) ordered seed=3 : "
    "accumulate(3) step*2";

Explanation explained(const Plant& plant, const char* text = kCase) {
  LyingRanks ranks(plant);
  return explain(Case::parse(text), Verdict::Outcome::values, ranks);
}

void expect_guess(const std::string& guess, const Plant& plant, const char* text = kCase) {
  const Explanation found = explained(plant, text);
  EXPECT_NE(found.guess.find(guess), std::string::npos) << found.where << "\n guess " << found.guess;
}

// Replaces all ranks' gradients of a step by those of a golden run in which each microbatch counts as often as said.
Plant as_if(const std::function<double(size_t round, size_t rank)>& counts, const char* text = kCase, size_t step = 1) {
  return [=](Steps& steps) {
    golden::Run run = make_run(Case::parse(text));
    auto& rounds = run.steps[step].microbatches;
    for (size_t round = 0; round < rounds.size(); ++round)
      for (size_t rank = 0; rank < rounds[round].size(); ++rank) rounds[round][rank].weight *= counts(round, rank);
    const golden::Trace trace = golden::train(run);
    for (RankStep& rank : steps[step])
      for (shardproof::Piece& piece : rank.gradients)
        for (const auto& [name, gradient] : trace[step].gradients)
          if (name == piece.name)
            piece.data = gradient.contiguous().view({-1}).narrow(0, piece.run.begin, piece.run.size()).clone();
  };
}

void change(Steps& steps, size_t step, size_t rank, const std::function<void(at::Tensor&)>& how) {
  for (shardproof::Piece& piece : steps[step][rank].gradients) how(piece.data);
}

}  // namespace

TEST(Explain, says_how_a_case_ends_the_second_time_where_its_values_differed_the_first) {
  class Throwing final : public Ranks {
    std::vector<std::vector<RankStep>> train(const Case&, const golden::Run&) override { throw std::runtime_error("planted"); }
  } ranks;
  const Case c = Case::parse(kCase);
  EXPECT_EQ(explain(c, Verdict::Outcome::values, ranks).where, "the same case, run once more: error: planted");
  EXPECT_EQ(in_lines(explain(c, Verdict::Outcome::error, ranks)), "") << "which was told with the verdict";
  EXPECT_EQ(in_lines(explain(c, Verdict::Outcome::property, ranks)), "");
}

TEST(Explain, says_nothing_of_a_case_that_holds) {
  const Explanation found = explain(Case::parse(kCase), Verdict::Outcome::values);
  EXPECT_EQ(found.where, "");
  EXPECT_EQ(found.guess, "");
}

TEST(Explain, names_the_tensors_and_the_ranks) {
  const Explanation found = explained([](Steps& steps) { change(steps, 1, 2, [](at::Tensor& g) { g = g * 3; }); });
  EXPECT_NE(found.where.find("step 2: "), std::string::npos) << found.where;
  EXPECT_NE(found.where.find("on rank 2 of 4"), std::string::npos) << found.where;
}

TEST(Explain, finds_a_term_that_is_missing_or_alone) {
  expect_guess("the terms of data-parallel rank 2 are missing", as_if([](size_t, size_t rank) { return rank == 2 ? 0 : 1; }));
  expect_guess("microbatch 0 of 3 is missing", as_if([](size_t round, size_t) { return round == 0 ? 0 : 1; }));
  expect_guess("only microbatch 2 of 3 is there", as_if([](size_t round, size_t) { return round == 2 ? 1 : 0; }));
}

TEST(Explain, names_a_wrong_divisor_by_what_has_its_size) {
  const auto times = [](double factor) {
    return [factor](Steps& steps) {
      for (size_t rank = 0; rank < 4; ++rank) change(steps, 0, rank, [&](at::Tensor& g) { g = g * factor; });
    };
  };
  expect_guess("the number of ranks along dp_shard", times(4));
  expect_guess("1/4, the number of", times(0.25));
  expect_guess("nothing has arrived", times(0));
}

TEST(Explain, tells_a_parameter_that_was_not_updated_from_one_that_moved_too_far) {
  const auto moved = [](double factor) {
    return [factor](Steps& steps) {
      for (size_t rank = 0; rank < steps[1].size(); ++rank)
        for (size_t i = 0; i < steps[1][rank].parameters.size(); ++i) {
          const at::Tensor before = steps[0][rank].parameters[i].data;
          at::Tensor& now = steps[1][rank].parameters[i].data;
          now = before + (now - before) * factor;
        }
    };
  };
  expect_guess("nothing has updated them", moved(0));
  expect_guess("their change in this step is 4 times", moved(4));
}

TEST(Explain, tells_a_rounding_from_a_mistake) {
  const char* const in_bf16 =
      "mlp(widths=5-7-3) mesh(dp_shard=4) zero2(units=leaf,alignment_bytes=64,loss=sum,reduce=bf16) sgd(lr=0.1) ordered seed=3 "
      ": step";
  const auto nearly = [](double factor) {
    return [factor](Steps& steps) { change(steps, 0, 1, [&](at::Tensor& g) { g = g * factor; }); };
  };
  expect_guess("another rounding", nearly(1 + 3e-7));
  expect_guess("another rounding", nearly(1 + 1e-3), in_bf16);
  expect_guess("another rounding", [](Steps& steps) { steps[0][1].losses[0] *= 1 + 1e-9; });
  expect_guess("another rounding", [](Steps& steps) { steps[0][0].gradient_norm *= 1 + 1e-9; });
  expect_guess("another rounding", [](Steps& steps) {
    for (shardproof::Piece& piece : steps[1][2].parameters) piece.data = piece.data * (1 + 3e-7);
  });
}

TEST(Explain, says_where_the_norm_has_too_much) {
  const char* const alone = "mlp(widths=5-7-3) mesh() zero3(loss=sum) sgd(lr=0.1) ordered seed=3 : step";
  const auto with_a_part_twice = [&](Steps& steps) {
    const golden::StepTrace step = golden::train(make_run(Case::parse(alone)))[0];
    const double part = step.gradients[1].second.to(at::kDouble).square().sum().item<double>();
    steps[0][0].gradient_norm = std::sqrt(step.gradient_norm * step.gradient_norm + part);
  };
  expect_guess("layers.0.bias counts twice", with_a_part_twice, alone);
  expect_guess("the norm of each rank's own part", [](Steps& steps) {
    double own = 0;
    for (const shardproof::Piece& piece : steps[0][0].gradients)
      own += piece.data.to(at::kDouble).square().sum().item<double>();
    for (RankStep& rank : steps[0]) rank.gradient_norm = std::sqrt(own);
  });
  EXPECT_EQ(explained([](Steps& steps) { steps[0][0].gradient_norm *= 1.37; }, alone).guess, "")
      << "on one rank its own part is the whole";
}

TEST(Explain, says_that_sums_of_earlier_microbatches_were_added_again) {
  expect_guess("added again with each later one", as_if([](size_t round, size_t) { return 3.0 - static_cast<double>(round); }));
  expect_guess("summed over ranks again with each later one",
               as_if([](size_t round, size_t) { return std::pow(4.0, 2.0 - static_cast<double>(round)); }));
}

TEST(Explain, knows_weight_decay_in_the_state_and_what_should_be_zero) {
  const char* const text = "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum) sgd(lr=0.1,momentum=0.5) ordered seed=3 : step";
  expect_guess(
      "0.25 times the parameters too much, as if by weight decay",
      [&](Steps& steps) {
        const golden::Run run = make_run(Case::parse(text));
        for (RankStep& rank : steps[0])
          for (auto& [slot, pieces] : rank.state)
            for (shardproof::Piece& piece : pieces)
              for (const auto& [name, value] : run.parameters)
                if (name == piece.name)
                  piece.data = piece.data + 0.25 * value.contiguous().view({-1}).narrow(0, piece.run.begin, piece.run.size());
      },
      text);
  const char* const unused = "odd(width=3) mesh(dp_shard=2) zero3(loss=sum) sgd(lr=0.1) ordered seed=3 : step";
  expect_guess(
      "they should be zero",
      [&](Steps& steps) {
        const golden::StepTrace step = golden::train(make_run(Case::parse(unused)))[0];
        for (RankStep& rank : steps[0])
          for (shardproof::Piece& piece : rank.gradients)
            for (const auto& [name, gradient] : step.gradients)
              if (name == piece.name && gradient.square().sum().item<float>() == 0) piece.data = at::full_like(piece.data, 0.5);
      },
      unused);
}

TEST(Explain, finds_numbers_of_each_rank_and_parts_of_a_sum) {
  expect_guess("each rank has them another number of times: 1.5 on rank 0, 2.5 on rank 1", [](Steps& steps) {
    for (size_t rank = 0; rank < 4; ++rank)
      change(steps, 0, rank, [&](at::Tensor& g) { g = g * (1.5 + static_cast<double>(rank)); });
  });
  expect_guess(
      "each rank along dp_replicate has a part of the sum: they were not summed over dp_replicate",
      [](Steps& steps) {
        for (size_t rank = 0; rank < 4; ++rank)
          change(steps, 0, rank, [&](at::Tensor& g) {
            const at::Tensor part = at::arange(g.numel(), at::kFloat).view(g.sizes()) / 64;
            g = rank < 2 ? part : g - part;
          });
      },
      "mlp(widths=5-7-3) mesh(dp_replicate=2,dp_shard=2) hsdp(units=leaf,loss=sum) sgd(lr=0.1) ordered seed=3 : step");
}

TEST(Explain, knows_each_rank_that_divides_by_its_own_tokens) {
  const char* const text = "mlp(widths=5-7-3) mesh(dp_shard=2) zero2(loss=tokens) sgd(lr=0.1) fast seed=3 : step";
  expect_guess(
      "each rank divides by its own number of tokens",
      [&](Steps& steps) {
        const golden::Run run = make_run(Case::parse(text));
        const auto& data = run.steps[0].microbatches[0];
        const auto tokens = [&](size_t rank) { return static_cast<double>(data[rank].target.numel()); };
        for (size_t rank = 0; rank < 2; ++rank)
          change(steps, 0, rank, [&](at::Tensor& g) { g = g * ((tokens(0) + tokens(1)) / (2 * tokens(rank))); });
      },
      text);
}

TEST(Explain, knows_what_was_scaled_up_and_what_ranks_were_built_with) {
  const char* const text = "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum) sgd(lr=0.1,clip=4096) ordered seed=3 : step";
  expect_guess(
      "they were scaled up to the norm at which clipping begins",
      [&](Steps& steps) {
        const double norm = golden::train(make_run(Case::parse(text)))[0].gradient_norm;
        for (size_t rank = 0; rank < 2; ++rank) change(steps, 0, rank, [&](at::Tensor& g) { g = g * (4096 / norm); });
      },
      text);
  expect_guess("the rank's own model was built with", [](Steps& steps) {
    for (shardproof::Piece& piece : steps[0][3].parameters) piece.data = at::full_like(piece.data, 3.5);
  });
}

TEST(Explain, knows_the_optimizer_that_counts_one_step_more_and_the_factor_of_a_schedule) {
  const char* const text = "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum) adamw(lr=0.01,beta1=0.5,beta2=0.75,decay=0) "
                           "ordered seed=3 : lr(50) step*2";
  const auto moved = [&](double factor) {
    return [=](Steps& steps) {
      const golden::Run run = make_run(Case::parse(text));
      for (RankStep& rank : steps[0])
        for (shardproof::Piece& piece : rank.parameters)
          for (const auto& [name, value] : run.parameters)
            if (name == piece.name) {
              const at::Tensor before = value.contiguous().view({-1}).narrow(0, piece.run.begin, piece.run.size());
              piece.data = before + (piece.data - before) * factor;
            }
    };
  };
  const auto correction = [](double t) { return std::sqrt(1 - std::pow(0.75, t)) / (1 - std::pow(0.5, t)); };
  expect_guess("the bias correction of step 2 instead of step 1", moved(correction(2) / correction(1)), text);
  expect_guess("the factors of steps for the learning rate were left out", moved(2), text);
  expect_guess("the factor 0.5 of the step's learning rate", moved(0.5), text);
}

TEST(Explain, knows_what_a_load_did_not_bring_back_and_what_was_discarded) {
  const char* const loaded = "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(loss=sum,ema=50) sgd(lr=0.1) ordered seed=3 : "
                             "save step step load@mesh(dp_shard=2) step";
  expect_guess(
      "the load did not bring them back",
      [&](Steps& steps) {
        const golden::Run run = make_run(Case::parse(loaded));
        const golden::Trace trace = golden::train(run);
        for (size_t rank = 0; rank < 2; ++rank)
          for (auto& [slot, pieces] : steps[2][rank].state)
            for (size_t i = 0; slot == "ema" && i < pieces.size(); ++i)
              for (const auto& [name, now] : trace[2].parameters)
                if (name == pieces[i].name)
                  pieces[i].data =
                      kResumedBeginning * run.ema +
                      (1 - run.ema) * now.contiguous().view({-1}).narrow(0, pieces[i].run.begin, pieces[i].run.size());
      },
      loaded);
  const char* const text =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(units=leaf,loss=sum) sgd(lr=0.1) ordered seed=3 : discard step";
  expect_guess("gradients that were computed and discarded before the step are in them",
               as_if([](size_t, size_t) { return 2.0; }, text, 0), text);
}

TEST(Explain, says_that_a_norm_counts_elements_once_for_each_rank_that_holds_them) {
  const char* const text = "mlp(widths=5-7-3) mesh(dp_replicate=3,dp_shard=2) hsdp(loss=sum) sgd(lr=0.1) ordered seed=3 : step";
  expect_guess(
      "the sum within the norm is 3 times what it should be: 3, the number of ranks along dp_replicate",
      [](Steps& steps) {
        for (RankStep& rank : steps[0]) rank.gradient_norm *= std::sqrt(3.0);
      },
      text);
  // Some elements are held once and others by both.
  const char* const mixed = "mlp(widths=5-7-3) mesh(tp=2) zero1(loss=sum) sgd(lr=0.1) fast seed=3 : step";
  expect_guess(
      "elements count once for each rank that holds them",
      [](Steps& steps) {
        double all = 0;
        for (const RankStep& rank : steps[0])
          for (const shardproof::Piece& piece : rank.gradients) all += piece.data.to(at::kDouble).square().sum().item<double>();
        for (RankStep& rank : steps[0]) rank.gradient_norm = std::sqrt(all);
      },
      mixed);
}

TEST(Explain, names_the_first_module_only_where_ranks_are_threads) {
  EXPECT_EQ(explained([](Steps& steps) { change(steps, 1, 2, [](at::Tensor& g) { g = g * 3; }); }).first, "");
}

TEST(Explain, survives_whatever_ranks_say) {
  const char* const freezing =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero2(alignment_bytes=64,loss=sum) sgd(lr=0.1,momentum=0.5) ordered seed=3 : "
      "freeze(%d) step "
      "freeze(%d) step";
  // Steps that train as many parameters, and others.
  for (int one = 1; one <= 9; ++one)
    for (int other = 1; other <= 9; ++other) {
      char text[200];
      std::snprintf(text, sizeof text, freezing, one, other);
      explained(
          [](Steps& steps) {
            for (RankStep& rank : steps[1])
              for (shardproof::Piece& piece : rank.gradients) piece.data = piece.data.square() + 0.25;
          },
          text);
    }
  explained([](Steps& steps) { steps[0][1].losses.pop_back(); });
  explained([](Steps& steps) { steps[1][0].gradients.clear(); });
  explained([](Steps& steps) {
    for (RankStep& rank : steps[0])
      for (shardproof::Piece& piece : rank.gradients) piece.run = {piece.run.begin + 1000, piece.run.end + 1000};
  });
}
