// What a save or load of a training state refuses, on every rank, and what stays as it was.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>

#include "properties/kit/checkpoint_trained.h"
#include "shardproof/checkpoint/format/durable.h"

namespace shardproof::checkpoint {
namespace {

const Place kPlace{"dp_shard=3", "zero3"};

// Runs the body on every rank; each must get an error with the words.
void expect_refused(const std::vector<std::string>& words, const std::function<void(std::shared_ptr<Comm>)>& body) {
  std::atomic<int64_t> refused = 0;
  on(kPlace, [&](std::shared_ptr<Comm> comm) {
    try {
      body(comm);
    } catch (const Error& error) {
      ++refused;
      for (const std::string& word : words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what() << " lacks " << word;
    }
  });
  EXPECT_EQ(refused, 3) << words.front();
}

// One kind of call fails, on one rank, from the `left`th on.
class Failing : public FileSystem {
 public:
  enum class Call { mkdir, open, pread };
  Failing(Call call, int64_t left, int error) : call_(call), left_(left), error_(error) {}
  int mkdir(const std::string& path, mode_t mode) override {
    return fails(Call::mkdir) ? -error_ : FileSystem::mkdir(path, mode);
  }
  int open(const std::string& path, int flags, mode_t mode) override {
    return fails(Call::open) ? -error_ : FileSystem::open(path, flags, mode);
  }
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    return fails(Call::pread) ? -error_ : FileSystem::pread(fd, data, bytes, offset);
  }

 private:
  bool fails(Call call) { return call == call_ && left_-- <= 0; }
  Call call_;
  int64_t left_;
  int error_;
};

TEST(Refusals, a_path_that_cannot_be_written_is_an_error_on_every_rank) {
  const Scratch scratch;
  spill(scratch / "file", "x");
  expect_refused({"no folder", "(rank 0)"}, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, kPlace, comm);
    save(scratch / "file/at", *run.sharded, &*run.optimizer);
  });
  expect_refused({"cannot make folder", "Permission denied", "(rank 0)"}, [&](std::shared_ptr<Comm> comm) {
    Failing files(Failing::Call::mkdir, 0, EACCES);
    Trained run({}, kPlace, comm);
    save(scratch / "at", *run.sharded, &*run.optimizer, {}, {.files = &files});
  });
  expect_refused({"Read-only", "(rank 2)"}, [&](std::shared_ptr<Comm> comm) {
    Failing files(Failing::Call::open, 0, EROFS);
    Trained run({}, kPlace, comm);
    SaveOptions options;
    if (comm->rank() == 2) options.files = &files;
    save(scratch / "at", *run.sharded, &*run.optimizer, {}, options);
  });
  EXPECT_EQ(list_folder(scratch.path()), std::vector<std::string>{"file"});
  trained({}, kPlace, 0, scratch / "at");
  expect_refused({"exists already", "overwrite"}, [&](std::shared_ptr<Comm> comm) {
    Trained run({}, kPlace, comm);
    save(scratch / "at", *run.sharded, &*run.optimizer);
  });
}

TEST(Refusals, another_dtype_is_named_with_both) {
  const Scratch scratch;
  trained({}, kPlace, 1, scratch / "at");
  expect_refused({"model.layers.0.weight", "float32 in the checkpoint", "float64 here"}, [&](std::shared_ptr<Comm> comm) {
    Mlp mlp(MlpOptions{.widths = {3, 5, 2}});
    mlp->to(at::kDouble);
    Sharded sharded = fully_shard(mlp.ptr(), std::make_shared<MeshComm>(comm, Mesh::parse(kPlace.mesh)), {});
    load(scratch / "at", sharded, nullptr);
  });
}

