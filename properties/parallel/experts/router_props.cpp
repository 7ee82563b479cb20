// What keeps experts equally busy: losses, biases and capacities of routers.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using kit::same_bits;
using parity::on_mesh;
using parity::ranks;

namespace {

constexpr int64_t kHidden = 6, kExperts = 4;

RouterOptions options_with(double balance, double z, double rate) {
  return {.experts = kExperts, .score = RouterScore::sigmoid, .balance_loss = balance, .z_loss = z, .bias_rate = rate};
}

// A router without a gate: what it is called with are logits.
struct Bare : torch::nn::Module, Router {
  explicit Bare(const RouterOptions& options) : Router(options, *this) {}
  at::Tensor bias() const { return named_buffers()["e_score_correction_bias"]; }
};

MoeMlp layer(const RouterOptions& router) {
  MoeMlp made(LlamaOptions{.hidden = kHidden, .router = router, .expert_intermediate = 5});
  initialize_parameters(*made, 11, 0.5);
  return made;
}

bool everything(const std::string&, const torch::nn::Module&) {
  return true;
}

at::Tensor matrix(const std::vector<std::vector<double>>& rows) {
  std::vector<at::Tensor> tensors;
  for (const auto& row : rows) tensors.push_back(at::tensor(row, at::kDouble));
  return at::stack(tensors);
}

bool are_experts(const at::Tensor& got, const std::vector<int64_t>& expected) {
  return at::equal(got.flatten(), at::tensor(expected, at::kLong));
}

// Two sequences a batch, of 1 to 3 tokens.
at::Tensor batch(int64_t salt) {
  return toy::data({2, 1 + salt % 3, kHidden}, salt);
}

parity::MakeTrainee trainee(const RouterOptions& router) {
  return [router] {
    MoeMlp moe = layer(router);
    return parity::Trainee{moe.ptr(), [moe](int64_t salt) mutable {
                             AuxiliaryLosses auxiliary;
                             return auxiliary.add_to(call(moe, batch(salt)).square().sum());
                           }};
  };
}

// The papers' formulas, expert by expert and token by token.
at::Tensor by_hand(const at::Tensor& logits, const at::Tensor& experts, const RouterOptions& o) {
  at::Tensor sum = at::zeros({}, logits.options());
  const int64_t length = logits.size(1);
  for (int64_t s = 0; s < logits.size(0); ++s)
    for (int64_t t = 0; t < length; ++t) {
      const at::Tensor token = logits[s][t], scores = at::sigmoid(token);
      for (int64_t e = 0; e < o.experts; ++e) {
        const double chosen = (experts.view({logits.size(0), -1})[s] == e).sum().item<double>();
        const double f = chosen * double(o.experts) / double(o.experts_per_token * length);
        sum = sum + o.balance_loss * f * scores[e] / scores.sum();
      }
      sum = sum + o.z_loss * at::exp(token).sum().log().square();
    }
  return sum;
}

}  // namespace

TEST(Routers, losses_and_gradients_are_those_of_the_papers_times_the_weight_of_the_loss) {
  for (const auto& [balance, z] : {std::pair{0.5, 0.0}, {0.0, 0.25}, {0.5, 0.25}}) {
    const RouterOptions options = options_with(balance, z, 0);
    Bare router(options);
    const at::Tensor logits = toy::data({3, 5, kExperts}, 4).to(at::kDouble).requires_grad_();
    const at::Tensor own = logits.detach().clone().requires_grad_();
    AuxiliaryLosses auxiliary;
    const Routes routes = router.choose(logits);
    const at::Tensor loss = auxiliary.add_to(routes.weights.square().sum());
    (loss * 3).backward();
    const Routes plain = route(own.flatten(0, 1), options);
    const at::Tensor expected = plain.weights.square().sum() + by_hand(own, plain.experts, options);
    (expected * 3).backward();
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
    EXPECT_TRUE(at::allclose(logits.grad(), own.grad(), 1e-10, 1e-12)) << logits.grad() << own.grad();
  }
}

// With recomputation as well: a forward that runs again adds nothing.
TEST(Routers, losses_train_alike_sharded_and_recomputed) {
  for (const Strategy& row : strategies())
    for (const bool recompute : {false, true}) {
      parity::Plan plan{.mesh = parity::grid(1, 2), .options = toy::options(row.name), .microbatches = 2};
      if (recompute) plan.options.recompute = everything;
      plan.tolerance = 1e-6;
      parity::expect_trains_like_plain(trainee(options_with(0.5, 0.25, 0)), plan);
    }
}

