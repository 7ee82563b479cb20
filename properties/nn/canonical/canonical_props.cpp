// Canonical arithmetic: no cut changes a bit, and values and gradients are those of plain arithmetic.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <numeric>

#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using kit::same_bits;

namespace {

at::Tensor values(at::IntArrayRef sizes, int64_t salt) {
  const int64_t count = c10::multiply_integers(sizes);
  return (at::arange(count, at::kDouble) * 0.731 + static_cast<double>(salt)).sin().view(sizes);
}

using Operation = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// The output and the gradient of every input, for a fixed gradient of the output.
std::vector<at::Tensor> passes(const Operation& f, std::vector<at::Tensor> inputs) {
  for (at::Tensor& x : inputs) x = x.detach().clone().set_requires_grad(true);
  const at::Tensor y = f(inputs);
  std::vector<at::Tensor> results = torch::autograd::grad({y}, inputs, {values(y.sizes(), 5)});
  results.push_back(y.detach());
  return results;
}

// Each of a few thousand roundings is at most 2^-41 beside the exact value.
void expect_close(const Operation& canonical, const Operation& plain, const std::vector<at::Tensor>& inputs, const char* what) {
  const auto ours = passes(canonical, inputs), theirs = passes(plain, inputs);
  for (size_t i = 0; i < ours.size(); ++i)
    EXPECT_LT((ours[i] - theirs[i]).abs().max().item<double>(), 1e-9) << what << ", result " << i;
}

TEST(Canonical, operations_and_their_gradients_are_those_of_plain_arithmetic_but_for_rounding) {
  namespace ops = canonical_ops;
  using Inputs = std::vector<at::Tensor>;
  const at::Tensor x = values({3, 5, 8}, 1), square = values({6, 8}, 2), vector = values({8}, 3);
  expect_close([](const Inputs& i) { return ops::linear(i[0], i[1], i[2], "l"); },
               [](const Inputs& i) { return at::linear(i[0], i[1], i[2]); }, {x, square, values({6}, 4)}, "linear");
  expect_close([](const Inputs& i) { return ops::layer_norm(i[0], i[1], i[2], 1e-5, "n"); },
               [](const Inputs& i) { return at::layer_norm(i[0], {8}, i[1], i[2], 1e-5); }, {x, vector, values({8}, 4)},
               "norm");
  expect_close([](const Inputs& i) { return ops::rms_norm(i[0], i[1], 1e-5, "n"); },
               [](const Inputs& i) { return i[0] * at::rsqrt(i[0].square().mean(-1, true) + 1e-5) * i[1]; }, {x, vector},
               "rms");
  expect_close([](const Inputs& i) { return ops::gelu(i[0]); }, [](const Inputs& i) { return at::gelu(i[0]); }, {x}, "gelu");
  expect_close([](const Inputs& i) { return ops::silu(i[0]); }, [](const Inputs& i) { return at::silu(i[0]); }, {x}, "silu");
  expect_close([](const Inputs& i) { return ops::tanh(i[0]); }, [](const Inputs& i) { return at::tanh(i[0]); }, {x}, "tanh");
  expect_close([](const Inputs& i) { return ops::relu(i[0]); }, [](const Inputs& i) { return at::relu(i[0]); }, {x}, "relu");
  const at::Tensor tokens = at::arange(15, at::kLong).remainder(6).view({3, 5});
  expect_close([&](const Inputs& i) { return ops::embedding(i[0], tokens, "e"); },
               [&](const Inputs& i) { return at::embedding(i[0], tokens); }, {square}, "embedding");
  expect_close(
      [&](const Inputs& i) { return ops::cross_entropy(i[0], tokens, 8); },
      [&](const Inputs& i) { return at::cross_entropy_loss(i[0].view({15, 8}), tokens.view({15}), {}, at::Reduction::Sum); },
      {x}, "cross entropy");
  const at::Tensor some = at::where(tokens.eq(2), -100, tokens);
  expect_close([&](const Inputs& i) { return ops::cross_entropy(i[0], some, 8); },
               [&](const Inputs& i) {
                 return at::cross_entropy_loss(i[0].view({15, 8}), some.view({15}), {}, at::Reduction::Sum);
               },
               {x}, "cross entropy with ignored targets");
  expect_close([&](const Inputs& i) { return ops::squared_error(i[0], x); },
               [&](const Inputs& i) { return (i[0] - x).square().sum(); }, {values({3, 5, 8}, 9)}, "squared error");
  const at::Tensor mask = values({3, 5, 8}, 6).gt(0).to(at::kDouble) * 1.25;
  expect_close([&](const Inputs& i) { return ops::dropout(i[0], mask); }, [&](const Inputs& i) { return i[0] * mask; }, {x},
               "dropout");
}

TEST(Canonical, attention_is_that_of_plain_arithmetic_with_grouped_heads_too) {
  const std::vector<at::Tensor> inputs = {values({2, 4, 5, 3}, 1), values({2, 2, 5, 3}, 2), values({2, 2, 5, 3}, 3)};
  for (const bool causal : {true, false})
    expect_close([&](const auto& i) { return canonical_ops::attention(i[0], i[1], i[2], {0, 1, 2, 3, 4}, causal, "a"); },
                 [&](const auto& i) {
                   return at::scaled_dot_product_attention(i[0], i[1].repeat_interleave(2, 1), i[2].repeat_interleave(2, 1), {},
                                                           0.0, causal);
                 },
                 inputs, "attention");
}

// A core takes some heads at a time, or one of several that share a head of keys, where all their scores are more than 2^16.
// Half of the queries to one head of keys are few enough to be taken at once.
TEST(Canonical, attention_has_the_same_bits_however_many_heads_a_core_takes_at_a_time) {
  struct Case {
    int64_t heads, kv_heads, length;
    bool causal = true, masked = false, documents = false;
  };
  for (const auto& [heads, kv_heads, length, causal, masked, documents] :
       {Case{6, 3, 140}, Case{6, 3, 200}, Case{4, 1, 150}, Case{5, 5, 130, false, true}, Case{6, 3, 140, true, true},
        Case{6, 3, 140, true, false, true}}) {
    const int64_t served = heads / kv_heads, half = length / 2;
    const at::Tensor q = values({2, heads, length, 4}, 1), k = values({2, kv_heads, length, 4}, 2),
                     v = values({2, kv_heads, length, 4}, 3), dy = values(q.sizes(), 4);
    const at::Tensor mask = masked ? values({2, heads, length, length}, 5).gt(0).to(at::kDouble) * 2 : at::Tensor();
    // Of all samples, heads and queries, or of those of one head of keys: the gradients and the output.
    struct Part {
      int64_t sample, samples, key, keys, query, queries;
    };
    const auto run = [&](const Part& p) {
      const auto cut = [&](const at::Tensor& x, int64_t each) {
        return x.narrow(0, p.sample, p.samples).narrow(1, p.key * each, p.keys * each);
      };
      const auto of_queries = [&](const at::Tensor& x) { return cut(x, served).narrow(2, p.query, p.queries).contiguous(); };
      std::vector<at::Tensor> in = {of_queries(q), cut(k, 1).contiguous(), cut(v, 1).contiguous()};
      for (at::Tensor& x : in) x.set_requires_grad(true);
      std::vector<int64_t> positions(static_cast<size_t>(p.queries));
      std::iota(positions.begin(), positions.end(), p.query);
      AttentionSight sight(causal, documents ? 50 : 0);
      // Others in each sample.
      const at::Tensor numbers = at::arange(2 * length, at::kLong).view({2, length}).div(60, "floor");
      if (documents) sight.documents = numbers.narrow(0, p.sample, p.samples);
      const at::Tensor y =
          canonical_ops::attention(in[0], in[1], in[2], positions, causal, "a", mask.defined() ? of_queries(mask) : mask,
                                   sight.hidden_besides(positions, whole_rows(length).rows, length, at::kCPU));
      std::vector<at::Tensor> results = torch::autograd::grad({y}, in, {of_queries(dy)});
      results.push_back(y.detach());
      return results;
    };
    const std::vector<at::Tensor> all = run({0, 2, 0, kv_heads, 0, length});
    for (int64_t sample = 0; sample < 2; ++sample)
      for (int64_t key = 0; key < kv_heads; ++key) {
        const auto first = run({sample, 1, key, 1, 0, half}), second = run({sample, 1, key, 1, half, length - half});
        const std::vector<at::Tensor> alone = {at::cat({first[0], second[0]}, 2), first[1] + second[1], first[2] + second[2],
                                               at::cat({first[3], second[3]}, 2)};
        for (size_t i = 0; i < alone.size(); ++i) {
          const int64_t each = alone[i].size(1);
          EXPECT_TRUE(same_bits(all[i].narrow(0, sample, 1).narrow(1, key * each, each).contiguous(), alone[i]))
              << heads << " heads, " << kv_heads << " of keys, length " << length << ", result " << i;
        }
      }
  }
}

TEST(Canonical, queries_may_come_in_any_order) {
  constexpr int64_t kLength = 40;  // several tiles of products
  const at::Tensor q = values({1, 2, kLength, 3}, 1), k = values({1, 2, kLength, 3}, 2), v = values({1, 2, kLength, 3}, 3);
  std::vector<int64_t> sorted, order;
  for (int64_t i = 0; i < kLength; ++i) sorted.push_back(i), order.push_back(i * 7 % kLength);
  const at::Tensor places = at::tensor(order, at::kLong), back = at::argsort(places);
  const auto of = [](const at::Tensor& q, const auto& i, const std::vector<int64_t>& positions) {
    return canonical_ops::attention(q, i[1], i[2], positions, /*causal=*/true, "a");
  };
  const auto ascending = passes([&](const auto& i) { return of(i[0], i, sorted); }, {q, k, v});
  const auto any =
      passes([&](const auto& i) { return of(i[0].index_select(2, places), i, order).index_select(2, back); }, {q, k, v});
  for (size_t i = 0; i < any.size(); ++i) EXPECT_TRUE(same_bits(ascending[i], any[i])) << "result " << i;
}

TEST(Canonical, attention_with_dropout_is_that_of_plain_arithmetic) {
  const at::Tensor mask = values({2, 4, 5, 5}, 7).gt(-0.3).to(at::kDouble) * 1.25;
  expect_close([&](const auto& i) { return canonical_ops::attention(i[0], i[1], i[2], {0, 1, 2, 3, 4}, true, "a", mask); },
               [&](const auto& i) {
                 const at::Tensor scores = at::matmul(i[0], i[1].transpose(2, 3)) / std::sqrt(3.0);
                 const at::Tensor hidden = at::ones({5, 5}, at::kBool).triu(1);
                 return at::matmul(at::softmax(scores.masked_fill(hidden, -INFINITY), -1) * mask, i[2]);
               },
               {values({2, 4, 5, 3}, 1), values({2, 4, 5, 3}, 2), values({2, 4, 5, 3}, 3)}, "attention with dropout");
}

// Output and gradients of attention over a sequence that is dealt out, put together again.
struct Dealt {
  int64_t ranks, length;
  AttentionSight sight;
  bool drops;
  decltype(&canonical_ring_attention) attention;
  ContextSplit split;
};

std::vector<at::Tensor> attended(const Dealt& d) {
  const at::Tensor q = values({2, 4, d.length, 3}, 1), k = values({2, 2, d.length, 3}, 2), v = values({2, 2, d.length, 3}, 3);
  const at::Tensor dy = values(q.sizes(), 4);
  const DimCut cut = context_cut(d.split, d.length, d.ranks);
  std::vector<at::Tensor> results;
  run_threads(d.ranks, [&](std::shared_ptr<Comm> comm) {
    std::vector<at::Tensor> own;
    for (const at::Tensor& x : {q, k, v}) own.push_back(context_piece(x, 2, cut, comm->rank()).set_requires_grad(true));
    std::optional<AttentionDropout> dropout;
    if (d.drops) dropout = AttentionDropout{{.key = 7, .probability = 0.25}, whole_rows(2), whole_rows(4)};
    const at::Tensor y = d.attention(own[0], own[1], own[2], cut, d.sight, dropout, "a", *comm);
    y.backward(context_piece(dy, 2, cut, comm->rank()));
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> whole;
    for (const at::Tensor& x : {y, own[0].grad(), own[1].grad(), own[2].grad()})
      whole.push_back(context_gather(x, 2, cut, *comm));
    if (comm->rank() == 0) results = whole;
  });
  return results;
}

// All keys, those before a query, those of a window, and those of a query's document.
std::vector<AttentionSight> sights(int64_t length) {
  std::vector<AttentionSight> all = {false, true, AttentionSight(true, 3), true};
  const at::Tensor numbers = at::arange(2 * length, at::kLong).view({2, length});
  all.back().documents = at::stack({numbers[0].div(3, "floor"), numbers[1].div(5, "floor")});
  return all;
}

TEST(Canonical, a_ring_a_gather_and_an_exchange_of_heads_give_the_bits_of_the_whole_sequence) {
  for (const int64_t length : {1, 4, 9}) {
    const std::vector<AttentionSight> all = sights(length);
    for (size_t sight = 0; sight < all.size(); ++sight)
      for (const bool drops : {true, false}) {
        const auto whole = attended({1, length, all[sight], drops, canonical_gathered_attention, ContextSplit::balanced});
        for (const int64_t ranks : {1, 2, 3, 4})
          for (const auto& [name, way] :
               {std::pair<const char*, decltype(&canonical_ring_attention)>("ring", canonical_ring_attention),
                {"gathered", canonical_gathered_attention},
                {"ulysses", canonical_ulysses_attention}})
            for (const ContextSplit split : {ContextSplit::balanced, ContextSplit::contiguous}) {
              const auto dealt = attended({ranks, length, all[sight], drops, way, split});
              for (size_t i = 0; i < whole.size(); ++i)
                EXPECT_TRUE(same_bits(whole[i], dealt[i])) << "result " << i << " on " << ranks << " ranks, length " << length
                                                           << ", sight " << sight << (drops ? " dropout " : " ") << name;
            }
      }
  }
}

TEST(Canonical, a_product_has_the_same_bits_however_what_is_summed_is_cut) {
  const at::Tensor x = values({4, 37}, 1), w = values({5, 37}, 2), dy = values({4, 5}, 3);
  const auto product = [](const at::Tensor& a, const at::Tensor& b) { return canonical_ops::linear(a, b, {}, "p"); };
  const at::Tensor whole = product(x, w), rows = product(dy.t(), x.t());
  for (int64_t cut = 0; cut <= 37; ++cut) {
    const at::Tensor sum =
        product(x.narrow(1, 0, cut), w.narrow(1, 0, cut)) + product(x.narrow(1, cut, 37 - cut), w.narrow(1, cut, 37 - cut));
    EXPECT_TRUE(same_bits(whole, sum)) << cut;
  }
  for (int64_t cut = 0; cut <= 4; ++cut) {
    const auto part = [&](int64_t begin, int64_t count) {
      return product(dy.narrow(0, begin, count).t(), x.narrow(0, begin, count).t());
    };
    EXPECT_TRUE(same_bits(rows, part(0, cut) + part(cut, 4 - cut))) << cut;
  }
  // Without rounded terms the order shows, so the equalities above say something.
  EXPECT_FALSE(same_bits(at::mm(x, w.t()), at::mm(x.narrow(1, 0, 18), w.narrow(1, 0, 18).t()) +
                                               at::mm(x.narrow(1, 18, 19), w.narrow(1, 18, 19).t())));
}

// Whoever rounds it: the sum over rows of a bias, or the units of an embedding.
TEST(Canonical, a_single_term_that_is_half_way_goes_away_from_zero) {
  const auto [zero, token] = std::pair(at::zeros({1, 1}, at::kDouble), at::zeros({1}, at::kLong));
  for (const auto& [halves, units] : {std::pair(1, 1), {-1, -1}, {3, 2}, {-3, -2}, {2, 1}, {0, 0}}) {
    const at::Tensor dy = at::full({1, 1}, halves * 0x1p-41, at::kDouble);
    const at::Tensor weight = zero.clone().requires_grad_(), bias = zero.clone().view({1}).requires_grad_();
    canonical_ops::embedding(weight, token, "e").backward(dy);
    canonical_ops::add_bias(zero, bias, "b").backward(dy);
    EXPECT_EQ(weight.grad().item<double>(), units * 0x1p-40) << halves;
    EXPECT_EQ(bias.grad().item<double>(), units * 0x1p-40) << halves;
  }
}

TEST(Canonical, a_loss_of_logits_that_are_not_finite_is_refused_on_every_rank) {
  const auto loss = [](int64_t row, double bad, bool of_all_entries) {
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      at::Tensor logits = values({3, 4}, comm->rank());  // of 8 entries
      if (of_all_entries)
        logits[row].fill_(bad);
      else if (comm->rank() == 0)
        logits[row][2] = bad;
      const at::Tensor targets = at::tensor({7, -100, 1}, at::kLong);
      const auto take = [&] { canonical_ops::cross_entropy(logits, targets, 8, comm.get()); };
      if (bad < 0 && !of_all_entries)
        EXPECT_NO_THROW(take());
      else
        EXPECT_THROW(take(), NonFiniteError) << "rank " << comm->rank() << ", row " << row << ", " << bad;
    });
  };
  for (const int64_t row : {0, 1, 2})
    for (const double bad : {double{NAN}, double{INFINITY}, -double{INFINITY}})
      for (const bool of_all_entries : {false, true}) loss(row, bad, of_all_entries);
}

