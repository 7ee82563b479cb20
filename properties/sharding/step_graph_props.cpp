// Steps that are captured once and replayed, beside steps that run each time. On the fake device, under any strategy on any
// mesh, of whose ranks one is there; and on a GPU, alone, where SHARDPROOF_TEST_DEVICE is cuda.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "properties/doubles/echo_comm.h"
#include "properties/doubles/fake_device.h"
#include "properties/kit/bits.h"
#include "properties/kit/device_subject.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/piece_values.h"
#include "shardproof/device/device_graph.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

constexpr int64_t kVocab = 11, kLength = 5, kBatch = 2;
constexpr int64_t kWarmUp = 2;  // steps

c10::Device the_device() {
  if (device_testing::on_cuda()) return {at::kCUDA, 0};
  fake_device::install();
  return fake_device::device();
}

struct Subject {
  std::string strategy = "zero3";
  int64_t replicas = 1, shards = 2;
  int64_t microbatches = 1;
  bool low_precision = false, recompute = false, tied = false, ordered = true;
  bool looks = false;  // at whole parameters before the step that is captured, and leaves them whole
  ShardOptions options = {};
  double dropout = 0;

  std::string str() const {
    return fmt::format(
        "{} on {} x {}, {} microbatches, low {}, recompute {}, tied {}, ordered {}, looks {}, pooled {}, reshards {}, prefetch "
        "{}",
        strategy, replicas, shards, microbatches, low_precision, recompute, tied, ordered, looks,
        options.buffers == Buffers::pooled, options.reshard_after_backward, options.prefetch_forward);
  }
};

Subject drawn_subject() {
  Subject subject;
  subject.strategy = *rc::gen::elementOf(std::vector<std::string>{"ddp", "zero1", "zero2", "zero3", "hsdp"});
  const bool alone = device_testing::on_cuda();
  subject.replicas = alone ? 1 : *rc::gen::inRange<int64_t>(1, 4);
  subject.shards = alone ? 1 : *rc::gen::inRange<int64_t>(1, 4);
  subject.microbatches = *rc::gen::inRange<int64_t>(1, 4);
  subject.low_precision = *rc::gen::arbitrary<bool>();
  subject.recompute = *rc::gen::arbitrary<bool>();
  subject.tied = *rc::gen::arbitrary<bool>();
  subject.ordered = *rc::gen::arbitrary<bool>();
  subject.looks = *rc::gen::arbitrary<bool>();
  subject.options.buffers = *rc::gen::element(Buffers::freed, Buffers::pooled);
  subject.options.granularity = *rc::gen::element(Granularity::element, Granularity::row);
  subject.options.prefetch_forward = subject.options.prefetch_backward = *rc::gen::inRange<int64_t>(0, 3);
  subject.options.reshard_after_backward = *rc::gen::arbitrary<bool>();
  subject.options.check_gradients = *rc::gen::arbitrary<bool>();
  return subject;
}

// A GPT on one rank, and what a training program does with it.
class Training {
 public:
  explicit Training(const Subject& subject) : subject_(subject), model_(make(subject)) {
    const Mesh mesh({{"dp_replicate", subject.replicas}, {"dp_shard", subject.shards}});
    ShardOptions options = subject.options;
    options.strategy = strategy(subject.strategy);
    options.units = by_type<GptBlockImpl>();
    options.device = the_device();
    options.initialize = normal_initializer(7, 0.3);
    options.numerics = subject.ordered ? options.numerics : Numerics::fast;
    if (subject.low_precision) options.precision = {.main = at::kFloat, .compute = at::kBFloat16};
    if (subject.recompute)
      options.unit_options = [](const std::string& unit) { return UnitOptions{.recompute = !unit.empty()}; };
    // The first: others may have nothing of a bucket, and then all echo nothing.
    comms_ = std::make_shared<MeshComm>(echo_comm(0, mesh.size()), mesh);
    sharded_.emplace(fully_shard(model_.ptr(), comms_, options));
    optimizer_.emplace(adamw(*sharded_, {.lr = 0.01}));
  }

  Sharded& sharded() { return *sharded_; }
  Comm& world() { return comms_->world(); }
  Gpt& model() { return model_; }
  StepGraph graph(int64_t warm_up = kWarmUp) {
    return StepGraph(*sharded_, [this](const auto& inputs) { return body(inputs); }, {.warm_up_steps = warm_up});
  }

