// Context parallelism: how positions are dealt out, attention over ranks beside attention on whole sequences, whole models on
// meshes with cp beside the run on one rank.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_models.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using parallel_models::expect_equal_on_meshes;

namespace {

constexpr ContextSplit kSplits[] = {ContextSplit::contiguous, ContextSplit::balanced};

at::Tensor waves(std::vector<int64_t> sizes, double step) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble) * step).view(sizes);
}

// Small integers and their products and sums are exact, in any order.
at::Tensor integers(std::vector<int64_t> sizes, int64_t salt) {
  return (at::arange(c10::multiply_integers(sizes), at::kLong) * 7 + salt * 13).remainder(9).sub(4).to(at::kDouble).view(sizes);
}

at::Tensor plain_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight) {
  Attention attention(sight);
  return attention->forward(q, k, v, sight.documents);
}

using Way = decltype(&ring_attention);
const std::vector<std::pair<const char*, Way>> kWays = {
    {"ring", ring_attention}, {"gathered", gathered_attention}, {"ulysses", ulysses_attention}};

struct Case {
  int64_t ranks, length, heads, kv_heads;
  AttentionSight sight;
  Way way;
  ContextSplit split;
};

// Of two sequences: a window or none, and documents of a few lengths, others in each, or none.
AttentionSight random_sight(int64_t length) {
  const auto causal = *rc::gen::arbitrary<bool>();
  AttentionSight sight(causal, causal ? *rc::gen::elementOf(std::vector<int64_t>{0, 0, 1, 2, 3, 5, 8, 30}) : 0);
  if (!*rc::gen::arbitrary<bool>()) return sight;
  const at::Tensor ends = integers({2, length}, *rc::gen::inRange<int64_t>(0, 9)).ge(3).to(at::kLong);
  sight.documents = ends.cumsum(1);
  return sight;
}

Case random_case() {
  const auto kv_heads = *rc::gen::inRange<int64_t>(1, 4);
  const auto length = *rc::gen::inRange<int64_t>(1, 20);
  const auto& [name, way] = kWays[*rc::gen::inRange<size_t>(0, kWays.size())];  // RapidCheck cannot show a function
  const Case c{*rc::gen::inRange<int64_t>(1, 5),
               length,
               kv_heads * *rc::gen::inRange<int64_t>(1, 4),
               kv_heads,
               random_sight(length),
               way,
               *rc::gen::elementOf(std::vector<ContextSplit>(std::begin(kSplits), std::end(kSplits)))};
  RC_LOG() << fmt::format("ranks {} length {} heads {} kv_heads {} causal {} window {} documents {} {} balanced {}\n", c.ranks,
                          c.length, c.heads, c.kv_heads, c.sight.causal, c.sight.window, c.sight.documents.defined(), name,
                          c.split == ContextSplit::balanced);
  return c;
}

struct Attended {
  at::Tensor output, q, k, v;  // and gradients, whole
};

// Which keys each query sees: bool [2, queries, keys].
at::Tensor seen_by_loops(const Case& c) {
  const at::Tensor seen = at::zeros({2, c.length, c.length}, at::kBool);
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t i = 0; i < c.length; ++i)
      for (int64_t j = 0; j < c.length; ++j) {
        const bool later = c.sight.causal && j > i, gone = c.sight.window > 0 && i - j >= c.sight.window;
        const at::Tensor& documents = c.sight.documents;
        const bool other = documents.defined() && documents[b][i].item<int64_t>() != documents[b][j].item<int64_t>();
        seen[b][i][j] = !later && !gone && !other;
      }
  return seen;
}

