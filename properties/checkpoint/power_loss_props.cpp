// Saves of a run's history on a disk that loses power: whole saves of one rank and of several, in the background or not. Every
// state in which the disk could be after a small save is looked at, and random ones after histories of small and large saves.
#include <gtest/gtest.h>

#include <algorithm>
#include <charconv>

#include "harness/commands/checkpoint_command.h"
#include "properties/doubles/cluster_disk.h"
#include "properties/kit/checkpoint_stamped.h"
#include "properties/kit/checkpoint_steps.h"
#include "properties/kit/power_loss.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"

namespace shardproof::checkpoint {
namespace {

using harness::LossyDisk;

// What a checkpoint holds is told by its stamp, which it has as its position in the data as well. Every rank writes something.
TrainerState trainer_of(int64_t step, int64_t stamp) {
  return {.step = step, .data_position = stamp, .of_rank = {{"stamp", Value::integer(stamp)}}};
}

// What must be there. Stamps begin at 1.
struct Expected {
  std::map<int64_t, std::set<int64_t>> may = {};  // by step: the stamps that it may have
  std::set<int64_t> must = {};                    // the steps that have to be there
  int64_t latest = -1;                            // the last one that is there comes no earlier
};

// The stamps of what can be seen, by step. Each is read completely, and has to be whole. Collective.
std::map<int64_t, int64_t> stamps_in(const std::string& run, Stamped& model) {
  std::map<int64_t, int64_t> stamps;
  for (const int64_t step : committed_steps(run)) {
    const std::string folder = step_folder(run, step);
    const Verified verified = verify_checkpoint(system_files(), folder);
    if (!verified.problems.empty()) throw Error(folder + ": " + verified.problems[0].str());
    const TrainerState trainer = load(folder, *model.sharded, &*model.optimizer).trainer;
    if (trainer.step != step || !model.has(trainer.data_position))
      throw Error(fmt::format("{} loads with other values than it was saved with", folder));
    stamps[step] = trainer.data_position;
  }
  return stamps;
}

// The same as another process sees it, which changes nothing.
std::map<int64_t, int64_t> read_by_another(const std::string& root, Stamped& model) {
  const auto before = contents(root);
  const std::map<int64_t, int64_t> stamps = stamps_in(root + "/run", model);
  Manager reader(root + "/run");
  const auto loaded = reader.load_latest(*model.sharded, &*model.optimizer);
  if (loaded ? stamps.empty() || !model.has(stamps.rbegin()->second) : !stamps.empty())
    throw Error("a reader is given another checkpoint than the latest");
  if (contents(root) != before) throw Error("a reader changed something");
  return stamps;
}

std::string str(const std::map<int64_t, int64_t>& stamps) {
  std::string text;
  for (const auto& [step, stamp] : stamps)
    text += fmt::format("{}step {} of stamp {}", text.empty() ? "" : " and ", step, stamp);
  return text.empty() ? "nothing" : text;
}

void require(const std::map<int64_t, int64_t>& stamps, const Expected& expected) {
  const int64_t latest = stamps.empty() ? -1 : stamps.rbegin()->first;
  if (latest < expected.latest) throw Error(fmt::format("step {} was saved, and {} is there", expected.latest, str(stamps)));
  for (const int64_t step : expected.must)
    if (!stamps.contains(step)) throw Error(fmt::format("step {} is lost: {} is there", step, str(stamps)));
  for (const auto& [step, stamp] : stamps) {
    const auto may = expected.may.find(step);
    if (may == expected.may.end() || !may->second.contains(stamp))
      throw Error(fmt::format("step {} has stamp {}, which it never had", step, stamp));
  }
}

// The next process: it resumes from the latest, saves, and leaves nothing else. Of one rank.
void go_on(const std::string& run, Stamped& model, const std::map<int64_t, int64_t>& stamps) {
  std::optional<Manager> manager(std::in_place, run, ManagerOptions{.files = &harness::hasty_files()});
  const auto loaded = manager->load_latest(*model.sharded, &*model.optimizer);
  const int64_t latest = stamps.empty() ? -1 : stamps.rbegin()->first;
  if ((loaded ? loaded->trainer.step : -1) != latest) throw Error("another checkpoint is resumed from than the latest");
  if (loaded && !model.has(stamps.rbegin()->second)) throw Error("what is resumed from has other values");
  model.stamp(99);
  manager->save(*model.sharded, &*model.optimizer, trainer_of(latest + 1, 99));
  manager.reset();
  load(step_folder(run, latest + 1), *model.sharded, &*model.optimizer);
  if (!model.has(99)) throw Error("the next save has other values");
  if (list_folder(run).size() != stamps.size() + 1) throw Error("the next save left what the last one left");
}

// A small save.
struct Story {
  std::string name;
  int64_t ranks = 1;
  bool async = false;
  std::vector<int64_t> before = {};  // steps that are there; each has itself as its stamp
  int64_t step = 1;
  int64_t keep = 0;
  uint64_t block = 4096;
  bool over_the_double = false;
  std::vector<Expected> expected = {};  // before and after the save has returned
};

constexpr int64_t kNew = 77;  // its stamp

void save_steps(const Story& story, const std::string& run, LossyDisk& disk) {
  run_threads(story.ranks, [&](std::shared_ptr<Comm> comm) {
    Stamped model(comm, {2, 2});
    model.stamp(kNew);
    // A disk that cannot flush folders may lose them, and is none that power may fail on.
    ClusterDisk cluster({.harmless = {.interrupts = 0.3, .cuts = 0.3, .forgets = 0.5}}, 1, disk.files(comm->rank()));
    FileSystem* const files = story.over_the_double ? &cluster : &disk.files(comm->rank());
    Manager manager(run, {.keep = story.keep, .async = story.async, .overwrite = true, .files = files});
    manager.save(*model.sharded, &*model.optimizer, trainer_of(story.step, kNew));
    model.stamp(kNew + 1);
    manager.wait();
    if (comm->rank() == 0) disk.mark(1);
  });
}

int64_t look_at_all(const Story& story) {
  const std::string name =
      fmt::format("{} by {} rank{}{}{}", story.name, story.ranks, story.ranks > 1 ? "s" : "",
                  story.async ? " in the background" : "", story.over_the_double ? " over a disk of a cluster" : "");
  if (replay.leaves_out(name)) return 0;
  const Scratch scratch;
  const std::string run = scratch / "run";
  if (!story.before.empty())
    run_threads(1, [&](std::shared_ptr<Comm> comm) {
      Stamped model(comm, {2, 2});
      Manager manager(run, {.files = &harness::hasty_files()});
      for (const int64_t step : story.before) {
        model.stamp(step);
        manager.save(*model.sharded, &*model.optimizer, trainer_of(step, step));
      }
    });
  LossyDisk disk(scratch.path());
  disk.take_turns(story.ranks, 1);
  save_steps(story, run, disk);
  int64_t all = 0;
  run_threads(1, [&](std::shared_ptr<Comm> comm) {
    Stamped model(comm, {2, 2});
    const auto look = [&](const std::string& root, int64_t mark) {
      const std::map<int64_t, int64_t> stamps = read_by_another(root, model);
      require(stamps, story.expected.at(static_cast<size_t>(mark)));
      go_on(root + "/run", model, stamps);
      return str(stamps);
    };
    all = tell(name, look_at_all_states(name, disk.record(), {.block = story.block}, look));
  });
  return all;
}

void look_at_all_kinds(Story story, int64_t few) {
  for (const int64_t ranks : {1, 2})
    for (const bool async : {false, true}) {
      story.ranks = ranks, story.async = async;
      story.block = ranks == 1 ? 4096 : 16384;
      story.over_the_double = false;
      expect_more_than(few, look_at_all(story));
      if (ranks > 1) continue;
      story.over_the_double = true;
      expect_more_than(few, look_at_all(story));
    }
}

TEST(PowerLoss, every_state_after_the_first_save_of_a_run_has_all_of_it_or_nothing) {
  look_at_all_kinds(
      {.name = "first save", .expected = {{.may = {{1, {kNew}}}}, {.may = {{1, {kNew}}}, .must = {1}, .latest = 1}}}, 40);
}

TEST(PowerLoss, every_state_after_a_save_over_a_history_has_the_one_before) {
  look_at_all_kinds({.name = "second save",
                     .before = {1},
                     .step = 2,
                     .expected = {{.may = {{1, {1}}, {2, {kNew}}}, .must = {1}, .latest = 1},
                                  {.may = {{1, {1}}, {2, {kNew}}}, .must = {1, 2}, .latest = 2}}},
                    40);
}

TEST(PowerLoss, every_state_after_the_last_checkpoint_was_overwritten_has_the_old_one_or_the_new_one) {
  look_at_all_kinds(
      {.name = "overwriting save",
       .before = {1},
       .expected = {{.may = {{1, {1, kNew}}}, .must = {1}, .latest = 1}, {.may = {{1, {kNew}}}, .must = {1}, .latest = 1}}},
      40);
}

TEST(PowerLoss, every_state_after_a_save_that_removes_older_ones_has_the_last_committed_one_or_the_new_one) {
  look_at_all_kinds(
      {.name = "removing save",
       .before = {1, 2},
       .step = 3,
       .keep = 1,
       .expected = {{.may = {{1, {1}}, {2, {2}}, {3, {kNew}}}, .latest = 2}, {.may = {{3, {kNew}}}, .must = {3}, .latest = 3}}},
      40);
}

TEST(PowerLoss, every_state_after_a_convert_has_all_of_it_or_nothing) {
  for (const std::string to : {"dcp", "safetensors", "torch"})
    for (const bool over_the_double : {false, true}) {
      const std::string name = "convert to " + to + (over_the_double ? " over a disk of a cluster" : "");
      if (replay.leaves_out(name)) continue;
      const Scratch scratch;
      std::filesystem::create_directory(scratch / "run");
      save_step(harness::hasty_files(), scratch / "run/step_1", 1);
      LossyDisk disk(scratch.path());
      ClusterDisk cluster({.harmless = {.interrupts = 0.3, .cuts = 0.3, .forgets = 0.5}}, 1, disk.files());
      FileSystem* const files = over_the_double ? &cluster : &disk.files();
      testing::internal::CaptureStdout();
      harness::checkpoint_convert({.one = scratch / "run/step_1", .two = scratch / "run/made", .to = to, .files = files});
      testing::internal::GetCapturedStdout();
      disk.mark(1);
      const auto made_in = [](const std::string& root) {
        std::map<std::string, std::string> made;
        for (const auto& [path, bytes] : contents(root))
          if (path.starts_with(root + "/run/made")) made[path.substr(root.size())] = bytes;
        return made;
      };
      const auto expected = made_in(scratch.path());
      const auto look = [&](const std::string& root, int64_t mark) {
        const auto before = contents(root);
        if (latest_step(root + "/run") != 1 || step_in(root + "/run/step_1") != 1) throw Error("the run's own step is lost");
        if (contents(root) != before) throw Error("a reader changed something");
        const auto made = made_in(root);
        if (made != expected && (mark == 1 || !made.empty())) throw Error("what was made is not there, or a part of it");
        return std::string(made.empty() ? "nothing" : "all of it");
      };
      expect_more_than(5, tell(name, look_at_all_states(name, disk.record(), {.block = 4096}, look)));
    }
}

// A random history: saves by several ranks, some of which are killed or whose flush fails, and power that fails.
class History {
 public:
  History(uint64_t seed, bool large)
      : draw_(harness::Draws(seed, large ? "large saves" : "small saves")), states_(large ? 4 : 8) {
    // The file of a rank has more than one block of 4 MiB in large saves.
    widths_ = large ? std::vector<int64_t>{320, 1280, 320}
                    : std::vector<int64_t>{draw_.integer(1, 9), draw_.integer(1, 9), draw_.integer(1, 9)};
  }

