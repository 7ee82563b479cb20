// Layers with experts, against values made by hand and by loops over single numbers.
#include <numeric>

#include "golden/experts.h"
#include "properties/kit/golden_runs.h"

namespace {

using namespace golden_runs;
using golden::Llama;
using Score = Llama::Score;
using Numbers = std::vector<double>;

constexpr double kClose = 1e-12;

bool are_close(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a, b, kClose, kClose);
}

// The routes of one token with these logits.
golden::Routes routes(const Llama& llama, Numbers logits) {
  return golden::routes_of(llama, at::tensor(logits, at::kDouble).unsqueeze(0));
}

void expect_routes(const Llama& llama, Numbers logits, std::vector<int64_t> experts, Numbers weights) {
  const golden::Routes got = routes(llama, std::move(logits));
  EXPECT_TRUE(at::equal(got.experts[0], at::tensor(experts))) << got.experts;
  EXPECT_TRUE(are_close(got.weights[0], at::tensor(weights, at::kDouble))) << got.weights;
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

golden::Model random_experts() {
  golden::Model model;
  model.kind = golden::Model::Kind::llama;
  Llama& m = model.llama;
  m.layers = draw(1, 2);
  m.vocab = draw(2, 9);
  m.positions = draw(1, 6);
  m.expert_groups = draw(1, 3);
  m.experts = m.expert_groups * draw(1, 3);
  m.groups_per_token = draw(1, m.expert_groups);
  m.experts_per_token = draw(1, m.experts / m.expert_groups * m.groups_per_token);
  m.expert_width = draw(1, 4);
  m.shared_width = draw(0, 3);
  m.dense_layers = draw(0, m.layers);
  m.score = pick({Score::softmax, Score::chosen_softmax, Score::sigmoid});
  m.normalized = pick({true, false});
  m.expert_scale = pick({1.0, 2.5});
  return model;
}

std::vector<std::string> names(const golden::Model& model) {
  std::vector<std::string> result;
  for (const auto& [name, shape] : golden::parameter_shapes(model)) result.push_back(name);
  return result;
}

// The places of the `count` largest of `scores` among `candidates`, falling, of equal ones the first.
std::vector<int64_t> largest(const Numbers& scores, std::vector<int64_t> candidates, int64_t count) {
  std::vector<int64_t> chosen;
  for (; count > 0; --count) {
    size_t best = 0;
    for (size_t i = 1; i < candidates.size(); ++i)
      if (scores[static_cast<size_t>(candidates[i])] > scores[static_cast<size_t>(candidates[best])]) best = i;
    chosen.push_back(candidates[best]);
    candidates.erase(candidates.begin() + static_cast<int64_t>(best));
  }
  return chosen;
}

// golden.h, line by line, for one token.
class Token {
 public:
  Token(const Llama& llama, const golden::Parameters& parameters, at::Tensor x)
      : m_(llama), parameters_(parameters), x_(std::move(x)) {}

  struct Term {
    int64_t expert;
    double weight;
  };
  std::vector<Term> terms() const {
    const Numbers logits = numbers(product("gate.weight", x_));
    const Numbers scores = scores_of(logits);
    const std::vector<int64_t> chosen = largest(scores, candidates(scores), m_.experts_per_token);
    Numbers weights;
    for (const int64_t e : chosen) weights.push_back(scores[static_cast<size_t>(e)]);
    double sum = 0;
    if (m_.score == Score::chosen_softmax)
      for (double& weight : weights) weight = std::exp(weight);
    for (const double weight : weights) sum += weight;
    if (m_.score == Score::chosen_softmax || m_.normalized)
      for (double& weight : weights) weight /= sum;
    std::vector<Term> terms;
    for (size_t j = 0; j < chosen.size(); ++j) terms.push_back({chosen[j], weights[j] * m_.expert_scale});
    return terms;
  }

  at::Tensor output(const std::vector<Term>& terms) const {
    at::Tensor y = at::zeros_like(x_);
    for (const Term& term : terms) y = y + term.weight * of_expert(term.expert);
    if (m_.shared_width == 0) return y;
    const at::Tensor gate = product("shared_experts.gate_proj.weight", x_);
    return y +
           product("shared_experts.down_proj.weight", gate * at::sigmoid(gate) * product("shared_experts.up_proj.weight", x_));
  }

 private:
  static Numbers numbers(const at::Tensor& t) { return {t.const_data_ptr<double>(), t.const_data_ptr<double>() + t.numel()}; }
  at::Tensor product(const char* name, const at::Tensor& v) const { return parameters_.at(name).mv(v).contiguous(); }

  Numbers scores_of(Numbers logits) const {
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit);
    for (double& logit : logits) {
      if (m_.score == Score::softmax) logit = std::exp(logit) / sum;
      if (m_.score == Score::sigmoid) logit = sigmoid(logit);
    }
    return logits;
  }
  std::vector<int64_t> candidates(const Numbers& scores) const {
    const int64_t each = m_.experts / m_.expert_groups;
    Numbers strengths;
    std::vector<int64_t> groups(static_cast<size_t>(m_.expert_groups)), experts;
    std::iota(groups.begin(), groups.end(), 0);
    for (const int64_t group : groups) {
      Numbers own(scores.begin() + group * each, scores.begin() + (group + 1) * each);
      std::sort(own.rbegin(), own.rend());
      strengths.push_back(each == 1 ? own[0] : own[0] + own[1]);
    }
    for (const int64_t group : largest(strengths, groups, m_.groups_per_token))
      for (int64_t e = group * each; e < (group + 1) * each; ++e) experts.push_back(e);
    std::sort(experts.begin(), experts.end());
    return experts;
  }
  at::Tensor of_expert(int64_t e) const {
    const at::Tensor both = parameters_.at("experts.gate_up_proj")[e].mv(x_);
    const at::Tensor gate = both.slice(0, 0, m_.expert_width), up = both.slice(0, m_.expert_width);
    return parameters_.at("experts.down_proj")[e].mv(gate * at::sigmoid(gate) * up);
  }

  const Llama& m_;
  const golden::Parameters& parameters_;
  at::Tensor x_;
};

