// Layers of tensor parallelism, and modules made of them, beside their plain selves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_pieces.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using pieces::integers;
using pieces::piece_of;

// The case that DTensor got wrong: tensor parallelism cuts dim 0, and the data-parallel strategy cuts what is left of it.
TEST(TensorParallel, what_tp_and_dp_both_cut_along_dim_0_is_gathered_exactly) {
  for (const auto& [tp, dp] : std::vector<std::pair<int64_t, int64_t>>{{2, 2}, {2, 3}, {3, 2}, {4, 2}})
    for (int64_t rows = 1; rows <= 3 * tp * dp; ++rows)
      run_threads(tp * dp, [&, tp = tp, dp = dp](std::shared_ptr<Comm> comm) {
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
// The data-parallel ranks of both meshes are the same, so only the axis of the cut can be at fault.
TEST(TensorParallel, a_unit_on_a_mesh_without_the_axis_of_its_cut_is_refused) {
  const Mesh mesh({{"dp_shard", 2}, {"tp", 2}});
  const auto shard_on = [&](const Mesh& view, const std::string& says) {
    run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
      auto comms = std::make_shared<MeshComm>(comm, mesh);
      torch::nn::Linear linear(3, 4);
      const TensorParallel parallel = parallelize(linear.ptr(), comms, {.styles = {{"", ColumnParallel{}}}});
      ShardOptions options = toy::options("zero3");
      options.unit_options = [&](const std::string&) { return UnitOptions{.mesh = view}; };
      if (says.empty()) EXPECT_NO_THROW(fully_shard(linear.ptr(), comms, options));
      else expect_error([&] { fully_shard(linear.ptr(), comms, options); }, {"[fully_shard]", says, "the same axis tp"});
    });
  };
  shard_on(mesh, "");
  shard_on(Mesh({{"dp_shard", 2}, {"other", 2}}), "mesh 'dp_shard=2,other=2'");
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
            const at::Tensor loss = vocab_parallel_cross_entropy(own, targets, 13, *comm,
                                                                 {.mean = mean, .label_smoothing = smoothing, .vocab = vocab});
            loss.backward();
            EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
            const at::Tensor gradient = piece_of(whole.grad(), 1, n, comm->rank());
            if (gradient.numel() > 0) {
              EXPECT_LT((own.grad() - gradient).abs().max().item<double>(), 1e-14);
            }
          });
        }
  expect_error(
      [&] { run_threads(2, [&](std::shared_ptr<Comm> comm) { vocab_parallel_cross_entropy(logits, targets, 13, *comm); }); },
      {"vocab_parallel_cross_entropy", "log(2)"});
}

// As exact as PyTorch's own on whole logits of the dtype. A sum of 70,000 ones is more than float16 holds.
TEST(TensorParallel, cross_entropy_of_low_precision_is_as_exact_as_pytorchs) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    for (const int64_t vocab : {int64_t{41}, int64_t{70000}}) {
      const at::Tensor logits = (at::sin(at::arange(8 * vocab, at::kDouble)).view({8, vocab}) * 0.3).to(dtype);
      const at::Tensor targets = at::arange(8, at::kLong) * 5;
      const auto of = [&](const at::Tensor& given) {
        const at::Tensor leaf = given.clone().set_requires_grad(true);
        const at::Tensor loss = at::cross_entropy_loss(leaf, targets);
        loss.backward();
        return std::pair(loss.item<double>(), leaf.grad().to(at::kDouble));
      };
      const auto [truth, true_gradient] = of(logits.to(at::kDouble));
      const auto [theirs, their_gradient] = of(logits);
      const double loss_bound = 1.5 * std::abs(theirs - truth) + truth * (dtype == at::kHalf ? 0x1p-11 : 0x1p-8);
      run_threads(2, [&, truth = truth, &g = true_gradient, &h = their_gradient](std::shared_ptr<Comm> comm) {
        const at::Tensor own = piece_of(logits, 1, 2, comm->rank()).clone().set_requires_grad(true);
        const at::Tensor loss = vocab_parallel_cross_entropy(own, targets, vocab, *comm);
        loss.backward();
        EXPECT_EQ(loss.scalar_type(), dtype);
        EXPECT_NEAR(loss.item<double>(), truth, loss_bound);
        const auto part = [&](const at::Tensor& whole) { return piece_of(whole, 1, 2, comm->rank()); };
        EXPECT_LE((own.grad().to(at::kDouble) - part(g)).norm().item<double>(),
                  1.5 * (part(h) - part(g)).norm().item<double>());
      });
    }
}

TEST(TensorParallel, a_mesh_with_ranks_along_tp_that_nothing_was_cut_along_is_refused) {
  expect_error(
      [] {
        run_threads(2, [](std::shared_ptr<Comm> comm) {
          torch::nn::Linear linear(3, 4);
          fully_shard(linear.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 1}, {"tp", 2}})),
                      toy::options("zero3"));
        });
      },
      {"tp", "Call parallelize before fully_shard"});
}