  std::vector<at::Tensor> body(const std::vector<at::Tensor>& inputs) {
    at::Tensor total;
    for (int64_t k = 0; k < subject_.microbatches; ++k) {
      sharded_->set_last_microbatch(k + 1 == subject_.microbatches);
      const at::Tensor logits = call(model_, inputs[static_cast<size_t>(2 * k)]);
      const at::Tensor loss =
          at::cross_entropy_loss(logits.to(at::kFloat).view({-1, kVocab}), inputs[static_cast<size_t>(2 * k + 1)].view({-1}));
      (loss / static_cast<double>(subject_.microbatches)).backward();
      total = total.defined() ? total + loss.detach() : loss.detach();
      between();
    }
    return {total};
  }

  // Of a step, on the host.
  std::vector<at::Tensor> inputs(int64_t step) const {
    std::vector<at::Tensor> all;
    for (int64_t k = 0; k < 2 * subject_.microbatches; ++k)
      all.push_back(
          at::arange(kBatch * kLength, at::kLong).mul(3 + 2 * k).add(7 * step + k).remainder(kVocab).view({kBatch, -1}));
    return all;
  }

  // What changes from step to step stays outside of the graph.
  void update(int64_t step) {
    sharded_->clip_gradients(step % 2 == 0 ? 0.1 : 10);
    optimizer_->set_lr_factor(1.0 / static_cast<double>(step + 1));
    optimizer_->step();
  }

  std::vector<at::Tensor> main_parameters() const { return kit::values_of(sharded_->main_parameters()); }

  std::function<void()> between = [] {};

 private:
  static Gpt make(const Subject& subject) {
    const MetaInit meta;
    return Gpt(GptOptions{.layers = 2,
                          .hidden = 8,
                          .heads = 2,
                          .vocab = kVocab,
                          .positions = kLength,
                          .tied = subject.tied,
                          .dropout = subject.dropout});
  }

  Subject subject_;
  Gpt model_;
  std::shared_ptr<MeshComm> comms_;
  std::optional<Sharded> sharded_;
  std::optional<Optimizer> optimizer_;
};

// Losses of each step and main parameters at the end.
struct Trained {
  std::vector<at::Tensor> losses, parameters;
};

Trained train(const Subject& subject, int64_t steps, bool captured) {
  Training training(subject);
  StepGraph graph = training.graph();
  Trained trained;
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<at::Tensor> inputs = training.inputs(step);
    if (!captured)
      for (at::Tensor& input : inputs) input = input.to(the_device());
    if (subject.looks && step == kWarmUp) training.sharded().unit("h.0").unshard();
    trained.losses.push_back((captured ? graph.run(inputs) : training.body(inputs))[0].to(at::kCPU).clone());
    training.update(step);
  }
  EXPECT_EQ(graph.is_captured(), captured);
  trained.parameters = training.main_parameters();
  return trained;
}

// What differs first; "" for nothing.
std::string difference(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& got) {
  if (expected.size() != got.size()) return fmt::format("{} tensors, expected {}", got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (!expected[i].isfinite().all().item<bool>()) return fmt::format("tensor {} is not finite", i);
    if (at::equal(expected[i], got[i])) continue;
    const auto first = expected[i].ne(got[i]).view({-1}).nonzero()[0].item<int64_t>();
    return fmt::format("tensor {} has {} at element {}, expected {}", i, got[i].view({-1})[first].item<double>(), first,
                       expected[i].view({-1})[first].item<double>());
  }
  return "";
}

// Where a graph's steps differ from steps that run each time; "" where they do not.
std::string difference_of_replays(Subject subject) {
  constexpr int64_t kSteps = 6;
  const Trained eager = train(subject, kSteps, false), captured = train(subject, kSteps, true);
  const std::string losses = difference(eager.losses, captured.losses);
  const std::string parameters = difference(eager.parameters, captured.parameters);
  if (!losses.empty()) return fmt::format("losses: {}: {}", losses, subject.str());
  return parameters.empty() ? "" : fmt::format("parameters: {}: {}", parameters, subject.str());
}

// What is told where a body does something that no graph can repeat.
std::string refusal_of_body(const std::function<void(Training&)>& between, Subject subject = {}) {
  Training training(subject);
  StepGraph graph = training.graph(1);
  graph.run(training.inputs(0));
  training.update(0);
  training.between = [&] { between(training); };
  const std::string told = refusal([&] { graph.run(training.inputs(1)); });
  EXPECT_FALSE(graph.is_captured());
  // Training goes on without it.
  training.between = [] {};
  training.body([&] {
    std::vector<at::Tensor> inputs = training.inputs(1);
    for (at::Tensor& input : inputs) input = input.to(the_device());
    return inputs;
  }());
  training.update(1);
  return told;
}

