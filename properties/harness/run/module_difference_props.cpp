// Which module goes wrong first: planted in what healthy ranks wrote down, each difference is named.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "harness/case/problem.h"
#include "harness/run/module_difference.h"
#include "harness/run/ranks.h"
#include "properties/kit/harness_env.h"

using namespace harness;
using shardproof::ModuleCall;

namespace {

const char* const kMlp =
    "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(units=leaf,loss=sum) sgd(lr=0.1) ordered seed=3 : "
    "accumulate(2) step*2";

// A step of a case, on the ranks and unsharded.
class Traced {
 public:
  explicit Traced(const char* text, size_t step = 1) : whole_(Case::parse(text)), c_(whole_.at(step)), run_(make_run(whole_)) {
    trace_ = golden::train(run_);
    before_ = step == 0 ? run_.parameters : trace_[step - 1].parameters;
    step_ = run_.steps[step];
    traced = trace_step(whole_, run_, step, before_);
    if (step == 1) earlier_ = run_.parameters;
  }

  ModuleDifference difference() const { return module_difference(c_, step_, traced, earlier_ ? &*earlier_ : nullptr); }

  ModuleCall& of(size_t rank, size_t round, const std::string& module) {
    for (ModuleCall& call : traced.ranks[rank][round].calls)
      if (call.module == module) return call;
    throw std::out_of_range(module);
  }
  at::Tensor& parameter(size_t rank, size_t round, const std::string& module, const std::string& name) {
    for (auto& [own, value] : of(rank, round, module).parameters)
      if (own == name) return value;
    throw std::out_of_range(name);
  }
  const golden::Named& initial() const { return run_.parameters; }

  TracedStep traced;

 private:
  Case whole_, c_;
  golden::Run run_;
  golden::Trace trace_;
  golden::Named before_;
  std::optional<golden::Named> earlier_;
  golden::Step step_;
};

void expect_told(const Traced& traced, const std::string& where, const std::string& guess) {
  const ModuleDifference found = traced.difference();
  EXPECT_NE(found.where.find(where), std::string::npos) << found.where;
  EXPECT_NE(found.guess.find(guess), std::string::npos) << found.guess;
}

const char* const kNone = "every module reads and gives what it does unsharded";

}  // namespace

TEST(ModuleDifference, finds_none_where_ranks_are_right_however_they_are_cut) {
  for (const char* const text :
       {kMlp,
        "gpt(layers=2,hidden=8,heads=2,vocab=9,positions=6,dropout=0.25) mesh(dp_shard=2,tp=2) zero3(loss=sum,recompute=1) "
        "sgd(lr=0.1) fast seed=3 : step*2",
        "gpt(layers=1,hidden=8,heads=2,vocab=9,positions=6) mesh(tp=2) zero1(loss=sum,sp=1) sgd(lr=0.1) fast seed=4 : step*2",
        "llama(layers=1,hidden=8,heads=4,kv_heads=1,intermediate=6,vocab=8,positions=6,qk_norm) mesh(tp=2) zero3(loss=sum) "
        "sgd(lr=0.1) fast seed=4 : step*2",
        "llama(layers=1,hidden=8,heads=4,kv_heads=1,intermediate=6,vocab=8,positions=8) mesh(cp=2,tp=2) "
        "zero3(loss=sum,arithmetic=canonical) sgd(lr=0.1) canonical seed=4 : step*2",
        "llama(layers=2,hidden=8,heads=4,kv_heads=2,intermediate=12,vocab=8,positions=8) mesh(cp=2,tp=2) zero3(loss=sum) "
        "sgd(lr=0.1) "
        "fast seed=5 : step*2",
        "llama(layers=1,hidden=4,heads=2,kv_heads=1,intermediate=6,vocab=8,positions=8) mesh(dp_replicate=2,dp_shard=2) "
        "hsdp(loss=sum,compute=bf16,scale=1024) sgd(lr=0.1) ordered seed=5 : step*2",
        "llama(layers=1,hidden=8,heads=4,kv_heads=2,intermediate=4,vocab=10,positions=3) mesh(tp=4) "
        "zero3(loss=sum,arithmetic=canonical) sgd(lr=0.1) canonical seed=8 : step*2",
        "gpt(layers=1,hidden=4,heads=2,vocab=5,positions=4,dropout=0.5) mesh(dp_shard=2,cp=2) "
        "zero3(loss=sum,arithmetic=canonical) sgd(lr=0.1) canonical seed=8 : step*2",
        "mlp(widths=5-7-3) mesh(tp=2) zero3(loss=sum,arithmetic=canonical) sgd(lr=0.1) canonical seed=9 : step*2",
        "odd(width=4,calls=2) mesh(dp_shard=3) zero3(loss=sum,meta=1) adamw(lr=0.1) fast seed=6 : step*2",
        "conv(channels=2-3) mesh(dp_shard=2) zero2(loss=sum) sgd(lr=0.1) fast seed=7 : step*2"}) {
    const Traced traced(text);
    EXPECT_TRUE(traced.traced.model_is_right) << text;
    for (const auto& rank : traced.traced.ranks)
      for (const MicrobatchTrace& round : rank) EXPECT_GE(round.calls.size(), 2u) << text;
    expect_told(traced, kNone, "");
  }
}

TEST(ModuleDifference, looks_at_all_ranks_of_a_step_that_has_more_of_them_than_the_first) {
  const Traced traced(
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(units=leaf,loss=sum) sgd(lr=0.1) ordered seed=3 : save step "
      "load@mesh(dp_shard=5) step");
  ASSERT_EQ(traced.traced.ranks.size(), 5u);
  for (const auto& rounds : traced.traced.ranks) EXPECT_EQ(rounds.size(), 1u);
}

