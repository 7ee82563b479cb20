// Whole saves and loads of several ranks, while calls fail and bits flip.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <fstream>

#include "properties/doubles/cluster_disk.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/checkpoint_stamped.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {
namespace {

const std::vector<int64_t> kSmall = {3, 5, 2};

void save_stamped(const std::string& root, int64_t step, int64_t ranks) {
  run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
    Stamped run(comm, kSmall);
    run.stamp(step);
    save(step_folder(root, step), *run.sharded, &*run.optimizer, {.step = step});
  });
}

// Every checkpoint that can be seen is whole and is what its name says.
void expect_whole(const std::string& root) {
  for (const int64_t step : committed_steps(root)) {
    const Verified verified = verify_checkpoint(system_files(), step_folder(root, step));
    EXPECT_TRUE(verified.problems.empty()) << verified.problems.front().str();
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      Stamped run(comm, kSmall);
      EXPECT_EQ(load(step_folder(root, step), *run.sharded, &*run.optimizer).trainer.step, step);
      EXPECT_TRUE(run.has(step)) << "step " << step;
    });
  }
}

// One save over an existing history, with call `failing` of rank `unlucky` failing. The number of ranks that got an error.
struct Outcome {
  int64_t errors = 0, calls = 0;
};
Outcome save_with_failure(const std::string& root, int64_t ranks, int64_t unlucky, int64_t failing, int error) {
  Outcome outcome;
  std::atomic<int64_t> errors = 0;
  run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
    Stamped run(comm, kSmall);
    run.stamp(2);
    ClusterDisk files({.fails = failing, .error = error});
    SaveOptions options;
    if (comm->rank() == unlucky) options.files = &files;
    try {
      save(step_folder(root, 2), *run.sharded, &*run.optimizer, {.step = 2}, options);
    } catch (const Error&) {
      ++errors;
    }
    if (comm->rank() == unlucky) outcome.calls = files.changes();
  });
  outcome.errors = errors;
  return outcome;
}

void sweep(int64_t ranks, int error) {
  for (int64_t unlucky = 0; unlucky < ranks; ++unlucky) {
    int64_t failed = 0;
    for (int64_t failing = 0;; ++failing) {
      const Scratch scratch;
      save_stamped(scratch.path(), 1, ranks);
      const Outcome outcome = save_with_failure(scratch.path(), ranks, unlucky, failing, error);
      const std::string where = fmt::format("call {} of rank {} of {}", failing, unlucky, ranks);
      const std::vector<int64_t> steps = committed_steps(scratch.path());
      EXPECT_EQ(steps.front(), 1) << where;
      EXPECT_TRUE(outcome.errors == ranks || (outcome.errors == 0 && steps.back() == 2))
          << where << ": an error of one is an error of all, and there were " << outcome.errors;
      failed += outcome.errors > 0;
      if (failing % 3 == 0 || steps.size() == 2) expect_whole(scratch.path());
      for (const std::string& name : list_folder(scratch.path()))
        EXPECT_TRUE(name.starts_with(".") || name.starts_with("step_")) << where << ": " << name;
      remove_leftovers(system_files(), scratch.path());
      EXPECT_EQ(list_folder(scratch.path()).size(), steps.size()) << where;
      if (outcome.calls <= failing) break;
    }
    EXPECT_GE(failed, unlucky == 0 ? 14 : 4) << "rank " << unlucky;
  }
}

TEST(SaveFailures, whichever_call_of_whichever_of_2_ranks_fails_all_ranks_know_and_the_checkpoint_before_is_whole) {
  sweep(2, EIO);
}

TEST(SaveFailures, whenever_the_disk_of_one_of_3_ranks_is_full_all_ranks_know_and_the_checkpoint_before_is_whole) {
  sweep(3, ENOSPC);
}

// Saved by 2, loaded by 3: ranks read parts of entries, whose checksums are of the whole.
TEST(LoadDamage, a_flip_in_any_entry_is_an_error_on_every_rank_though_each_reads_parts_of_it) {
  const Scratch scratch;
  save_stamped(scratch.path(), 1, 2);
  const std::string folder = step_folder(scratch.path(), 1);
  const Checkpoint checkpoint = open_checkpoint(system_files(), folder);
  Random random(11);
  for (const auto& [name, tensor] : checkpoint.tensors)
    for (const Chunk& chunk : tensor.chunks) {
      const std::string path = folder + "/" + chunk.extent.file, before = slurp(path);
      std::string after = before;
      const auto byte = chunk.extent.offset + static_cast<uint64_t>(draw(random, static_cast<int64_t>(chunk.extent.length)));
      after[byte] = static_cast<char>(after[byte] ^ 1 << draw(random, 8));
      spill(path, after);
      std::atomic<int64_t> errors = 0, kept = 0;
      run_threads(3, [&](std::shared_ptr<Comm> comm) {
        Stamped run(comm, kSmall);
        run.stamp(9);
        try {
          load(folder, *run.sharded, &*run.optimizer);
        } catch (const Error&) {
          ++errors;
        }
        kept += run.has(9);
      });
      const bool used = !name.ends_with(".step");  // counts of updates are read from another entry
      EXPECT_EQ(errors, used ? 3 : errors.load()) << name << " byte " << byte;
      EXPECT_TRUE(errors == 0 || kept == 3) << name;
      spill(path, before);
    }
}

TEST(LoadDamage, a_load_without_a_check_before_finds_damage_while_it_reads) {
  const Scratch scratch;
  save_stamped(scratch.path(), 1, 1);
  const std::string folder = step_folder(scratch.path(), 1);
  const auto load_unchecked = [&] {
    run_threads(1, [&](std::shared_ptr<Comm> comm) {
      Stamped run(comm, kSmall);
      load(folder, *run.sharded, &*run.optimizer, {.check_before = false});
      EXPECT_TRUE(run.has(1));
    });
  };
  load_unchecked();
  const Checkpoint checkpoint = open_checkpoint(system_files(), folder);
  int64_t damaged = 0;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    if (numel(tensor.sizes) == 0 || name.ends_with(".step")) continue;  // a load counts by another value
    const Extent& extent = tensor.chunks.front().extent;
    const std::string path = folder + "/" + extent.file;
    const FileSource file(system_files(), path);
    const TensorEntry entry = parse_tensor_entry(SliceSource(file, extent.offset, extent.length, name));
    const auto flip = [&] {
      std::fstream bytes(path, std::ios::in | std::ios::out | std::ios::binary);
      const auto at = static_cast<std::streamoff>(extent.offset + entry.payload_offset);
      bytes.seekg(at);
      const char old = static_cast<char>(bytes.get());
      bytes.seekp(at);
      bytes.put(static_cast<char>(old ^ 1));
    };
    flip();
    expect_error(load_unchecked, {"while loading", "damaged"});
    flip();
    ++damaged;
  }
  EXPECT_GT(damaged, 5);
}

}  // namespace
}  // namespace shardproof::checkpoint
