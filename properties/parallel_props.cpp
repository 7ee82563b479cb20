// Tensor and sequence parallelism: cuts, differentiable collectives, layers, whole models beside their unsharded selves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include <numeric>

#include "expect_error.h"
#include "shardproof/shardproof.h"
#include "toy_modules.h"

using namespace shardproof;

namespace {

// Small integers and their products and sums are exact, in any order.
at::Tensor integers(std::vector<int64_t> sizes, int64_t salt) {
  const int64_t count = c10::multiply_integers(sizes);
  return (at::arange(count, at::kLong) * 7 + salt * 13).remainder(9).sub(4).to(at::kFloat).view(sizes);
}

at::Tensor piece_of(const at::Tensor& whole, int64_t dim, int64_t parts, int64_t part) {
  const Interval own = piece({}, whole.size(dim), parts, part);
  return whole.narrow(dim, own.begin, own.size());
}

// Runs op on every rank's input, and backward with every rank's output gradient; returns (output, input gradient) by rank.
using Op = std::function<at::Tensor(const at::Tensor&, Comm&)>;
std::vector<std::pair<at::Tensor, at::Tensor>> run_op(int64_t ranks, const Op& op, const std::vector<at::Tensor>& inputs,
                                                      const std::vector<at::Tensor>& gradients) {
  std::vector<std::pair<at::Tensor, at::Tensor>> results(ranks);
  run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
    const auto r = static_cast<size_t>(comm->rank());
    const at::Tensor x = inputs[r].clone().set_requires_grad(true);
    const at::Tensor y = op(x, *comm);
    y.backward(gradients[r]);
    results[r] = {y.detach().clone(), x.grad().clone()};
  });
  return results;
}

at::Tensor total(const std::vector<at::Tensor>& terms) {
  at::Tensor sum = terms[0].clone();
  for (size_t i = 1; i < terms.size(); ++i) sum += terms[i];
  return sum;
}

std::vector<at::Tensor> per_rank(int64_t ranks, const std::function<at::Tensor(int64_t)>& make) {
  std::vector<at::Tensor> tensors;
  for (int64_t r = 0; r < ranks; ++r) tensors.push_back(make(r));
  return tensors;
}

const std::vector<int64_t> kRanks = {1, 2, 3, 4};
constexpr int64_t kRows = 5, kWidth = 3;  // rows over 4 ranks: 2, 2, 1, 0

}  // namespace

TEST(Collectives, copy_passes_forward_and_sums_backward) {
  for (const int64_t n : kRanks) {
    const auto x = per_rank(n, [](int64_t) { return integers({kRows, kWidth}, 1); });
    const auto dy = per_rank(n, [](int64_t r) { return integers({kRows, kWidth}, r + 2); });
    for (const auto& [y, dx] : run_op(n, [](auto& t, Comm& g) { return collective::copy(t, g); }, x, dy)) {
      EXPECT_TRUE(at::equal(y, x[0]));
      EXPECT_TRUE(at::equal(dx, total(dy)));
    }
  }
}

TEST(Collectives, reduce_sums_forward_and_passes_backward) {
  for (const int64_t n : kRanks) {
    const auto x = per_rank(n, [](int64_t r) { return integers({kRows, kWidth}, r); });
    const auto dy = per_rank(n, [](int64_t) { return integers({kRows, kWidth}, 3); });
    for (const auto& [y, dx] : run_op(n, [](auto& t, Comm& g) { return collective::reduce(t, g); }, x, dy)) {
      EXPECT_TRUE(at::equal(y, total(x)));
      EXPECT_TRUE(at::equal(dx, dy[0]));
    }
  }
}

TEST(Collectives, gather_joins_pieces_and_keeps_the_own_piece_of_the_gradient) {
  for (const int64_t n : kRanks) {
    const at::Tensor whole = integers({2, kRows, kWidth}, 1), gradient = integers({2, kRows, kWidth}, 5);
    const auto results = run_op(
        n, [](auto& t, Comm& g) { return collective::gather(t, 1, kRows, g); },
        per_rank(n, [&](int64_t r) { return piece_of(whole, 1, n, r); }), per_rank(n, [&](int64_t) { return gradient; }));
    for (int64_t r = 0; r < n; ++r) {
      EXPECT_TRUE(at::equal(results[r].first, whole));
      EXPECT_TRUE(at::equal(results[r].second, piece_of(gradient, 1, n, r)));
    }
  }
}

