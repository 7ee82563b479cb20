// Experts on a view of the ranks of their own: laws that must hold on any mesh, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "properties/kit/bits.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/parity_training.h"
#include "shardproof/checkpoint/manager.h"

using namespace shardproof;
using kit::same_bits;
using parity::grid;
using parity::on_mesh;
using parity::ranks;

namespace {

constexpr int64_t kHidden = 6;

LlamaOptions layer_options(int64_t experts, int64_t shared = 0) {
  LlamaOptions options{.hidden = kHidden, .expert_intermediate = 5, .shared_intermediate = shared};
  options.router = {.experts = experts, .experts_per_token = std::min<int64_t>(2, experts)};
  return options;
}

MoeMlp layer(const LlamaOptions& options) {
  MoeMlp made(options);
  initialize_parameters(*made, 11, 0.5);
  return made;
}

// The batch that `salt` stands for has 1 to 3 tokens: often fewer than there are experts, or ranks.
parity::MakeTrainee trainee(const LlamaOptions& options) {
  return [options] {
    MoeMlp moe = layer(options);
    return parity::Trainee{moe.ptr(), [moe](int64_t salt) mutable {
                             return call(moe, toy::data({1, 1 + salt % 3, kHidden}, salt)).square().sum();
                           }};
  };
}

ParallelPlan over(int64_t ranks) {
  return {.styles = {{"experts", ExpertParallel{ranks}}}};
}

// Trains the layer with its experts over so many ranks.
parity::Plan plan_of(const Mesh& mesh, const std::string& row, int64_t sharing, Divide divide = Divide::after) {
  parity::Plan plan{.mesh = mesh, .options = toy::options(row)};
  plan.options.divide = divide;
  plan.shard = [options = plan.options, sharing](const parity::Trainee& trainee, std::shared_ptr<MeshComm> comms) {
    const TensorParallel parallel = parallelize(trainee.module, comms, over(sharing));
    return fully_shard(trainee.module, comms, options);
  };
  return plan;
}

at::Tensor matrix(const std::vector<std::vector<int64_t>>& rows) {
  std::vector<at::Tensor> tensors;
  for (const auto& row : rows) tensors.push_back(at::tensor(row, at::kLong));
  return at::stack(tensors);
}

struct Held {
  MoeMlp moe;
  Sharded sharded;
};
Held held(const LlamaOptions& options, const std::shared_ptr<MeshComm>& comms, int64_t sharing, ShardOptions how = {}) {
  MoeMlp moe = layer(options);
  const TensorParallel parallel = parallelize(moe.ptr(), comms, over(sharing));
  return {moe, fully_shard(moe.ptr(), comms, std::move(how))};
}

}  // namespace

// Law 1 of experts.h, bit for bit where ep takes all ranks along dp_shard: then all sums are in one order.
TEST(Experts, gradients_over_all_shards_have_the_bits_of_the_plain_sum) {
  for (const Strategy& row : strategies())
    for (const int64_t experts : {1, 3, 4, 7})
      for (const int64_t shared : {0, 4})
        parity::expect_trains_like_plain(trainee(layer_options(experts, shared)), plan_of(grid(2, 2), row.name, 2));
}

TEST(Experts, gradients_are_sums_over_the_world_on_every_view) {
  for (const Strategy& row : strategies())
    for (const auto& [mesh, sharing] : std::vector<std::pair<Mesh, int64_t>>{
             {ranks(4), 2}, {ranks(4), 4}, {grid(2, 2), 4}, {grid(2, 4), 2}, {grid(2, 4), 8}, {ranks(6), 3}, {ranks(3), 1}}) {
      if (!std::ranges::all_of(row.axes, [&mesh = mesh](const std::string& axis) { return mesh.has(axis); })) continue;
      parity::Plan plan = plan_of(mesh, row.name, sharing);
      plan.tolerance = 1e-6;  // other orders of sums
      plan.microbatches = 2;
      parity::expect_trains_like_plain(trainee(layer_options(4)), plan);
    }
}