TEST(GoldenExperts, a_token_gets_those_with_the_highest_scores_and_of_equal_ones_the_first) {
  Llama m{.experts = 4, .experts_per_token = 3, .score = Score::chosen_softmax};
  const double e3 = std::exp(3), e1 = std::exp(1), sum = 2 * e3 + e1;
  expect_routes(m, {1, 3, 3, 0}, {1, 2, 0}, {e3 / sum, e3 / sum, e1 / sum});
  expect_routes(m, {1, 1, 1, 1}, {0, 1, 2}, {1 / 3.0, 1 / 3.0, 1 / 3.0});
  m.experts_per_token = 1;
  expect_routes(m, {-1, -2, 0, 0}, {2}, {1});
}

TEST(GoldenExperts, weights_are_scores_or_their_shares_times_the_scale) {
  Llama m{.experts = 3, .experts_per_token = 2, .normalized = false};
  const double all = std::exp(0) + std::exp(1) + std::exp(2), two = std::exp(1) + std::exp(2);
  expect_routes(m, {0, 2, 1}, {1, 2}, {std::exp(2) / all, std::exp(1) / all});
  m.normalized = true;
  expect_routes(m, {0, 2, 1}, {1, 2}, {std::exp(2) / two, std::exp(1) / two});
  m.expert_scale = 2.5;
  m.score = Score::sigmoid;
  const double a = sigmoid(2), b = sigmoid(1);
  expect_routes(m, {0, 2, 1}, {1, 2}, {2.5 * a / (a + b), 2.5 * b / (a + b)});
  m.normalized = false;
  expect_routes(m, {0, 2, 1}, {1, 2}, {2.5 * a, 2.5 * b});
  m.normalized = true;
  expect_routes(m, {-200, -200, -200}, {0, 1}, {0, 0});  // sums of nothing are no NaN
}