Attended attend_on_ranks(const Case& c, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dy) {
  Attended result;
  run_threads(c.ranks, [&](std::shared_ptr<Comm> comm) {
    const DimCut cut = context_cut(c.split, c.length, c.ranks);
    const auto own = [&](const at::Tensor& x) { return context_piece(x, 2, cut, comm->rank()); };
    const at::Tensor q_own = own(q).set_requires_grad(true), k_own = own(k).set_requires_grad(true),
                     v_own = own(v).set_requires_grad(true);
    const at::Tensor y = c.way(q_own, k_own, v_own, cut, c.sight, {}, *comm);
    y.backward(own(dy));
    const at::NoGradGuard no_grad;
    const auto whole = [&](const at::Tensor& x) { return context_gather(x, 2, cut, *comm); };
    const Attended all{whole(y), whole(q_own.grad()), whole(k_own.grad()), whole(v_own.grad())};
    if (comm->rank() == 0) result = all;
  });
  return result;
}

double apart(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace

RC_GTEST_PROP(ContextCut, the_positions_of_all_ranks_tile_the_sequence, ()) {
  const DimCut cut = context_cut(*rc::gen::elementOf(std::vector<ContextSplit>(std::begin(kSplits), std::end(kSplits))),
                       *rc::gen::inRange<int64_t>(0, 40), *rc::gen::inRange<int64_t>(1, 8));
  std::vector<int> seen(static_cast<size_t>(cut.length), 0);
  for (int64_t rank = 0; rank < cut.parts; ++rank) {
    const std::vector<int64_t> positions = cut.positions(rank);
    RC_ASSERT(std::ssize(positions) == cut.count(rank));
    RC_ASSERT(std::is_sorted(positions.begin(), positions.end()));
    RC_ASSERT(cut.runs(rank).size() <= 2u);
    for (const int64_t position : positions) ++seen.at(static_cast<size_t>(position));
  }
  RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }));
}

TEST(ContextCut, balanced_ranks_have_equal_work_under_a_causal_mask) {
  for (const int64_t ranks : {1, 2, 3, 4, 7}) {
    const DimCut cut = context_cut(ContextSplit::balanced, 6 * ranks, ranks);
    const auto work = [&](int64_t rank) {
      int64_t pairs = 0;
      for (const int64_t position : cut.positions(rank)) pairs += position + 1;
      return pairs;
    };
    for (int64_t rank = 1; rank < ranks; ++rank) EXPECT_EQ(work(rank), work(0));
  }
}

RC_GTEST_PROP(Context, gathering_inverts_cutting_and_sums_gradients_where_they_belong, ()) {
  const Case c = random_case();
  const DimCut cut = context_cut(c.split, c.length, c.ranks);
  const at::Tensor whole = integers({2, c.length, 3}, 1);
  run_threads(c.ranks, [&](std::shared_ptr<Comm> comm) {
    const at::Tensor own = context_piece(whole, 1, cut, comm->rank()).set_requires_grad(true);
    const at::Tensor gathered = context_gather(own, 1, cut, *comm);
    EXPECT_TRUE(at::equal(gathered, whole));
    gathered.backward(integers({2, c.length, 3}, comm->rank()));
    at::Tensor sum = at::zeros_like(whole);
    for (int64_t rank = 0; rank < c.ranks; ++rank) sum += integers({2, c.length, 3}, rank);
    EXPECT_TRUE(at::equal(own.grad(), context_piece(sum, 1, cut, comm->rank())));
  });
}

// Where all scores are equal, every step is exact up to one division: other orders of sums make no difference.
RC_GTEST_PROP(Context, attention_with_equal_scores_is_the_mean_of_the_values_bit_for_bit, ()) {
  const Case c = random_case();
  if (c.way != ring_attention) return;  // softmax divides before it adds
  const at::Tensor q = at::zeros({2, c.heads, c.length, 2}, at::kDouble), k = integers({2, c.kv_heads, c.length, 2}, 1),
                   v = integers({2, c.kv_heads, c.length, 2}, 2);
  const at::Tensor weights = seen_by_loops(c).to(at::kDouble).unsqueeze(1);
  const at::Tensor means = at::matmul(weights, v) / weights.sum(-1, /*keepdim=*/true);
  const Attended run = attend_on_ranks(c, q, k, v, at::ones_like(q));
  RC_ASSERT(at::equal(run.output, means.repeat_interleave(c.heads / c.kv_heads, 1)));
}