class StepGraphs : public device_testing::Kernels {
 protected:
  void SetUp() override {
    device_testing::Kernels::SetUp();
    if (IsSkipped() || !device_testing::on_cuda()) return;
    use_cuda();
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
  }
};
// What only the fake device can show.
class FakeStepGraphs : public testing::Test {};

}  // namespace

TEST_F(StepGraphs, replays_have_the_bits_of_steps_that_run_each_time) {
  EXPECT_TRUE(rc::check("bits", [] {
    if (const std::string differs = difference_of_replays(drawn_subject()); !differs.empty()) RC_FAIL(differs);
  }));
}

// Drawn subjects have it too, but not in every run.
TEST_F(StepGraphs, replays_gather_what_somebody_had_gathered_before_the_capture) {
  for (const char* strategy : {"zero3", "hsdp", "hfsdp"})
    for (const Buffers buffers : {Buffers::freed, Buffers::pooled}) {
      Subject subject{.strategy = strategy, .looks = true};
      if (device_testing::on_cuda()) subject.replicas = subject.shards = 1;
      subject.options.buffers = buffers;
      EXPECT_EQ(difference_of_replays(subject), "");
    }
}

// So that the property above says something. (Under some drawn cuts an echo holds nothing that a loss depends on.)
TEST_F(FakeStepGraphs, what_is_compared_changes_from_step_to_step) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp"}) {
    Subject subject{.strategy = strategy};
    const std::vector<at::Tensor> losses = train(subject, 6, true).losses;
    for (size_t step = 1; step < losses.size(); ++step) EXPECT_FALSE(at::equal(losses[step], losses[step - 1])) << strategy;
  }
}

TEST_F(FakeStepGraphs, gradients_of_a_replay_are_checked_before_the_update) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"}) {
    Training training({.strategy = strategy, .microbatches = 2});
    StepGraph graph = training.graph();
    auto step = [&, next = int64_t{0}]() mutable { graph.run(training.inputs(next)), training.update(next++); };
    for (int64_t i = 0; i < kWarmUp + 2; ++i) step();
    ASSERT_TRUE(graph.is_captured());
    training.sharded().main_parameters()[0].data.fill_(NAN);
    training.sharded().main_parameters_changed();
    expect_error(step, {"rank 0, step 5", "the gradient of", "is NaN or infinite at element 0"});
  }
}

// The plan of addresses: what a graph relies on holds in steps that nobody captures for good.
TEST_F(FakeStepGraphs, each_of_three_steps_has_the_same_launches_and_collectives_on_the_same_addresses) {
  EXPECT_TRUE(rc::check("launches", [] {
    Subject subject = drawn_subject();
    subject.options.buffers = Buffers::freed;
    Training training(subject);
    std::vector<at::Tensor> inputs = training.inputs(0);
    for (at::Tensor& input : inputs) input = input.to(the_device());
    training.body(inputs);
    training.update(0);
    std::vector<std::vector<std::string>> launches;
    for (int64_t step = 1; step <= 3; ++step) {
      for (UnitHandle unit : training.sharded().units()) unit.reshard();  // as a StepGraph does
      const std::shared_ptr<DeviceGraph> graph = capture_graph(the_device(), [&] { training.body(inputs); });
      graph->replay();
      launches.push_back(fake_device::last_launches());
      training.sharded().zero_gradients();
      training.body(inputs);
      training.update(step);
    }
    RC_ASSERT(launches[0].size() > 20u);
    RC_ASSERT(launches[0] == launches[1]);
    RC_ASSERT(launches[0] == launches[2]);
    const auto collectives =
        std::ranges::count_if(launches[0], [](const std::string& launch) { return launch.find(" of ") != std::string::npos; });
    RC_ASSERT((collectives > 0) == (subject.replicas * subject.shards > 1));
  }));
}

TEST_F(FakeStepGraphs, a_model_whose_options_let_the_host_take_part_is_refused_by_the_options_names) {
  const auto refused = [](const std::function<void(ShardOptions&)>& set, std::initializer_list<std::string> parts) {
    Subject subject;
    set(subject.options);
    Training training(subject);
    expect_error([&] { training.graph(); }, parts);
  };
  refused([](ShardOptions& options) { options.offload = Offload::pageable; }, {"ShardOptions::offload"});
  refused([](ShardOptions& options) { options.divide_by_tokens = true; }, {"divide_by_tokens"});
  refused([](ShardOptions& options) { options.publish = Publish::at_first_use; }, {"Publish::at_first_use"});
  refused([](ShardOptions& options) { options.offload_activations = by_type<GptBlockImpl>(); },
          {"activations offloaded", "h.0"});
}

