// Whole training states: saved on one mesh, loaded on another.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <cerrno>

#include "checkpoint_scratch.h"
#include "expect_error.h"
#include "shardproof/checkpoint/durable.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/shardproof.h"

namespace shardproof::checkpoint {
namespace {

struct Place {
  std::string mesh, strategy;
};
const std::vector<Place> kPlaces = {{"dp_shard=1", "zero3"}, {"dp_shard=2", "zero3"}, {"dp_shard=4", "zero3"},
                                    {"dp_shard=3", "zero2"}, {"dp_shard=2", "ddp"},   {"dp_shard=4", "zero1"},
                                    {"dp_replicate=2,dp_shard=2", "hsdp"}, {"dp_replicate=2,dp_shard=3", "hfsdp"}};

struct Recipe {
  std::vector<int64_t> widths{3, 5, 2};
  bool tied = false;  // a small Gpt with a tied head instead
  std::string optimizer = "adamw";
};

// One rank's model in training.
struct Trained {
  Trained(const Recipe& setup, const Place& place, std::shared_ptr<Comm> world, double fill = 0.125) : setup_(setup) {
    if (setup.tied)
      gpt_ = Gpt(GptOptions{.layers = 1, .hidden = 8, .heads = 2, .vocab = 11, .positions = 4, .tied = true});
    else
      mlp_ = Mlp(MlpOptions{.widths = setup.widths});
    module = setup.tied ? std::static_pointer_cast<torch::nn::Module>(gpt_.ptr()) : mlp_.ptr();
    {
      at::NoGradGuard no_grad;
      double start = fill;
      for (const at::Tensor& p : module->parameters())
        p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.37 + (start += fill)).view(p.sizes()) * 0.5);
    }
    comms = std::make_shared<MeshComm>(world, Mesh::parse(place.mesh));
    sharded.emplace(fully_shard(
        module, comms, {.strategy = strategy(place.strategy), .numerics = Numerics::canonical, .gradient_divide = 1}));
    if (setup.optimizer == "adamw") optimizer.emplace(adamw(*sharded, {.lr = 0.01}));
    if (setup.optimizer == "sgd") optimizer.emplace(sgd(*sharded, {.lr = 0.1, .momentum = 0.9}));
    if (setup.optimizer == "lion") optimizer.emplace(lion(*sharded, {.lr = 0.01}));
  }

  // Twelve samples a step, one at a time, dealt to the ranks.
  void train(int64_t begin, int64_t end) {
    const int64_t ranks = comms->mesh().size(), rounds = 12 / ranks;
    for (int64_t step = begin; step < end; ++step) {
      for (int64_t round = 0; round < rounds; ++round) {
        sharded->set_last_microbatch(round + 1 == rounds);
        const int64_t sample = step * 12 + round * ranks + comms->rank();
        if (setup_.tied) {
          const at::Tensor tokens = (at::arange(4, at::kLong) * 3 + sample).remainder(11).view({1, 4});
          call(gpt_, tokens).square().sum().mul(0.01).backward();
        } else {
          const at::Tensor x = at::cos(at::arange(setup_.widths.front(), at::kFloat) + static_cast<double>(sample));
          call(mlp_, x.view({1, -1})).square().sum().mul(0.1).backward();
        }
      }
      optimizer->step();
    }
  }

  // All bits of all that a run is, by name.
  std::map<std::string, std::string> bits() {
    std::map<std::string, std::string> all;
    for (const auto& [name, value] : sharded->gather_parameters()) all[name] = bytes_in(value);
    for (const std::string& slot : optimizer->slots()) {
      std::map<std::string, at::Tensor> whole;
      for (const auto& [name, value] : sharded->gather_parameters())
        whole[name] = at::zeros({value.numel()}, at::kInt);
      for (const Piece& piece : optimizer->state(slot))
        whole[piece.name].narrow(0, piece.run.begin, piece.run.size()).copy_(piece.data.view(at::kInt));
      for (auto& [name, value] : whole) {
        // Replicas hold the same: of positive and negative bit patterns, one of max and min is the value, the other 0.
        at::Tensor high = value.clone(), low = value.clone();
        comms->world().all_reduce(high, Reduce::max).wait();
        comms->world().all_reduce(low, Reduce::min).wait();
        all[slot + " of " + name] = bytes_in(high.add(low).sub(high.eq(low).to(at::kInt).mul(low)));
      }
    }
    for (const auto& group : optimizer->groups())
      for (const std::string& name : group.parameters) all["updates of " + name] = std::to_string(optimizer->updates(name));
    return all;
  }

  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<MeshComm> comms;
  std::optional<Sharded> sharded;
  std::optional<Optimizer> optimizer;