TEST(GoldenExperts, groups_take_part_whose_two_best_have_the_highest_sum) {
  Llama m{.experts = 6, .experts_per_token = 2, .score = Score::sigmoid, .normalized = false, .expert_groups = 2};
  expect_routes(m, {9, -9, -9, 1, 1, 1}, {3, 4}, {sigmoid(1), sigmoid(1)});
  expect_routes(m, {0, 0, 7, 7, 0, 0}, {2, 0}, {sigmoid(7), sigmoid(0)});  // equal groups: the first
  m.groups_per_token = 2;
  expect_routes(m, {9, -9, -9, 1, 1, 1}, {0, 3}, {sigmoid(9), sigmoid(1)});
  m = {.experts = 3, .score = Score::chosen_softmax, .expert_groups = 3};  // one expert has no second best
  expect_routes(m, {-5, -3, -4}, {1}, {1});
}

RC_GTEST_PROP(GoldenExperts, each_token_has_the_sum_of_its_experts_whatever_the_others_are, ()) {
  const golden::Model model = random_experts();
  const Llama& m = model.llama;
  Tensors tensors(*rc::gen::arbitrary<uint64_t>());
  golden::Parameters parameters;
  for (const auto& [name, shape] : golden::mixture_shapes(m, "")) parameters[name] = tensors.normal(shape).to(at::kDouble);
  if (pick({true, false})) parameters["gate.weight"].zero_();  // all scores are equal
  const int64_t batch = draw(1, 3), length = draw(1, 4);
  const at::Tensor x = tensors.normal({batch, length, m.hidden}).to(at::kDouble);
  golden::Forward forward{parameters, model.adapters, {0, 0}};
  const at::Tensor y = golden::mixture(m, forward, "", x);
  RC_ASSERT(y.sizes() == x.sizes());
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = 0; t < length; ++t) {
      const Token token(m, parameters, x[b][t]);
      RC_ASSERT(are_close(y[b][t], token.output(token.terms())));
    }
}

// A choice stays where fewer than `room` of the same sequence and expert come before it: heavier ones, or equal ones of tokens
// before.
RC_GTEST_PROP(GoldenExperts, of_a_sequence_an_expert_keeps_what_weighs_most, ()) {
  golden::Model model = random_experts();
  Llama& m = model.llama;
  m.expert_capacity = pick({0.25, 0.5, 1.0, 1.5});
  Tensors tensors(*rc::gen::arbitrary<uint64_t>());
  golden::Parameters parameters;
  for (const auto& [name, shape] : golden::mixture_shapes(m, "")) parameters[name] = tensors.normal(shape).to(at::kDouble);
  const int64_t batch = draw(1, 3), length = draw(1, 6);
  const at::Tensor x = tensors.normal({batch, length, m.hidden}).to(at::kDouble);
  golden::Forward forward{parameters, model.adapters, {0, 0}};
  const at::Tensor y = golden::mixture(m, forward, "", x);
  const double room = std::ceil(m.expert_capacity * double(length * m.experts_per_token) / double(m.experts));
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<std::vector<Token::Term>> all;
    for (int64_t t = 0; t < length; ++t) all.push_back(Token(m, parameters, x[b][t]).terms());
    const auto stays = [&](size_t token, const Token::Term& term) {
      double before = 0;
      for (size_t t = 0; t < all.size(); ++t)
        for (const Token::Term& other : all[t])
          before += other.expert == term.expert && (other.weight > term.weight || (other.weight == term.weight && t < token));
      return before < room;
    };
    for (size_t t = 0; t < all.size(); ++t) {
      std::vector<Token::Term> kept;
      std::ranges::copy_if(all[t], std::back_inserter(kept), [&](const Token::Term& term) { return stays(t, term); });
      const auto row = static_cast<int64_t>(t);
      RC_ASSERT(are_close(y[b][row], Token(m, parameters, x[b][row]).output(kept)));
    }
  }
}

TEST(GoldenExperts, what_is_dropped_is_what_the_definition_says) {
  const Llama two{.experts = 2, .experts_per_token = 1, .expert_capacity = 1};
  using Dropped = std::vector<bool>;
  // Of 3 tokens an expert takes 3 / 2, rounded up; the first sequence is full, and the second has equal weights.
  EXPECT_EQ(golden::dropped_choices(two, 3, {0, 0, 0, 1, 1, 1}, {0.5, 0.9, 0.7, 0.6, 0.6, 0.6}),
            (Dropped{true, false, false, false, false, true}));
  EXPECT_EQ(golden::dropped_choices(two, 1, {1, 1}, {0.1, 0.2}), (Dropped{false, false}));
  const Llama more{.experts = 3, .experts_per_token = 2, .expert_capacity = 0.75};  // 2 * 2 * 0.75 / 3 = 1
  EXPECT_EQ(golden::dropped_choices(more, 2, {0, 2, 2, 1}, {0.6, 0.4, 0.7, 0.3}), (Dropped{false, true, false, false}));
  EXPECT_EQ(golden::dropped_choices({.experts = 1}, 2, {0, 0}, {1, 1}), (Dropped{false, false}));
}

