// Whole training states: saved on one mesh, loaded on another.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <cerrno>

#include "properties/kit/checkpoint_trained.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/shardproof.h"

namespace shardproof::checkpoint {
namespace {

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
    Trained run(setup, to, comm, 0.75);    // starts elsewhere
    if (before % 2 == 0) run.train(0, 1);  // and may have trained
    const TrainerState got = load(scratch / "at", *run.sharded, &*run.optimizer).trainer;
    const bool mine = comm->rank() < ranks_from;
    if (got.step != before || got.schedule_step != 2 * before || got.data_position != 12 * before || !got.scaler ||
        got.scaler->scale != 1024 || !(got.values.at("note") == Value::string("hello")) || got.random.has_value() != mine ||
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

// Every rank gets an error with the words, and keeps its values.
void expect_refused(const std::string& directory, const Recipe& setup, const std::vector<std::string>& words) {
  const auto look = [&](const Error& error) {
    for (const std::string& word : words) EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  };
  EXPECT_EQ(refused_on({"dp_shard=3", "zero3"}, setup, directory, {}, look), (Refusals{3, 3})) << words.front();
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

struct WithEmptyImpl : torch::nn::Module {
  WithEmptyImpl() {
    weight = register_parameter("weight", at::full({5}, 0.5));
    empty = register_parameter("empty", at::zeros({0, 3}));
  }
  at::Tensor weight, empty;
};

TEST(SavedState, a_parameter_of_no_elements_has_its_state_in_the_checkpoint) {
  const Scratch scratch;
  const auto run = [&](const char* mesh, bool saves) {
    on({mesh, "zero3"}, [&](std::shared_ptr<Comm> comm) {
      const auto module = std::make_shared<WithEmptyImpl>();
      Sharded sharded = fully_shard(module, std::make_shared<MeshComm>(comm, Mesh::parse(mesh)), {});
      Optimizer optimizer = adamw(sharded, {.lr = 0.01});
      optimizer.restore("weight", 1, true);
      optimizer.restore("empty", 1, true);
      if (saves) return save(scratch / "at", sharded, &optimizer, {.step = 1});
      optimizer.restore("empty", 0, true);
      load(scratch / "at", sharded, &optimizer);
      EXPECT_EQ(optimizer.updates("empty"), 1);
    });
  };
  run("dp_shard=2", true);
  const Checkpoint checkpoint = open_checkpoint(system_files(), scratch / "at");
  EXPECT_EQ(checkpoint.tensors.at("optim.state.empty.exp_avg").sizes, (Shape{0, 3}));
  run("dp_shard=3", false);
}

// Its buffer has its columns end to end in memory.
struct WithTransposedImpl : torch::nn::Module {
  WithTransposedImpl() {
    weight = register_parameter("weight", at::full({5}, 0.5));
    table = register_buffer("table", at::zeros({3, 2}).t());
  }
  at::Tensor weight, table;
};

TEST(SavedState, a_buffer_that_is_not_contiguous_is_loaded_where_it_lies) {
  const Scratch scratch;
  const at::Tensor values = at::arange(6, at::kFloat).view({2, 3});
  on({"dp_shard=2", "zero3"}, [&](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh::parse("dp_shard=2"));
    const auto module = std::make_shared<WithTransposedImpl>();
    Sharded sharded = fully_shard(module, comms, {});
    module->table.copy_(values);
    save(scratch / "at", sharded, nullptr, {});
  });
  for (const uint64_t room : {0, 1 << 20})
    on({"dp_shard=3", "zero3"}, [&](std::shared_ptr<Comm> comm) {
      const auto comms = std::make_shared<MeshComm>(comm, Mesh::parse("dp_shard=3"));
      const auto module = std::make_shared<WithTransposedImpl>();
      Sharded sharded = fully_shard(module, comms, {});
      const at::Tensor before = module->table;
      load(scratch / "at", sharded, nullptr, {.staging_bytes_max = room});
      EXPECT_TRUE(at::equal(module->table, values)) << "room for " << room << " bytes";
      EXPECT_TRUE(module->table.is_alias_of(before) && !module->table.is_contiguous());
    });
}

// Of each rank: a buffer of few bytes and one of many, a count, and a parameter that is not sharded.
struct WithOwnValuesImpl : torch::nn::Module {
  WithOwnValuesImpl() {
    weight = register_parameter("weight", at::full({50}, 0.5));
    own = {register_parameter("outside", at::zeros({3, 7})), register_buffer("few", at::zeros({2})),
           register_buffer("many", at::zeros({90})), register_buffer("count", at::zeros({}, at::kLong))};
  }
  at::Tensor weight;
  std::vector<at::Tensor> own;
};

TEST(SavedState, what_ranks_have_as_their_own_is_saved_as_rank_0_has_it_whoever_has_least_to_write) {
  const ShardOptions options{.ignored = [](const std::string& name, const at::Tensor&) { return name == "outside"; }};
  const auto sharded_on = [&](std::shared_ptr<WithOwnValuesImpl> module, const Place& place, std::shared_ptr<Comm> comm) {
    ShardOptions here = options;
    here.strategy = strategy(place.strategy);
    return fully_shard(module, std::make_shared<MeshComm>(comm, Mesh::parse(place.mesh)), here);
  };
  const std::vector<ManagerOptions> kinds = {{}, {.async = true}, {.async = true, .copy_in_background = true}};
  const std::vector<Place> places = {{"dp_shard=3", "zero3"}, {"dp_shard=2", "ddp"}, {"dp_replicate=2,dp_shard=2", "hsdp"}};
  for (const Place& place : places)
    for (const ManagerOptions& kind : kinds) {
      const Scratch scratch;
      on(place, [&](std::shared_ptr<Comm> comm) {
        const at::NoGradGuard no_grad;
        const auto module = std::make_shared<WithOwnValuesImpl>();
        Sharded sharded = sharded_on(module, place, comm);
        for (at::Tensor& value : module->own) value.fill_(comm->rank() + 7);
        Manager manager(scratch / "run", kind);
        manager.save(sharded, nullptr, {.step = 1});
        manager.wait();
      });
      on({"dp_shard=3", "zero2"}, [&](std::shared_ptr<Comm> comm) {
        const auto module = std::make_shared<WithOwnValuesImpl>();
        Sharded sharded = sharded_on(module, {"dp_shard=3", "zero2"}, comm);
        load(scratch / "run/step_1", sharded, nullptr);
        for (const at::Tensor& value : module->own)
          EXPECT_TRUE(value.eq(7).all().item<bool>()) << place.mesh << " on rank " << comm->rank() << ": " << value;
      });
    }
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

// An optimizer that notes what is called, a function several times in a row once.
class Noted final : public OptimizerState {
 public:
  Noted(OptimizerState& inner, bool takes) : inner_(inner), takes_(takes) {}
  std::vector<Group> groups() const override { return note("groups"), inner_.groups(); }
  std::vector<std::string> state_names() const override { return note("state_names"), inner_.state_names(); }
  std::vector<Shard> state_shards(const std::string& name) const override {
    return note("state_shards"), inner_.state_shards(name);
  }
  std::vector<Scalar> scalars() const override { return note("scalars"), inner_.scalars(); }
  int64_t updates(const std::string& parameter) const override { return note("updates"), inner_.updates(parameter); }
  void restore(const std::string& parameter, int64_t updates, bool with_state) override {
    if (!calls_.ends_with(" restore replace_state")) note("restore");  // the next parameter's
    inner_.restore(parameter, updates, with_state);
  }
  bool replace_state(const std::string& parameter, const std::string& state_name, at::Tensor values) override {
    return note("replace_state"), inner_.replace_state(parameter, state_name, std::move(values));
  }
  bool takes_settings() const override { return note("takes_settings"), takes_; }
  void restore_settings(size_t, const std::vector<Setting>&) override { note("restore_settings"); }

  std::string take() { return std::exchange(calls_, ""); }

 private:
  void note(const std::string& call) const {
    if (!calls_.ends_with(" " + call)) calls_ += " " + call;
  }
  OptimizerState& inner_;
  bool takes_;
  mutable std::string calls_;
};

TEST(SavedState, an_optimizer_is_asked_and_filled_in_the_order_that_its_header_says) {
  const Scratch scratch;
  const Place place{"dp_shard=2", "zero3"};
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, place, comm);
    run.train(0, 1);
    Noted optimizer(*run.optimizer, /*takes=*/true);
    save(scratch / "at", *run.sharded, &optimizer, {.step = 1});
    EXPECT_EQ(optimizer.take(), std::string(comm->rank() == 0 ? " groups updates" : "") + " state_names state_shards scalars");
    load(scratch / "at", *run.sharded, &optimizer);
    EXPECT_EQ(optimizer.take(), " groups takes_settings restore replace_state restore_settings state_names state_shards");
    Trained other({.widths = {3, 6, 2}}, place, comm);
    Noted unfit(*other.optimizer, /*takes=*/true);
    expect_error([&] { load(scratch / "at", *other.sharded, &unfit); }, {"does not fit this model"});
    EXPECT_EQ(unfit.take(), " groups takes_settings");
  });
}

std::vector<const void*> memory_of(const Optimizer& optimizer) {
  std::vector<const void*> memory;
  for (const std::string& name : optimizer.state_names())
    for (const Shard& shard : optimizer.state_shards(name))
      if (shard.data.numel() > 0) memory.push_back(shard.data.const_data_ptr());
  return memory;
}

TEST(SavedState, what_was_read_of_an_optimizers_state_becomes_the_state_and_counts_as_the_old_one_did) {
  for (const Place& place : kPlaces) {
    const Scratch scratch;
    const Bits saved = trained({}, place, 2, scratch / "at");
    on(place, [&](std::shared_ptr<Comm> comm) {
      Trained run({}, place, comm, 0.75);
      run.train(0, 1);
      for (int time = 0; time < 2; ++time) {
        const MemoryUse before = run.sharded->memory();
        const std::vector<const void*> old = memory_of(*run.optimizer);
        load(scratch / "at", *run.sharded, &*run.optimizer);
        const std::vector<const void*> now = memory_of(*run.optimizer);
        for (const void* memory : now) EXPECT_EQ(std::count(old.begin(), old.end(), memory), 0) << place.strategy;
        EXPECT_EQ(run.sharded->memory().now_bytes, before.now_bytes) << place.strategy;
        EXPECT_EQ(run.sharded->memory().host.now_bytes, before.host.now_bytes) << place.strategy;
        const Bits loaded = run.bits();
        EXPECT_TRUE(comm->rank() != 0 || loaded == saved) << place.strategy;
      }
    });
  }
}

TEST(SavedState, whoever_holds_tensors_of_an_optimizers_state_sees_what_was_loaded) {
  const Scratch scratch;
  const Place place{"dp_shard=2", "zero3"};
  trained({}, place, 2, scratch / "at");
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained other({}, place, comm), run({}, place, comm, 0.75);
    load(scratch / "at", *other.sharded, &*other.optimizer);
    const std::vector<Piece> wanted = other.optimizer->state("exp_avg");
    {
      const std::vector<Shard> held = run.optimizer->state_shards("exp_avg");  // the tensors themselves
      load(scratch / "at", *run.sharded, &*run.optimizer);
      const std::vector<Shard> now = other.optimizer->state_shards("exp_avg");
      for (size_t i = 0; i < held.size(); ++i) EXPECT_TRUE(held[i].data.equal(now[i].data)) << held[i].name;
    }
    run.train(2, 3);
    std::vector<at::Tensor> held;  // others in the same memory
    for (const Piece& piece : run.optimizer->state("exp_avg")) held.push_back(piece.data.detach());
    load(scratch / "at", *run.sharded, &*run.optimizer);
    ASSERT_EQ(held.size(), wanted.size());
    for (size_t i = 0; i < held.size(); ++i) EXPECT_TRUE(held[i].equal(wanted[i].data)) << wanted[i].name;
  });
}