namespace {

// What a module made parallel computes, and the gradients of its whole parameters, beside the same of the plain one. Integers:
// every bit must agree.
void expect_as_plain(const std::function<std::shared_ptr<torch::nn::Module>()>& make, const ParallelPlan& plan,
                     const std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)>& forward, const at::Tensor& x) {
  const auto fill = [](torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    int64_t salt = 1;
    for (at::Tensor& p : module.parameters()) p.copy_(integers(p.sizes().vec(), salt++));
  };
  const auto input = [&] { return x.is_floating_point() ? x.clone().set_requires_grad(true) : x; };
  const auto plain = make();
  fill(*plain);
  const at::Tensor plain_x = input(), expected = forward(*plain, plain_x), dy = integers(expected.sizes().vec(), 5);
  expected.backward(dy);
  for (const int64_t tp : {1, 2, 3})
    run_threads(tp, [&](std::shared_ptr<Comm> comm) {
      const auto module = make();
      fill(*module);
      const auto parallel = parallelize(module, std::make_shared<MeshComm>(comm, Mesh({{"tp", tp}})), plan);
      const at::Tensor own_x = input(), y = forward(*module, own_x);
      EXPECT_TRUE(at::equal(y, expected)) << tp;
      y.backward(dy);
      if (x.is_floating_point()) {
        EXPECT_TRUE(at::equal(own_x.grad(), plain_x.grad())) << tp;
      }
      const auto whole = plain->named_parameters();
      for (const auto& item : module->named_parameters()) {
        at::Tensor gradient = whole[item.key()].grad();
        for (const ParallelParameter& known : parallel.parameters())
          if (module->named_parameters()[known.name].is_same(item.value()) && !known.layout.dims.empty())
            gradient = piece_of(gradient, std::ssize(known.layout.dims) - 1, tp, comm->rank());
        EXPECT_TRUE(at::equal(item.value().grad(), gradient)) << item.key() << " tp " << tp;
      }
    });
}

at::Tensor forward_linear(torch::nn::Module& module, const at::Tensor& x) {
  return call(dynamic_cast<torch::nn::LinearImpl&>(module), x);
}

}  // namespace

TEST(TensorParallel, a_column_layer_that_gathers_its_output_is_the_plain_one) {
  for (const int64_t outputs : {5, 6, 2})
    expect_as_plain([=] { return torch::nn::Linear(3, outputs).ptr(); },
                    {.styles = {{"", ColumnParallel{.gather_output = true}}}}, forward_linear, integers({4, 3}, 2));
}

TEST(TensorParallel, a_row_layer_that_cuts_its_own_input_is_the_plain_one) {
  for (const int64_t inputs : {5, 6, 2})
    expect_as_plain([=] { return torch::nn::Linear(inputs, 4).ptr(); },
                    {.styles = {{"", RowParallel{.input_is_parallel = false}}}}, forward_linear, integers({2, 3, inputs}, 2));
}

TEST(TensorParallel, a_column_and_a_row_layer_may_have_the_sequence_cut_along_any_dim) {
  const at::Tensor x = integers({5, 7, 3}, 1), w = integers({4, 3}, 2), b = integers({4}, 3), v = integers({6, 4}, 4);
  const at::Tensor plain_x = x.clone().set_requires_grad(true), plain_w = w.clone().set_requires_grad(true),
                   plain_b = b.clone().set_requires_grad(true), plain_v = v.clone().set_requires_grad(true);
  const at::Tensor plain = at::linear(at::linear(plain_x, plain_w, plain_b), plain_v), dy = integers({5, 7, 6}, 5);
  plain.backward(dy);
  for (const int64_t tp : {2, 3})
    for (const int64_t given : {0, 1, -2, -3})
      run_threads(tp, [&](std::shared_ptr<Comm> comm) {
        const int64_t dim = given < 0 ? given + 3 : given, rank = comm->rank();
        const auto own = [&](const at::Tensor& whole, int64_t along) {
          return piece_of(whole, along, tp, rank).contiguous().set_requires_grad(true);
        };
        const at::Tensor own_x = own(x, dim), own_w = own(w, 0), own_b = own(b, 0), own_v = own(v, 1);
        const at::Tensor hidden =
            column_parallel_linear(own_x, own_w, own_b, *comm, SequenceSplit{.dim = given, .length = x.size(dim)});
        const at::Tensor y = row_parallel_linear(hidden, own_v, {}, *comm, given);
        EXPECT_TRUE(at::equal(y, piece_of(plain, dim, tp, rank))) << tp << " ranks, dim " << given;
        y.backward(piece_of(dy, dim, tp, rank));
        EXPECT_TRUE(at::equal(own_x.grad(), piece_of(plain_x.grad(), dim, tp, rank))) << tp << " ranks, dim " << given;
        EXPECT_TRUE(at::equal(own_w.grad(), piece_of(plain_w.grad(), 0, tp, rank)));
        EXPECT_TRUE(at::equal(own_b.grad(), piece_of(plain_b.grad(), 0, tp, rank)));
        EXPECT_TRUE(at::equal(own_v.grad(), piece_of(plain_v.grad(), 1, tp, rank)));
      });
}