// Values are at most 1 in magnitude (keys 3), and each result is a chain of sums of at most 20 x 9 terms, twice: some hundred
// roundings of 2^-53, of numbers below 100.
RC_GTEST_PROP(Context, attention_over_ranks_is_that_of_the_whole_sequence, ()) {
  const Case c = random_case();
  constexpr int64_t kBatch = 2, kHead = 4;
  const at::Tensor q = waves({kBatch, c.heads, c.length, kHead}, 1.3),
                   k = waves({kBatch, c.kv_heads, c.length, kHead}, 0.7) * 3,
                   v = waves({kBatch, c.kv_heads, c.length, kHead}, 2.1), dy = waves({kBatch, c.heads, c.length, kHead}, 0.9);
  const at::Tensor q_whole = q.clone().set_requires_grad(true), k_whole = k.clone().set_requires_grad(true),
                   v_whole = v.clone().set_requires_grad(true);
  const at::Tensor expected = plain_attention(q_whole, k_whole, v_whole, c.sight);
  expected.backward(dy);
  const Attended run = attend_on_ranks(c, q, k, v, dy);
  RC_ASSERT(apart(run.output, expected) < 1e-12);
  RC_ASSERT(apart(run.q, q_whole.grad()) < 1e-12);
  RC_ASSERT(apart(run.k, k_whole.grad()) < 1e-12);
  RC_ASSERT(apart(run.v, v_whole.grad()) < 1e-12);
}

TEST(Context, attention_in_bfloat16_is_as_near_as_one_rounding_of_its_result) {
  const at::Tensor q = waves({2, 4, 11, 8}, 1.3).to(at::kBFloat16), k = waves({2, 2, 11, 8}, 0.7).to(at::kBFloat16),
                   v = waves({2, 2, 11, 8}, 2.1).to(at::kBFloat16), dy = waves({2, 4, 11, 8}, 0.9).to(at::kBFloat16);
  const at::Tensor expected = plain_attention(q.to(at::kDouble), k.to(at::kDouble), v.to(at::kDouble), true);
  const Attended run = attend_on_ranks({3, 11, 4, 2, true, ring_attention, ContextSplit::balanced}, q, k, v, dy);
  EXPECT_EQ(run.output.scalar_type(), at::kBFloat16);
  EXPECT_EQ(run.k.scalar_type(), at::kBFloat16);
  // Half a unit in the last of 8 bits, and float32's roundings.
  EXPECT_TRUE(at::all((run.output.to(at::kDouble) - expected).abs() <= expected.abs() * 0x1p-8 + 1e-5).item<bool>());
}

// One rank computes a query's results from every key, as without ranks. So the same kernel rounds the same numbers.
RC_GTEST_PROP(Context, gathered_attention_in_low_precision_has_the_bits_of_the_whole_sequences, ()) {
  // Of wider heads, the order of sums in a product of queries and keys depends on the number of its rows. Where a query sees
  // one key only, such sums cancel, and its gradient is what their roundings leave: of heads of 4, one case in 200 differed. So
  // it is in float16, on processors that add in float16 (AVX512-FP16): one element in some thousand is then the neighbour.
  constexpr int64_t kHead = 2;
  Case c = random_case();
  if (c.way == ring_attention) c.way = gathered_attention;
  const auto input = [&](int64_t heads, double step) {
    return waves({2, heads, c.length, kHead}, step).to(at::kBFloat16).set_requires_grad(true);
  };
  const at::Tensor q = input(c.heads, 1.3), k = input(c.kv_heads, 0.7), v = input(c.kv_heads, 2.1);
  const at::Tensor dy = input(c.heads, 0.9).detach();
  const at::Tensor expected = plain_attention(q, k, v, c.sight);
  expected.backward(dy);
  const Attended run = attend_on_ranks(c, q.detach(), k.detach(), v.detach(), dy);
  RC_ASSERT(at::equal(run.output, expected));
  RC_ASSERT(at::equal(run.q, q.grad()));
}

