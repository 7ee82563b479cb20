// Saves in the background have the values of the call, though the run goes on before they are copied or written.
#include <gtest/gtest.h>

#include <thread>

#include "properties/doubles/late_host_work.h"
#include "properties/kit/checkpoint_trained.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/checkpoint/weights.h"
#include "shardproof/comm/decorated.h"
#include "shardproof/optim/ema.h"
#include "shardproof/sharding/transfer.h"

namespace shardproof::checkpoint {
namespace {

const Place kPlace{"dp_shard=2", "zero3"};

// A communicator that a program makes of another one.
struct Wrapped final : DecoratedComm {
  explicit Wrapped(std::shared_ptr<Comm> inner) : DecoratedComm(std::move(inner)) {}
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { return std::make_shared<Wrapped>(group); }
};

// A run with averages, saved in DIRECTORY/other and DIRECTORY/weights as it was after one step, and trained one step more.
struct Saved {
  Saved(std::string folder, std::shared_ptr<Comm> ranks)
      : directory(std::move(folder)), comm(std::move(ranks)), run({}, kPlace, comm), averages(*run.sharded) {
    run.train(0, 1);
    save(directory + "/other", *run.sharded, &*run.optimizer);
    save_weights(directory + "/weights", *run.sharded);
    run.train(1, 2);
    averages.update();
  }
  std::map<std::string, at::Tensor> twos() const {
    std::map<std::string, at::Tensor> values = run.sharded->gather_main_parameters();
    for (auto& [name, value] : values) value = at::full_like(value, 2);
    return values;
  }

  std::string directory;
  std::shared_ptr<Comm> comm;
  Trained run;
  Ema averages;
};

struct Change {
  const char* name;
  void (*make)(Saved& saved);
  void (*before_save)(Saved& saved) = nullptr;
};
const std::vector<Change> kChanges = {
    {"a step", [](Saved& s) { s.run.train(2, 3); }},
    {"a step whose backward came before the save", [](Saved& s) { s.run.optimizer->step(); },
     [](Saved& s) { s.run.backward(2); }},
    {"a backward, and a step of somebody else's optimizer",
     [](Saved& s) {
       s.run.backward(2);
       const at::NoGradGuard no_grad;
       for (const Piece& piece : s.run.sharded->main_parameters()) at::Tensor(piece.data).fill_(7);
     }},
    {"an announced write",
     [](Saved& s) {
       s.run.sharded->main_parameters_will_change();
       const at::NoGradGuard no_grad;
       for (const Piece& piece : s.run.sharded->main_parameters()) at::Tensor(piece.data).fill_(7);
     }},
    {"write_parameters", [](Saved& s) { s.run.sharded->write_parameters(s.twos()); }},
    {"write_state", [](Saved& s) { s.run.optimizer->write_state("exp_avg", s.twos()); }},
    {"an update of averages", [](Saved& s) { s.averages.update(); }},
    {"a write of averages", [](Saved& s) { s.averages.write(s.twos()); }},
    {"averages in the place of parameters", [](Saved& s) { s.averages.swap_in(), s.averages.swap_out(); }},
    {"a load", [](Saved& s) { load(s.directory + "/other", *s.run.sharded, &*s.run.optimizer); }},
    {"a load of weights", [](Saved& s) { load_weights(s.directory + "/weights", *s.run.sharded); }},
    {"a transfer", [](Saved& s) {
       const Trained other({}, kPlace, s.comm, 0.5);
       transfer(*s.comm, &*other.sharded, &*s.run.sharded);
     }}};

// All that the checkpoint has, with the averages.
Bits bits_of(const std::string& checkpoint, const std::shared_ptr<Comm>& comm) {
  Trained run({}, kPlace, comm, 0.75);
  const Ema averages(*run.sharded);
  load(checkpoint, *run.sharded, &*run.optimizer);
  Bits bits = run.bits();
  for (const auto& [name, value] : averages.gather()) bits["average of " + name] = bytes_in(value);
  return bits;
}

TEST(CopyInBackground, a_save_has_the_values_of_the_call_whatever_the_library_changes_next) {
  for (const Change& change : kChanges) {
    SCOPED_TRACE(change.name);
    const Scratch scratch;
    on(kPlace, [&](std::shared_ptr<Comm> comm) {
      Saved saved(scratch / "run", comm);
      if (change.before_save) change.before_save(saved);
      save(scratch / "expected", *saved.run.sharded, &*saved.run.optimizer);
      const LateHostWork late;
      Manager manager(scratch / "run", {.async = true, .copy_in_background = true});
      manager.save(*saved.run.sharded, &*saved.run.optimizer, {.step = 5});
      change.make(saved);
      manager.wait();
      EXPECT_EQ(bits_of(step_folder(scratch / "run", 5), comm), bits_of(scratch / "expected", comm));
    });
  }
}

// A running mean that forwards change, a parameter that the library leaves alone, and one that it trains.
class ChangingImpl : public torch::nn::Module {
 public:
  ChangingImpl() : Module("changing") {
    mean = register_buffer("mean", at::zeros({3}));
    plain = register_parameter("plain", at::zeros({5}));
    trained = register_parameter("trained", at::ones({7}));
  }
  at::Tensor mean, plain, trained;
};

TEST(Manager, a_save_in_the_background_has_buffers_and_ignored_parameters_of_the_call) {
  const auto set = [](ChangingImpl& model, double value) {
    const at::NoGradGuard no_grad;
    model.mean.fill_(value);
    model.plain.fill_(2 * value);
  };
  for (const bool copies : {false, true}) {
    const Scratch scratch;
    on(kPlace, [&](std::shared_ptr<Comm> comm) {
      const LateHostWork late;
      const auto comms = std::make_shared<MeshComm>(comm, Mesh::parse(kPlace.mesh));
      const ShardOptions options{.ignored = [](const std::string& name, const at::Tensor&) { return name == "plain"; }};
      auto model = std::make_shared<ChangingImpl>(), other = std::make_shared<ChangingImpl>();
      Sharded sharded = fully_shard(model, comms, options), resumed = fully_shard(other, comms, options);
      Manager manager(scratch / "run", {.async = true, .copy_in_background = copies});
      set(*model, 3);
      ASSERT_TRUE(manager.save(sharded, nullptr, {.step = 1}));
      set(*model, 5);
      manager.wait();
      load(step_folder(scratch / "run", 1), resumed, nullptr);
      EXPECT_TRUE(other->mean.equal(at::full({3}, 3.0))) << other->mean;
      EXPECT_TRUE(other->plain.equal(at::full({5}, 6.0))) << other->plain;
    });
  }
}

TEST(CopyInBackground, a_value_that_somebody_else_wrote_to_meanwhile_fails_the_save_on_every_rank) {
  const Scratch scratch;
  on(kPlace, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, kPlace, comm);
    const LateHostWork late;
    Manager manager(scratch / "run", {.async = true, .copy_in_background = true});
    manager.save(*run.sharded, &*run.optimizer, {.step = 1});
    if (comm->rank() == 1) {
      const at::NoGradGuard no_grad;
      at::Tensor(run.sharded->main_parameters().back().data).add_(1);
    }
    expect_error([&] { manager.wait(); },
                 {"model.layers.", "in one buffer", "rank 1", "main_parameters_will_change", "copy_in_background"});
    EXPECT_TRUE(manager.steps().empty());
    EXPECT_TRUE(manager.save(*run.sharded, &*run.optimizer, {.step = 2})) << "the next save is not touched by it";
    manager.wait();
    EXPECT_EQ(manager.latest(), 2);
  });
}