// Each expert takes one token of a sequence.
TEST(Experts, gradients_are_the_same_on_any_mesh_where_choices_are_dropped) {
  LlamaOptions options = layer_options(4, /*shared=*/3);
  options.router.capacity = 0.5;
  for (const Strategy& row : strategies()) parity::expect_trains_like_plain(trainee(options), plan_of(grid(2, 2), row.name, 2));
}

TEST(Experts, averages_in_collectives_are_over_the_world_too) {
  parity::Plan plan = plan_of(ranks(4), "zero3", 2, Divide::in_collective);
  plan.tolerance = 1e-6;
  parity::expect_trains_like_plain(trainee(layer_options(4)), plan);
}

TEST(Experts, the_norm_counts_each_element_once) {
  for (const int64_t sharing : {1, 2, 4})
    on_mesh(grid(2, 2), [&](const std::shared_ptr<MeshComm>& comms) {
      Held on = held(layer_options(5), comms, sharing, toy::options("hsdp"));
      call(on.moe, toy::data({1, 3, kHidden}, comms->rank())).square().sum().backward();
      double squares = 0;
      for (const auto& [name, gradient] : on.sharded.gather_gradients())
        squares += gradient.to(at::kDouble).square().sum().item<double>();
      EXPECT_NEAR(on.sharded.gradient_norm(), std::sqrt(squares), 1e-9 * squares) << sharing;
    });
}

// No gradient, no hang: one rank's tokens all go to the last expert, another has none.
TEST(Experts, ranks_and_experts_without_tokens_are_ordinary) {
  on_mesh(ranks(3), [&](const std::shared_ptr<MeshComm>& comms) {
    Experts experts(5, kHidden, 4);
    initialize_parameters(*experts, 3, 0.5);
    const at::Tensor whole = experts->down_proj.detach().clone();
    const TensorParallel parallel = parallelize(experts.ptr(), comms, {.styles = {{"", ExpertParallel{3}}}});
    EXPECT_EQ(experts->down_proj.size(0), comms->rank() == 2 ? 1 : 2);
    const int64_t tokens = comms->rank() == 1 ? 0 : 2;
    const at::Tensor x = toy::data({tokens, kHidden}, comms->rank()).requires_grad_();
    const at::Tensor y = call(experts, x, at::full({tokens, 1}, 4, at::kLong), at::ones({tokens, 1}));
    y.square().sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_EQ(experts->down_proj.grad().abs().sum().item<float>() > 0, comms->rank() == 2);
    EXPECT_TRUE(same_bits(parallel.gather_parameters().back().second, whole));
  });
}

// Against a layer that gets the choices that go somewhere, and each as a token of its own. On the second rank nothing goes
// anywhere.
TEST(Experts, a_choice_that_goes_nowhere_is_no_row_of_any_expert) {
  const auto share = [](Experts& experts, const std::shared_ptr<MeshComm>& comms, bool canonical) {
    initialize_parameters(*experts, 3, 0.5);
    if (canonical) experts->to(at::kDouble), use_canonical_arithmetic(*experts);
    return parallelize(experts.ptr(), comms, {.styles = {{"", ExpertParallel{comms->mesh().size()}}}});
  };
  for (const bool canonical : {false, true})
    for (const int64_t sharing : {1, 3})
      on_mesh(ranks(sharing), [&](const std::shared_ptr<MeshComm>& comms) {
        const auto dtype = canonical ? at::kDouble : at::kFloat;
        const bool goes = comms->rank() != 1;
        const at::Tensor chosen = goes ? matrix({{0, -1}, {-1, -1}, {3, 1}, {-1, 2}}) : at::full({4, 2}, -1, at::kLong);
        const at::Tensor places = at::nonzero(chosen.flatten() >= 0).flatten(), tokens = places.floor_divide(2);
        const at::Tensor x = toy::data({4, kHidden}, comms->rank()).to(dtype).requires_grad_();
        const at::Tensor weights = toy::data({4, 2}, 7).to(dtype).requires_grad_(), factors = toy::data({4, kHidden}, 8);
        const at::Tensor alone = x.detach().index_select(0, tokens).requires_grad_();
        const at::Tensor weight = weights.detach().flatten().index_select(0, places).unsqueeze(1).requires_grad_();
        Experts experts(4, kHidden, 5), others(4, kHidden, 5);
        const TensorParallel parallel = share(experts, comms, canonical), beside = share(others, comms, canonical);
        const at::Tensor y = call(experts, x, chosen, weights);
        const at::Tensor terms = call(others, alone, chosen.flatten().index_select(0, places).unsqueeze(1), weight);
        EXPECT_TRUE(at::equal(y, at::zeros_like(y).index_add(0, tokens, terms)));
        (y * factors).sum().backward();
        (terms * factors.index_select(0, tokens)).sum().backward();
        EXPECT_TRUE(at::equal(x.grad(), at::zeros_like(x).index_add(0, tokens, alone.grad())));
        EXPECT_TRUE(at::equal(weights.grad().flatten(), at::zeros({8}, dtype).index_copy(0, places, weight.grad().flatten())));
        EXPECT_TRUE(same_bits(experts->gate_up_proj.grad(), others->gate_up_proj.grad()));
        EXPECT_TRUE(same_bits(experts->down_proj.grad(), others->down_proj.grad()));
      });
}

