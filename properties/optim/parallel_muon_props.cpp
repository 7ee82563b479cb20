// Muon, which needs whole matrices, on those that tensor parallelism has cut.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>

#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_models.h"
#include "properties/kit/toy_modules.h"

using namespace shardproof;

namespace {

using Whole = std::map<std::string, at::Tensor>;

// Of the pieces of all ranks, which are threads.
class Assembled {
 public:
  explicit Assembled(std::shared_ptr<Comm> comm) : comm_(std::move(comm)) {}

  const Whole& of(const std::vector<Piece>& pieces) {
    comm_->barrier().wait();
    if (comm_->rank() == 0) whole().clear();
    comm_->barrier().wait();
    {
      const std::lock_guard lock(mutex());
      for (const Piece& piece : pieces) {
        at::Tensor& tensor = whole()[piece.name];
        if (!tensor.defined()) tensor = at::full({numel(piece.shape)}, NAN);
        tensor.narrow(0, piece.run.begin, piece.run.size()).copy_(piece.data);
      }
    }
    comm_->barrier().wait();
    return whole();
  }

 private:
  static Whole& whole() {
    static Whole whole;
    return whole;
  }
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  std::shared_ptr<Comm> comm_;
};

const MuonOptions kMuon{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1};

bool is_matrix(const std::string& name, const Shape& shape) {
  return shape.size() == 2 && name.starts_with("h.");
}

// Two steps; each matrix has after each the bits that the rule gives for the whole one.
void expect_whole_updates(const Mesh& mesh, const char* strategy_name, int64_t heads = 6) {
  run_threads(mesh.size(), [&](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, mesh);
    GptOptions options = parallel_models::gpt_options(true);
    options.heads = heads;
    Gpt model(options);
    initialize_parameters(*model, 3, 0.3);
    const TensorParallel parallel = parallelize(model.ptr(), comms, gpt_plan(options));
    Sharded sharded = fully_shard(
        model.ptr(), comms,
        {.strategy = strategy(strategy_name), .units = by_type<GptBlockImpl>(), .granularity = Granularity::tensor});
    const std::shared_ptr<UpdateRule> rule = make_rule(kMuon);
    Optimizer optimizer(sharded, {{.takes = is_matrix, .rule = rule}, {.rule = make_rule(AdamWOptions{.lr = 0.01})}});
    Assembled assembled(comm);
    std::map<std::string, Shape> shapes;
    Whole parameters, momenta;
    for (const auto& [name, value] : sharded.gather_parameters())
      if (is_matrix(name, value.sizes().vec())) {
        shapes[name] = value.sizes().vec();
        parameters[name] = value.clone().view({-1});
        momenta[name] = at::zeros_like(parameters[name]);
      }
    for (int64_t step = 1; step <= 2; ++step) {
      const at::Tensor tokens = (at::arange(16, at::kLong) * 5 + step).remainder(options.vocab).view({2, 8});
      vocab_parallel_cross_entropy(call(model, tokens), tokens.roll(1, 1), options.vocab, comms->along({"tp"})).backward();
      const Whole gradients = assembled.of(sharded.gradients());
      for (auto& [name, parameter] : parameters)
        rule->update({.name = name,
                      .shape = shapes[name],
                      .parameter = parameter,
                      .gradient = gradients.at(name).clone(),
                      .state = {momenta[name]},
                      .step = step});
      optimizer.step();
      std::map<std::string, at::Tensor> found;
      for (const auto& [name, value] : sharded.gather_parameters()) found[name] = value;
      for (const auto& [name, parameter] : parameters)
        EXPECT_TRUE(kit::same_bits(found.at(name), parameter.view(shapes[name]))) << name << " step " << step;
    }
  });
}

}  // namespace

TEST(ParallelMuon, a_matrix_that_is_cut_has_the_update_of_the_whole_one) {
  for (const char* name : {"ddp", "zero1", "zero3"}) {
    expect_whole_updates(Mesh({{"dp_shard", 1}, {"tp", 2}}), name);
    expect_whole_updates(Mesh({{"dp_shard", 2}, {"tp", 3}}), name);
  }
  for (const char* name : {"ddp", "zero1", "zero3"})  // unevenly cut
    expect_whole_updates(Mesh({{"dp_shard", 2}, {"tp", 2}}), name, 3);
}