// What three ranks call for causal attention to 12 positions, forwards and backwards.
std::shared_ptr<Trace> trace_of(Way way, int64_t heads, int64_t kv_heads) {
  auto trace = std::make_shared<Trace>();
  run_threads(3, [&](std::shared_ptr<Comm> comm) {
    const auto recorded = traced(comm, trace);
    const at::Tensor q = waves({1, heads, 4, 2}, comm->rank() + 1).set_requires_grad(true), k = waves({1, kv_heads, 4, 2}, 2);
    way(q, k, k, context_cut(ContextSplit::balanced, 12, 3), true, {}, *recorded).sum().backward();
  });
  return trace;
}

TEST(Context, ulysses_exchanges_heads_for_positions_twice_in_each_direction) {
  const auto trace = trace_of(ulysses_attention, 6, 3);
  for (int64_t rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(trace->of_rank(rank).size(), 4u);
    for (const TraceRecord& record : trace->of_rank(rank)) EXPECT_EQ(record.op, "all_to_all") << record.call;
  }
}

// Which also says how long the sequences are, of which a rank has a part.
TEST(Context, documents_of_other_sizes_than_the_whole_sequences_are_refused) {
  for (const auto& [name, way] : kWays)
    expect_error(
        [&, attend = way] {
          run_threads(2, [&](std::shared_ptr<Comm> comm) {
            const DimCut cut = context_cut(ContextSplit::balanced, 8, 2);
            const at::Tensor x = waves({2, 2, 4, 2}, 1);
            AttentionSight sight;
            sight.documents = at::zeros({2, 4}, at::kLong);
            attend(x, x, x, cut, sight, {}, *comm);
          });
        },
        {"2 sequences of 8 positions", "int64 2x8, got Long 2x4"});
  Attention attention;
  const at::Tensor x = waves({2, 2, 4, 2}, 1);
  expect_error([&] { attention->forward(x, x, x, at::zeros({2, 4})); }, {"must be int64 2x4, got Float 2x4"});
  static_assert(!std::is_constructible_v<AttentionSight, int> && !std::is_constructible_v<AttentionSight, int64_t>);
  expect_error([] { Attention attend(AttentionSight(true, -1)); }, {"a window of -1 keys"});
  expect_error([] { Attention attend(AttentionSight(false, 3)); }, {"a window of 3 keys", "only causal attention"});
}

// Their tokens come out as if each document had been alone in its sequence.
TEST(Context, documents_behind_one_another_are_as_if_each_were_alone) {
  for (const int64_t window : {0, 2}) {
    Llama model(
        LlamaOptions{.layers = 2, .hidden = 16, .heads = 4, .kv_heads = 2, .vocab = 9, .window = window, .document_end = 3});
    initialize_parameters(*model, 3, 0.3);
    model->to(at::kDouble);
    const at::Tensor both = at::tensor({1, 5, 3, 7, 4, 4, 2}, at::kLong).unsqueeze(0);
    const at::Tensor logits = call(model, both);
    for (const auto& [begin, length] : {std::pair<int64_t, int64_t>(0, 3), {3, 4}})
      EXPECT_LT(apart(call(model, both.narrow(1, begin, length)), logits.narrow(1, begin, length)), 1e-5);
  }
}

TEST(Context, the_ring_sends_each_ranks_keys_around_and_gathers_nothing) {
  constexpr int64_t kRanks = 3;
  const auto trace = trace_of(ring_attention, 4, 2);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    int64_t sent = 0, bytes = 0;
    for (const TraceRecord& record : trace->of_rank(rank)) {
      EXPECT_EQ(record.op, "all_to_all") << record.call;  // to the next rank, from the one before
      ++sent, bytes += record.bytes;
    }
    // Keys and values twice n - 1 times, their gradients n times.
    EXPECT_EQ(sent, 2 * (kRanks - 1) + kRanks);
    EXPECT_EQ(bytes, sent * 2 * 2 * 4 * 2 * 8);
  }
}