TEST(Collectives, all_gather_joins_pieces_and_scatters_the_sum_of_gradients) {
  for (const int64_t n : kRanks) {
    const at::Tensor whole = integers({kRows, kWidth}, 1);
    const auto dy = per_rank(n, [](int64_t r) { return integers({kRows, kWidth}, r); });
    const auto results = run_op(
        n, [](auto& t, Comm& g) { return collective::all_gather(t, 0, kRows, g); },
        per_rank(n, [&](int64_t r) { return piece_of(whole, 0, n, r); }), dy);
    for (int64_t r = 0; r < n; ++r) {
      EXPECT_TRUE(at::equal(results[r].first, whole));
      EXPECT_TRUE(at::equal(results[r].second, piece_of(total(dy), 0, n, r)));
    }
  }
}

TEST(Collectives, scatter_and_reduce_scatter_gather_their_gradients) {
  for (const int64_t n : kRanks)
    for (const bool terms : {false, true}) {
      const auto x = per_rank(n, [&](int64_t r) { return integers({kRows, kWidth}, terms ? r : 0); });
      const at::Tensor gradient = integers({kRows, kWidth}, 4), result = terms ? total(x) : x[0];
      const auto results = run_op(
          n, [&](auto& t, Comm& g) { return terms ? collective::reduce_scatter(t, 0, g) : collective::scatter(t, 0, g); }, x,
          per_rank(n, [&](int64_t r) { return piece_of(gradient, 0, n, r); }));
      for (int64_t r = 0; r < n; ++r) {
        EXPECT_TRUE(at::equal(results[r].first, piece_of(result, 0, n, r)));
        EXPECT_TRUE(at::equal(results[r].second, gradient));
      }
    }
}

TEST(Collectives, all_to_all_turns_one_cut_into_another_and_its_gradient_back) {
  for (const int64_t n : kRanks) {
    const at::Tensor whole = integers({kRows, 7, 2}, 1), gradient = integers({kRows, 7, 2}, 2);
    const auto results = run_op(
        n, [](auto& t, Comm& g) { return collective::all_to_all(t, 0, 1, 7, g); },
        per_rank(n, [&](int64_t r) { return piece_of(whole, 1, n, r).contiguous(); }),
        per_rank(n, [&](int64_t r) { return piece_of(gradient, 0, n, r).contiguous(); }));
    for (int64_t r = 0; r < n; ++r) {
      EXPECT_TRUE(at::equal(results[r].first, piece_of(whole, 0, n, r)));
      EXPECT_TRUE(at::equal(results[r].second, piece_of(gradient, 1, n, r)));
    }
  }
}

TEST(Collectives, a_piece_of_the_wrong_size_is_refused_on_every_rank) {
  expect_error([] {
    run_threads(2, [](std::shared_ptr<Comm> comm) { collective::gather(at::zeros({2, 3}), 0, 5, *comm); });
  }, {"collective", "gather", "5 rows"});
}

RC_GTEST_PROP(TensorCut, rows_that_are_first_copies_tile_the_dim_and_runs_read_the_local_tensor, ()) {
  const auto parts = *rc::gen::inRange<int64_t>(1, 7);
  TensorCut cut;
  const auto dims = *rc::gen::inRange<int64_t>(1, 4);
  cut.dim = *rc::gen::inRange<int64_t>(0, dims);
  int64_t length = 0;
  for (int64_t s = *rc::gen::inRange<int64_t>(1, 4); s > 0; --s) {
    const auto granule = *rc::gen::inRange<int64_t>(1, 4);
    cut.segments.push_back({granule * *rc::gen::inRange<int64_t>(0, 9), granule, false});
    length += cut.segments.back().length;
  }
  if (*rc::gen::arbitrary<bool>() && parts % 2 == 0) {
    cut.segments.push_back({parts / 2 * 3, 3, true});  // each granule on two parts
    length += cut.segments.back().length;
  }
  Shape shape;
  for (int64_t d = 0; d < dims; ++d) shape.push_back(d == cut.dim ? length : *rc::gen::inRange<int64_t>(0, 4));
  validate(cut, shape, parts, "the parameter");

  std::vector<int> seen(static_cast<size_t>(length), 0);
  const at::Tensor whole = at::arange(numel(shape), at::kLong).view(shape);
  for (int64_t part = 0; part < parts; ++part) {
    std::vector<at::Tensor> pieces;
    for (const CutRows& rows : cut.rows(parts, part)) {
      pieces.push_back(whole.narrow(cut.dim, rows.whole.begin, rows.whole.size()));
      if (rows.first_copy)
        for (int64_t row = rows.whole.begin; row < rows.whole.end; ++row) ++seen[static_cast<size_t>(row)];
    }
    const at::Tensor local = at::cat(pieces, cut.dim).contiguous();
    RC_ASSERT(local.sizes().vec() == cut.local_shape(shape, parts, part));
    const auto begin = *rc::gen::inRange<int64_t>(0, local.numel() + 1),
               end = *rc::gen::inRange<int64_t>(begin, local.numel() + 1);
    int64_t at = begin;
    for (const CutRun& run : cut.runs(shape, parts, part, {begin, end})) {
      RC_ASSERT(run.local == at);
      for (int64_t i = run.whole.begin; i < run.whole.end; ++i, ++at) RC_ASSERT(local.view({-1})[at].item<int64_t>() == i);
    }
    RC_ASSERT(at == end);
  }
  RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }));
}