// An optimizer with a number for each parameter and a setting that is a text, as those of other programs have.
class Numbered final : public OptimizerState {
 public:
  Numbered(OptimizerState& inner, std::string number, double value = 0)
      : inner_(inner), number_(std::move(number)), value_(value) {}
  std::vector<Group> groups() const override {
    std::vector<Group> groups = inner_.groups();
    for (Group& group : groups) {
      group.scalar_names = {number_};
      group.settings.emplace_back("mode", std::string("amsgrad"));
    }
    return groups;
  }
  std::vector<std::string> state_names() const override { return inner_.state_names(); }
  std::vector<Shard> state_shards(const std::string& name) const override {
    std::vector<Shard> shards = inner_.state_shards(name);
    for (Shard& shard : shards)
      if (says_whole) shard.at.layout = replicated();
    return shards;
  }
  std::vector<Scalar> scalars() const override {
    std::vector<Scalar> all;
    for (const Group& group : inner_.groups())
      for (const std::string& name : group.parameters) all.push_back({name, number_, at::scalar_tensor(value_, at::kDouble)});
    return all;
  }
  int64_t updates(const std::string& parameter) const override { return inner_.updates(parameter); }
  void restore(const std::string& parameter, int64_t updates, bool with_state) override {
    inner_.restore(parameter, updates, with_state);
  }
  void restore_scalar(const std::string& parameter, const std::string& name, const at::Tensor& value) override {
    numbers[parameter + " " + name] = value.item<double>();
  }
  bool takes_settings() const override { return true; }
  void restore_settings(size_t, const std::vector<Setting>& all) override { settings = all; }