// Five steps of GPT or Llama on four samples; whole parameters and losses at the end.
struct Trained {
  std::vector<double> losses;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

struct Setting {
  int64_t replicate = 1, dp = 1, cp = 1, tp = 1;
  bool sequence = false;
  const char* strategy = "zero3";
  bool tied = false, llama = false;
  int64_t kv_heads = 4;  // of a Llama with 8 heads
  double dropout = 0;
  ContextAttention attention = ContextAttention::gathered;
  bool recompute = false;
};

constexpr int64_t kVocab = 13, kLength = 8, kSteps = 3;

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(at::Tensor)> forward;
  ParallelPlan plan;
};

Model model_of(const Setting& s) {
  if (s.llama) {
    const LlamaOptions options{.layers = 1,
                               .hidden = 32,
                               .heads = 8,
                               .kv_heads = s.kv_heads,
                               .intermediate = 10,
                               .vocab = kVocab,
                               .tied = s.tied,
                               .attention_dropout = s.dropout};
    Llama llama(options);
    return {llama.ptr(), [llama](at::Tensor tokens) mutable { return call(llama, tokens); },
            llama_plan(options, s.tp, s.sequence)};
  }
  const GptOptions options{
      .layers = 2, .hidden = 21, .heads = 7, .vocab = kVocab, .positions = kLength, .tied = s.tied, .dropout = s.dropout};
  Gpt gpt(options);
  return {gpt.ptr(), [gpt](at::Tensor tokens) mutable { return call(gpt, tokens); }, gpt_plan(options, s.sequence)};
}