// The case that DTensor got wrong: tensor parallelism cuts dim 0, and the data-parallel strategy cuts what is left of it.
TEST(TensorParallel, what_tp_and_dp_both_cut_along_dim_0_is_gathered_exactly) {
  for (const auto& [tp, dp] : std::vector<std::pair<int64_t, int64_t>>{{2, 2}, {2, 3}, {3, 2}, {4, 2}})
    for (int64_t rows = 1; rows <= 3 * tp * dp; ++rows)
      run_threads(tp * dp, [&](std::shared_ptr<Comm> comm) {
        auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", dp}, {"tp", tp}}));
        torch::nn::Linear linear(3, rows);
        const at::Tensor weight = integers({rows, 3}, rows), bias = integers({rows}, 1);
        {
          const at::NoGradGuard no_grad;
          linear->weight.copy_(weight);
          linear->bias.copy_(bias);
        }
        const TensorParallel parallel = parallelize(linear.ptr(), comms, {.styles = {{"", ColumnParallel{}}}});
        EXPECT_EQ(linear->weight.size(0), piece({}, rows, tp, comms->mesh().coordinate(comm->rank(), "tp")).size());
        Sharded sharded = fully_shard(linear.ptr(), comms, toy::options("zero3"));
        const auto whole = sharded.gather_parameters();
        EXPECT_TRUE(at::equal(whole[0].second, weight)) << rows;
        EXPECT_TRUE(at::equal(whole[1].second, bias)) << rows;
        int64_t elements = 0;
        for (const Piece& piece : sharded.parameters()) {
          const at::Tensor& from = piece.name == "weight" ? weight : bias;
          EXPECT_EQ(piece.shape, from.sizes().vec());
          EXPECT_TRUE(at::equal(piece.data, from.view({-1}).narrow(0, piece.run.begin, piece.run.size())));
          elements += piece.run.size();
        }
        at::Tensor sum = at::full({1}, elements, at::kLong);
        comm->all_reduce(sum).wait();
        EXPECT_EQ(sum.item<int64_t>(), rows * 4);
      });
}