TEST(TensorParallel, a_sequential_is_made_parallel_without_a_change) {
  expect_as_plain(
      [] { return torch::nn::Sequential(torch::nn::Linear(3, 7), torch::nn::ReLU(), torch::nn::Linear(7, 4)).ptr(); },
      {.styles = {{"0", ColumnParallel{}}, {"2", RowParallel{}}}},
      [](torch::nn::Module& module, const at::Tensor& x) { return call(dynamic_cast<torch::nn::SequentialImpl&>(module), x); },
      integers({5, 3}, 2));
}

TEST(TensorParallel, the_padding_row_of_a_cut_embedding_is_read_and_gets_no_gradient) {
  for (const int64_t padding : {0, 3, 6})
    expect_as_plain([=] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 3).padding_idx(padding)).ptr(); },
                    {.styles = {{"", VocabParallel{}}}},
                    [](torch::nn::Module& module, const at::Tensor& tokens) {
                      return call(dynamic_cast<torch::nn::EmbeddingImpl&>(module), tokens);
                    },
                    at::tensor({0, 6, 3, 2, 3, 1, 0, 5}, at::kLong).view({2, 4}));
}

namespace {

// The head comes before the embedding that shares its weight.
struct HeadFirst : torch::nn::Module {
  explicit HeadFirst(int64_t vocab)
      : head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, vocab).bias(false)))),
        tokens(register_module("tokens", torch::nn::Embedding(torch::nn::EmbeddingOptions(vocab, 4)._weight(head->weight)))) {}

  torch::nn::Linear head;
  torch::nn::Embedding tokens;
};

}  // namespace

TEST(TensorParallel, a_weight_that_a_head_and_an_embedding_share_is_cut_once_whichever_comes_first) {
  for (const int64_t vocab : {6, 7})
    expect_as_plain([=] { return std::make_shared<HeadFirst>(vocab); },
                    {.styles = {{"head", ColumnParallel{.gather_output = true}}, {"tokens", VocabParallel{}}}},
                    [](torch::nn::Module& module, const at::Tensor& tokens) {
                      auto& model = dynamic_cast<HeadFirst&>(module);
                      return call(*model.head, call(*model.tokens, tokens));
                    },
                    at::tensor({0, 5, 3, 2, 3, 1}, at::kLong).view({2, 3}));
}

TEST(TensorParallel, a_shared_weight_that_two_styles_cut_in_different_ways_is_refused) {
  for (const ParallelStyle& style : {ParallelStyle(RowParallel{}), ParallelStyle(ColumnParallel{.segments = {{2}, {4}}})})
    expect_error(
        [&] {
          run_threads(2, [&](std::shared_ptr<Comm> comm) {
            auto comms = std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}}));
            const auto parallel =
                parallelize(std::make_shared<HeadFirst>(6), comms, {.styles = {{"head", style}, {"tokens", VocabParallel{}}}});
          });
        },
        {"tensor_parallel", "head.weight", "shared", "in different ways"});
}

TEST(TensorParallel, outputs_of_two_segments_that_are_to_be_gathered_are_refused) {
  expect_error(
      [] {
        run_threads(2, [](std::shared_ptr<Comm> comm) {
          auto comms = std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}}));
          torch::nn::Linear linear(3, 6);
          const auto parallel = parallelize(linear.ptr(), comms,
                                            {.styles = {{"", ColumnParallel{.gather_output = true, .segments = {{2}, {4}}}}}});
        });
      },
      {"tensor_parallel", "several segments cannot be gathered"});
}

// Of a cut weight, so that only one rank of the four has it, before and after the reduction.
TEST(TensorParallel, an_infinite_gradient_in_one_cut_skips_the_step_on_all_ranks) {
  for (const bool infinite : {true, false})
    for (const char* name : {"ddp", "zero1", "zero3"})
      run_threads(4, [&](std::shared_ptr<Comm> comm) {
        auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}, {"tp", 2}}));
        torch::nn::Linear linear(3, 4);
        const TensorParallel parallel =
            parallelize(linear.ptr(), comms, {.styles = {{"", ColumnParallel{.gather_output = true}}}});
        ShardOptions options = toy::options(name);
        options.check_gradients = false;
        if (infinite && comm->rank() == 3)
          linear->weight.register_hook([](const at::Tensor& gradient) { return gradient / 0; });
        Sharded sharded = fully_shard(linear.ptr(), comms, options);
        Optimizer optimizer = adamw(sharded, {.lr = 0.01});
        LossScaler scaler({.initial = 2});
        scaler.scale(call(linear, integers({2, 3}, comm->rank() / 2)).square().sum()).backward();
        EXPECT_EQ(scaler.unscale(sharded), !infinite) << "rank " << comm->rank();
        EXPECT_EQ(scaler.value(), infinite ? 1 : 2);
        if (!infinite) optimizer.step();
        EXPECT_EQ(sharded.step(), 1);
      });
}