TEST(Experts, every_rank_begins_with_the_experts_of_rank_0) {
  for (const int64_t sharing : {2, 4})
    on_mesh(ranks(4), [&](const std::shared_ptr<MeshComm>& comms) {
      MoeMlp moe = layer(layer_options(5));
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : moe->parameters()) parameter.add_(static_cast<double>(comms->rank()));
      const TensorParallel parallel = parallelize(moe.ptr(), comms, over(sharing));
      const Sharded sharded = fully_shard(moe.ptr(), comms, toy::options("zero3"));
      const auto wanted = layer(layer_options(5))->named_parameters();
      for (const auto& [name, value] : sharded.gather_parameters()) EXPECT_TRUE(same_bits(value, wanted[name])) << name;
    });
}

TEST(Experts, any_number_of_ranks_loads_what_any_other_saved) {
  const checkpoint::Scratch scratch;
  const auto values = [](const Sharded& sharded) { return sharded.gather_main_parameters(); };
  std::map<std::string, at::Tensor> saved;
  int64_t number = 0;
  for (const int64_t from : {4, 1, 2}) {
    const std::string directory = scratch / std::to_string(number++);
    on_mesh(grid(2, 2), [&](const std::shared_ptr<MeshComm>& comms) {
      Held on = held(layer_options(5), comms, from, toy::options("zero3"));
      Optimizer optimizer = adamw(on.sharded, {.lr = 0.1});
      call(on.moe, toy::data({1, 3, kHidden}, comms->rank())).square().sum().backward();
      optimizer.step();
      checkpoint::Manager(directory).save(on.sharded, &optimizer, {.step = 1});
      const auto own = values(on.sharded);
      if (comms->rank() == 0) saved = own;
    });
    for (const int64_t to : {1, 2, 4})
      on_mesh(ranks(4), [&](const std::shared_ptr<MeshComm>& comms) {
        Held on = held(layer_options(5), comms, to, toy::options("zero1"));
        Optimizer optimizer = adamw(on.sharded, {.lr = 0.1});
        ASSERT_TRUE(checkpoint::Manager(directory).load_latest(on.sharded, &optimizer));
        for (const auto& [name, value] : values(on.sharded)) EXPECT_TRUE(same_bits(value, saved.at(name))) << name;
      });
  }
}

TEST(Experts, of_equal_scores_the_first_expert_is_chosen) {
  const at::Tensor logits = matrix({{1, 3, 3, 0, 3}, {0, 0, 0, 0, 0}}).to(at::kFloat);
  for (const RouterScore score : {RouterScore::softmax, RouterScore::chosen_softmax, RouterScore::sigmoid}) {
    const Routes routes = route(logits, {.experts = 5, .experts_per_token = 2, .score = score});
    EXPECT_TRUE(at::equal(routes.experts, matrix({{1, 2}, {0, 1}})));
    EXPECT_TRUE(at::equal(routes.weights, at::full({2, 2}, 0.5f)));
  }
}