  // Throws Error when something is there that must not be.
  void run() {
    const int64_t rounds = draw_.integer(1, 3);
    for (int64_t round = 0; round < rounds; ++round) {
      LossyDisk disk(scratch_.path());
      expected_ = {last_};
      for (int64_t saves = draw_.integer(1, 3); saves > 0; --saves) save(disk);
      for (int64_t state = 0; state < states_; ++state) lose_power(disk.record());
    }
  }
  int64_t states() const { return seen_; }

 private:
  void save(LossyDisk& disk) {
    const std::vector<int64_t> there = committed_steps(run_);
    const int64_t ranks = draw_.integer(1, 4), keep = draw_.integer(0, 2), stamp = ++stamps_;
    const bool async = draw_.chance(0.5), overwrite = !there.empty() && draw_.chance(0.3);
    const int64_t step = there.empty() ? 1 : there.back() + (overwrite ? 0 : 1);
    disk.take_turns(ranks, draw_.bits());
    if (draw_.chance(0.4)) disk.kill_after(draw_.integer(0, 30 + 6 * ranks));
    if (draw_.chance(0.2)) disk.fail_flush(draw_.integer(0, 5 + ranks));
    // From now on the new one may be there, and those that it removes may be gone.
    last_.may[step].insert(stamp);
    std::vector<int64_t> kept = there;
    if (!overwrite) kept.push_back(step);
    if (keep > 0 && static_cast<int64_t>(kept.size()) > keep) kept.erase(kept.begin(), kept.end() - keep);
    std::erase_if(last_.must, [&](int64_t known) { return std::find(kept.begin(), kept.end(), known) == kept.end(); });
    mark(disk);
    try {
      run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
        Stamped model(comm, widths_);
        Manager manager(run_, {.keep = keep,
                               .async = async,
                               .overwrite = true,
                               .lost = [](const std::string&) {},
                               .files = &disk.files(comm->rank())});
        const auto loaded = manager.load_latest(*model.sharded, &*model.optimizer);
        if (loaded) SHARD_CHECK(model.has(loaded->trainer.data_position), "test", "what was seen is not what was saved");
        model.stamp(stamp);
        manager.save(*model.sharded, &*model.optimizer, trainer_of(step, stamp));
        if (async) model.stamp(stamp + 1);
        manager.wait();
      });
      last_.may[step] = {stamp};
      last_.must.insert(step);
      last_.latest = step;
      mark(disk);
    } catch (const Error&) {
      // Killed, or told that a flush failed: it is there or not.
    }
    disk.restart();
  }