Trained train(const Setting& s) {
  Trained run;
  run_threads(s.replicate * s.dp * s.cp * s.tp, [&](std::shared_ptr<Comm> comm) {
    const Mesh mesh({{"dp_replicate", s.replicate}, {"dp_shard", s.dp}, {"cp", s.cp}, {"tp", s.tp}});
    auto comms = std::make_shared<MeshComm>(comm, mesh);
    Model model = model_of(s);
    initialize_parameters(*model.module, 3, 0.3);
    use_canonical_arithmetic(*model.module);
    std::optional<TensorParallel> parallel;
    std::optional<ContextParallel> context;
    if (s.tp > 1) parallel = parallelize(model.module, comms, model.plan);
    if (s.cp > 1) context = context_parallel(model.module, comms, {.attention = s.attention});
    Sharded sharded = fully_shard(model.module, comms,
                                  {.strategy = strategy(s.strategy),
                                   .units = by_type<GptBlockImpl, LlamaLayerImpl>(),
                                   .recompute = s.recompute ? by_type<GptBlockImpl, LlamaLayerImpl>() : UnitSelector(),
                                   .precision = {.main = at::kFloat, .compute = at::kDouble},
                                   .numerics = Numerics::canonical,
                                   .gradient_divide = 1});
    Optimizer optimizer = adamw(sharded, {.lr = 0.01});
    const int64_t samples = 4 / (s.replicate * s.dp);
    const int64_t first = comm->rank() / (s.cp * s.tp) * samples;
    for (int64_t step = 0; step < kSteps; ++step) {
      at::Tensor total = at::zeros({1}, at::kDouble);
      for (int64_t k = 0; k < samples; ++k) {
        sharded.set_last_microbatch(k + 1 == samples);
        at::Tensor tokens =
            (at::arange(kLength, at::kLong) * 5 + step * 3 + (first + k) * 7).remainder(kVocab).view({1, kLength});
        at::Tensor targets = tokens.roll(1, 1);
        if (context) tokens = context->cut(tokens), targets = context->cut(targets);
        random_stream() = {.seed = static_cast<uint64_t>(step * 4 + first + k)};
        const at::Tensor loss =
            canonical_ops::cross_entropy(model.forward(tokens), targets, kVocab, s.tp > 1 ? &comms->along({"tp"}) : nullptr);
        (loss / 32).backward();
        total += loss.detach();
      }
      for (const char* axis : {"cp", "dp_shard", "dp_replicate"}) comms->along({axis}).all_reduce(total).wait();
      sharded.clip_gradients(0.5);
      optimizer.step();
      if (comm->rank() == 0) run.losses.push_back(total.item<double>());
    }
    const auto whole = sharded.gather_parameters();
    if (comm->rank() == 0) run.parameters = whole;
  });
  return run;
}