// The sums of the groups' two best are 5, 6 and 6: the second group, though the first has the best expert.
TEST(Experts, experts_come_from_the_groups_whose_two_best_are_best) {
  const at::Tensor logits = matrix({{5, 0, 3, 3, 2, 4}}).to(at::kFloat);
  const Routes one = route(
      logits, {.experts = 6, .experts_per_token = 2, .score = RouterScore::chosen_softmax, .groups = 3, .groups_per_token = 1});
  EXPECT_TRUE(at::equal(one.experts, matrix({{2, 3}})));
  const Routes two = route(
      logits, {.experts = 6, .experts_per_token = 3, .score = RouterScore::chosen_softmax, .groups = 3, .groups_per_token = 2});
  EXPECT_TRUE(at::equal(two.experts, matrix({{5, 2, 3}})));
}

// The logits 1 and 1 + 2^-9 are one number of bfloat16, of which the first expert would get the token. Only the second one
// gives anything.
TEST(Experts, of_sigmoids_logits_that_are_one_in_bfloat16_are_two) {
  RouterOptions options{.experts = 2, .experts_per_token = 1, .score = RouterScore::sigmoid};
  for (const RouterScore score : {RouterScore::sigmoid, RouterScore::softmax}) {
    options.score = score;
    MoeMlp moe = layer({.hidden = 2, .router = options, .expert_intermediate = 1});
    const at::NoGradGuard no_grad;
    moe->to(at::kBFloat16);
    auto parameters = moe->named_parameters();
    parameters["gate.weight"].copy_(at::tensor({1.0, 0.0, 1.0, 1.0}).view({2, 2}));
    parameters["experts.gate_up_proj"].fill_(1);
    parameters["experts.down_proj"].zero_()[1].fill_(1);
    const at::Tensor y = moe->forward(at::tensor({1.0, 0x1p-9}).to(at::kBFloat16).view({1, 1, 2}));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(y.ne(0).all().item<bool>(), score == RouterScore::sigmoid);
  }
}

TEST(Experts, rows_go_to_the_ranks_that_counts_say_and_gradients_come_back) {
  on_mesh(ranks(3), [](const std::shared_ptr<MeshComm>& comms) {
    const int64_t rank = comms->rank();  // rank r sends r rows to rank 0, none to rank 1 and one to rank 2
    const std::vector<int64_t> sent{rank, 0, 1};
    const std::vector<int64_t> received = rank == 0   ? std::vector<int64_t>{0, 1, 2}
                                          : rank == 1 ? std::vector<int64_t>{0, 0, 0}
                                                      : std::vector<int64_t>{1, 1, 1};
    const at::Tensor x = at::full({rank + 1, 2}, static_cast<double>(rank)).requires_grad_();
    const at::Tensor y = collective::exchange_rows(x, sent, received, comms->world());
    const std::vector<std::vector<int64_t>> from{{1, 2, 2}, {}, {0, 1, 2}};
    EXPECT_TRUE(at::equal(y.select(1, 0).to(at::kLong), at::tensor(from[static_cast<size_t>(rank)], at::kLong)));
    (y * static_cast<double>(rank + 1)).sum().backward();
    at::Tensor wanted = at::ones_like(x);  // rank 0 multiplied by 1, rank 2 by 3
    wanted[rank].fill_(3);
    EXPECT_TRUE(at::equal(x.grad(), wanted));
  });
}

TEST(Experts, a_layer_of_ones_own_is_told_which_of_its_experts_each_row_is_for) {
  on_mesh(ranks(2), [](const std::shared_ptr<MeshComm>& comms) {
    const Dispatch dispatch(matrix({{0}, {2}, {1}}), /*count=*/3, comms->world().shared());
    const at::Tensor x = at::arange(3, at::kFloat).unsqueeze(1) + 10 * static_cast<double>(comms->rank());
    const bool first = comms->rank() == 0;  // it has the experts 0 and 1
    EXPECT_EQ(dispatch.blocks(), first ? std::vector<int64_t>({1, 1, 1, 1}) : std::vector<int64_t>({1, 1}));
    EXPECT_TRUE(at::equal(dispatch.experts(), first ? matrix({{0, 1, 0, 1}})[0] : matrix({{0, 0}})[0]));
    const at::Tensor rows = dispatch.rows(x);
    EXPECT_TRUE(at::equal(rows.flatten(), (first ? matrix({{0, 2, 10, 12}}) : matrix({{1, 11}}))[0].to(at::kFloat)));
    EXPECT_TRUE(at::equal(dispatch.sums(rows, at::full({3, 1}, 2.0f)), 2 * x));
  });
}