  void mark(LossyDisk& disk) {
    disk.mark(static_cast<int64_t>(expected_.size()));
    expected_.push_back(last_);
  }

  // The run goes on from the last state.
  void lose_power(const harness::DiskRecord& record) {
    harness::RandomChoice choices(draw_.bits());
    const harness::PowerLoss how{.block = draw_.one_of<uint64_t>({512, 4096, 1 << 20, 1000, 777777}),
                                 .fill = draw_.chance(0.5) ? '\0' : '\xa5'};
    const harness::DiskState state = harness::lose_power(record, choices, how);
    ++seen_;
    // The folder that was recorded is needed for the other states of this record.
    harness::restore(state, scratch_.path());
    const Expected& expected = expected_.at(static_cast<size_t>(state.mark));
    const int64_t ranks = draw_.integer(1, 3);
    Expected found;
    try {
      run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
        Stamped model(comm, widths_);
        const std::map<int64_t, int64_t> stamps = stamps_in(run_, model);
        if (comm->rank() != 0) return;
        require(stamps, expected);
        for (const auto& [step, stamp] : stamps) {
          found.may[step] = {stamp};
          found.must.insert(step);
          found.latest = step;
        }
      });
    } catch (const Error& error) {
      throw Error(fmt::format("{}\nafter {} of {} calls, with this on the disk:\n{}", error.what(), state.calls,
                              record.calls.size(), state.str()));
    }
    last_ = found;
  }

  harness::Chooser draw_;
  int64_t states_;
  std::vector<int64_t> widths_;
  const Scratch scratch_;
  std::string run_ = scratch_ / "run";
  int64_t stamps_ = 0, seen_ = 0;
  std::vector<Expected> expected_;  // by mark of the record
  Expected last_;
};

