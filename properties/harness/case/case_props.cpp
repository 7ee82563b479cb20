// Cases as text, and the generator of cases.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "harness/case/generate.h"
#include "harness/case/mesh_order.h"
#include "harness/case/model_fields.h"
#include "properties/kit/expect_error.h"
#include "shardproof/algebra/strategy.h"

using namespace harness;
using shardproof::expect_error;

namespace {

constexpr const char* kGood = "mlp(widths=5-7-3) mesh(dp_shard=4) zero3 sgd(lr=0.1) ordered seed=3 : step";

// `kGood` with one part replaced.
std::string with(const std::string& part, const std::string& other) {
  std::string text = kGood;
  text.replace(text.find(part), part.size(), other);
  return text;
}

// Expects an error at the column where `marked` begins in the text, with a caret below it.
void expect_column(const std::string& text, const std::string& marked, const std::string& expected) {
  const size_t column = text.find(marked);
  ASSERT_NE(column, std::string::npos) << text;
  expect_error([&] { Case::parse(text); }, {"[case] column " + std::to_string(column + 1) + ": ", expected,
                                            "\n  " + text + "\n  " + std::string(column, ' ') + "^"});
}

}  // namespace

RC_GTEST_PROP(Case, text_of_a_case_reads_back_as_the_same_case, ()) {
  Limits limits;
  limits.world_max = *rc::gen::inRange<int64_t>(1, 1025);
  const Case c = generate(*rc::gen::arbitrary<uint64_t>(), *rc::gen::inRange<int64_t>(0, 1'000'000), limits);
  RC_ASSERT(Case::parse(c.str()) == c);
}

RC_GTEST_PROP(Case, numbers_read_back_exactly, (double lr, double clip)) {
  Case c = Case::parse(kGood);
  c.optimizer.lr = std::abs(lr);
  c.clip_norm = std::abs(clip);
  const Case read = Case::parse(c.str());
  RC_ASSERT(read.optimizer.lr == c.optimizer.lr);
  RC_ASSERT(read.clip_norm == c.clip_norm);
}

TEST(Case, every_field_is_in_the_text) {
  const Case base = Case::parse(
      "gpt(layers=2,hidden=6,heads=3,vocab=7,positions=5) mesh(dp_replicate=2,dp_shard=2) zero1 adamw(lr=0.1) "
      "ordered seed=1 : step*2 accumulate(3) step");
  std::vector<std::function<void(Case&)>> changes = {
      [](Case& c) { c.model.gpt.layers = 1; },
      [](Case& c) { c.model.gpt.hidden = 9; },
      [](Case& c) { c.model.gpt.heads = 2; },
      [](Case& c) { c.model.gpt.vocab = 8; },
      [](Case& c) { c.model.gpt.positions = 4; },
      [](Case& c) { c.model.gpt.tied = true; },
      [](Case& c) { c.model.gpt.dropout = 0.5; },
      [](Case& c) { c.mesh = shardproof::Mesh({{"dp_shard", 3}}); },
      [](Case& c) { c.strategy = "zero2"; },
      [](Case& c) { c.optimizer.lr = 0.25; },
      [](Case& c) { c.optimizer.beta1 = 0.5; },
      [](Case& c) { c.optimizer.beta2 = 0.5; },
      [](Case& c) { c.optimizer.eps = 1; },
      [](Case& c) { c.optimizer.weight_decay = 1; },
      [](Case& c) { c.optimizer.kind = golden::Optimizer::Kind::lion; },
      [](Case& c) { c.groups = 1; },
      [](Case& c) { c.norm_order = 0; },
      [](Case& c) { c.clip_norm = 1; },
      [](Case& c) { c.mode = Mode::fast; },
      [](Case& c) { c.seed = 2; },
      [](Case& c) { c.steps.pop_back(); },
      [](Case& c) { c.steps[0].rounds = 2; },
      [](Case& c) { c.steps[1].sync_every = 2; },
      [](Case& c) { c.steps[1].frozen = 2; },
      [](Case& c) { c.steps[1].lr_percent = 2; },
      [](Case& c) { c.steps[1].eval = true; },
      [](Case& c) { c.steps[1].discard = true; },
      [](Case& c) { c.steps[1].unshard = true; },
      [](Case& c) { c.steps[1].save = true; },
      [](Case& c) { c.steps[1].crash = true; },
      [](Case& c) { c.steps[1].load_strategy = "zero2"; },
      [](Case& c) { c.steps[1].load_mesh = shardproof::Mesh({{"dp_shard", 3}}); }};
  for (const OptionRow& row : option_rows()) changes.push_back([&row](Case& c) { row.of(c.options) = row.others.front(); });
  std::set<std::string> texts = {base.str()};
  for (const auto& change : changes) {
    Case c = base;
    change(c);
    EXPECT_TRUE(texts.insert(c.str()).second) << "not in the text: " << c.str();
  }
}