TEST(Routers, a_bias_changes_who_is_chosen_and_not_what_they_weigh) {
  const at::Tensor logits = matrix({{3, 1, 0.5, -1}}), bias = matrix({{0, -9, 0, 9}})[0];
  RouterOptions options = options_with(0, 0, 0);
  options.normalized = false;
  const Routes routes = route(logits, options, bias);
  EXPECT_TRUE(are_experts(routes.experts, {3, 0})) << routes.experts;
  EXPECT_TRUE(at::allclose(routes.weights, at::sigmoid(matrix({{-1, 3}})))) << routes.weights;
  options.groups = 2, options.groups_per_token = 1;
  EXPECT_TRUE(are_experts(route(logits, options, bias).experts, {3, 2}));
}

// On ranks with tokens of their own, in several microbatches, as on one rank that has all of them; forwards that nobody takes a
// loss of, evaluations, and what was forgotten are not counted.
TEST(Routers, biases_follow_the_counts_of_a_whole_step_on_any_mesh) {
  const RouterOptions options = options_with(0, 0, 0.125);
  const auto forward = [](MoeMlp& moe, int64_t salt) {
    AuxiliaryLosses auxiliary;
    auxiliary.add_to(call(moe, batch(salt)).square().sum()).backward();
  };
  const auto bias_after = [&](MoeMlp& moe, MeshComm& comms, int64_t world) {
    for (int64_t step = 0; step < 3; ++step) {
      forward(moe, 90);
      forget_router_counts(*moe);
      for (int64_t salt = 8 * step + comms.rank() * (8 / world), end = salt + 8 / world; salt < end; ++salt) forward(moe, salt);
      {
        const at::NoGradGuard evaluation;
        AuxiliaryLosses auxiliary;
        auxiliary.add_to(call(moe, batch(91)).sum());
      }
      AuxiliaryLosses dropped;
      call(moe, batch(92));
      update_router_biases(*moe, comms);
    }
    return moe->named_buffers()["gate.e_score_correction_bias"].clone();
  };
  std::vector<at::Tensor> biases;
  for (const int64_t world : {1, 2, 4})
    on_mesh(ranks(world), [&](const std::shared_ptr<MeshComm>& comms) {
      MoeMlp moe = layer(options);
      Sharded sharded = fully_shard(moe.ptr(), comms, {.recompute = world == 4 ? UnitSelector(everything) : UnitSelector()});
      sharded.set_last_microbatch(false);  // of one long step, as far as gradients go
      const at::Tensor bias = bias_after(moe, *comms, world);
      if (comms->rank() == world - 1) biases.push_back(bias);
    });
  ASSERT_EQ(biases.size(), 3);
  EXPECT_GT(biases[0].abs().max().item<double>(), 0);
  EXPECT_TRUE(same_bits(biases[0], biases[1]) && same_bits(biases[0], biases[2])) << biases;
}

TEST(Routers, a_bias_rises_where_its_expert_was_chosen_less_than_the_mean) {
  on_mesh(ranks(1), [](const std::shared_ptr<MeshComm>& comms) {
    RouterOptions options = options_with(0, 0, 0.25);
    options.experts_per_token = 1;
    Bare router(options);
    AuxiliaryLosses auxiliary;
    // Expert 0 twice, 1 once, 3 once, 2 never; the mean is 1.
    router.choose(matrix({{9, 0, 0, 0}, {9, 0, 0, 0}, {0, 9, 0, 0}, {0, 0, 0, 9}}).unsqueeze(0));
    auxiliary.add_to(at::zeros({}));
    update_router_biases(router, *comms);
    EXPECT_TRUE(same_bits(router.bias(), matrix({{-0.25, 0, 0.25, 0}})[0].to(at::kFloat))) << router.bias();
    update_router_biases(router, *comms);  // nothing was chosen meanwhile
    EXPECT_TRUE(same_bits(router.bias(), matrix({{-0.25, 0, 0.25, 0}})[0].to(at::kFloat))) << router.bias();
  });
}