// `model`: what the settings have in common.
void expect_same_bits_on_every_mesh(const Setting& model, const std::vector<Setting>& meshes) {
  const Trained golden = train(model);
  EXPECT_NE(golden.losses.front(), golden.losses.back());
  for (Setting setting : meshes) {
    setting.tied = model.tied;
    setting.llama = model.llama;
    setting.kv_heads = model.kv_heads;
    setting.dropout = model.dropout;
    const Trained run = train(setting);
    const std::string where =
        fmt::format("replicate {} dp {} cp {} tp {} sequence {} attention {} {}", setting.replicate, setting.dp, setting.cp,
                    setting.tp, setting.sequence, static_cast<int>(setting.attention), setting.strategy);
    EXPECT_EQ(golden.losses, run.losses) << where;
    for (size_t i = 0; i < golden.parameters.size(); ++i)
      EXPECT_TRUE(same_bits(golden.parameters[i].second, run.parameters[i].second))
          << where << " " << golden.parameters[i].first;
  }
}

TEST(Canonical, a_gpt_trains_to_the_same_bits_on_every_mesh) {
  for (const bool tied : {false, true})
    expect_same_bits_on_every_mesh({.tied = tied}, {{.tp = 2},
                                                    {.tp = 4, .sequence = true},
                                                    {.cp = 2, .attention = ContextAttention::ring},
                                                    {.dp = 2, .cp = 3, .strategy = "zero2"},
                                                    {.dp = 2, .cp = 2, .tp = 2, .sequence = true},
                                                    {.replicate = 2, .dp = 2, .tp = 3, .strategy = "hsdp"}});
}