TEST(Case, every_field_of_a_llama_is_in_the_text) {
  const Case base = Case::parse(
      "llama(layers=2,hidden=24,heads=6,kv_heads=2,intermediate=7,vocab=9,positions=5) mesh(dp_shard=2,tp=2) zero1 sgd(lr=0.1) "
      "fast seed=1 : step");
  EXPECT_EQ(Case::parse(base.str()), base);
  std::set<std::string> texts = {base.str()};
  using golden::Llama;
  for (int64_t Llama::* size : {&Llama::layers, &Llama::hidden, &Llama::heads, &Llama::kv_heads, &Llama::intermediate,
                                &Llama::vocab, &Llama::positions}) {
    Case c = base;
    c.model.llama.*size *= 2;
    EXPECT_TRUE(texts.insert(c.str()).second) << "not in the text: " << c.str();
  }
  Case tied = base, dropped = base, normed = base, biased = base, wide = base;
  tied.model.llama.tied = true;
  dropped.model.llama.dropout = 0.25;
  normed.model.llama.qk_norm = true;
  biased.model.llama.qkv_bias = true;
  wide.model.llama.head_size = 10;
  Case windowed = base, packed = base;
  windowed.model.llama.window = 3;
  Case mixed = windowed;
  mixed.model.llama.full_layers = 1;
  packed.model.llama.document_end = 0;
  for (const Case& c : {tied, dropped, normed, biased, wide, windowed, mixed, packed}) {
    EXPECT_TRUE(texts.insert(c.str()).second) << "not in the text: " << c.str();
    EXPECT_EQ(Case::parse(c.str()), c);
  }
}

constexpr const char* kExperts =
    "llama(layers=2,hidden=8,heads=2,kv_heads=1,intermediate=7,vocab=9,positions=5,experts=6,top_k=2,expert_groups=3,"
    "groups_per_token=2) mesh(dp_shard=2) zero1 sgd(lr=0.1) ordered seed=1 : step";

namespace {

// What stands behind `mark` in the texts of the valid models that are simpler than the case's by one field.
std::set<std::string> simpler_models(const Case& base, const std::string& mark) {
  std::set<std::string> rests;
  for (const ModelField& field : model_fields(base.model.kind))
    for (const golden::Model& model : field.simpler(base.model)) {
      Case c = base;
      c.model = model;
      const std::string text = str(model);
      if (is_valid(c)) rests.insert(text.substr(text.find(mark) + mark.size()));
    }
  return rests;
}

}  // namespace

