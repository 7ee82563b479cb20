// A load reads each byte once, checks it, and only then changes the model; a repeated save plans once.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "properties/kit/checkpoint_trained.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/comm/traced.h"
#include "internal/checkpoint/format/crc32.h"

namespace shardproof::checkpoint {
namespace {

SummedRun run_of(const std::string& bytes, uint64_t begin, uint64_t end) {
  return {begin, end - begin, crc32(0, bytes.data() + begin, end - begin)};
}

std::string random_bytes(Random& random, int64_t count) {
  std::string bytes;
  for (int64_t i = 0; i < count; ++i) bytes.push_back(static_cast<char>(draw(random, 256)));
  return bytes;
}

// Rows of runs from 0 to the end, each cut at other places, in any order.
std::vector<SummedRun> cut_at_random(Random& random, const std::string& bytes, int64_t rows) {
  std::vector<SummedRun> runs;
  for (int64_t row = 0; row < rows; ++row)
    for (uint64_t begin = 0; begin < bytes.size();) {
      const uint64_t end = begin + 1 + static_cast<uint64_t>(draw(random, static_cast<int64_t>(bytes.size() - begin)));
      runs.push_back(run_of(bytes, begin, end));
      begin = end;
    }
  std::shuffle(runs.begin(), runs.end(), random);
  return runs;
}

RC_GTEST_PROP(JoinedCrc, of_runs_that_make_up_the_bytes_is_that_of_the_bytes, (uint64_t seed)) {
  Random random(seed);
  const std::string bytes = random_bytes(random, draw(random, 60));
  RC_ASSERT(joined_crc(bytes.size(), cut_at_random(random, bytes, 1 + draw(random, 3)), "x") ==
            crc32(0, bytes.data(), bytes.size()));
}

RC_GTEST_PROP(JoinedCrc, a_byte_that_nobody_read_leaves_none, (uint64_t seed)) {
  Random random(seed);
  const std::string bytes = random_bytes(random, 1 + draw(random, 60));
  std::vector<SummedRun> runs = cut_at_random(random, bytes, 1);
  runs.erase(runs.begin() + draw(random, std::ssize(runs)));
  RC_ASSERT(joined_crc(bytes.size(), runs, "x") == std::nullopt);
}

RC_GTEST_PROP(JoinedCrc, a_run_that_fits_no_row_leaves_none, (uint64_t seed)) {
  Random random(seed);
  const std::string bytes = random_bytes(random, 3 + draw(random, 60));
  const auto middle = 1 + static_cast<uint64_t>(draw(random, std::ssize(bytes) - 2));
  // Beside a run of everything, nothing else begins or ends there.
  std::vector<SummedRun> runs{run_of(bytes, 0, bytes.size())};
  runs.push_back(draw(random, 2) == 0 ? run_of(bytes, 0, middle) : run_of(bytes, middle, bytes.size()));
  RC_ASSERT(joined_crc(bytes.size(), runs, "x") == std::nullopt);
}

TEST(JoinedCrc, of_no_bytes_is_zero_and_rows_that_disagree_are_an_error) {
  EXPECT_EQ(joined_crc(0, {}, "x"), 0U);
  const std::string bytes = "abcdefgh";
  std::vector<SummedRun> runs{run_of(bytes, 0, 8), run_of(bytes, 0, 3), run_of(bytes, 3, 8)};
  runs[2].crc ^= 1;
  expect_error([&] { joined_crc(8, runs, "w in file"); }, {"w in file", "were not the same"});
}

// Adds up what is read.
class CountingFiles : public FileSystem {
 public:
  ssize_t pread(int fd, void* data, size_t bytes, off_t offset) override {
    const ssize_t count = FileSystem::pread(fd, data, bytes, offset);
    if (count > 0) read_ += count;
    return count;
  }
  int64_t read() const { return read_; }

 private:
  std::atomic<int64_t> read_ = 0;
};

const Recipe kWide{.widths = {300, 500, 200}};

int64_t bytes_in_folder(const std::string& folder) {
  int64_t bytes = 0;
  for (const std::string& name : list_folder(folder)) bytes += static_cast<int64_t>(slurp(folder + "/" + name).size());
  return bytes;
}

struct LoadedBits {
  Bits bits;
  int64_t read = 0;          // by all ranks
  uint64_t staged_most = 0;  // by any rank
};
LoadedBits loaded_on(const Place& place, const Recipe& setup, const std::string& folder, const LoadOptions& given) {
  LoadedBits result;
  CountingFiles files;
  LoadOptions options = given;
  options.files = &files;
  std::mutex mutex;
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, place, comm, 0.75);
    const Loaded loaded = load(folder, *run.sharded, &*run.optimizer, options);
    Bits bits = run.bits();
    const std::lock_guard lock(mutex);
    result.staged_most = std::max(result.staged_most, loaded.counts.staged_bytes);
    if (comm->rank() == 0) result.bits = std::move(bits);
  });
  result.read = files.read();
  return result;
}