TEST(Experts, on_replicas_alone_ranks_share_experts_too) {
  EXPECT_EQ(expert_mesh(Mesh::parse("dp_replicate=2,dp_shard=4"), 2).str(), "dp_replicate=2,dp_shard=2,ep=2");
  EXPECT_EQ(expert_mesh(Mesh::parse("dp_replicate=2,dp_shard=4"), 8).str(), "dp_replicate=1,dp_shard=1,ep=8");
  EXPECT_EQ(expert_mesh(Mesh::parse("dp_replicate=4,tp=1"), 2).str(), "dp_replicate=2,dp_shard=1,ep=2,tp=1");
  EXPECT_EQ(expert_mesh(Mesh::parse("dp_shard=2,dp_replicate=2"), 2).str(), "dp_shard=1,ep=2,dp_replicate=2");
  expect_error([] { expert_mesh(Mesh::parse("dp_shard=2,dp_replicate=2"), 4); }, {"4 ranks cannot share experts"});
  parity::Plan plan = plan_of(Mesh({{"dp_replicate", 4}}), "ddp", 2);
  plan.tolerance = 1e-6;
  parity::expect_trains_like_plain(trainee(layer_options(3)), plan);
}

TEST(Experts, what_would_be_wrong_silently_is_refused_on_every_rank) {
  on_mesh(ranks(2), [](const std::shared_ptr<MeshComm>& comms) {
    Held on = held(layer_options(4), comms, 2, toy::options("ddp"));
    const at::Tensor loss = call(on.moe, toy::data({1, 2, kHidden}, comms->rank())).square().sum();
    expect_error([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }, {"create_graph"});
  });
  on_mesh(ranks(2), [](const std::shared_ptr<MeshComm>& comms) {
    MoeMlp moe = layer(layer_options(4));
    const ParallelPlan twice{.styles = {{"experts", ExpertParallel{2}}, {"again", ExpertParallel{2}}}};
    moe->register_module("again", std::make_shared<torch::nn::Module>("again"))
        ->register_parameter("gate_up_proj", moe->named_parameters()["experts.gate_up_proj"]);
    expect_error([&] { (void)parallelize(moe.ptr(), comms, twice); }, {"experts.gate_up_proj", "another style already"});
    MoeMlp scaled = layer(layer_options(4));
    scaled->named_children()["experts"]->register_buffer("scale", at::ones({4}));
    expect_error([&] { (void)parallelize(scaled.ptr(), comms, over(2)); }, {"buffer scale", "a row for each of 4 experts"});
    MoeMlp whole = layer(layer_options(4));
    const TensorParallel parallel = parallelize(whole.ptr(), comms, over(2));
    ShardOptions options = toy::options("zero3");
    options.numerics = Numerics::canonical;
    options.gradient_divide = 1;
    expect_error([&] { fully_shard(whole.ptr(), comms, options); }, {"Numerics::canonical", "2 ranks share"});
  });
  expect_error([] { Dispatch(matrix({{-2}}), 2, nullptr); }, {"expert -2", "-1 is nowhere"});
}

TEST(Experts, a_choice_that_is_no_expert_is_refused_on_every_rank_also_where_there_are_none) {
  on_mesh(ranks(4), [](const std::shared_ptr<MeshComm>& comms) {
    const bool mine = comms->rank() == 1;
    expect_error([&] { Dispatch(matrix({{mine ? 3L : 0L}}), /*count=*/3, comms->world().shared()); },
                 {mine ? "expert 3, and there are 3" : "rank 1 of"});
  });
}