TEST(Case, every_field_of_experts_is_in_the_text_and_has_simpler_values) {
  const Case base = Case::parse(kExperts);
  EXPECT_EQ(base.str(), kExperts);
  using golden::Llama;
  const std::vector<std::function<void(Llama&)>> changes = {[](Llama& m) { m.experts = 9; },
                                                            [](Llama& m) { m.experts_per_token = 3; },
                                                            [](Llama& m) { m.expert_width = 5; },
                                                            [](Llama& m) { m.shared_width = 3; },
                                                            [](Llama& m) { m.expert_balance = 0.5; },
                                                            [](Llama& m) { m.expert_z = 0.25; },
                                                            [](Llama& m) { m.expert_bias = 0.125; },
                                                            [](Llama& m) { m.expert_lean = 0.125; },
                                                            [](Llama& m) { m.expert_capacity = 1.25; },
                                                            [](Llama& m) { m.dense_layers = 1; },
                                                            [](Llama& m) { m.score = Llama::Score::chosen_softmax; },
                                                            [](Llama& m) { m.score = Llama::Score::sigmoid; },
                                                            [](Llama& m) { m.normalized = false; },
                                                            [](Llama& m) { m.expert_scale = 2.5; },
                                                            [](Llama& m) { m.expert_groups = 2; },
                                                            [](Llama& m) { m.groups_per_token = 3; }};
  std::set<std::string> texts = {base.str()};
  for (const auto& change : changes) {
    Case c = base;
    change(c.model.llama);
    EXPECT_TRUE(texts.insert(c.str()).second) << "not in the text: " << c.str();
    EXPECT_EQ(Case::parse(c.str()), c);
  }
  const std::set<std::string> simpler = simpler_models(base, "positions=5");
  for (const char* rest : {")", ",experts=3,top_k=2,expert_groups=3,groups_per_token=2)", ",experts=5,top_k=2)",
                           ",experts=6,expert_groups=3,groups_per_token=2)", ",experts=6,top_k=2)",
                           ",experts=6,top_k=2,expert_groups=3)", ",experts=6,top_k=2,expert_groups=2,groups_per_token=2)"})
    EXPECT_TRUE(simpler.contains(rest)) << rest;
}

TEST(Case, every_field_of_latent_attention_is_in_the_text_and_without_it_none_is) {
  const char* text =
      "llama(layers=1,hidden=8,heads=2,kv_heads=2,intermediate=7,vocab=9,positions=5,rope_factor=8,rope_yarn,rope_mscale=0.5,"
      "rotary_size=2,kv_rank=3,query_rank=4,value_size=1,interleaved) mesh(dp_shard=2) zero1 sgd(lr=0.1) ordered seed=1 : step";
  const Case base = Case::parse(text);
  EXPECT_EQ(base.str(), text);
  const std::set<std::string> simpler = simpler_models(base, "rope_factor=8");
  EXPECT_TRUE(simpler.contains(")")) << "latent attention stays";
  const std::string rest = ",rope_yarn,rope_mscale=0.5,rotary_size=2,kv_rank=3,";
  EXPECT_TRUE(simpler.contains(rest + "value_size=1,interleaved)"));
  EXPECT_TRUE(simpler.contains(rest + "query_rank=4,interleaved)"));
  EXPECT_TRUE(simpler.contains(rest + "query_rank=4,value_size=1)"));
  const auto refused = [](const std::string& fields, std::initializer_list<std::string> words) {
    expect_error(
        [&] {
          Case::parse("llama(layers=1,hidden=8,heads=2,kv_heads=2," + fields +
                      ") mesh(dp_shard=2) zero1 sgd(lr=0.1) ordered seed=1 : step");
        },
        words);
  };
  refused("rotary_size=3", {"rotary_size=3 must be even and at most the 4 features"});
  refused("query_rank=3", {"query_rank=3", "are of latent attention"});
  refused("rope_mscale=1", {"rope_mscale=1", "is of rope_yarn"});
  refused("kv_rank=3", {"rotary_size=4 below the 4 features"});
  refused("kv_rank=3,rotary_size=2,qk_norm", {"neither qk_norm nor qkv_bias"});
  refused("kv_rank=3,rotary_size=2,value_size=5", {"value_size=5 at most the 4 features"});
}

TEST(Case, what_equals_its_default_is_left_out) {
  const Case c = Case::parse(
      "mlp(widths=5-7-3,act=tanh,bias) mesh(dp_shard=4) zero3(units=block,bucket_bytes_max=0,reshard=1,alignment_bytes=512) "
      "sgd(lr=0.1,momentum=0,clip=0) ordered seed=3 : accumulate(1) step step*2");
  EXPECT_EQ(c.str(), "mlp(widths=5-7-3) mesh(dp_shard=4) zero3 sgd(lr=0.1) ordered seed=3 : step*3");
}

TEST(Case, rounds_hold_until_they_change) {
  const Case c = Case::parse(with(": step", ": step*2 accumulate(3) step accumulate(1) step*2"));
  std::vector<int64_t> rounds;
  for (const StepPlan& step : c.steps) rounds.push_back(step.rounds);
  EXPECT_EQ(rounds, (std::vector<int64_t>{1, 1, 3, 1, 1}));
}