TEST(CopyInBackground, a_save_outlives_the_model_that_it_copies) {
  const Scratch scratch;
  const Bits expected = trained({}, kPlace, 1, "");
  on(kPlace, [&](std::shared_ptr<Comm> comm) {
    const LateHostWork late;
    Manager manager(scratch / "run", {.async = true, .copy_in_background = true});
    {
      Trained run({}, kPlace, comm);
      run.train(0, 1);
      manager.save(*run.sharded, &*run.optimizer, {.step = 1});
      run.optimizer.reset();
      run.sharded.reset();
      run.module.reset();
      manager.wait();
    }
    Trained other({}, kPlace, comm, 0.75);
    load(step_folder(scratch / "run", 1), *other.sharded, &*other.optimizer);
    EXPECT_EQ(other.bits(), expected);
  });
}

TEST(Manager, a_save_keeps_the_communicator_that_only_its_model_had) {
  const Scratch scratch;
  on(kPlace, [&](std::shared_ptr<Comm> comm) {
    for (const bool later : {false, true}) {
      const std::string directory = scratch / (later ? "later" : "at_once");
      std::weak_ptr<Comm> of_the_model;
      {
        const LateHostWork late;
        Manager manager(directory, {.async = true, .copy_in_background = later});
        {
          const auto own = std::make_shared<Wrapped>(comm);
          of_the_model = own;
          Trained run({}, kPlace, own);
          run.train(0, 1);
          manager.save(*run.sharded, &*run.optimizer, {.step = 1});
        }
        EXPECT_FALSE(of_the_model.expired());
        manager.wait();
        EXPECT_EQ(manager.latest(), 1);
      }
      EXPECT_TRUE(of_the_model.expired());
    }
  });
}

TEST(CopyInBackground, a_save_without_a_step_behind_it_is_committed_by_polls_and_one_that_nobody_waits_for_is_lost) {
  const Scratch scratch;
  on(kPlace, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, kPlace, comm);
    std::string told;
    {
      Manager manager(scratch / "run",
                      {.async = true, .copy_in_background = true, .lost = [&](const std::string& message) { told = message; }});
      manager.save(*run.sharded, &*run.optimizer, {.step = 1});
      while (!manager.poll()) std::this_thread::yield();
      EXPECT_EQ(manager.latest(), 1);
      manager.save(*run.sharded, &*run.optimizer, {.step = 2});
    }
    EXPECT_NE(told.find("step_2 was not committed"), std::string::npos) << told;
    run.train(0, 1);  // which has nothing to wait for any more
    comm->barrier().wait();
    EXPECT_EQ(committed_steps(scratch / "run"), std::vector<int64_t>{1});
  });
}

}  // namespace
}  // namespace shardproof::checkpoint