// Scores of hundreds overflow exp unless the maximum is taken off, and running maxima grow and shrink from block to block.
TEST(Context, ring_attention_merges_blocks_of_very_different_scores) {
  for (const double scale : {30.0, -30.0}) {
    const int64_t length = 12;
    const at::Tensor ramp = at::arange(length, at::kDouble).view({1, 1, length, 1}) * scale;
    const at::Tensor q = waves({1, 2, length, 4}, 1.3) + 2, k = waves({1, 2, length, 4}, 0.7) + ramp,
                     v = waves({1, 2, length, 4}, 2.1);
    for (const bool causal : {false, true}) {
      const at::Tensor expected = plain_attention(q, k, v, causal);
      const Attended run =
          attend_on_ranks({3, length, 2, 2, causal, ring_attention, ContextSplit::balanced}, q, k, v, at::ones_like(q));
      EXPECT_LT(apart(run.output, expected), 1e-11);
      EXPECT_TRUE(run.q.isfinite().all().item<bool>());
    }
  }
}

TEST(Context, a_gpt_on_any_mesh_trains_as_the_unsharded_one) {
  const ContextOptions gathered{.attention = ContextAttention::gathered}, contiguous{.split = ContextSplit::contiguous},
      ulysses{.attention = ContextAttention::ulysses},
      both{.attention = ContextAttention::gathered, .split = ContextSplit::contiguous};
  expect_equal_on_meshes(
      parallel_models::gpt(true),
      {{1, 2, 1}, {2, 2, 1, false, "zero2", gathered}, {1, 3, 1, false, "ddp"}, {1, 2, 2, true, "zero3", contiguous}}, {8, 7});
  expect_equal_on_meshes(parallel_models::gpt(false),
                         {{2, 2, 2},
                          {1, 4, 1, false, "zero1", both},
                          {1, 3, 1, false, "zero3", ulysses},
                          {4, 2, 1},
                          {1, 2, 3, false, "zero3", gathered}},
                         {8, 5});
}

TEST(Context, a_llama_on_any_mesh_trains_as_the_unsharded_one) {
  const ContextOptions gathered{.attention = ContextAttention::gathered}, ulysses{.attention = ContextAttention::ulysses};
  expect_equal_on_meshes(parallel_models::llama(false, 3), {{2, 2, 1, false, "zero3", ulysses}}, {8, 7});
  expect_equal_on_meshes(parallel_models::llama(false, 3),
                         {{1, 2, 1}, {2, 2, 1, false, "zero2", gathered}, {1, 2, 3, true, "zero3"}}, {8, 7});
  expect_equal_on_meshes(parallel_models::llama(true, 2),
                         {{2, 3, 1, false, "ddp"}, {1, 2, 6, false, "zero3", gathered}, {1, 4, 2, true, "zero3"}}, {16, 13});
}

TEST(Context, replicas_of_shards_over_dp_and_cp_train_as_the_unsharded_one) {
  expect_equal_on_meshes(parallel_models::gpt(true),
                         {{1, 2, 1, false, "hsdp", {}, false, 2},
                          {2, 2, 2, true, "hfsdp", {}, false, 2},
                          {2, 2, 1, false, "ddp", {}, false, 2}},
                         {7});
}

TEST(Context, units_that_are_computed_again_run_the_ring_again) {
  expect_equal_on_meshes(parallel_models::gpt(true), {{2, 2, 1, false, "zero3", {}, true}, {1, 3, 2, false, "zero2", {}, true}},
                         {7});
}