TEST(Experts, what_does_not_fit_is_refused_by_name) {
  on_mesh(ranks(4), [](const std::shared_ptr<MeshComm>& comms) {
    MoeMlp moe = layer(layer_options(4));
    expect_error([&] { (void)parallelize(moe.ptr(), comms, over(3)); }, {"3 ranks cannot share experts", "dp_shard"});
    expect_error(
        [&] {
          (void)parallelize(moe.ptr(), comms, {.styles = {{"gate", ExpertParallel{2}}}});
        },
        {"a matrix for each expert", "'gate'"});
    expect_error([&] { route(at::zeros({2, 3}), {.experts = 4}); }, {"4 experts", "[2, 3]"});
    expect_error(
        [&] {
          route(at::zeros({2, 4}), {.experts = 4, .experts_per_token = 3, .groups = 2});
        },
        {"cannot get 3 experts"});
    Experts experts(2, kHidden, 4);
    expect_error(
        [&] {
          call(experts, at::ones({1, kHidden}), at::full({1, 1}, 2, at::kLong), at::ones({1, 1}));
        },
        {"expert 2", "there are 2"});
  });
}

// They take part in the backward's exchange, also where what is below needs no gradient.
TEST(Experts, ranks_without_experts_take_part_in_canonical_arithmetic) {
  on_mesh(ranks(4), [](const std::shared_ptr<MeshComm>& comms) {
    MoeMlp moe = layer(layer_options(2));
    moe->to(at::kDouble);
    use_canonical_arithmetic(*moe);
    const TensorParallel parallel = parallelize(moe.ptr(), comms, over(4));
    const at::Tensor x = toy::data({1, 3, kHidden}, comms->rank()).to(at::kDouble);
    call(moe, x).sum().backward();
    EXPECT_TRUE(moe->named_parameters()["gate.weight"].grad().defined());
  });
}

TEST(Experts, ranks_along_tp_that_would_send_pieces_of_sequences_are_refused) {
  on_mesh(Mesh({{"dp_shard", 2}, {"tp", 2}}), [](const std::shared_ptr<MeshComm>& comms) {
    MoeMlp moe = layer(layer_options(4));
    ParallelPlan plan{.styles = {{"gate", SequenceParallel{}}, {"experts", ExpertParallel{2}}}, .sequence_dim = 1};
    expect_error([&] { (void)parallelize(moe.ptr(), comms, plan); }, {"'experts'", "WholeSequence"});
  });
}

// Whatever the order of axes: the norm, too, counts what ranks along tp hold in copies once.
TEST(Experts, beside_ranks_along_tp_have_the_gradients_of_the_whole_model) {
  const LlamaOptions options{
      .vocab = 11, .router = {.experts = 4, .capacity = 0.75}, .expert_intermediate = 5, .dense_layers = 1};
  const at::Tensor tokens = at::arange(12).view({2, 6}).remainder(11);
  const auto loss_of = [](const at::Tensor& logits) { return logits.square().sum(); };
  const auto made = [&options] {
    Llama model(options);
    initialize_parameters(*model, 5, 0.2);
    return model;
  };
  Llama plain = made();
  (loss_of(call(plain, tokens)) * 2).backward();  // two data-parallel ranks with the same batch
  double squares = 0;
  std::map<std::string, at::Tensor> expected;
  for (const auto& item : plain->named_parameters()) {
    expected[item.key()] = item.value().grad();
    squares += item.value().grad().to(at::kDouble).square().sum().item<double>();
  }
  for (const Mesh& mesh : {Mesh({{"dp_shard", 2}, {"tp", 2}}), Mesh({{"tp", 2}, {"dp_shard", 2}})})
    for (const bool sequence_parallel : {false, true})
      on_mesh(mesh, [&](const std::shared_ptr<MeshComm>& comms) {
        Llama model = made();
        ParallelPlan plan = llama_plan(options, 2, sequence_parallel);
        plan.styles.emplace_back("model.layers.*.mlp.experts", ExpertParallel{2});
        const TensorParallel parallel = parallelize(model.ptr(), comms, plan);
        Sharded sharded = fully_shard(model.ptr(), comms, {.gradient_divide = 1});
        const at::Tensor own = call(model, tokens);  // this rank's entries of the vocabulary
        loss_of(own).backward();
        EXPECT_NEAR(sharded.gradient_norm() / std::sqrt(squares), 1, 1e-5) << mesh.str();
        for (const auto& [name, gradient] : sharded.gather_gradients())
          EXPECT_LE((gradient - expected.at(name)).abs().max().item<double>(),
                    1e-5 * expected.at(name).abs().max().item<double>())
              << mesh.str() << ' ' << name;
      });
}