TEST(Case, words_for_the_next_step_hold_for_that_step) {
  const Case c = Case::parse(with(": step", ": eval discard step step sync(2) unshard step freeze(3) lr(50) step"));
  const std::vector<StepPlan> expected = {{.eval = true, .discard = true},
                                          {},
                                          {.sync_every = 2, .unshard = true},
                                          {.sync_every = 2, .frozen = 3, .lr_percent = 50}};
  EXPECT_EQ(c.steps, expected);
}

TEST(Case, a_load_goes_on_elsewhere_from_the_last_save) {
  const Case c = Case::parse(with(": step", ": save step crash-during-save load@mesh(dp_shard=3) step*2 "
                                            "load@strategy(ddp) load@mesh(dp_shard=2) save step"));
  EXPECT_EQ(Case::parse(c.str()), c);
  EXPECT_EQ(c.at(0).mesh, c.mesh);
  EXPECT_EQ(c.at(2).mesh.str(), "dp_shard=3");
  EXPECT_EQ(c.at(2).strategy, c.strategy);
  EXPECT_EQ(c.at(3).strategy + c.at(3).mesh.str(), "ddpdp_shard=2");
  EXPECT_EQ(c.loaded_after(1), -1);
  EXPECT_EQ(c.loaded_after(3), 2);  // a save comes before the load that follows it in the same step
  EXPECT_TRUE(c.steps[1].crash && c.steps[3].save && !c.steps[2].loads());
  expect_error([] { Case::parse(with(": step", ": step load@mesh(dp_shard=2) step")); }, {"needs a save before it"});
  expect_column(with(": step", ": save load@world(2) step"), "world", "mesh(...) or strategy(...)");
  expect_column(with(": step", ": save load@strategy(zero9) step"), "zero9", "a strategy");
  expect_column(with(": step", ": crash step"), " step", "'-'");
}

TEST(Case, malformed_text_is_shown_with_its_column) {
  expect_column(with("mlp", "mpl"), "mpl", "gpt(...), llama(...), mlp(...), conv(...) or odd(...)");
  expect_column(with("5-7-3", "5-x-3"), "x-3", "an integer");
  expect_column(with("5-7-3)", "5-7-3,act=sin)"), "sin", "act=identity|relu|tanh|gelu");
  expect_column(with("5-7-3)", "5-7-3,depth=3)"), "depth", "widths, act, bias");
  expect_column(with("5-7-3)", "5-7-3,bias,bias)"), "bias)", "'bias' once only");
  expect_column(with("5-7-3)", "5-7-3"), " mesh", "')'");
  expect_column(with("mesh", "mash"), "mash", "mesh(axis=size,...)");
  expect_column(with("dp_shard=4", "dp_shard=0"), "mesh", "size");
  expect_column(with("zero3", "zero4"), "zero4", "ddp, zero1, zero2, zero3");
  expect_column(with("zero3", "zero3(reshard=x)"), "x) sgd", "reshard=INTEGER");
  expect_column(with("zero3", "zero3(loss=most)"), "most", "loss=mean|sum|tokens");
  expect_column(with("zero3", "zero3(speed=1)"), "speed", "units, bucket");
  expect_column(with("lr=0.1", "lr=fast"), "fast", "lr=NUMBER");
  expect_column(with("lr=0.1", "lr=0.1,beta1=0.5"), "beta1", "lr, momentum, nesterov, decay, groups, clip, norm");
  expect_column(with("ordered", "orderly"), "orderly", "exact, ordered, canonical or fast");
  expect_column(with("seed=3", "seed=x"), "x :", "a number");
  expect_column(with(" : step", " step"), "step", "':'");
  expect_column(with(": step", ": stop"), "stop", "step, step*N, accumulate(N)");
  expect_column(with(": step", ": step*0"), "step*0", "steps");
  expect_column(with(": step", ": accumulate(0) step"), "0) step", "rounds");
  expect_error([] { Case::parse(""); }, {"[case] column 1: expected a model"});
  expect_error([] { Case::parse(with(" : step", " :")); }, {"no step"});
}