TEST(ModuleDifference, names_the_parameter_that_a_module_reads_wrongly_and_the_gather_before_it) {
  Traced wrong(kMlp);
  wrong.parameter(1, 1, "layers.1", "layers.1.weight")[2][3] += 1;
  expect_told(wrong, "microbatch 1: layers.1 reads another layers.1.weight in the forward on rank 1 of 2, after all_gather",
              "elements [17, 18) of layers.1.weight are wrong where the forward reads them");
  EXPECT_NE(wrong.difference().where.find("of unit 'layers.1' in 'dp_shard'"), std::string::npos) << wrong.difference().where;

  Traced stale(kMlp);
  for (const auto& [name, value] : stale.initial())
    if (name == "layers.0.weight")
      for (size_t rank = 0; rank < 2; ++rank) stale.parameter(rank, 0, "layers.0", name) = value.clone();
  expect_told(stale, "layers.0 reads another layers.0.weight in the forward on all 2 ranks",
              "the parameters of the step before");

  Traced ring(kMlp);
  at::Tensor& weight = ring.parameter(1, 0, "layers.1", "layers.1.weight");
  weight = weight.flatten().roll(-11).view(weight.sizes());
  expect_told(ring, "rank 1 of 2", "the elements that layers.1 reads are there in another order");

  Traced broken(kMlp);
  broken.parameter(1, 0, "layers.0", "layers.0.bias")[3] = NAN;
  expect_told(broken, "layers.0.bias in the forward on rank 1 of 2", "elements [3, 4) of layers.0.bias are wrong");

  Traced lost(kMlp);
  lost.parameter(0, 0, "layers.0", "layers.0.bias").zero_();
  expect_told(lost, "layers.0.bias in the forward on rank 0 of 2", "nothing was gathered");
}

TEST(ModuleDifference, tells_initial_values_and_buffers_from_what_training_made) {
  Traced built("odd(width=4) mesh(dp_shard=2) zero3(loss=sum) sgd(lr=0.1) fast seed=6 : step", 0);
  built.parameter(1, 0, "shared", "shared.bias")[0] += 1;
  expect_told(built, "shared reads another shared.bias",
              "elements [0, 1) of shared.bias are not the initial values that rank 0 has");
  built.parameter(1, 0, "", "scales")[0] += 1;
  expect_told(built, "the model reads another scales in the forward on rank 1 of 2",
              "elements [0, 1) of scales, a buffer, are not what");
}

TEST(ModuleDifference, says_that_a_load_did_not_bring_what_a_module_reads) {
  const char* const loads =
      "mlp(widths=5-7-3) mesh(dp_shard=2) zero3(units=leaf,loss=sum) sgd(lr=0.1) ordered seed=3 : step save "
      "load@mesh(dp_shard=2) step";
  Traced zeros(loads);
  zeros.parameter(1, 0, "layers.0", "layers.0.bias").zero_();
  expect_told(zeros, "layers.0 reads another layers.0.bias", "the load did not bring them back, or nothing was gathered");
  Traced built(loads);
  built.parameter(1, 0, "layers.0", "layers.0.bias").fill_(kResumedBeginning);
  expect_told(built, "layers.0 reads another layers.0.bias",
              "layers.0.bias is what the new run was built with: the load did not bring it there");
}

TEST(ModuleDifference, tells_a_wrong_input_from_a_wrong_module) {
  Traced input(kMlp);
  input.of(1, 0, "layers.1").input += 1;
  expect_told(input, "microbatch 0: layers.1 gets another input on rank 1 of 2", "between layers.0 and layers.1 goes wrong");
  input.of(0, 0, "layers.0").input += 1;
  expect_told(input, "layers.0 gets another input on rank 0", "the input of the model is wrong on its way to layers.0");
  Traced output(kMlp);
  output.of(0, 0, "layers.0").output *= 1.5;
  output.of(0, 0, "layers.1").input += 1;
  expect_told(output, "layers.0 gives another output of the same input and parameters on rank 0", "the forward of layers.0");
}

TEST(ModuleDifference, follows_the_backward_from_the_loss_and_names_a_factor) {
  Traced wrong(kMlp);
  for (size_t rank = 0; rank < 2; ++rank) wrong.of(rank, 0, "layers.0").output_gradient *= 2;
  expect_told(wrong, "layers.0 gets another gradient of its output on all 2 ranks",
              "between the outputs of layers.1 and layers.0");
  expect_told(wrong, "", "2 times what it should be: 2, the number of data-parallel ranks");
  wrong.of(1, 0, "layers.1").output_gradient.zero_();
  expect_told(wrong, "layers.1 gets another gradient of its output on rank 1 of 2", "between the loss and layers.1");
}

TEST(ModuleDifference, compares_parts_of_tensor_parallel_modules_with_the_parts_that_they_should_be) {
  const char* const text =
      "gpt(layers=1,hidden=8,heads=2,vocab=9,positions=6) mesh(tp=2) zero3(loss=sum) sgd(lr=0.1) fast seed=4 : step*2";
  Traced swapped(text);
  std::swap(swapped.parameter(0, 0, "h.0.mlp.c_fc", "h.0.mlp.c_fc.weight"),
            swapped.parameter(1, 0, "h.0.mlp.c_fc", "h.0.mlp.c_fc.weight"));
  expect_told(swapped, "h.0.mlp.c_fc reads another h.0.mlp.c_fc.weight in the forward on all 2 ranks", "");
}

TEST(ModuleDifference, tells_a_model_that_is_wrong_by_itself_from_one_that_is_sharded_wrongly) {
  Traced traced(kMlp);
  EXPECT_TRUE(traced.traced.model_is_right);
  traced.traced.model_is_right = false;
  expect_told(traced, "the unsharded model, whose gradients are wrong too", "the model itself computes something else");
}