TEST_F(FakeStepGraphs, a_host_without_graphs_and_backends_that_need_the_host_are_refused_by_name) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    Mlp model(MlpOptions{.widths = {4, 4}});
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})), {});
    expect_error([&] { StepGraph(sharded, [](const auto& inputs) { return inputs; }); },
                 {"cpu has no graphs", "backend of 'world'", "use NCCL"});
  });
}

TEST_F(FakeStepGraphs, a_finishing_step_on_the_host_is_refused_by_its_name) {
  Training training{Subject()};
  training.sharded().add_finishing_step("log the norm", 50, [](Sharded&) {});
  expect_error([&] { training.graph(); }, {"finishing step 'log the norm'"});
}

TEST_F(FakeStepGraphs, a_body_that_does_what_a_graph_cannot_repeat_is_refused_by_name_and_training_goes_on) {
  expect_says(refusal_of_body([](Training&) { at::ones({1}, fake_device::options(at::kFloat)).item<float>(); }),
              {"cannot be captured", "_local_scalar_dense", "rank 0, step 2"});
  expect_says(refusal_of_body(
                  [](Training&) { LossScaler(LossScalerOptions()).scale(at::ones({1}, fake_device::options(at::kFloat))); }),
              {"LossScaler::scale", "replay would keep the scale"});
  expect_says(refusal_of_body([](Training&) { at::ones({3}).to(fake_device::device()); }), {"aten::copy_"});
  expect_says(refusal_of_body([](Training& training) { training.model()->eval(); }), {"the body changed", "is in training"});
  expect_says(refusal_of_body([](Training&) { throw Error("no more data"); }), {"cannot be captured", "no more data"});
}

TEST_F(FakeStepGraphs, inputs_that_were_refused_are_forgotten) {
  Training training{Subject()};
  StepGraph graph = training.graph(1);
  expect_error([&] { graph.run({training.inputs(0)[0], at::Tensor()}); }, {"input 1 is undefined"});
  graph.run(training.inputs(0));
  training.update(0);
}

TEST_F(FakeStepGraphs, dropout_is_refused_by_name) {
  Subject subject;
  subject.dropout = 0.1;
  Training training(subject);
  StepGraph graph = training.graph(1);
  graph.run(training.inputs(0));
  training.update(0);
  expect_error([&] { graph.run(training.inputs(1)); }, {"dropout inside of a captured step", "Set the probability to 0"});
}

TEST_F(StepGraphs, a_replay_is_refused_when_what_it_relies_on_has_changed) {
  Subject subject{.shards = device_testing::on_cuda() ? 1 : 2};
  Training training(subject);
  StepGraph graph = training.graph(1);
  int64_t step = 0;
  const auto one_step = [&] {
    graph.run(training.inputs(step));
    training.update(step++);
  };
  one_step();
  one_step();
  ASSERT_TRUE(graph.is_captured());
  expect_error(
      [&] {
        graph.run({at::zeros({kBatch, kLength + 1}, at::kLong), at::zeros({1}, at::kLong)});
      },
      {"input 0 is Long [2,6], and was Long [2,5] at first"});
  expect_error([&] { graph.run({at::zeros({1}, at::kLong)}); }, {"2 inputs were expected", "got 1"});
  training.model()->eval();
  expect_error([&] { one_step(); }, {"is in training", "forget()"});
  training.model()->train();
  training.sharded().set_gradient_sync(false);
  expect_error([&] { one_step(); }, {"are synchronized"});
  training.sharded().set_gradient_sync(true);
  graph.run(training.inputs(step));
  expect_error([&] { graph.run(training.inputs(step)); }, {"is final before the step begins", "Optimizer::step"});
  training.update(step++);
  training.model()->named_parameters()["ln_f.bias"].set_requires_grad(false);
  expect_error([&] { one_step(); }, {"whether ln_f.bias trains"});
  graph.forget();
  one_step();
  one_step();
  EXPECT_TRUE(graph.is_captured());
}

