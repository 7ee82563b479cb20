// The check of replicas for real training: quiet when all is well, and alike on every rank when something is not.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <set>

#include "properties/kit/expect_error.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

// One rank of a training, and what a test does to it after an update.
struct Rank {
  std::shared_ptr<Comm> comm;
  Mlp& model;
  Sharded& sharded;
  Optimizer& optimizer;
  int64_t step;
};
using Body = std::function<void(const Rank&)>;

struct Training {
  Mesh mesh{{{"dp_shard", 3}}};
  std::string strategy = "zero1";
  Precision precision = {};
  Offload offload = Offload::none;
  std::function<std::shared_ptr<UpdateRule>(int64_t rank)> rule = [](int64_t) { return make_rule(AdamWOptions{.lr = 0.01}); };
  Body before_update = [](const Rank&) {};
  std::vector<int64_t> widths = {3, 5, 2};
};

using CheckStep = std::function<void(FingerprintCheck&)>;

void train(const Training& setting, int64_t steps, const Body& after_update, const CheckStep& check_step) {
  run_threads(setting.mesh.size(), [&](std::shared_ptr<Comm> comm) {
    Mlp model(MlpOptions{.widths = setting.widths});
    initialize_parameters(*model, 1, 0.5);
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, setting.mesh),
                                  {.strategy = strategy(setting.strategy),
                                   .units = by_type<torch::nn::LinearImpl>(),
                                   .offload = setting.offload,
                                   .precision = setting.precision});
    Optimizer optimizer(sharded, setting.rule(comm->rank()));
    FingerprintCheck check(sharded, optimizer);
    for (int64_t step = 0; step < steps; ++step) {
      const at::Tensor x = at::linspace(step, comm->rank() + 2, 12).view({4, 3});
      call(model, x).to(at::kFloat).square().mean().backward();
      setting.before_update({comm, model, sharded, optimizer, step});
      if (sharded.step() == step) optimizer.step();
      after_update({comm, model, sharded, optimizer, step});
      check_step(check);
    }
  });
}

void expect_quiet(const Training& setting, const Body& after_update = [](const Rank&) {}) {
  EXPECT_NO_THROW(train(setting, 3, after_update, [](FingerprintCheck& check) { check.step(); }))
      << setting.strategy << " on " << setting.mesh.str();
}

// What each of the ranks throws, from now on.
class Messages {
 public:
  void of(FingerprintCheck& check) {
    try {
      check.step();
    } catch (const FingerprintError& error) {
      const std::lock_guard lock(mutex_);
      all_.insert(error.what());
    }
  }
  // The first one, which `ranks` ranks have thrown alike; "nothing" when no rank has thrown.
  std::string first(int64_t ranks) const {
    if (all_.empty()) return "nothing";
    EXPECT_EQ(static_cast<int64_t>(all_.count(*all_.begin())), ranks) << "not alike on every rank";
    return *all_.begin();
  }

 private:
  std::mutex mutex_;
  std::multiset<std::string> all_;
};

// Of two steps, after the second of which the test does something.
std::string found(const Training& setting, const Body& after_update) {
  Messages messages;
  const Body in_step_one = [&](const Rank& rank) {
    if (rank.step == 1) after_update(rank);
  };
  train(setting, 2, in_step_one, [&](FingerprintCheck& check) { messages.of(check); });
  return messages.first(setting.mesh.size());
}

void flip_a_bit(const std::vector<Piece>& pieces, size_t which) {
  at::Tensor bits = pieces.at(which).data.view(pieces.at(which).data.element_size() == 2 ? at::kShort : at::kInt);
  bits[0].bitwise_xor_(1);
}

}  // namespace

TEST(FingerprintCheck, finds_nothing_where_nothing_is_wrong) {
  for (const Strategy& row : strategies())
    expect_quiet({.mesh = Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}), .strategy = row.name});
  for (const char* name : {"ddp", "zero2", "zero3"}) {
    expect_quiet({.strategy = name, .precision = {.main = at::kFloat, .compute = at::kBFloat16}});
    expect_quiet({.strategy = name, .offload = Offload::pageable});
  }
  expect_quiet({.mesh = Mesh({{"dp_shard", 1}})});
}

TEST(FingerprintCheck, finds_nothing_where_nothing_has_to_move) {
  const auto adamw = [](double lr) { return [lr](int64_t) { return make_rule(AdamWOptions{.lr = lr}); }; };
  expect_quiet({.rule = adamw(0)});
  expect_quiet({.before_update = [](const Rank& rank) { rank.optimizer.set_lr_factor(0); }});
  expect_quiet({.before_update = [](const Rank& rank) {
    if (rank.step == 1) rank.sharded.skip_step();
  }});
  // A gradient below what a float holds beside the parameter.
  expect_quiet({.rule = [](int64_t) { return make_rule(SgdOptions{.lr = 1e-12}); }});
  expect_quiet({}, [](const Rank& rank) {
    for (at::Tensor& parameter : rank.model->parameters()) parameter.set_requires_grad(rank.step % 2 == 0);
    if (rank.step % 2 == 1) rank.model->parameters()[0].set_requires_grad(true);
  });
}

TEST(FingerprintCheck, names_step_tensor_and_ranks_of_one_bit_in_a_parameter) {
  for (const char* name : {"ddp", "zero1", "zero2"}) {
    const std::string message = found({.strategy = name}, [](const Rank& rank) {
      if (rank.comm->rank() == 2) flip_a_bit(rank.sharded.parameters(), 1);
    });
    expect_says(message, {"[fingerprint] step 2: parameter", "bias differs between ranks 0 and 2", "1 of "});
  }
}