TEST(LoadOnce, each_byte_is_read_by_one_rank_once_on_as_many_ranks_as_saved_it_and_on_others) {
  const Scratch scratch;
  const Bits saved = trained(kWide, {"dp_shard=2", "zero3"}, 1, scratch / "at");
  const int64_t bytes = bytes_in_folder(scratch / "at");
  for (const char* mesh : {"dp_shard=1", "dp_shard=2", "dp_shard=3"}) {
    const LoadedBits once = loaded_on({mesh, "zero3"}, kWide, scratch / "at", {});
    EXPECT_EQ(once.bits == saved, true) << mesh;
    EXPECT_LT(once.read, bytes * 11 / 10) << mesh << ": the descriptions of entries are read by each rank";
    EXPECT_GT(once.read, bytes * 9 / 10) << mesh;
  }
}

TEST(LoadOnce, replicas_read_what_they_hold_and_nothing_for_its_checksum) {
  const Scratch scratch;
  trained(kWide, {"dp_shard=2", "ddp"}, 1, scratch / "at");
  const int64_t bytes = bytes_in_folder(scratch / "at");
  EXPECT_LT(loaded_on({"dp_shard=2", "ddp"}, kWide, scratch / "at", {}).read, bytes * 22 / 10);
}

TEST(LoadOnce, what_finds_no_room_beside_the_model_is_read_twice_and_the_room_is_kept) {
  const Scratch scratch;
  const Bits saved = trained(kWide, {"dp_shard=2", "zero3"}, 1, scratch / "at");
  const int64_t bytes = bytes_in_folder(scratch / "at");
  int64_t before = bytes * 23 / 10;
  for (const uint64_t room : {0, 400 << 10, 900 << 10, 4 << 20}) {
    const LoadedBits loaded = loaded_on({"dp_shard=2", "zero3"}, kWide, scratch / "at", {.staging_bytes_max = room});
    EXPECT_EQ(loaded.bits == saved, true) << room;
    EXPECT_LE(loaded.staged_most, room);
    EXPECT_LT(loaded.read, before) << room << ": more room, fewer bytes";
    before = loaded.read;
  }
  EXPECT_LT(before, bytes * 11 / 10);
}

void flip(const std::string& path, uint64_t byte, int bit) {
  std::string bytes = slurp(path);
  bytes[byte] = static_cast<char>(bytes[byte] ^ 1 << bit);
  spill(path, bytes);
}

// Whatever ranks read together, and wherever the bit is.
RC_GTEST_PROP(LoadOnce, a_flipped_bit_anywhere_is_an_error_on_every_rank_before_anything_is_changed, ()) {
  const Recipe setup = any_setup();
  const Place from = any_place(), to = any_place();
  const LoadOptions options{.staging_bytes_max = static_cast<uint64_t>(*rc::gen::element<int64_t>(0, 100, 400, 1 << 20)),
                            .read = {.bytes_max = static_cast<uint64_t>(*rc::gen::inRange<int64_t>(1, 3000)),
                                     .gap_max = static_cast<uint64_t>(*rc::gen::inRange<int64_t>(0, 300))}};
  const Scratch scratch;
  const Bits saved = trained(setup, from, 1, scratch / "at");
  RC_ASSERT(loaded_on(to, setup, scratch / "at", options).bits == saved);
  const Checkpoint checkpoint = open_checkpoint(system_files(), scratch / "at");
  std::vector<const Chunk*> chunks;
  for (const auto& [name, tensor] : checkpoint.tensors)
    if (!name.ends_with(".step"))  // counts of updates are read from another entry
      for (const Chunk& chunk : tensor.chunks) chunks.push_back(&chunk);
  const Extent& entry = (*rc::gen::elementOf(chunks))->extent;
  const std::string path = scratch / ("at/" + entry.file);
  const auto byte = entry.offset + static_cast<uint64_t>(*rc::gen::inRange<int64_t>(0, static_cast<int64_t>(entry.length)));
  flip(path, byte, *rc::gen::inRange(0, 8));
  const int64_t ranks = Mesh::parse(to.mesh).size();
  RC_ASSERT(refused_on(to, setup, scratch / "at", options) == (Refusals{ranks, ranks}));
}

// Entries that are too large to be read whole when they are opened.
TEST(LoadOnce, damage_in_an_entry_of_which_ranks_read_parts_is_found_by_the_sums_of_the_parts) {
  const Scratch scratch;
  trained(kWide, {"dp_shard=2", "zero3"}, 1, scratch / "at");
  const Checkpoint checkpoint = open_checkpoint(system_files(), scratch / "at");
  for (const Chunk& chunk : checkpoint.tensors.at("model.layers.0.weight").chunks)
    for (const uint64_t part : {2, 4, 6}) {
      const uint64_t byte = chunk.extent.offset + part * chunk.extent.length / 8;
      const std::string path = scratch / ("at/" + chunk.extent.file);
      flip(path, byte, 3);
      EXPECT_EQ(refused_on({"dp_shard=3", "zero3"}, kWide, scratch / "at", {}), (Refusals{3, 3})) << path << " at " << byte;
      flip(path, byte, 3);
    }
  EXPECT_EQ(refused_on({"dp_shard=3", "zero3"}, kWide, scratch / "at", {}).errors, 0);
}