 private:
  Recipe setup_;
  Gpt gpt_{nullptr};
  Mlp mlp_{nullptr};
};

void on(const Place& place, const std::function<void(std::shared_ptr<Comm>)>& body) {
  run_threads(Mesh::parse(place.mesh).size(), body);
}

using Bits = std::map<std::string, std::string>;

Bits trained(const Recipe& setup, const Place& place, int64_t steps, const std::string& directory) {
  Bits bits;
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, place, comm);
    run.train(0, steps);
    TrainerState trainer{.step = steps, .schedule_step = 2 * steps, .scaler = LossScaler::State{1024, 3}};
    trainer.values["note"] = Value::string("hello");
    trainer.random = RandomStream{~uint64_t{0} - static_cast<uint64_t>(comm->rank()), 7};
    trainer.of_rank["mine"] = Value::integer(comm->rank() * 10);
    if (!directory.empty()) save(directory, *run.sharded, &*run.optimizer, trainer);
    Bits own = run.bits();
    if (comm->rank() == 0) bits = std::move(own);
  });
  return bits;
}

Place any_place() { return *rc::gen::elementOf(kPlaces); }
Recipe any_setup() {
  Recipe setup;
  setup.widths = *rc::gen::container<std::vector<int64_t>>(3, rc::gen::inRange<int64_t>(1, 8));
  setup.tied = *rc::gen::inRange(0, 3) == 0;
  setup.optimizer = *rc::gen::element<std::string>("adamw", "sgd", "lion");
  return setup;
}

RC_GTEST_PROP(SavedState, training_on_after_a_load_elsewhere_is_training_through, ()) {
  const Recipe setup = any_setup();
  const Place from = any_place(), to = any_place();
  const int64_t before = *rc::gen::inRange<int64_t>(0, 3), after = *rc::gen::inRange<int64_t>(0, 3);
  const Scratch scratch;
  const Bits saved = trained(setup, from, before, scratch / "at");
  const Verified verified = verify_checkpoint(system_files(), scratch / "at");
  for (const Problem& problem : verified.problems) RC_FAIL(problem.str());
  Bits loaded, resumed;
  std::atomic<int64_t> wrong_trainers = 0;
  const int64_t ranks_from = Mesh::parse(from.mesh).size();
  on(to, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, to, comm, 0.75);  // starts elsewhere
    if (before % 2 == 0) run.train(0, 1);  // and may have trained
    const TrainerState got = load(scratch / "at", *run.sharded, &*run.optimizer).trainer;
    const bool mine = comm->rank() < ranks_from;
    if (got.step != before || got.schedule_step != 2 * before || !got.scaler || got.scaler->scale != 1024 ||
        !(got.values.at("note") == Value::string("hello")) || got.random.has_value() != mine ||
        got.of_rank.size() != (mine ? 1 : 0) ||
        (mine && (got.random->seed != ~uint64_t{0} - static_cast<uint64_t>(comm->rank()) || got.random->sites != 7 ||
                  !(got.of_rank.at("mine") == Value::integer(comm->rank() * 10)))))
      ++wrong_trainers;
    Bits first = run.bits();
    run.train(before, before + after);
    Bits second = run.bits();
    if (comm->rank() == 0) loaded = std::move(first), resumed = std::move(second);
  });
  RC_ASSERT(wrong_trainers == 0);
  RC_ASSERT(loaded == saved);
  RC_ASSERT(resumed == trained(setup, {"dp_shard=1", "zero3"}, before + after, ""));
}

// Loads on `place` what `damage` made of the checkpoint; every rank must get an error with the words and keep its values.
void expect_refused(const std::string& directory, const Recipe& setup, const std::vector<std::string>& words) {
  const Place place{"dp_shard=3", "zero3"};
  std::atomic<int64_t> refused = 0, kept = 0;
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, place, comm, 0.75);
    run.train(0, 1);
    const Bits before = run.bits();
    try {
      load(directory, *run.sharded, &*run.optimizer);
    } catch (const Error& error) {
      ++refused;
      for (const std::string& word : words) EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
    if (run.bits() == before) ++kept;
  });
  EXPECT_EQ(refused, 3) << words.front();
  EXPECT_EQ(kept, 3) << words.front();
}