namespace {

// Which choices [tokens, experts of one] of a sequence are not dropped: those that fewer than `room` of the same expert come
// before, heavier ones or equal ones of earlier tokens.
at::Tensor stay(const Routes& all, int64_t room) {
  const at::Tensor experts = all.experts.flatten(), weights = all.weights.detach().flatten();
  at::Tensor result = at::zeros(experts.sizes(), at::kBool);
  for (int64_t i = 0; i < experts.numel(); ++i) {
    const at::Tensor heavier = (weights > weights[i]) | ((weights == weights[i]) & (at::arange(experts.numel()) < i));
    result[i] = (heavier & (experts == experts[i])).sum().item<int64_t>() < room;
  }
  return result.view_as(all.experts);
}

Routes part(const Routes& routes, int64_t begin, int64_t tokens) {
  return {routes.experts.narrow(0, begin, tokens), routes.weights.narrow(0, begin, tokens)};
}

}  // namespace

// The even share comes first, as in Megatron-LM: 1.1 times it is 11 here, and 1.1 times 100 is a bit more than 110 in doubles.
TEST(Routers, the_room_of_an_expert_is_its_even_share_times_the_capacity_rounded_up) {
  EXPECT_EQ(room_for({.experts = 10, .experts_per_token = 1, .capacity = 1.1}, 100), 11);
  EXPECT_EQ(room_for({.experts = 3, .experts_per_token = 1, .capacity = 1}, 5), 2);
  EXPECT_EQ(room_for({.experts = 8, .experts_per_token = 1, .capacity = 0.5}, 2), 1);
}

// Two of five, as 5 / 3 is rounded up. The second token weighs most, and the other three that chose expert 0 weigh the same.
TEST(Routers, an_expert_keeps_of_a_sequence_what_weighs_most_and_of_equal_weights_the_first) {
  Bare router({.experts = 3, .experts_per_token = 1, .normalized = false, .capacity = 1});
  const Routes routes = router.choose(matrix({{2, 0, 0}, {3, 0, 0}, {2, 0, 0}, {0, 0, 1}, {2, 0, 0}}).unsqueeze(0));
  EXPECT_TRUE(are_experts(routes.experts, {0, 0, -1, 2, -1})) << routes.experts;
  EXPECT_TRUE(at::equal(routes.weights == 0, routes.experts == -1)) << routes.weights;
}

TEST(Routers, weights_are_compared_before_they_are_rounded) {
  Bare router({.experts = 2, .experts_per_token = 1, .normalized = false, .capacity = 1});
  const at::Tensor logits = matrix({{5, 0}, {5.03125, 0}}).to(at::kBFloat16);
  const Routes all = route(logits, {.experts = 2, .experts_per_token = 1, .normalized = false});
  ASSERT_TRUE(same_bits(all.weights[0], all.weights[1])) << all.weights;
  const Routes routes = router.choose(logits.unsqueeze(0));
  EXPECT_TRUE(are_experts(routes.experts, {-1, 0})) << routes.experts;
  EXPECT_TRUE(same_bits(routes.weights[1], all.weights[1]));
}

// Small whole logits, so that many weights are equal. A batch of three sequences, and each of them alone.
TEST(Routers, what_is_dropped_is_a_matter_of_each_sequence_and_leaves_all_else_as_it_was) {
  int64_t salt = 0, dropped = 0;
  for (const RouterScore score : {RouterScore::softmax, RouterScore::chosen_softmax, RouterScore::sigmoid})
    for (const double capacity : {0.3, 1.0, 1.25, 9.0})
      for (const int64_t tokens : {0, 1, 4, 9})
        for (const int64_t each : {1, 3}) {
          RouterOptions options{.experts = kExperts, .experts_per_token = each, .score = score, .normalized = salt % 2 == 0};
          const at::Tensor logits = toy::data({3, tokens, kExperts}, ++salt).mul(2).round().to(at::kDouble).requires_grad_();
          const at::Tensor own = logits.detach().clone().requires_grad_();
          const Routes all = route(own.flatten(0, 1), options);
          options.capacity = capacity;
          Bare router(options);
          const Routes routes = router.choose(logits);
          const auto room = static_cast<int64_t>(std::ceil(capacity * double(tokens * each) / kExperts));
          std::vector<at::Tensor> stays;
          for (int64_t s = 0; s < 3; ++s) {
            stays.push_back(stay(part(all, s * tokens, tokens), room));
            const Routes alone = router.choose(logits.narrow(0, s, 1)), here = part(routes, s * tokens, tokens);
            EXPECT_TRUE(at::equal(alone.experts, here.experts) && same_bits(alone.weights, here.weights));
          }
          const at::Tensor wanted = at::cat(stays);
          dropped += (~wanted).sum().item<int64_t>();
          EXPECT_TRUE(at::equal(routes.experts, all.experts.masked_fill(~wanted, -1))) << capacity << ' ' << all.experts;
          EXPECT_TRUE(same_bits(routes.weights, all.weights.masked_fill(~wanted, 0)));
          const at::Tensor factors = toy::data(all.weights.sizes().vec(), salt).to(at::kDouble);
          (routes.weights * factors).sum().backward();
          (all.weights * factors.masked_fill(~wanted, 0)).sum().backward();
          EXPECT_TRUE(at::equal(logits.grad(), own.grad())) << logits.grad() << own.grad();
        }
  EXPECT_GT(dropped, 100);
}

