// The two references against each other. What they share is the LibTorch kernels and the names of parameters;
// models, losses, optimizers, clipping and accumulation are written twice, so a mistake in one shows.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>

#include "properties/kit/golden_runs.h"

namespace {

using namespace golden_runs;

// Two right programs differ by roundings, which act like a relative change of the numbers they start from by
// a few units roundoff. What such a change does is up to the run (layer norm of three nearly equal features
// multiplies it by hundreds, AdamW by up to lr / eps), so it is measured: the same run from parameters
// disturbed by a few float32 roundings, scaled down. The bound is the effect of 2000 float64 roundings.
// Measured: 28,000 random runs needed 126 at most; half of the bounds are below 1e-12, and a millionth more
// of any number of the run (below) is beyond them.
constexpr double kDisturbance = 3e-7, kRoundings = 2000, kUnitRoundoff = 0x1p-53;

// How far traces of this run may be apart.
double apart_max(golden::Run run, const golden::Trace& trace) {
  Tensors tensors(0);
  for (auto& [name, value] : run.parameters) value = value * (1 + kDisturbance * tensors.normal(value.sizes()));
  const double moved = Widest(trace, golden::train(run, at::kDouble)).apart;
  RC_PRE(moved < 0.01);  // a run this sensitive proves nothing
  return kRoundings * kUnitRoundoff * moved / kDisturbance;
}

void agree(const golden::Run& run) {
  const golden::Trace trace = golden::train(run, at::kDouble);
  const double bound = apart_max(run, trace);
  const Widest widest(trace, golden::train_in_python(run));
  RC_LOG() << widest.where << ": " << widest.apart << " apart, at most " << bound << '\n';
  RC_ASSERT(widest.apart <= bound);
}

RC_GTEST_PROP(GoldenPython, an_mlp_trains_as_in_pytorch, ()) {
  agree(random_run(random_mlp()));
}

RC_GTEST_PROP(GoldenPython, a_gpt_trains_as_in_pytorch, ()) {
  agree(random_run(random_gpt()));
}

// Of a query that sees itself alone, or equal tokens, the gradient of its score is only roundings. So sequences are long enough
// here, neighbours differ, and the first token ends no document.
golden::Model llama_of_sequences() {
  golden::Model model = random_llama();
  model.llama.vocab = draw(4, 13);
  model.llama.positions = draw(3, 7);
  return model;
}
void draw_sequences(golden::Run& run) {
  const golden::Llama& m = run.model.llama;
  int64_t salt = draw(0, 99);
  for (golden::Step& step : run.steps)
    for (auto& ranks : step.microbatches)
      for (golden::Microbatch& data : ranks) {
        const int64_t tokens = data.input.size(0) * m.positions;
        data.input = (at::arange(tokens, at::kLong) * 3 + salt++).remainder(m.vocab).view({-1, m.positions});
        if (m.document_end >= 0) data.input.select(1, 0).fill_((m.document_end + 1) % m.vocab);
        data.target = data.input.roll(1, 1);
      }
}

RC_GTEST_PROP(GoldenPython, a_llama_trains_as_in_pytorch, ()) {
  golden::Run run = random_run(llama_of_sequences());
  draw_sequences(run);
  agree(run);
}

RC_GTEST_PROP(GoldenPython, a_llama_with_windows_and_documents_trains_as_in_pytorch, ()) {
  golden::Model model = llama_of_sequences();
  golden::Llama& m = model.llama;
  m.window = pick({0, 2, 3, 4});
  m.full_layers = m.window > 0 ? draw(0, 1) : 0;
  m.document_end = draw(-1, 1);
  golden::Run run = random_run(model);
  draw_sequences(run);
  agree(run);
}

// Of one expert's weight over itself only roundings are left as a gradient, so such a weight is not normalized here.
RC_GTEST_PROP(GoldenPython, a_llama_with_experts_trains_as_in_pytorch, ()) {
  using Score = golden::Llama::Score;
  golden::Model model = llama_of_sequences();
  golden::Llama& m = model.llama;
  m.expert_groups = draw(1, 3);
  m.experts = m.expert_groups * draw(1, 3);
  m.groups_per_token = draw(1, m.expert_groups);
  m.experts_per_token = draw(1, m.experts / m.expert_groups * m.groups_per_token);
  m.expert_width = draw(1, 5);
  m.shared_width = draw(0, 3);
  m.dense_layers = draw(0, 1);
  m.score = pick({Score::softmax, Score::chosen_softmax, Score::sigmoid});
  m.normalized = m.experts_per_token > 1 && pick({true, false});
  m.expert_scale = pick({1.0, 2.5});
  m.expert_balance = m.experts > 1 ? pick({0.0, 0.3}) : 0;  // likewise of the only expert's probability
  m.expert_z = pick({0.0, 0.1});
  m.expert_bias = pick({0.0, 0.2});
  golden::Run run = random_run(model);
  draw_sequences(run);
  agree(run);
}

// Where tokens weigh the same, roundings say who stays: so it is with equal ones at the beginning of a sequence. Weights of a
// single choice are 1 in both references.
RC_GTEST_PROP(GoldenPython, a_llama_that_drops_choices_trains_as_in_pytorch, ()) {
  using Score = golden::Llama::Score;
  golden::Model model = llama_of_sequences();
  golden::Llama& m = model.llama;
  m.experts = draw(1, 4);
  m.experts_per_token = draw(1, m.experts);
  m.score = pick({Score::softmax, Score::chosen_softmax, Score::sigmoid});
  m.normalized = m.experts_per_token > 1 && pick({true, false});
  m.expert_balance = m.experts > 1 ? pick({0.0, 0.3}) : 0;
  m.expert_bias = pick({0.0, 0.2});
  m.expert_capacity = pick({0.3, 0.5, 1.0, 1.25});
  golden::Run run = random_run(model);
  draw_sequences(run);
  agree(run);
}

golden::Optimizer::Kind known_to_torch() {
  using enum golden::Optimizer::Kind;
  return pick({sgd, adam, adamw});
}

RC_GTEST_PROP(GoldenPython, convolutions_train_as_in_pytorch, ()) {
  golden::Model model = random_conv();
  model.conv.batch = model.conv.norm && pick({true, false});
  agree(random_family_run(model, known_to_torch()));
}

RC_GTEST_PROP(GoldenPython, odd_parameters_train_as_in_pytorch, ()) {
  agree(random_family_run(random_odd(), known_to_torch()));
}

RC_GTEST_PROP(GoldenPython, groups_frozen_parameters_replicas_and_other_norms_train_as_in_pytorch, ()) {
  agree(random_family_run(pick({true, false}) ? random_mlp() : random_gpt(), known_to_torch()));
}

TEST(GoldenPython, what_the_oracle_does_not_know_it_refuses) {
  const auto refuses = [](auto change) {
    golden::Run run = one_microbatch_run();
    EXPECT_TRUE(golden::oracle_supports(run));
    change(run);
    EXPECT_FALSE(golden::oracle_supports(run));
    EXPECT_THROW(golden::train_in_python(run), std::invalid_argument);
  };
  refuses([](golden::Run& run) { run.optimizer.kind = golden::Optimizer::Kind::lion; });
  refuses([](golden::Run& run) { run.optimizer.kind = golden::Optimizer::Kind::muon; });
  refuses([](golden::Run& run) { run.precision.compute = at::kBFloat16; });
  refuses([](golden::Run& run) { run.precision.reduce = at::kHalf; });
  refuses([](golden::Run& run) { run.scaling.initial = 4; });
  refuses([](golden::Run& run) {
    Tensors tensors(1);
    run.model = {.kind = golden::Model::Kind::llama, .llama = {.dropout = 0.1}};
    run.parameters = random_parameters(run.model, tensors);
    run.steps[0].microbatches = {{{tensors.tokens({2, 4}, 16), tensors.tokens({2, 4}, 16), 1}}};
  });
}

// The comparison above has teeth: it tells a run from one in which a single number is off by a millionth.
RC_GTEST_PROP(GoldenPython, a_millionth_more_of_any_number_is_seen, ()) {
  golden::Run run = random_run(random_mlp());
  run.optimizer.weight_decay = 0.3;
  run.optimizer.beta1 = 0.9;
  run.optimizer.momentum = 0.9;
  run.steps.push_back(run.steps.front());  // two steps at least: the first one does not see beta1 and momentum
  for (golden::Step& step : run.steps) step.clip_norm = 1e-3, step.divide = 3;
  const golden::Trace trace = golden::train_in_python(run);
  RC_PRE(trace.back().gradient_norm > 0.01);
  const double bound = apart_max(run, trace);

  golden::Optimizer& o = run.optimizer;
  std::vector<double*> numbers = {&o.lr, &o.weight_decay, &run.steps[0].clip_norm, &run.steps[0].microbatches[0][0].weight};
  if (o.kind == golden::Optimizer::Kind::sgd)
    numbers.push_back(&o.momentum);
  else
    numbers.insert(numbers.end(), {&o.beta1, &o.beta2, &o.eps});
  double* number = *rc::gen::elementOf(numbers);
  *number *= 1 - 1e-6;
  RC_ASSERT(Widest(golden::train(run, at::kDouble), trace).apart > bound);
}

// A rate that is one float32 off shows in the tenth digit of a loss. 32 pairs of features have rates of all kinds.
TEST(GoldenPython, slowed_rotary_positions_have_the_same_rates_in_pytorch) {
  golden::Run run;
  Tensors tensors(1);
  run.model.kind = golden::Model::Kind::llama;
  golden::Llama& llama = run.model.llama;
  llama = {.hidden = 8,
           .vocab = 11,
           .positions = 16,
           .head_size = 64,
           .theta = 500,
           .rope_factor = 8,
           .rope_high = 4.3,
           .rope_positions = 1024};
  run.parameters = random_parameters(run.model, tensors);
  run.steps.push_back({.microbatches = {{{tensors.tokens({3, 16}, 11), tensors.tokens({3, 16}, 11), 0.5}}}});
  EXPECT_LE(Widest(golden::train(run, at::kDouble), golden::train_in_python(run)).apart, 1e-13);
}

// Importing torch into a process that already uses LibTorch replaces the autograd engine, for one.
TEST(GoldenPython, loading_pytorch_changes_no_bit_of_the_cpp_reference) {
  golden::Run run;
  Tensors tensors(1);
  run.model.kind = golden::Model::Kind::gpt;
  run.model.gpt = {.layers = 2, .hidden = 12, .heads = 3, .vocab = 11, .positions = 9};
  run.parameters = random_parameters(run.model, tensors);
  run.optimizer.kind = golden::Optimizer::Kind::adamw;
  run.steps.push_back({.microbatches = {{{tensors.tokens({3, 9}, 11), tensors.tokens({3, 9}, 11), 0.5}}}, .clip_norm = 0.1});
  run.steps.push_back(run.steps.front());

  const golden::Trace before = golden::train(run);
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  shared.set_current_seed(5);
  const double expected = at::rand({}, at::kDouble).item<double>();
  shared.set_current_seed(5);
  golden::train_in_python(run);
  EXPECT_EQ(at::rand({}, at::kDouble).item<double>(), expected) << "the oracle drew from the process' random generator";
  EXPECT_EQ(at::get_num_threads(), 1);

  const golden::Trace after = golden::train(run);
  for (size_t s = 0; s < before.size(); ++s)
    for (size_t i = 0; i < before[s].parameters.size(); ++i) {
      EXPECT_TRUE(same_bits(before[s].gradients[i].second, after[s].gradients[i].second));
      EXPECT_TRUE(same_bits(before[s].parameters[i].second, after[s].parameters[i].second));
    }
}

TEST(GoldenPython, any_thread_may_call_it) {
  std::vector<std::future<double>> apart;
  for (uint64_t seed = 0; seed < 6; ++seed)
    apart.push_back(std::async(std::launch::async, [seed] {
      const golden::Run run = one_microbatch_run(seed);
      return Widest(golden::train(run, at::kDouble), golden::train_in_python(run)).apart;
    }));
  for (std::future<double>& a : apart) EXPECT_LE(a.get(), 1e-13);
}

class GoldenEnvironment : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(venv_ / "bin");
    if (const char* set = std::getenv("SHARDPROOF_VENV")) before_ = set;
    setenv("SHARDPROOF_VENV", venv_.c_str(), 1);
  }
  void TearDown() override {
    before_.empty() ? unsetenv("SHARDPROOF_VENV") : setenv("SHARDPROOF_VENV", before_.c_str(), 1);
    std::filesystem::remove_all(venv_);
  }
  void expect_missing(const std::string& what) {
    try {
      golden::train_in_python(one_microbatch_run());
      ADD_FAILURE() << "expected an EnvironmentError about: " << what;
    } catch (const golden::EnvironmentError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(what), std::string::npos) << message;
      EXPECT_NE(message.find(venv_.string()), std::string::npos) << message;
      EXPECT_NE(message.find("ci/setup"), std::string::npos) << message;
    }
  }
  void add_file(const std::filesystem::path& path) {
    std::filesystem::create_directories((venv_ / path).parent_path());
    std::ofstream(venv_ / path) << "not what it seems";
  }

  std::filesystem::path venv_ = std::filesystem::path(testing::TempDir()) / ("shardproof-venv-" + std::to_string(getpid()));
  std::string before_;
};

TEST_F(GoldenEnvironment, without_python_the_message_says_where_it_was_sought) {
  expect_missing("no Python at");
}

TEST_F(GoldenEnvironment, without_torch_the_message_says_where_it_was_sought) {
  add_file("bin/python");
  expect_missing("no torch in");
}

TEST_F(GoldenEnvironment, another_libtorch_than_the_one_in_the_process_is_refused) {
  add_file("bin/python");
  add_file(std::filesystem::path("lib") / "python" GOLDEN_PYTHON_VERSION / "site-packages/torch/lib/libtorch_cpu.so");
  expect_missing("this program runs with");
}

}  // namespace