  bool says_whole = false;  // each rank of its part
  std::map<std::string, double> numbers;
  std::vector<Setting> settings;

 private:
  OptimizerState& inner_;
  std::string number_;
  double value_;
};

TEST(SavedState, numbers_and_settings_of_an_optimizer_come_back_and_a_number_that_is_none_is_refused) {
  const Scratch scratch;
  const Place from{"dp_shard=2", "zero3"}, to{"dp_shard=3", "zero1"};
  trained({}, from, 1, scratch / "without");
  on(from, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, from, comm);
    run.train(0, 1);
    Numbered optimizer(*run.optimizer, "restarts", 2.5);
    save(scratch / "with", *run.sharded, &optimizer, {});
  });
  on(to, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, to, comm);
    Numbered optimizer(*run.optimizer, "restarts");
    load(scratch / "with", *run.sharded, &optimizer);
    EXPECT_EQ(optimizer.numbers.size(), 4U);
    for (const auto& [name, value] : optimizer.numbers) EXPECT_EQ(value, 2.5) << name;
    const Setting mode{"mode", std::string("amsgrad")};
    EXPECT_NE(std::find(optimizer.settings.begin(), optimizer.settings.end(), mode), optimizer.settings.end());
    expect_error([&] { load(scratch / "without", *run.sharded, &optimizer); },
                 {"optim.state.layers.0.bias.restarts is missing from the checkpoint"});
    Numbered moments(*run.optimizer, "exp_avg");
    expect_error([&] { load(scratch / "without", *run.sharded, &moments); },
                 {"optim.state.layers.0.weight.exp_avg has shape [5, 3] in the checkpoint, and here it is one number"});
  });
}