TEST(FingerprintCheck, knows_who_holds_the_same_on_a_mesh_of_two_axes) {
  const Training hsdp{.mesh = Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}), .strategy = "hsdp"};
  expect_says(found(hsdp,
                    [](const Rank& rank) {
                      if (rank.comm->rank() == 3) flip_a_bit(rank.sharded.parameters(), 0);
                    }),
              {"step 2: parameter", "differs between ranks 1 and 3"});
  // Nobody else holds what a rank holds under zero3, so that there is nothing to compare with.
  EXPECT_EQ(found({.strategy = "zero3"},
                  [](const Rank& rank) {
                    if (rank.comm->rank() == 0) flip_a_bit(rank.sharded.parameters(), 0);
                  }),
            "nothing");
}

TEST(FingerprintCheck, looks_at_main_parameters_and_at_the_optimizers_state) {
  expect_says(found({.strategy = "ddp", .precision = {.main = at::kFloat, .compute = at::kBFloat16}},
                    [](const Rank& rank) {
                      if (rank.comm->rank() == 1) flip_a_bit(rank.sharded.main_parameters(), 2);
                    }),
              {"step 2: main parameter", "between ranks 0 and 1"});
  expect_says(found({.strategy = "ddp"},
                    [](const Rank& rank) {
                      if (rank.comm->rank() == 2) flip_a_bit(rank.optimizer.state("exp_avg_sq"), 3);
                    }),
              {"step 2: exp_avg_sq", "between ranks 0 and 2"});
}

TEST(FingerprintCheck, finds_padding_that_was_written) {
  const std::string message = found({.strategy = "ddp"}, [](const Rank& rank) {
    if (rank.comm->rank() != 1) return;
    const Piece piece = rank.sharded.parameters().at(0);
    at::empty({0}).set_(piece.data.storage())[piece.data.storage_offset() + piece.run.size()].fill_(3);
  });
  expect_says(message, {"[fingerprint] step 2: on rank 1 the padding of the bucket of ", "is not zero"});
}

namespace {

// A rule that forgets to update on rank 0.
class IdleOnFirst final : public UpdateRule {
 public:
  explicit IdleOnFirst(int64_t rank) : rank_(rank) {}
  std::vector<std::string> state_names() const override { return {}; }
  std::vector<shardproof::Setting> settings() const override { return rule_->settings(); }
  void update(const Update& update) const override {
    if (rank_ > 0) rule_->update(update);
  }

 private:
  int64_t rank_;
  std::shared_ptr<UpdateRule> rule_ = make_rule(SgdOptions{.lr = 0.1});
};

// A rule that forgets shards of one element.
class IdleForOne final : public UpdateRule {
 public:
  std::vector<std::string> state_names() const override { return {}; }
  std::vector<shardproof::Setting> settings() const override { return rule_->settings(); }
  void update(const Update& update) const override {
    if (update.parameter.numel() > 1) rule_->update(update);
  }

 private:
  std::shared_ptr<UpdateRule> rule_ = make_rule(SgdOptions{.lr = 0.1});
};

}  // namespace

TEST(FingerprintCheck, finds_a_trained_shard_that_does_not_move) {
  const auto rule = [](int64_t rank) { return std::make_shared<IdleOnFirst>(rank); };
  expect_says(found({.strategy = "zero3", .rule = rule}, [](const Rank&) {}),
              {"[fingerprint] step 1: on rank 0 neither ", " nor its optimizer state has moved"});
}

TEST(FingerprintCheck, finds_a_shard_of_one_element_that_does_not_move) {
  const auto rule = [](int64_t) { return std::make_shared<IdleForOne>(); };
  expect_says(found({.strategy = "ddp", .rule = rule, .widths = {3, 5, 1}}, [](const Rank&) {}),
              {"[fingerprint] step 1: on rank 0 neither layers.1.bias nor its optimizer state has moved"});
}

TEST(FingerprintCheck, compares_what_tensor_parallelism_leaves_whole_and_what_ranks_hold_in_copies) {
  // Four ranks hold norms, and two neighbours each key head.
  for (const auto& [which, ranks] :
       {std::pair{"", ""}, {"norm", "between ranks 0 and 3"}, {"k_proj", "between ranks 2 and 3"}}) {
    Messages messages;
    run_threads(4, [&, which = which](std::shared_ptr<Comm> comm) {
      const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 1}, {"tp", 4}}));
      const LlamaOptions options{.layers = 1, .hidden = 16, .heads = 4, .kv_heads = 2, .intermediate = 8, .vocab = 13};
      Llama model(options);
      initialize_parameters(*model, 3, 0.3);
      const TensorParallel parallel = parallelize(model.ptr(), comms, llama_plan(options, 4));
      Sharded sharded = fully_shard(model.ptr(), comms, {.strategy = strategy("zero3")});
      Optimizer optimizer = sgd(sharded, {.lr = 0.1});
      FingerprintCheck check(sharded, optimizer);
      call(model, at::arange(8).view({1, 8})).square().mean().backward();
      optimizer.step();
      const std::vector<Piece> pieces = sharded.parameters();
      for (size_t i = 0; i < pieces.size() && comm->rank() == 3 && *which; ++i)
        if (pieces[i].name.find(which) != std::string::npos) {
          flip_a_bit(pieces, i);
          break;
        }
      messages.of(check);
    });
    if (*which)
      expect_says(messages.first(4), {which, ranks, "1 of "});
    else
      EXPECT_EQ(messages.first(4), "nothing");
  }
}