TEST(Refusals, a_read_that_fails_on_one_rank_is_an_error_on_every_rank_and_nothing_is_loaded_unless_it_says_so) {
  const Scratch scratch;
  trained({}, kPlace, 2, scratch / "at");
  bool failed = true;
  int64_t kept = 0, half = 0;
  for (int64_t calls = 0; failed; ++calls) {
    std::atomic<int64_t> errors = 0, changed = 0, said = 0;
    on(kPlace, [&](std::shared_ptr<Comm> comm) {
      Failing files(Failing::Call::pread, calls, EIO);
      Trained run({}, kPlace, comm, 0.75);
      run.train(0, 1);
      const Bits before = run.bits();
      LoadOptions options;
      if (comm->rank() == 1) options.files = &files;
      try {
        load(scratch / "at", *run.sharded, &*run.optimizer, options);
      } catch (const Error& error) {
        ++errors;
        said += std::string(error.what()).find("now has some of the checkpoint's values") != std::string::npos;
        EXPECT_NE(std::string(error.what()).find("(rank 1)"), std::string::npos) << error.what();
      }
      changed += run.bits() != before;
    });
    failed = errors > 0;
    if (!failed) break;
    EXPECT_EQ(errors, 3) << calls;
    EXPECT_TRUE(said == 3 || changed == 0) << calls;
    ++(said == 3 ? half : kept);
  }
  EXPECT_GT(kept, 10);
  EXPECT_EQ(half, 0) << "all is read before anything is changed";
}

// bf16 to compute with, fp32 to update; some parameters frozen.
struct Mixed {
  Mixed(const std::shared_ptr<Comm>& comm, const Place& place, double fill) {
    {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& p : mlp->parameters()) p.copy_(at::sin(at::arange(p.numel(), at::kFloat) + fill).view(p.sizes()));
    }
    mlp->named_parameters()["layers.1.weight"].set_requires_grad(false);
    ShardOptions options{.strategy = strategy(place.strategy), .gradient_divide = 1};
    options.precision.compute = at::kBFloat16;
    options.precision.main = at::kFloat;
    sharded.emplace(fully_shard(mlp.ptr(), std::make_shared<MeshComm>(comm, Mesh::parse(place.mesh)), options));
    optimizer.emplace(adamw(*sharded, {.lr = 0.01}));
  }
  void step() {
    call(mlp, at::ones({1, 3})).to(at::kFloat).square().sum().backward();
    optimizer->step();
  }
  // Elements that this rank holds, by name and index.
  std::map<std::pair<std::string, int64_t>, float> elements() {
    std::map<std::pair<std::string, int64_t>, float> all;
    const auto add = [&](const std::string& state_name, const std::vector<Piece>& pieces) {
      for (const Piece& piece : pieces)
        for (int64_t i = 0; i < piece.run.size(); ++i)
          all[{state_name + piece.name, piece.run.begin + i}] = piece.data.to(at::kFloat).data_ptr<float>()[i];
    };
    add("", sharded->main_parameters());
    add("compute ", sharded->parameters());
    for (const std::string& state_name : optimizer->state_names()) add(state_name + " ", optimizer->state(state_name));
    return all;
  }
  Mlp mlp{MlpOptions{.widths = {3, 5, 2}}};
  std::optional<Sharded> sharded;
  std::optional<Optimizer> optimizer;
};

TEST(Refusals, main_parameters_of_mixed_precision_keep_all_their_bits_and_frozen_ones_have_no_state) {
  const Scratch scratch;
  std::map<std::pair<std::string, int64_t>, float> saved;
  on({"dp_shard=1", "zero3"}, [&](std::shared_ptr<Comm> comm) {
    Mixed run(comm, {"dp_shard=1", "zero3"}, 0.25);
    run.step();
    saved = run.elements();
    save(scratch / "at", *run.sharded, &*run.optimizer, {.data_position = 12345678901});
  });
  const Checkpoint checkpoint = open_checkpoint(system_files(), scratch / "at");
  EXPECT_EQ(checkpoint.tensors.at("model.layers.0.weight").dtype, at::kFloat);
  EXPECT_FALSE(checkpoint.tensors.contains("optim.state.layers.1.weight.exp_avg"));
  EXPECT_TRUE(checkpoint.tensors.contains("optim.state.layers.0.weight.exp_avg"));
  for (const Place& place : {kPlace, Place{"dp_shard=2", "zero1"}, Place{"dp_replicate=2,dp_shard=2", "hsdp"}})
    on(place, [&](std::shared_ptr<Comm> comm) {
      Mixed run(comm, place, 0.75);
      const Loaded loaded = load(scratch / "at", *run.sharded, &*run.optimizer);
      EXPECT_EQ(loaded.trainer.data_position, 12345678901);
      for (const auto& [element, value] : run.elements()) EXPECT_EQ(value, saved.at(element)) << element.first;
    });
}

}  // namespace
}  // namespace shardproof::checkpoint