TEST(Canonical, a_llama_trains_to_the_same_bits_on_every_mesh) {
  for (const bool tied : {false, true})
    expect_same_bits_on_every_mesh(
        {.tied = tied, .llama = true},
        {{.tp = 2, .sequence = true}, {.tp = 4}, {.cp = 2, .tp = 2}, {.dp = 4, .cp = 2, .strategy = "ddp"}});
}

TEST(Canonical, dropout_has_the_same_bits_on_every_mesh_and_when_it_is_computed_again) {
  expect_same_bits_on_every_mesh(
      {.dropout = 0.25}, {{.recompute = true},
                          {.tp = 4, .sequence = true},
                          {.dp = 2, .cp = 2, .tp = 2, .sequence = true, .attention = ContextAttention::ring, .recompute = true},
                          {.dp = 2, .cp = 3, .strategy = "zero2"}});
  expect_same_bits_on_every_mesh({.llama = true, .kv_heads = 2, .dropout = 0.5},
                                 {{.tp = 4, .recompute = true}, {.dp = 2, .cp = 2, .attention = ContextAttention::ring}});
}

TEST(Canonical, key_heads_in_copies_train_to_the_same_bits) {
  for (const int64_t kv_heads : {1, 2})
    expect_same_bits_on_every_mesh({.llama = true, .kv_heads = kv_heads},
                                   {{.tp = 4},
                                    {.tp = 4, .sequence = true, .strategy = "ddp"},
                                    {.dp = 2, .tp = 8, .strategy = "zero2"},
                                    {.dp = 1, .cp = 2, .tp = 4, .sequence = true, .attention = ContextAttention::ring}});
}