RC_GTEST_PROP(GoldenExperts, an_expert_that_no_token_chose_has_a_zero_gradient, ()) {
  golden::Model model = random_experts();
  model.llama.dense_layers = 0;
  golden::Run run = random_run(model);
  run.steps.resize(1);
  RC_ASSERT(golden::train(run)[0].gradients.size() == run.parameters.size());
  // One token has experts_per_token experts and no more.
  run.steps[0] = {.microbatches = {{{at::zeros({1, 1}, at::kLong), at::zeros({1, 1}, at::kLong), 1}}}};
  run.order = {};
  const golden::Named gradients = golden::train(run)[0].gradients;
  for (const auto& [name, gradient] : gradients) {
    if (!name.ends_with("experts.gate_up_proj") && !name.ends_with("experts.down_proj")) continue;
    const int64_t with_gradient = (gradient != 0).flatten(1).any(1).sum().item<int64_t>();
    RC_ASSERT(with_gradient <= model.llama.experts_per_token);
  }
}

// Law: a single expert whose weight is 1 is a gated MLP.
RC_GTEST_PROP(GoldenExperts, a_single_expert_of_weight_one_is_a_gated_mlp, ()) {
  golden::Model dense = random_llama(), model = dense;
  dense.llama.layers = model.llama.layers = draw(1, 2);
  model.llama.experts = 1;
  model.llama.expert_width = model.llama.intermediate;
  golden::Run run = random_run(dense);
  run.steps.resize(1);
  golden::Run other = run;
  other.model = model;
  other.parameters.clear();
  for (size_t i = 0; i < run.parameters.size(); ++i) {
    const auto& [name, value] = run.parameters[i];
    if (!name.ends_with("mlp.gate_proj.weight")) {
      other.parameters.push_back(run.parameters[i]);
      continue;
    }
    const std::string mlp = name.substr(0, name.size() - std::string("gate_proj.weight").size());
    const at::Tensor both = at::cat({value, run.parameters[i + 1].second});
    other.parameters.emplace_back(mlp + "gate.weight", at::ones({1, dense.llama.hidden}));
    other.parameters.emplace_back(mlp + "experts.gate_up_proj", both.unsqueeze(0));
    other.parameters.emplace_back(mlp + "experts.down_proj", run.parameters[i + 2].second.unsqueeze(0));
    i += 2;
  }
  const auto losses = golden::train(run, at::kDouble)[0].losses, others = golden::train(other, at::kDouble)[0].losses;
  for (size_t round = 0; round < losses.size(); ++round)
    for (size_t rank = 0; rank < losses[round].size(); ++rank)
      RC_ASSERT(std::abs(losses[round][rank] - others[round][rank]) <= kClose * std::abs(losses[round][rank]));
}

TEST(GoldenExperts, have_their_parameters_in_place_of_the_mlp_in_layers_that_are_not_dense) {
  golden::Model model;
  model.kind = golden::Model::Kind::llama;
  model.llama = {.layers = 2, .hidden = 4, .experts = 3, .expert_width = 5, .shared_width = 6, .dense_layers = 1};
  const auto all = names(model);
  const std::string mlp = "model.layers.1.mlp.";
  const std::vector<std::string> expected = {mlp + "gate.weight",
                                             mlp + "experts.gate_up_proj",
                                             mlp + "experts.down_proj",
                                             mlp + "shared_experts.gate_proj.weight",
                                             mlp + "shared_experts.up_proj.weight",
                                             mlp + "shared_experts.down_proj.weight",
                                             "model.layers.1.input_layernorm.weight"};
  const auto begin = std::find(all.begin(), all.end(), expected[0]);
  EXPECT_EQ(std::vector(begin, begin + std::ssize(expected)), expected);
  EXPECT_EQ(std::count(all.begin(), all.end(), "model.layers.0.mlp.gate_proj.weight"), 1);
  EXPECT_EQ(std::count(all.begin(), all.end(), "model.layers.1.mlp.gate_proj.weight"), 0);
  const auto shapes = golden::mixture_shapes(model.llama, mlp);
  EXPECT_EQ(shapes[1].second, (std::vector<int64_t>{3, 10, 4}));
  EXPECT_EQ(shapes[2].second, (std::vector<int64_t>{3, 4, 5}));
}