TEST(Case, what_cannot_run_is_refused) {
  const auto refused = [](const std::string& text, std::initializer_list<std::string> parts) {
    expect_error([&] { Case::parse(text); }, parts);
  };
  refused("gpt(hidden=10,heads=3) mesh(dp_shard=1) ddp sgd(lr=1) ordered seed=1 : step", {"hidden=10", "heads=3", "divisible"});
  refused(with("dp_shard=4", "ep=4"), {"axis 'ep'", "dp_shard"});
  refused("mlp(widths=3-3) mesh(dp_shard=4,dp_replicate=2) ddp sgd(lr=1) ordered seed=1 : step",
          {"dp_shard=4,dp_replicate=2", "ddp sums gradients along both axes at once", "Let dp_replicate come first"});
  for (const char* mesh : {"dp_shard=4,dp_replicate=2", "dp_replicate=3,tp=2,dp_shard=4"})
    refused("mlp(widths=3-3) mesh(" + std::string(mesh) + ") zero3(unit_mesh=1) sgd(lr=1) fast seed=1 : step",
            {mesh, "dp_replicate, if it is there, has to stand directly before dp_shard"});
  refused(with("dp_shard=4", "dp_shard=4,tp=2"), {"tp=2", "exact", "fast"});
  refused("gpt(hidden=8,heads=2) mesh(dp_shard=1,tp=3) ddp sgd(lr=1) fast seed=1 : step", {"heads=2", "tp=3"});
  refused("gpt(hidden=9,heads=3,positions=4) mesh(dp_shard=1,tp=3) ddp(sp=1) sgd(lr=1) fast seed=1 : step", {"positions=4"});
  refused("mlp(widths=3-3) mesh(dp_shard=1,tp=3) ddp(sp=1) sgd(lr=1) fast seed=1 : step", {"sp", "gpt"});
  refused("mlp(widths=3-3) mesh(dp_shard=1,tp=3) ddp(etp=1) sgd(lr=1) fast seed=1 : step", {"etp", "experts=4"});
  refused("mlp(widths=3-3) mesh(dp_shard=3) ddp(overlap_pieces=2) sgd(lr=1) fast seed=1 : step", {"overlap_pieces", "tp"});
  refused("mlp(widths=3-3) mesh(dp_shard=1,tp=3) ddp(overlap_pieces=0) sgd(lr=1) fast seed=1 : step", {"overlap_pieces=0"});
  const std::string llama =
      "llama(hidden=24,heads=6,kv_heads=3,intermediate=8) mesh(dp_shard=1,tp=3) ddp sgd(lr=1) fast seed=1 : step";
  EXPECT_NO_THROW(Case::parse(llama));
  const auto another = [&](const char* part, const char* other) {
    return std::string(llama).replace(llama.find(part), strlen(part), other);
  };
  refused(another("kv_heads=3", "kv_heads=2"), {"kv_heads=2", "tp=3"});
  refused(another("tp=3", "tp=4"), {"kv_heads=3", "tp=4"});
  refused(another("intermediate=8", "intermediate=2"), {"intermediate=2", "tp=3"});
  refused(another("hidden=24", "hidden=30"), {"hidden=30", "twice heads=6"});
  refused(another("intermediate=8", "intermediate=8,dropout=1"), {"dropout=1"});
  refused(another("ddp", "ddp(compute=bf16,reduce=bf16)"), {"reduce", "ordered"});
  EXPECT_NO_THROW(Case::parse(another("ddp", "ddp(compute=bf16)")));
  refused(with("zero3", "hsdp"), {"hsdp", "dp_replicate"});
  refused(with("zero3", "zero3(reshard=3)"), {"reshard=3", "dp_shard x cp=4"});
  refused(with("sgd(lr=0.1)", "muon(lr=0.1)"), {"granularity=tensor"});
  refused(with("ordered", "canonical"), {"loss=sum or loss=tokens"});
  refused("conv(channels=1-2,kernel=2) mesh(dp_shard=1) ddp sgd(lr=1) ordered seed=1 : step", {"kernel must be odd"});
  refused(with("dp_shard=4", "dp_shard=1025"), {"1025 ranks", "at most 1024"});
  refused(with("zero3", "zero3(alignment_bytes=100)"), {"alignment_bytes=100", "power of two"});
  refused(with("lr=0.1", "lr=-1"), {"lr=-1"});
  refused(with("sgd(lr=0.1)", "adamw(lr=0.1,beta2=1)"), {"beta2=1"});
  refused(with("5-7-3", "5"), {"two widths"});
  refused(with("ordered", "exact"), {"exact", "act=identity or act=relu"});
}