namespace {

// After three steps, of which the last is a replay.
struct Captured {
  explicit Captured(Buffers buffers) : training(make(buffers)), graph(training.graph(1)) {
    for (; step < 3; ++step) one_step();
  }
  void one_step() {
    graph.run(training.inputs(step));
    training.update(step);
  }
  static Subject make(Buffers buffers) {
    Subject subject{.low_precision = true};
    subject.options.buffers = buffers;
    return subject;
  }

  Training training;
  StepGraph graph;
  int64_t step = 0;
};

}  // namespace

TEST_F(FakeStepGraphs, replays_leave_alone_what_was_made_and_gathered_after_the_capture) {
  for (const Buffers buffers : {Buffers::freed, Buffers::pooled}) {
    Captured captured(buffers);
    Sharded& sharded = captured.training.sharded();
    Ema ema(sharded, {.decay = 0.5, .name = "average"});
    sharded.unit("h.1").unshard();
    const auto whole = [&] {
      std::vector<at::Tensor> all;
      for (const auto& parameter : captured.training.model()->named_parameters())
        if (parameter.key().starts_with("h.1.")) all.push_back(parameter.value().detach().to(at::kCPU).clone());
      return all;
    };
    const std::vector<at::Tensor> averages = kit::values_of(ema.pieces()), parameters = whole();
    captured.graph.run(captured.training.inputs(3));
    EXPECT_TRUE(kit::same_bits(kit::values_of(ema.pieces()), averages));
    EXPECT_TRUE(kit::same_bits(whole(), parameters));
    captured.training.update(3);
  }
}

TEST_F(FakeStepGraphs, a_replay_is_refused_while_somebody_has_yet_to_wait_for_a_call_of_his_own) {
  Captured captured(Buffers::freed);
  at::Tensor sum = at::ones({4}, fake_device::options(at::kFloat));
  Work work = captured.training.world().all_reduce(sum);
  expect_error([&] { captured.graph.run(captured.training.inputs(3)); },
               {"all_reduce(sum, float32 x 4) of world has not been waited for", "Call wait()", "rank 0, step 4"});
  work.wait();
  captured.graph.run(captured.training.inputs(3));
  captured.training.update(3);
}

TEST_F(FakeStepGraphs, after_a_capture_that_failed_with_gathers_and_sums_on_their_way_steps_have_their_bits) {
  for (const bool in_forward : {true, false}) {
    std::vector<float> losses;
    for (const bool fails : {false, true}) {
      Subject subject;
      subject.options.prefetch_forward = subject.options.prefetch_backward = 1;
      Training training(subject);
      StepGraph graph(training.sharded(), [&](const std::vector<at::Tensor>& inputs) {
        if (!in_forward || !is_capturing()) return training.body(inputs);
        training.sharded().unit("h.0").start_unshard();
        throw Error("no more data");
      }, {.warm_up_steps = 1});
      // Its gradient comes when those of blocks are being summed.
      training.model()->named_parameters()["wpe.weight"].register_hook([](const at::Tensor&) -> void {
        if (is_capturing()) throw Error("no more data");
      });
      graph.run(training.inputs(0));
      training.update(0);
      if (fails) expect_error([&] { graph.run(training.inputs(1)); }, {"cannot be captured", "no more data"});
      std::vector<at::Tensor> inputs = training.inputs(1);
      for (at::Tensor& input : inputs) input = input.to(the_device());
      losses.push_back(training.body(inputs)[0].to(at::kCPU).item<float>());
    }
    EXPECT_EQ(losses[0], losses[1]);
  }
}

TEST_F(FakeStepGraphs, after_a_capture_that_failed_in_its_forward_steps_have_their_bits) {
  std::vector<float> losses;
  for (const bool fails_once : {false, true}) {
    Subject subject;
    subject.options.prefetch_forward = 1;
    Training training(subject);
    bool fails = fails_once;
    StepGraph graph(training.sharded(), [&](const std::vector<at::Tensor>& inputs) {
      if (is_capturing() && std::exchange(fails, false)) {
        call(training.model(), inputs[0]);
        throw Error("no more data");
      }
      return training.body(inputs);
    }, {.warm_up_steps = 1});
    graph.run(training.inputs(0));
    training.update(0);
    if (fails_once) expect_error([&] { graph.run(training.inputs(1)); }, {"cannot be captured", "no more data"});
    std::vector<at::Tensor> inputs = training.inputs(1);
    for (at::Tensor& input : inputs) input = input.to(the_device());
    losses.push_back(training.body(inputs)[0].to(at::kCPU).item<float>());
  }
  EXPECT_EQ(losses[0], losses[1]);
}