TEST(SavedState, what_does_not_fit_or_is_damaged_is_an_error_on_every_rank_and_changes_nothing) {
  const Scratch scratch;
  trained({}, {"dp_shard=2", "zero3"}, 2, scratch / "at");
  expect_refused(scratch / "at", {.widths = {3, 6, 2}}, {"model.layers.0.weight", "[5, 3]", "[6, 3]"});
  expect_refused(scratch / "at", {.widths = {3, 5, 2, 2}}, {"model.layers.2.weight is missing"});
  expect_refused(scratch / "at", {.widths = {3, 5}}, {"model.layers.1.weight is in the checkpoint"});
  expect_refused(scratch / "at", {.optimizer = "sgd"}, {"optim.state.layers.0.bias.momentum_buffer is missing"});
  expect_refused(scratch / "nowhere", {}, {"nowhere"});
  const std::string path = scratch / "at/__1_0.distcp", bytes = slurp(path);
  spill(path, bytes.substr(0, bytes.size() / 2));
  expect_refused(scratch / "at", {}, {"__1_0.distcp"});
}

TEST(SavedState, a_partial_load_lists_what_it_skipped_and_leaves_it) {
  const Scratch scratch;
  const Place place{"dp_shard=2", "zero3"};
  trained({}, place, 2, scratch / "at");
  on(place, [&](std::shared_ptr<Comm> comm) {
    const Recipe longer{.widths = {3, 5, 4}};
    Trained run(longer, place, comm, 0.75);
    const Bits before = run.bits();
    const Loaded loaded = load(scratch / "at", *run.sharded, &*run.optimizer, {.partial = true});
    const Bits after = run.bits();
    EXPECT_EQ(loaded.skipped.size(), 6U) << fmt::format("{}", loaded.skipped.size());
    EXPECT_NE(after.at("layers.0.weight"), before.at("layers.0.weight"));
    EXPECT_EQ(after.at("layers.1.weight"), before.at("layers.1.weight"));
  });
}

class FullDisk : public FileSystem {
 public:
  ssize_t write(int fd, const void* data, size_t bytes) override {
    FileSystem::write(fd, data, bytes / 2);
    return -ENOSPC;
  }
};

TEST(SavedState, a_full_disk_of_one_rank_is_an_error_on_every_rank_and_leaves_the_checkpoint_before) {
  for (const int64_t unlucky : {0, 1, 2}) {
    const Scratch scratch;
    const Place place{"dp_shard=3", "zero3"};
    trained({}, place, 1, scratch / "at");
    const std::string before = slurp(scratch / "at/.metadata");
    std::atomic<int64_t> refused = 0;
    on(place, [&](std::shared_ptr<Comm> comm) {
      FullDisk full;
      Trained run({}, place, comm);
      SaveOptions options{.overwrite = true};
      if (comm->rank() == unlucky) options.files = &full;
      try {
        save(scratch / "at", *run.sharded, &*run.optimizer, {}, options);
      } catch (const Error& error) {
        ++refused;
        EXPECT_NE(std::string(error.what()).find("space"), std::string::npos) << error.what();
      }
    });
    EXPECT_EQ(refused, 3);
    EXPECT_EQ(slurp(scratch / "at/.metadata"), before);
    EXPECT_TRUE(verify_checkpoint(system_files(), scratch / "at").problems.empty());
    EXPECT_EQ(list_folder(scratch.path()).size(), 1U);
  }
}

TEST(SavedState, a_snapshot_keeps_the_values_of_the_call_and_every_element_is_written_once) {
  const Scratch scratch;
  const Place place{"dp_shard=4", "ddp"};
  const Bits expected = trained({}, place, 1, scratch / "now");
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, place, comm);
    run.train(0, 1);
    SaveJob::Snapshot memory;
    SaveJob job(scratch / "later", *run.sharded, &*run.optimizer, {.step = 1}, {}, &memory);
    run.train(1, 3);
    job.write();
    job.commit();
    Trained other({}, place, comm, 0.5);
    load(scratch / "later", *other.sharded, &*other.optimizer);
    EXPECT_EQ(other.bits(), expected);
  });
  uint64_t largest = 0, all = 0;
  for (int64_t rank = 0; rank < 4; ++rank) {
    const uint64_t bytes = slurp(scratch / ("later/" + entry_file_name(rank))).size();
    largest = std::max(largest, bytes), all += bytes;
  }
  EXPECT_LT(largest, all / 2) << "replicas share the work";
}

}  // namespace
}  // namespace shardproof::checkpoint