TEST(Context, a_module_that_was_not_made_context_parallel_is_refused_on_a_mesh_with_cp) {
  expect_error(
      [] {
        run_threads(2, [](std::shared_ptr<Comm> comm) {
          Gpt model(GptOptions{});
          fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"cp", 2}})), {});
        });
      },
      {"cp", "positions", "Call context_parallel before fully_shard"});
}

TEST(Context, axes_that_are_not_neighbours_are_refused) {
  expect_error([] { data_parallel_mesh(Mesh::parse("dp_shard=2,tp=2,cp=2")); },
               {"dp_shard=2,tp=2,cp=2", "cp must follow dp_shard"});
  EXPECT_EQ(data_parallel_mesh(Mesh::parse("dp_replicate=2,dp_shard=3,cp=2,tp=2")).str(), "dp_replicate=2,dp_shard=6,tp=2");
  EXPECT_EQ(data_parallel_mesh(Mesh::parse("dp_replicate=2,cp=4")).str(), "dp_replicate=2,dp_shard=4");
}

TEST(Context, a_mesh_without_data_parallelism_is_one_replica) {
  EXPECT_EQ(data_parallel_mesh(Mesh::parse("tp=2")).str(), "dp_shard=1,tp=2");
  EXPECT_EQ(data_parallel_mesh(Mesh::parse("cp=2")).str(), "dp_shard=2");
}

TEST(Context, a_batch_that_was_not_cut_is_refused_on_every_rank) {
  expect_error(
      [] {
        run_threads(2, [](std::shared_ptr<Comm> comm) {
          Gpt model(GptOptions{});
          ContextParallel context = context_parallel(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"cp", 2}})));
          const at::Tensor tokens = at::zeros({1, 7}, at::kLong);
          context.cut(tokens);
          call(model, tokens);
        });
      },
      {"of the 7 positions", "was given 7", "ContextParallel::cut"});
}

TEST(Context, a_dim_may_be_counted_from_either_end_and_must_have_the_length) {
  const DimCut cut = context_cut(ContextSplit::balanced, 5, 2);
  for (int64_t dim = 0; dim < 3; ++dim) {
    std::vector<int64_t> sizes{2, 3, 4};
    sizes[static_cast<size_t>(dim)] = 5;
    const at::Tensor x = waves(sizes, 1);
    for (int64_t rank = 0; rank < 2; ++rank)
      EXPECT_TRUE(at::equal(context_piece(x, dim - 3, cut, rank), context_piece(x, dim, cut, rank)));
    for (const int64_t other : {-4, -3, -2, -1, 0, 1, 2, 3})
      if (other != dim && other != dim - 3)
        expect_error([&] { context_piece(x, other, cut, 0); },
                     {"context_parallel", "5 positions", fmt::format("dim {}", other)});
  }
}

TEST(Context, a_module_that_does_not_attend_is_refused) {
  expect_error(
      [] {
        run_threads(2, [](std::shared_ptr<Comm> comm) {
          torch::nn::Linear linear(3, 4);
          const auto context = context_parallel(linear.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"cp", 2}})));
        });
      },
      {"no Attention or Positions"});
  expect_error(
      [] {
        run_threads(2, [](std::shared_ptr<Comm> comm) {
          MoeMlp experts(LlamaOptions{.hidden = 4, .router = {.experts = 2}, .expert_intermediate = 3});
          const auto context = context_parallel(experts.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"cp", 2}})));
        });
      },
      {"no Attention or Positions"});
}

TEST(Context, a_module_is_itself_again_when_its_context_ends) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"cp", 2}}));
    Gpt model(GptOptions{.layers = 1});
    initialize_parameters(*model, 1);
    const at::Tensor tokens = at::arange(6, at::kLong).view({1, 6}), before = model->forward(tokens);
    {
      ContextParallel context = context_parallel(model.ptr(), comms);
      const at::Tensor logits = context.join(call(model, context.cut(tokens)));
      EXPECT_LT((logits - before).abs().max().item<double>(), 1e-5);
    }
    EXPECT_TRUE(at::equal(model->forward(tokens), before));
  });
}