// Plain in float64 to rounding, and canonical to the bit.
TEST(GoldenExperts, losses_of_a_step_do_not_know_how_its_sequences_are_dealt_to_ranks) {
  const auto gradients = [](bool canonical, Llama::BalanceOver over, const std::vector<int64_t>& sequences) {
    golden::Run run;
    run.model.kind = golden::Model::Kind::llama;
    run.model.canonical = run.order.canonical = canonical;
    run.order.shards = std::ssize(sequences);
    run.model.llama = {.vocab = 5, .positions = 6, .experts = 3, .expert_balance = 0.5, .expert_z = 0.25, .balance_over = over};
    int64_t salt = 0;
    for (const auto& [name, shape] : golden::parameter_shapes(run.model)) {
      const at::Tensor places = at::arange(c10::multiply_integers(shape), at::kFloat);
      run.parameters.emplace_back(name, at::sin(places * 1.7 + ++salt).view(shape));
    }
    const at::Tensor tokens = at::arange(24).mul(7).remainder(5).view({4, 6});
    golden::Step step;
    step.microbatches.emplace_back();
    for (int64_t begin = 0; const int64_t count : sequences) {
      const at::Tensor own = tokens.narrow(0, begin, count);
      step.microbatches[0].push_back({.input = own, .target = own.roll(1, 1), .weight = 0.25});
      begin += count;
    }
    run.steps.push_back(step);
    return golden::train(run, canonical ? at::kFloat : at::kDouble)[0].gradients;
  };
  const auto differ = [](const golden::Named& a, const golden::Named& b, double tolerance) {
    for (size_t i = 0; i < a.size(); ++i)
      if (!at::allclose(a[i].second.to(at::kDouble), b[i].second.to(at::kDouble), tolerance, tolerance)) return true;
    return false;
  };
  using enum Llama::BalanceOver;
  for (const bool canonical : {false, true}) {
    const golden::Named whole = gradients(canonical, step, {4});
    EXPECT_FALSE(differ(whole, gradients(canonical, step, {1, 3}), canonical ? 0 : kClose));
    EXPECT_FALSE(differ(whole, gradients(!canonical, step, {4}), 1e-6));
    EXPECT_TRUE(differ(whole, gradients(canonical, sequence, {4}), 1e-5));
  }
}

TEST(GoldenExperts, that_make_no_sense_are_refused) {
  const auto refused = [](Llama llama, const std::string& words) {
    golden::Run run;
    run.model.kind = golden::Model::Kind::llama;
    run.model.llama = llama;
    expect_refused(run, words);
  };
  refused({.experts = -1}, "experts");
  refused({.experts = 2, .experts_per_token = 3}, "1 to 2 experts_per_token");
  refused({.experts = 4, .experts_per_token = 3, .expert_groups = 2}, "1 to 2 experts_per_token");
  refused({.experts = 2, .experts_per_token = 0}, "experts_per_token");
  refused({.experts = 3, .expert_groups = 2}, "expert_groups=2");
  refused({.experts = 4, .expert_groups = 2, .groups_per_token = 3}, "groups_per_token=3");
  refused({.experts = 2, .expert_width = 0}, "expert_width");
  refused({.experts = 2, .shared_width = -1}, "shared_width");
  refused({.experts = 2, .dense_layers = -1}, "dense_layers");
  refused({.experts = 2, .expert_scale = NAN}, "expert_scale");
  refused({.experts = 2, .expert_z = NAN}, "expert_z");
  refused({.experts = 2, .expert_capacity = -1}, "expert_capacity");
}

}  // namespace