TEST(TensorParallel, a_pattern_that_fits_no_module_is_refused) {
  for (const char* pattern : {"1", "layers.*", "0.weight"})
    expect_error(
        [&] {
          run_threads(2, [&](std::shared_ptr<Comm> comm) {
            const auto parallel = parallelize(
                torch::nn::Sequential(torch::nn::Linear(3, 4)).ptr(), std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}})),
                {.styles = {{"0", ColumnParallel{.gather_output = true}}, {pattern, RowParallel{}}}});
          });
        },
        {"tensor_parallel", fmt::format("pattern '{}'", pattern), "fits no module"});
}

TEST(Mlp, a_width_of_nothing_or_less_is_refused_wherever_it_is) {
  for (size_t at = 0; at < 4; ++at)
    for (const int64_t width : {0, -1}) {
      std::vector<int64_t> widths{3, 4, 5, 2};
      widths[at] = width;
      expect_error([&] { Mlp model(MlpOptions{.widths = widths}); }, {"mlp", "positive", fmt::format("{}", width)});
    }
}

TEST(Attention, takes_heads_of_queries_keys_and_values_that_fit_and_refuses_others) {
  const auto attend = [](std::vector<int64_t> q, std::vector<int64_t> k, std::vector<int64_t> v) {
    return Attention()->forward(at::ones(q), at::ones(k), at::ones(v));
  };
  const std::vector<int64_t> q{2, 4, 3, 6}, k{2, 2, 3, 6};
  EXPECT_EQ(attend(q, k, k).sizes(), at::IntArrayRef(q));
  using Sizes = std::vector<int64_t>;
  for (const auto& [queries, keys, values] : std::vector<std::tuple<Sizes, Sizes, Sizes>>{{{4, 3, 6}, k, k},
                                                                                          {{1, 2, 4, 3, 6}, k, k},
                                                                                          {q, {2, 3, 6}, {2, 3, 6}},
                                                                                          {q, {1, 2, 2, 3, 6}, {1, 2, 2, 3, 6}},
                                                                                          {q, k, {2, 4, 3, 6}},
                                                                                          {q, {2, 3, 3, 6}, {2, 3, 3, 6}},
                                                                                          {q, {2, 0, 3, 6}, {2, 0, 3, 6}}})
    expect_error([&, &queries = queries, &keys = keys, &values = values] { attend(queries, keys, values); },
                 {"attention", "needs q [B, heads, T, head]"});
}

namespace {

// A linear layer that is called with two tensors, as a style and an adapter do not expect.
struct OfTwoImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  at::Tensor forward(const at::Tensor& a, const at::Tensor& b) { return torch::nn::LinearImpl::forward(a + b); }
};
TORCH_MODULE(OfTwo);

struct HolderImpl : torch::nn::Module {
  HolderImpl() { layer = register_module("layer", OfTwo(4, 6)); }
  OfTwo layer{nullptr};
};
TORCH_MODULE(Holder);

}  // namespace

TEST(TensorParallel, a_module_with_a_style_or_an_adapter_that_is_called_with_two_tensors_is_refused) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    const at::Tensor x = at::ones({2, 4});
    Holder cut, adapted;
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}}));
    const TensorParallel parallel = parallelize(cut.ptr(), comms, {.styles = {{"layer", ColumnParallel{}}}});
    expect_error([&] { call(cut->layer, x, x); },
                 {"[tensor_parallel]", "has a style", "one tensor for one tensor", "its parts"});
    const Lora lora = add_lora(adapted.ptr(), {.rank = 2, .targets = {"layer"}});
    expect_error([&] { call(adapted->layer, x, x); }, {"[unit]", "has an adapter", "one tensor for one tensor", "its parts"});
  });
}

TEST(ParallelLinear, inputs_of_another_width_are_refused_with_both_widths) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    const at::Tensor x = at::ones({2, 7}), weight = at::ones({3, 4});
    const std::string who = fmt::format("rank {} of", comm->rank());
    expect_error([&] { row_parallel_linear(x, weight, {}, *comm); },
                 {"[row_parallel_linear]", who, "the input has 7 features, this rank's columns of the weight take 4"});
  });
}