TEST(Canonical, what_would_depend_on_the_mesh_is_refused) {
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    auto tensor = std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}}));
    const GptOptions options{.layers = 1, .hidden = 4, .heads = 2, .vocab = 5, .positions = 4};
    Gpt plain(options);
    TensorParallel parallel = parallelize(plain.ptr(), tensor, gpt_plan(options));
    expect_error([&] { (void)fully_shard(plain.ptr(), tensor, {.numerics = Numerics::canonical, .gradient_divide = 1}); },
                 {"use_canonical_arithmetic", "tp"});
  });
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}}));
    const LlamaOptions options{.layers = 1, .hidden = 8, .heads = 2, .kv_heads = 1, .intermediate = 4, .vocab = 5};
    Llama copied(options);
    use_canonical_arithmetic(*copied);
    ParallelPlan plan = llama_plan(options, 2);
    for (auto& [pattern, style] : plan.styles)
      if (pattern.ends_with("attend")) style = CutDropout{1, {{2, 1}}};
    expect_error([&] { (void)parallelize(copied.ptr(), comms, plan); },
                 {"k_proj", "key-value heads", "2 ranks", "CutAttention"});
  });
  torch::nn::Linear unknown(2, 2);
  expect_error([&] { use_canonical_arithmetic(*unknown); }, {"CanonicalPart", "Linear"});
}

}  // namespace