TEST(Case, experts_that_cannot_run_are_refused) {
  const auto refused = [](const char* part, const char* other, std::initializer_list<std::string> parts) {
    const std::string text = std::string(kExperts).replace(std::string(kExperts).find(part), strlen(part), other);
    expect_error([&] { Case::parse(text); }, parts);
  };
  refused("experts=6,", "window=-1,experts=6,", {"window=-1"});
  refused("experts=6,", "full_layers=1,experts=6,", {"full_layers=1", "without a window every layer is full"});
  refused("experts=6,", "document_end=9,experts=6,", {"document_end=9", "one of the vocab=9 tokens"});
  refused("experts=6,", "experts=5,", {"expert_groups=3", "experts=5"});
  refused("experts=6,", "experts=-1,", {"experts"});
  refused("experts=6,", "", {"without experts", "experts=4"});
  refused("top_k=2", "top_k=5", {"top_k=5", "at most the 4 experts"});
  refused("top_k=2", "top_k=0", {"top_k", "at least 1"});
  refused("top_k=2", "top_k=2,expert_width=0", {"expert_width"});
  refused("top_k=2", "top_k=2,shared_width=-1", {"shared_width=-1"});
  refused("top_k=2", "top_k=2,dense_layers=2", {"dense_layers=2", "layers=2"});
  refused("top_k=2", "top_k=2,dense_layers=-1", {"dense_layers=-1"});
  refused("top_k=2", "top_k=2,score=linear", {"score=softmax|chosen_softmax|sigmoid"});
  refused("top_k=2", "top_k=2,expert_scale=0", {"expert_scale=0"});
  refused("groups_per_token=2", "groups_per_token=4", {"groups_per_token=4"});
  refused("top_k=2", "top_k=2,expert_balance=-1", {"expert_balance=-1"});
  refused("top_k=2", "top_k=2,expert_capacity=-1", {"expert_capacity=-1"});
  expect_error(
      [] { Case::parse("llama(experts=2,expert_capacity=1) mesh(dp_shard=2,cp=2) zero1 sgd(lr=0.1) fast seed=1 : step"); },
      {"expert_capacity=1", "the mesh axis cp cuts"});
  expect_error(
      [] {
        Case::parse(
            "llama(experts=2,expert_balance=0.5,expert_balance_over=step) mesh(dp_shard=2) zero1 sgd(lr=0.1) fast seed=1 "
            ": accumulate(2) step");
      },
      {"expert_balance_over=step", "leave out accumulate(2)"});
}

TEST(Generate, every_case_is_valid_and_a_function_of_seed_and_index) {
  std::set<std::string> texts;
  for (int64_t i = 0; i < 2000; ++i) {
    const Case c = generate(7, i, {});
    EXPECT_NO_THROW(validate(c)) << c.str();
    EXPECT_TRUE(c == generate(7, i, {}));
    texts.insert(c.str());
  }
  EXPECT_GT(texts.size(), 1990u) << "cases repeat";
  EXPECT_FALSE(generate(7, 0, {}) == generate(8, 0, {}));
}

TEST(Generate, limits_hold) {
  for (int64_t i = 0; i < 300; ++i) {
    EXPECT_EQ(generate(1, i, {.strategy = "zero2"}).strategy, "zero2");
    EXPECT_LE(generate(1, i, {.world_max = 3}).mesh.size(), 3);
    EXPECT_EQ(generate(1, i, {.mesh = shardproof::Mesh({{"dp_shard", 6}})}).mesh.size(), 6);
    EXPECT_EQ(generate(1, i, {.mode = Mode::exact}).mode, Mode::exact);
    const Case tiny = generate(1, i, {.tiny = true});
    EXPECT_EQ(tiny.mesh.str() + " " + tiny.strategy, "dp_shard=4 zero3");
    EXPECT_EQ(tiny.steps.size(), 3u);
    EXPECT_LE(tiny.model.mlp.widths.size(), 5u);
  }
}