TEST(Routers, losses_and_biases_are_of_what_was_chosen_before_anything_is_dropped) {
  on_mesh(ranks(1), [](const std::shared_ptr<MeshComm>& comms) {
    std::vector<at::Tensor> losses, gradients, biases;
    for (const double capacity : {0.0, 0.5}) {
      RouterOptions options = options_with(0.5, 0.25, 0.125);
      options.capacity = capacity;
      Bare router(options);
      const at::Tensor logits = toy::data({2, 7, kExperts}, 4).requires_grad_();
      AuxiliaryLosses auxiliary;
      const Routes routes = router.choose(logits);
      EXPECT_EQ((routes.experts == -1).any().item<bool>(), capacity > 0);
      losses.push_back(auxiliary.add_to((routes.weights * 0).sum()));
      losses.back().backward();
      update_router_biases(router, *comms);
      gradients.push_back(logits.grad());
      biases.push_back(router.bias());
    }
    EXPECT_TRUE(same_bits(losses[0], losses[1]) && at::equal(gradients[0], gradients[1]) && same_bits(biases[0], biases[1]));
    EXPECT_GT(biases[0].abs().max().item<double>(), 0);
  });
}

TEST(Routers, a_capacity_where_sequences_are_cut_is_refused_on_every_rank) {
  on_mesh(Mesh({{"cp", 2}}), [](const std::shared_ptr<MeshComm>& comms) {
    Llama model(LlamaOptions{.vocab = 11, .router = {.experts = 4, .capacity = 1.5}, .expert_intermediate = 5});
    ContextParallel context = context_parallel(model.ptr(), comms);
    const at::Tensor own = context.cut(at::arange(8).view({1, 8}), 1);
    expect_error([&] { call(model, own); }, {"experts", "capacity 1.5", "Leave out the capacity"});
  });
  on_mesh(Mesh({{"cp", 1}}), [](const std::shared_ptr<MeshComm>& comms) {  // which cuts none
    Llama model(LlamaOptions{.vocab = 11, .router = {.experts = 4, .capacity = 1.5}, .expert_intermediate = 5});
    ContextParallel context = context_parallel(model.ptr(), comms);
    EXPECT_NO_THROW(call(model, context.cut(at::arange(8).view({1, 8}), 1)));
  });
}

namespace {

RouterOptions over_step(RouterScore score) {
  return {.experts = kExperts, .score = score, .balance_loss = 0.5, .balance_over = BalanceOver::step, .z_loss = 0.25};
}

// The loss of logits of a step, and their gradient.
std::pair<at::Tensor, at::Tensor> loss_and_gradient(Bare& router, const at::Tensor& given) {
  const at::Tensor logits = given.clone().requires_grad_();
  AuxiliaryLosses auxiliary;
  const Routes routes = router.choose(logits);
  const at::Tensor loss = auxiliary.add_to(routes.weights.sum() * 0);
  (loss * 0.375).backward();
  return {loss.detach(), logits.grad()};
}

}  // namespace

// Also of ranks without a sequence, and of those along tp, which have the same ones.
TEST(Routers, a_balance_over_the_step_is_of_the_tokens_of_all_ranks) {
  const at::Tensor logits = toy::data({4, 3, kExperts}, 4).mul(2).to(at::kDouble);
  for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid})
    for (const bool canonical : {false, true}) {
      Bare alone(over_step(score));
      if (canonical) alone.use_canonical("alone");
      const auto [whole, of_whole] = loss_and_gradient(alone, logits);
      RouterOptions of_sequences = over_step(score);
      of_sequences.balance_over = BalanceOver::sequence;
      Bare other(of_sequences);
      EXPECT_FALSE(at::allclose(of_whole, loss_and_gradient(other, logits).second, 1e-4, 1e-4));
      for (const int64_t first : {2, 1, 4})
        on_mesh(Mesh({{"dp_shard", 2}, {"tp", 3}}), [&, &whole = whole, &of_whole = of_whole](const auto& comms) {
          const int64_t begin = comms->data_rank() == 0 ? 0 : first, count = comms->data_rank() == 0 ? first : 4 - first;
          Bare router(over_step(score));
          if (canonical) router.use_canonical("router");
          share_router_counts(router, comms);
          const auto [own, gradient] = loss_and_gradient(router, logits.narrow(0, begin, count));
          at::Tensor sum = own.clone();
          comms->along({"dp_shard"}).all_reduce(sum).wait();
          const at::Tensor expected = of_whole.narrow(0, begin, count);
          if (canonical) EXPECT_TRUE(same_bits(sum, whole) && same_bits(gradient, expected)) << sum << whole;
          EXPECT_NEAR(sum.template item<double>(), whole.item<double>(), 1e-12);
          EXPECT_TRUE(at::allclose(gradient, expected, 1e-10, 1e-12));
        });
    }
}