namespace {

struct ModelRun {
  std::vector<double> losses, norms;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

struct Setting {
  int64_t dp = 1, tp = 1;
  bool sequence = false;
  const char* strategy = "zero3";
  std::string str() const { return fmt::format("dp {} tp {} sequence {} {}", dp, tp, sequence, strategy); }
};

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(at::Tensor)> forward;
  ParallelPlan plan;
};
using MakeModel = std::function<Model(const Setting&)>;

constexpr int64_t kVocab = 13;
GptOptions small_gpt(bool tied) {
  return {.layers = 2, .hidden = 12, .heads = 6, .vocab = kVocab, .positions = 8, .tied = tied};
}

MakeModel gpt_of(bool tied) {
  return [tied](const Setting& setting) {
    Gpt gpt(small_gpt(tied));
    return Model{gpt.ptr(), [gpt](at::Tensor tokens) mutable { return call(gpt, tokens); },
                 gpt_plan(small_gpt(tied), setting.sequence)};
  };
}

MakeModel llama_of(bool tied, int64_t kv_heads) {
  return [=](const Setting& setting) {
    const LlamaOptions options{.layers = 2, .hidden = 24, .heads = 6, .kv_heads = kv_heads, .intermediate = 10, .vocab = kVocab,
                               .tied = tied};
    Llama llama(options);
    return Model{llama.ptr(), [llama](at::Tensor tokens) mutable { return call(llama, tokens); },
                 llama_plan(options, setting.tp, setting.sequence)};
  };
}

at::Tensor tokens_of(int64_t step, int64_t microbatch, int64_t length) {
  return (at::arange(2 * length, at::kLong) * 5 + step * 3 + microbatch * 7).remainder(kVocab).view({2, length});
}

// Three steps of two microbatches each, in double. Without ranks it is the run without any parallelism.
ModelRun train(const MakeModel& make, const Setting& setting, int64_t length) {
  ModelRun run;
  run_threads(setting.dp * setting.tp, [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", setting.dp}, {"tp", setting.tp}}));
    Model model = make(setting);
    initialize_parameters(*model.module, 3, 0.3);
    model.module->to(at::kDouble);
    const TensorParallel parallel = parallelize(model.module, comms, model.plan);
    Sharded sharded = fully_shard(model.module, comms,
                                  {.strategy = strategy(setting.strategy),
                                   .units = by_type<GptBlockImpl, LlamaLayerImpl>(),
                                   .gradient_divide = 2});
    Optimizer optimizer = adamw(sharded, {.lr = 0.01});
    const int64_t rank = comms->mesh().coordinate(comm->rank(), "dp_shard"), rounds = 2 / setting.dp;
    for (int64_t step = 0; step < 3; ++step) {
      at::Tensor sum = at::zeros({1}, at::kDouble);
      for (int64_t k = 0; k < rounds; ++k) {
        sharded.set_last_microbatch(k + 1 == rounds);
        const at::Tensor tokens = tokens_of(step, rank * rounds + k, length);
        const at::Tensor loss =
            vocab_parallel_cross_entropy(model.forward(tokens), tokens.roll(1, 1), kVocab, comms->along({"tp"}));
        loss.backward();
        sum += loss.detach();
      }
      comms->along({"dp_shard"}).all_reduce(sum).wait();
      const double norm = sharded.clip_gradients(0.5);
      optimizer.step();
      if (comm->rank() == 0) run.losses.push_back(sum.item<double>()), run.norms.push_back(norm);
    }
    const auto whole = sharded.gather_parameters();
    if (comm->rank() == 0) run.parameters = whole;
  });
  return run;
}

// In double another order of sums moves the 15th digit; a term left out, or taken twice, moves the first. Adam's first steps
// make a tiny gradient a whole step, so that parameters are compared more coarsely than norms.
void expect_same_run(const ModelRun& golden, const ModelRun& run, const std::string& where) {
  for (size_t i = 0; i < golden.losses.size(); ++i) {
    EXPECT_NEAR(run.losses[i], golden.losses[i], 1e-11) << where;
    EXPECT_NEAR(run.norms[i], golden.norms[i], 1e-11 * golden.norms[i]) << where;
  }
  ASSERT_EQ(run.parameters.size(), golden.parameters.size());
  for (size_t i = 0; i < golden.parameters.size(); ++i) {
    EXPECT_EQ(golden.parameters[i].first, run.parameters[i].first);
    const at::Tensor difference = golden.parameters[i].second - run.parameters[i].second;
    EXPECT_LT(difference.abs().max().item<double>(), 1e-8) << where << " " << golden.parameters[i].first;
  }
}

void expect_equal_on_meshes(const MakeModel& make, const std::vector<Setting>& settings) {
  for (const int64_t length : {8, 7}) {
    const ModelRun golden = train(make, {}, length);
    EXPECT_NE(golden.losses[0], golden.losses[2]);
    for (const Setting& setting : settings)
      expect_same_run(golden, train(make, setting, length), fmt::format("{} length {}", setting.str(), length));
  }
}

}  // namespace

TEST(TensorParallel, a_gpt_on_any_mesh_trains_as_the_unsharded_one) {
  for (const bool tied : {false, true})
    expect_equal_on_meshes(gpt_of(tied), {{1, 2, false, "zero3"},
                                          {2, 2, false, "zero3"},
                                          {2, 3, true, "zero3"},
                                          {1, 2, true, "ddp"},
                                          {2, 2, true, "zero2"},
                                          {2, 2, true, "zero1"},
                                          {1, 6, false, "zero3"},
                                          {1, 3, true, "zero3"}});
}