TEST(Generate, capacities_of_experts_are_drawn_and_not_where_a_tolerance_judges) {
  int drawn = 0;
  for (int64_t i = 0; i < 3000; ++i) {
    const Case c = generate(5, i, {});
    if (c.model.llama.expert_capacity == 0) continue;
    ++drawn;
    EXPECT_NE(c.mode, Mode::fast) << c.str();
  }
  EXPECT_GE(drawn, 15);
}

// Shares in percent that no feature may fall below: nobody should believe in cases that are never drawn.
TEST(Generate, no_feature_is_rare) {
  std::map<std::string, int> counts;
  constexpr int kCases = 4000;
  for (int64_t i = 0; i < kCases; ++i) {
    const Case c = generate(3, i, {});
    ++counts[std::string("mode ") + to_string(c.mode)];
    const auto& table = shardproof::strategies();
    const bool named = std::any_of(table.begin(), table.end(), [&](const auto& row) { return row.name == c.strategy; });
    ++counts[named ? "strategy " + c.strategy : "strategy that is a row without a name"];
    ++counts[std::string("model ") + to_string(c.model.kind)];
    ++counts[std::string("optimizer ") + to_string(c.optimizer.kind)];
    counts["mesh of two axes"] += c.mesh.axes().size() == 2;
    counts["axes in another order"] += !is_in_usual_order(c.mesh);
    counts["momentum"] += c.optimizer.momentum != 0;
    counts["decay"] += c.optimizer.weight_decay != 0;
    counts["groups"] += c.groups != 0;
    counts["dropout"] += c.model.dropout() > 0;
    counts["experts"] += c.model.kind == golden::Model::Kind::llama && c.model.llama.experts > 0;
    const bool parallel = c.microbatch_ranks() > 1;
    counts["dropout with tp or cp"] += c.model.dropout() > 0 && parallel;
    counts["low precision with tp or cp"] += c.options.compute != fp32 && parallel;
    counts["key heads fewer than tp"] +=
        c.model.kind == golden::Model::Kind::llama && c.model.llama.kv_heads < c.tensor_ranks();
    counts["clip"] += c.clip_norm > 0;
    counts["another norm"] += c.norm_order != 2;
    const auto any = [&](const char* name, const auto& has) {
      counts[name] += std::any_of(c.steps.begin(), c.steps.end(), has);
    };
    any("three rounds or more", [](const StepPlan& step) { return step.rounds >= 3; });
    any("no_sync", [](const StepPlan& step) { return step.sync_every > 1 && step.rounds > 1; });
    any("frozen", [](const StepPlan& step) { return step.frozen != 0; });
    any("rate", [](const StepPlan& step) { return step.lr_percent != 100; });
    any("eval", [](const StepPlan& step) { return step.eval; });
    any("discard", [](const StepPlan& step) { return step.discard; });
    any("unshard", [](const StepPlan& step) { return step.unshard; });
    any("save", [](const StepPlan& step) { return step.save; });
    any("crash", [](const StepPlan& step) { return step.crash; });
    any("load@mesh", [](const StepPlan& step) { return step.load_mesh.has_value(); });
    any("load@strategy", [](const StepPlan& step) { return !step.load_strategy.empty(); });
    counts["three steps or more"] += c.steps.size() >= 3;
    for (const OptionRow& row : option_rows())
      counts[std::string("option ") + row.key] += row.of(c.options) != row.of(CaseOptions{});
  }
  const size_t of_strategies = shardproof::strategies().size() + 1;
  EXPECT_EQ(counts.size(), of_strategies + 4 + 5 + 5 + 7 + 4 + 11 + 2 + option_rows().size())
      << "a kind of case is never drawn";
  for (const auto& [feature, count] : counts) EXPECT_GE(count * 100, 2 * kCases) << feature;
}