TEST(Routers, losses_in_canonical_arithmetic_are_close_to_plain_ones_and_do_not_know_the_batch) {
  for (const RouterScore score : {RouterScore::softmax, RouterScore::chosen_softmax, RouterScore::sigmoid}) {
    RouterOptions options = over_step(score);
    options.balance_over = BalanceOver::sequence;
    Bare plain(options), canonical(options);
    canonical.use_canonical("canonical");
    const at::Tensor logits = toy::data({4, 3, kExperts}, 5).mul(2).to(at::kDouble);
    const auto [loss, gradient] = loss_and_gradient(canonical, logits);
    const auto [expected, of_plain] = loss_and_gradient(plain, logits);
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-10);
    EXPECT_TRUE(at::allclose(gradient, of_plain, 1e-9, 1e-11));
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int64_t s = 0; s < 4; ++s) {
      const auto [own, of_own] = loss_and_gradient(canonical, logits.narrow(0, s, 1));
      sum += own;
      EXPECT_TRUE(same_bits(of_own, gradient.narrow(0, s, 1)));
    }
    EXPECT_TRUE(same_bits(sum, loss));
  }
}

// A forward that runs again in a backward is the same one.
TEST(Routers, a_balance_over_the_step_has_one_forward_in_a_step) {
  RouterOptions options = over_step(RouterScore::sigmoid);
  std::vector<at::Tensor> gradients;
  for (const bool recompute : {false, true})
    on_mesh(ranks(2), [&](const std::shared_ptr<MeshComm>& comms) {
      MoeMlp moe = layer(options);
      Sharded sharded = fully_shard(moe.ptr(), comms, {.recompute = recompute ? UnitSelector(everything) : UnitSelector()});
      const auto forward = [&](int64_t salt) {
        AuxiliaryLosses auxiliary;
        return auxiliary.add_to(call(moe, batch(salt)).square().sum());
      };
      for (int64_t step = 0; step < 2; ++step) {
        sharded.zero_gradients();
        forward(3 + comms->rank()).backward();
        {
          const at::NoGradGuard evaluation;
          (void)call(moe, batch(6));
        }
        const std::map<std::string, at::Tensor> whole = sharded.gather_gradients();
        for (const auto& [name, gradient] : whole)
          if (comms->rank() == 0) gradients.push_back(gradient.clone());
        if (step == 0) forget_router_counts(*moe);
      }
      expect_error([&] { (void)forward(5); }, {"experts", "a second training forward in a step", "BalanceOver::sequence"});
      update_router_biases(*moe, *comms);
      EXPECT_NO_THROW(forward(5));
    });
  ASSERT_GT(gradients.size(), 2);
  for (size_t each = gradients.size() / 4, i = each; i < gradients.size(); ++i)
    EXPECT_TRUE(same_bits(gradients[i], gradients[i % each])) << i;
}

TEST(Routers, know_from_parallelize_alone_which_ranks_have_the_tokens_of_a_step) {
  const auto gradient_of = [](MoeMlp& moe, const at::Tensor& x) {
    AuxiliaryLosses auxiliary;
    auxiliary.add_to(call(moe, x).square().sum()).backward();
    return moe->named_parameters()["gate.weight"].grad();
  };
  const std::vector<at::Tensor> parts = {batch(2), batch(5)};
  MoeMlp whole = layer(over_step(RouterScore::sigmoid));
  const at::Tensor expected = gradient_of(whole, at::cat(parts));
  on_mesh(ranks(2), [&](const std::shared_ptr<MeshComm>& comms) {
    MoeMlp moe = layer(over_step(RouterScore::sigmoid));
    const TensorParallel parallel = parallelize(moe.ptr(), comms, {.styles = {{"experts", ExpertParallel{.ranks = 2}}}});
    at::Tensor sum = gradient_of(moe, parts[static_cast<size_t>(comms->rank())]).clone();
    comms->world().all_reduce(sum).wait();
    EXPECT_TRUE(at::allclose(sum, expected, 1e-4, 1e-5)) << sum << expected;
  });
}