// What a save tells the others besides values of the trainer: two places and a checksum for each box, and no names.
int64_t bytes_gathered(const std::vector<TraceRecord>& records) {
  int64_t most = 0;
  for (const TraceRecord& record : records)
    if (record.op == "all_gather") most = std::max(most, record.bytes);
  return most;
}

TEST(KeptPlan, repeated_saves_plan_once_and_tell_checksums_only) {
  const Place place{"dp_shard=2", "zero3"};
  const Recipe deep{.widths = std::vector<int64_t>(41, 4)};
  const Scratch scratch;
  const auto trace = std::make_shared<Trace>();
  Bits last;
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run(deep, place, traced(comm, trace));
    Manager manager(scratch / "run", {.async = true});
    for (int64_t step = 1; step <= 4; ++step) {
      run.train(step - 1, step);
      manager.save(*run.sharded, &*run.optimizer, {.step = step});
      manager.wait();
    }
    EXPECT_EQ(manager.plans_made(), 1);
    const std::vector<TraceRecord> before = trace->of_rank(comm->rank());
    save(scratch / "alone", *run.sharded, nullptr);
    const std::vector<TraceRecord> after = trace->of_rank(comm->rank());
    // 80 tensors of which a rank has half, each one or two boxes.
    const int64_t bytes = bytes_gathered({after.begin() + std::ssize(before), after.end()});
    EXPECT_LT(bytes, 2 * (80 * 2 * 4 + 400));
    Bits bits = run.bits();
    if (comm->rank() == 0) last = std::move(bits);
  });
  for (const int64_t step : {1, 2, 3, 4})
    EXPECT_TRUE(verify_checkpoint(system_files(), fmt::format("{}/run/step_{}", scratch.path(), step)).problems.empty());
  EXPECT_EQ(loaded_on({"dp_shard=3", "zero3"}, deep, scratch / "run/step_4", {}).bits == last, true);
}

// One kept plan goes from model to model. Each save is right, and a plan is made exactly when the one before was for others.
RC_GTEST_PROP(KeptPlan, a_save_of_other_tensors_or_on_another_mesh_plans_anew_and_is_right, ()) {
  struct Saved {
    Recipe setup;
    Place place;
    bool averages = false;
    bool operator==(const Saved& other) const {
      return setup.widths == other.setup.widths && setup.tied == other.setup.tied && setup.optimizer == other.setup.optimizer &&
             place.mesh == other.place.mesh && place.strategy == other.place.strategy && averages == other.averages;
    }
  };
  // Alike in all but one thing, so that names and numbers of tensors agree.
  const std::vector<Saved> all = {{{.widths = {3, 5, 2}}, {"dp_shard=2", "zero3"}},
                                  {{.widths = {3, 5, 2}}, {"dp_shard=2", "zero3"}, true},
                                  {{.widths = {3, 7, 2}}, {"dp_shard=2", "zero3"}},
                                  {{.widths = {3, 5, 2}}, {"dp_shard=2", "ddp"}},
                                  {{.widths = {3, 5, 2}}, {"dp_replicate=2,dp_shard=1", "hsdp"}},
                                  {{.widths = {3, 5, 2}, .optimizer = "lion"}, {"dp_shard=2", "zero3"}},
                                  {{.widths = {3, 5, 2}, .optimizer = "sgd"}, {"dp_shard=2", "zero3"}}};
  std::vector<size_t> order = *rc::gen::container<std::vector<size_t>>(4, rc::gen::inRange<size_t>(0, all.size()));
  order.push_back(order.back());
  const Scratch scratch;
  std::vector<KeptPlan> kept(2);
  for (size_t i = 0; i < order.size(); ++i) {
    const Saved& now = all[order[i]];
    const std::string folder = fmt::format("{}/{}", scratch.path(), i);
    Bits saved;
    std::vector<int64_t> made(2);
    on(now.place, [&](std::shared_ptr<Comm> comm) {
      Trained run(now.setup, now.place, comm, 0.1 * static_cast<double>(i));
      run.train(0, 1);
      std::optional<Ema> averages;
      if (now.averages) averages.emplace(*run.sharded);
      KeptPlan& plan = kept[static_cast<size_t>(comm->rank())];
      const int64_t before = plan.made;
      save(folder, *run.sharded, &*run.optimizer, {}, {.plan = &plan});
      made[static_cast<size_t>(comm->rank())] = plan.made - before;
      Bits bits = run.bits();
      if (comm->rank() == 0) saved = std::move(bits);
    });
    const bool is_same = i > 0 && all[order[i - 1]] == now;
    RC_ASSERT(made == std::vector<int64_t>(2, is_same ? 0 : 1));
    RC_ASSERT(verify_checkpoint(system_files(), folder).problems.empty());
    RC_ASSERT(open_checkpoint(system_files(), folder).tensors.contains("ema.layers.0.weight") == now.averages);
    RC_ASSERT(loaded_on({"dp_shard=3", "zero3"}, now.setup, folder, {}).bits == saved);
  }
}

}  // namespace
}  // namespace shardproof::checkpoint