uint64_t asked_seed() {
  const std::string& text = replay.choices();
  uint64_t seed = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  SHARD_REQUIRE(error == std::errc() && stop == text.data() + text.size(), "test", "'{}' is no seed, e.g. 12", text);
  return seed;
}

// SHARDPROOF_POWER_LOSSES=N takes so many histories instead, others than those.
void look_at_histories(bool large, int64_t few) {
  const char* asked = std::getenv("SHARDPROOF_POWER_LOSSES");
  const std::string story = large ? "large saves" : "small saves";
  if (replay.leaves_out(story)) return;
  const int64_t histories = replay.asked() ? 1 : asked ? std::atoll(asked) / (large ? 10 : 1) : few;
  int64_t states = 0;
  for (int64_t i = 0; i < histories; ++i) {
    const uint64_t seed = replay.asked() ? asked_seed() : static_cast<uint64_t>(asked ? 1'000'000 + i : i);
    History history(seed, large);
    try {
      history.run();
    } catch (const std::exception& error) {
      FAIL() << error.what() << "\n" << replay_line(story, std::to_string(seed));
    }
    states += history.states();
  }
  std::printf("%s: %lld crash states of %lld histories\n", story.c_str(), static_cast<long long>(states),
              static_cast<long long>(histories));
}

TEST(PowerLoss, random_states_after_random_histories_have_the_last_committed_checkpoint_or_a_later_one) {
  look_at_histories(false, 25);
}

TEST(PowerLoss, random_states_after_large_saves_have_the_last_committed_checkpoint_or_a_later_one) {
  look_at_histories(true, 2);
}

}  // namespace
}  // namespace shardproof::checkpoint