TEST(ParallelMuon, a_matrix_of_which_a_rank_has_nothing_is_refused_on_every_rank) {
  std::atomic<int64_t> refused = 0;
  run_threads(8, [&](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}, {"tp", 4}}));
    torch::nn::Linear model(2, 3);
    const TensorParallel parallel = parallelize(model.ptr(), comms, {.styles = {{"", ColumnParallel{}}}});
    Sharded sharded = fully_shard(model.ptr(), comms, {.granularity = Granularity::tensor});
    expect_error([&] { Optimizer(sharded, make_rule(kMuon)); }, {"parameter weight", "rank 3 nothing"});
    ++refused;
  });
  EXPECT_EQ(refused, 8);
}

TEST(Muon, takes_the_matrices_and_leaves_the_rest_to_adamw) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    torch::nn::Linear model(2, 3);
    initialize_parameters(*model, 3, 0.3);
    const at::Tensor bias = model->bias.detach().clone();
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})),
                                  {.granularity = Granularity::tensor});
    Optimizer optimizer = muon(sharded, kMuon, {.lr = 0.125, .weight_decay = 0});
    ASSERT_EQ(optimizer.groups().size(), 2U);
    EXPECT_EQ(optimizer.groups()[0].parameters, std::vector<std::string>{"weight"});
    EXPECT_EQ(optimizer.groups()[1].parameters, std::vector<std::string>{"bias"});
    call(model, at::ones({4, 2})).sum().backward();
    optimizer.step();
    // The first step of AdamW is the learning rate, whatever the gradient, but for its epsilon.
    EXPECT_TRUE(at::allclose(sharded.gather_main_parameter("bias"), bias - 0.125, 0, 1e-6));
  });
}

TEST(Muon, leaves_a_matrix_without_elements_to_adamw) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    for (const Shape& sizes : {Shape{3, 0}, Shape{0, 3}}) {
      auto model = std::make_shared<torch::nn::Module>("model");
      model->register_parameter("empty", at::zeros(sizes));
      model->register_parameter("matrix", at::zeros({2, 3}));
      Sharded sharded =
          fully_shard(model, std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})), {.granularity = Granularity::tensor});
      const Optimizer optimizer = muon(sharded, kMuon, {});
      ASSERT_EQ(optimizer.groups().size(), 2U);
      EXPECT_EQ(optimizer.groups()[0].parameters, std::vector<std::string>{"matrix"});
    }
  });
}

TEST(Optimizer, whose_groups_leave_a_parameter_out_is_refused_with_its_name) {
  run_threads(1, [](std::shared_ptr<Comm> comm) {
    torch::nn::Linear model(2, 3);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 1}})), {});
    const auto only_weights = [](const std::string& name, const Shape&) { return name == "weight"; };
    expect_error([&] { Optimizer(sharded, {{.takes = only_weights, .rule = make_rule(AdamWOptions{})}}); },
                 {"[optimizer] no group takes parameter bias", "`takes` is empty"});
  });
}

// As Muon scales by rows and columns, a rule of elements may scale by what the whole parameter has.
TEST(Update, tells_the_shape_of_the_whole_parameter_where_tp_has_cut_it) {
  struct Notes final : UpdateRule {
    std::vector<std::string> state_names() const override { return {}; }
    void update(const Update& update) const override { seen.at(update.name) = update.shape; }
    mutable std::map<std::string, Shape> seen = {{"weight", {}}, {"bias", {}}};
  };
  run_threads(4, [&](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}, {"tp", 2}}));
    torch::nn::Linear model(3, 5);
    const TensorParallel parallel = parallelize(model.ptr(), comms, {.styles = {{"", ColumnParallel{}}}});
    Sharded sharded = fully_shard(model.ptr(), comms, {.strategy = strategy("ddp")});
    const auto notes = std::make_shared<Notes>();
    Optimizer optimizer(sharded, {{.rule = notes}});
    call(model, at::ones({2, 3})).sum().backward();
    optimizer.step();
    EXPECT_EQ(notes->seen, (std::map<std::string, Shape>{{"weight", {5, 3}}, {"bias", {5}}}));
  });
}