// What is thrown in a forward ends its AuxiliaryLosses.
TEST(Routers, a_forward_that_threw_leaves_nothing_to_the_next_one) {
  RouterOptions options = over_step(RouterScore::sigmoid);
  options.bias_rate = 0.125;
  std::vector<at::Tensor> gradients, biases;
  for (const bool recompute : {false, true})
    for (const bool throws : {false, true})
      on_mesh(ranks(2), [&](const std::shared_ptr<MeshComm>& comms) {
        MoeMlp moe = layer(options);
        Sharded sharded = fully_shard(moe.ptr(), comms, {.recompute = recompute ? UnitSelector(everything) : UnitSelector()});
        struct Ended {};
        const auto forward = [&](int64_t salt, bool ends) {
          AuxiliaryLosses auxiliary;
          const at::Tensor output = call(moe, batch(salt));
          if (ends) throw Ended();
          return auxiliary.add_to(output.square().sum());
        };
        for (int64_t step = 0; step < 2; ++step) {
          if (throws) {
            EXPECT_THROW(forward(5 + comms->rank(), true), Ended);
          }
          forward(3 + comms->rank() + step, false).backward();
          expect_error([&] { (void)forward(5, false); }, {"experts", "a second training forward in a step"});
          const at::Tensor gradient = sharded.gather_gradients().at("gate.weight").clone();
          sharded.zero_gradients();
          update_router_biases(*moe, *comms);
          if (comms->rank() != 0) continue;
          gradients.push_back(gradient);
          biases.push_back(moe->named_buffers()["gate.e_score_correction_bias"].clone());
        }
      });
  for (size_t i = 0; i < 8; ++i)
    EXPECT_TRUE(same_bits(gradients[i], gradients[i % 2]) && same_bits(biases[i], biases[i % 2])) << i;
}

TEST(Routers, a_loss_that_nobody_takes_is_an_error) {
  MoeMlp moe = layer(options_with(0.5, 0, 0));
  expect_error([&] { call(moe, batch(1)); }, {"auxiliary_losses", "nobody collects it", "Make an AuxiliaryLosses"});
  AuxiliaryLosses auxiliary;
  const at::Tensor loss = call(moe, batch(1)).sum();
  expect_error([&] { loss.backward(); }, {"auxiliary_losses", "a loss without them", "add_to first"});
  auxiliary.add_to(call(moe, batch(1)).sum()).backward();
  expect_error([&] { call(moe, batch(1)); }, {"a forward after add_to"});
  expect_error([&] { auxiliary.add_to(loss); }, {"add_to was called already"});
  {
    AuxiliaryLosses kept;
    const at::Tensor own = call(moe, batch(1)).square().sum();
    kept.add_to(own).backward({}, /*retain_graph=*/true);
    expect_error([&] { own.backward(); }, {"a loss without them"});  // the gradient of another backward is not its own
  }
  AuxiliaryLosses of_sequences;
  expect_error([&] { of_sequences.add_to(at::zeros({2})); }, {"loss [2]", "their sum"});
  {
    const at::Tensor twice = of_sequences.add_to(call(moe, batch(1)).square().sum());
    std::vector<at::Tensor> parameters{moe->named_parameters()["gate.weight"]};
    expect_error([&] { torch::autograd::grad({twice}, parameters, {}, true, /*create_graph=*/true); }, {"create_graph"});
  }
  expect_error([&] { layer(options_with(-1, 0, 0)); }, {"experts", "balance_loss -1"});
  expect_error([&] { layer({.experts = kExperts, .capacity = -0.5}); }, {"experts", "capacity -0.5"});
  MoeMlp biased = layer(options_with(0, 0, 0.1));
  {
    AuxiliaryLosses again;
    again.add_to(at::zeros({}));
    expect_error([&] { call(biased, batch(1)); }, {"a forward after add_to"});
  }
  biased->to(at::kBFloat16);
  expect_error([&] { call(biased, batch(1).to(at::kBFloat16)); }, {"bias of a router", "float32"});
  const at::NoGradGuard evaluation;
  call(moe, batch(1));
}