TEST(TensorParallel, a_llama_on_any_mesh_trains_as_the_unsharded_one) {
  for (const bool tied : {false, true})
    expect_equal_on_meshes(llama_of(tied, 3), {{1, 2, false, "zero3"}, {2, 3, true, "zero3"}, {1, 2, true, "ddp"}});
}

TEST(TensorParallel, key_heads_that_are_fewer_than_ranks_are_held_in_copies_whose_gradients_are_summed) {
  expect_equal_on_meshes(llama_of(false, 1), {{1, 2, false, "zero3"}, {2, 3, true, "zero2"}, {1, 6, true, "zero3"}});
  expect_equal_on_meshes(llama_of(false, 2), {{1, 6, false, "zero3"}, {2, 6, true, "zero3"}});
}

TEST(TensorParallel, cross_entropy_of_cut_logits_is_that_of_whole_ones) {
  const at::Tensor logits = at::sin(at::arange(6 * 13, at::kDouble)).view({6, 13}) * 3;
  const at::Tensor targets = at::tensor({3, 0, -100, 9, 5, 2}, at::kLong);
  for (const int64_t n : {1, 2, 4, 5})
    for (const double smoothing : {0.0, 0.2})
      for (const int64_t vocab : {13, 10})
        for (const bool mean : {true, false}) {
          const at::Tensor whole = logits.clone().set_requires_grad(true);
          const at::Tensor expected =
              at::cross_entropy_loss(whole.narrow(1, 0, vocab), targets, {}, mean ? 1 : 2, -100, smoothing);
          expected.backward();
          run_threads(n, [&](std::shared_ptr<Comm> comm) {
            const at::Tensor own = piece_of(logits, 1, n, comm->rank()).clone().set_requires_grad(true);
            const at::Tensor loss = vocab_parallel_cross_entropy(
                own, targets, 13, *comm, {.mean = mean, .label_smoothing = smoothing, .vocab = vocab});
            loss.backward();
            EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
            const at::Tensor gradient = piece_of(whole.grad(), 1, n, comm->rank());
            if (gradient.numel() > 0) EXPECT_LT((own.grad() - gradient).abs().max().item<double>(), 1e-14);
          });
        }
  expect_error([&] {
    run_threads(2, [&](std::shared_ptr<Comm> comm) { vocab_parallel_cross_entropy(logits, targets, 13, *comm); });
  }, {"vocab_parallel_cross_entropy", "log(2)"});
}

TEST(TensorParallel, a_mesh_with_ranks_along_tp_that_nothing_was_cut_along_is_refused) {
  expect_error([] {
    run_threads(2, [](std::shared_ptr<Comm> comm) {
      torch::nn::Linear linear(3, 4);
      fully_shard(linear.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 1}, {"tp", 2}})), toy::options("zero3"));
    });
  }, {"tp", "Call parallelize before fully_shard"});
}

TEST(TensorParallel, a_module_without_a_style_is_refused_when_the_sequence_is_split) {
  expect_error([] {
    run_threads(2, [](std::shared_ptr<Comm> comm) {
      const GptOptions options = small_gpt(true);
      Gpt model(options);
      ParallelPlan plan = gpt_plan(options, true);
      std::erase_if(plan.styles, [](const auto& style) { return style.first == "ln_f"; });
      const auto parallel = parallelize(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}})), plan);
    });
  }, {"ln_f", "SequenceParallel"});
}

TEST(TensorParallel, a_model_built_without_memory_has_the_bits_of_the_unsharded_initialization) {
  const GptOptions options = small_gpt(true);
  Gpt plain(options);
  initialize_parameters(*plain, 5);
  const auto expected = plain->named_parameters();
  run_threads(4, [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}, {"tp", 2}}));
    std::shared_ptr<GptImpl> model;
    {
      const MetaInit meta;
      model = Gpt(options).ptr();
    }
    const TensorParallel parallel = parallelize(model, comms, gpt_plan(options));
    ShardOptions shard = toy::options("zero3");
    shard.initialize = normal_initializer(5);
    shard.broadcast_initial_values = false;
    Sharded sharded = fully_shard(model, comms, shard);
    for (const auto& [name, value] : sharded.gather_parameters()) EXPECT_TRUE(toy::same_bits(value, expected[name])) << name;
  });
}