TEST(SavedState, state_that_lies_elsewhere_than_its_parameter_is_refused_on_every_rank) {
  const Scratch scratch;
  const Place place{"dp_shard=2", "zero3"};
  std::atomic<int64_t> refused = 0;
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, place, comm);
    run.train(0, 1);
    Numbered optimizer(*run.optimizer, "restarts");
    optimizer.says_whole = true;
    expect_error([&] { save(scratch / "at", *run.sharded, &optimizer, {}); },
                 {"exp_avg lies as replicated, and its parameter as flat[dp_shard]", "where a load will look for it"});
    ++refused;
  });
  EXPECT_EQ(refused, 2);
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

TEST(SavedState, a_checkpoint_says_nothing_of_merged_adapters_where_there_are_none) {
  const Scratch scratch;
  trained({}, {"dp_shard=2", "zero3"}, 1, scratch / "at");
  EXPECT_EQ(slurp(scratch / "at/.metadata").find("merged_adapters"), std::string::npos);
}

TEST(TrainerState, is_equal_to_another_when_all_its_parts_are) {
  const TrainerState state{.step = 3,
                           .schedule_step = 4,
                           .data_position = 5,
                           .scaler = LossScaler::State{.scale = 8, .good_steps = 2},
                           .values = {{"epoch", Value::integer(1)}},
                           .random = RandomStream{.seed = 7, .sites = 2},
                           .of_rank = {{"worker", Value::integer(2)}}};
  const std::vector<std::function<void(TrainerState&)>> changes = {
      [](TrainerState& s) { ++s.step; },          [](TrainerState& s) { ++s.schedule_step; },
      [](TrainerState& s) { ++s.data_position; }, [](TrainerState& s) { s.scaler->good_steps = 0; },
      [](TrainerState& s) { s.scaler.reset(); },  [](TrainerState& s) { s.values["epoch"] = Value::integer(2); },
      [](TrainerState& s) { ++s.random->seed; },  [](TrainerState& s) { ++s.random->sites; },
      [](TrainerState& s) { s.random.reset(); },  [](TrainerState& s) { s.of_rank.clear(); }};
  EXPECT_TRUE(state == TrainerState(state));
  for (size_t i = 0; i < changes.size(); ++i) {
    TrainerState other = state;
    changes[i](other);
    EXPECT_FALSE(state == other) << "change " << i;
  }
}

}  // namespace
}  // namespace shardproof::checkpoint
