// Processes that save are killed at random instants. Nothing here starts a thread before it forks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "properties/doubles/cluster_disk.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/checkpoint_stamped.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/comm/agree.h"

namespace shardproof::checkpoint {
namespace {

const std::vector<int64_t> kWidths = {512, 1024, 512};  // a rank's file has more than one block

void tell(int told, int64_t what) {
  if (::write(told, &what, sizeof what) != sizeof what) std::_Exit(3);
}

// Saves on and on over the history. Tells -step when it begins a save, step when that is committed.
[[noreturn]] void save_until_killed(const std::string& root, int told) {
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    Stamped run(comm, kWidths);
    for (int64_t step = latest_step(root).value_or(0) + 1;; ++step) {
      run.stamp(step);
      comm->barrier().wait();
      if (comm->rank() == 0) tell(told, -step);
      save(step_folder(root, step), *run.sharded, &*run.optimizer, {.step = step});
      if (comm->rank() != 0) continue;
      tell(told, step);
      retain_steps(system_files(), root, 3);
    }
  });
  std::_Exit(4);
}

// That every checkpoint is whole and the last is at least `committed`, loaded by another number of ranks.
int check(const std::string& root, int64_t committed) {
  const std::optional<int64_t> latest = latest_step(root);
  if (!latest || *latest < committed || *latest > committed + 1) return 10;
  for (const int64_t step : committed_steps(root))
    if (!verify_checkpoint(system_files(), step_folder(root, step)).problems.empty()) return 11;
  int result = 0;
  run_threads(3, [&](std::shared_ptr<Comm> comm) {
    Stamped run(comm, kWidths);
    const int64_t step = load(step_folder(root, *latest), *run.sharded, &*run.optimizer).trainer.step;
    const bool same = run.has(*latest);
    if (comm->rank() == 0 && (step != *latest || !same)) result = 12;
  });
  remove_leftovers(system_files(), root);
  for (const std::string& name : list_folder(root))
    if (!name.starts_with("step_") && name != ".step_owner") return 13;
  return result;
}

int exit_code_of(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Forks a saver and kills it at `fraction` of a save's usual time after its second began. The last commit that it told of.
int64_t save_and_kill(const std::string& root, double fraction) {
  using Clock = std::chrono::steady_clock;
  int ends[2];
  if (::pipe(ends) != 0) throw Error("no pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    save_until_killed(root, ends[1]);
  }
  ::close(ends[1]);
  int64_t committed = 0, told = 0;
  const auto next = [&] {
    const bool any = ::read(ends[0], &told, sizeof told) == sizeof told;
    if (any && told > 0) committed = told;
    return any;
  };
  next();
  const auto began = Clock::now();
  next();
  const auto usual = Clock::now() - began;
  next();
  std::this_thread::sleep_for(usual * fraction);  // to any instant of the save under way
  ::kill(child, SIGKILL);
  EXPECT_EQ(exit_code_of(child), -SIGKILL);
  while (next()) continue;
  ::close(ends[0]);
  return committed;
}

TEST(Killed, a_process_killed_while_it_saves_leaves_the_last_committed_checkpoint_to_the_bit) {
  const char* asked = std::getenv("SHARDPROOF_KILLS");
  const int64_t kills = asked ? std::atoll(asked) : 40;
  Random random(asked ? 2 : 1);
  const Scratch scratch;
  int64_t in_a_save = 0;
  for (int64_t i = 0; i < kills; ++i) {
    const int64_t committed = save_and_kill(scratch.path(), static_cast<double>(draw(random, 1200)) / 1000);
    ASSERT_GT(committed, 0) << "kill " << i;
    const std::vector<std::string> left = list_folder(scratch.path());
    in_a_save += std::any_of(left.begin(), left.end(), [](const auto& name) { return name.find(".saving-") != name.npos; });
    const pid_t checker = ::fork();
    if (checker == 0) std::_Exit(check(scratch.path(), committed));
    ASSERT_EQ(exit_code_of(checker), 0) << "kill " << i << ", committed " << committed;
  }
  RecordProperty("kills_in_a_save", static_cast<int>(in_a_save));
  std::printf("%lld kills, %lld of them while a save was under way\n", static_cast<long long>(kills),
              static_cast<long long>(in_a_save));
  EXPECT_GT(in_a_save, kills / 3);
}

// What a process of the next test tells: a step that it has committed or loaded, or the error that it got.
struct News {
  enum Kind : int64_t { committed, loaded, refused } kind;
  int64_t step = 0;
  char text[1000] = "";
};
static_assert(sizeof(News) <= 4096, "a pipe takes so much at once");

struct Role {
  bool saves = true;  // else it reads on and on
  bool async = false;
  uint64_t disk = 0;  // the seed of its habits; 0: the disk as it is
};

// A process that is killed in the end. One that saves resumes first, and begins again where it was refused.
class Player {
 public:
  Player(const std::string& root, const Role& role) : role_(role) {
    int ends[2];
    if (::pipe(ends) != 0) throw Error("no pipe");
    process_ = ::fork();
    if (process_ == 0) {
      ::close(ends[0]);
      play(root, ends[1]);
    }
    ::close(ends[1]);
    end_ = ends[0];
  }
  ~Player() {
    kill();
    ::close(end_);
  }
  Player(const Player&) = delete;
  Player& operator=(const Player&) = delete;

  // Waits for news. Nothing when the process is dead.
  std::optional<News> next() {
    News news{};
    if (::read(end_, &news, sizeof news) != sizeof news) return std::nullopt;
    heard_.push_back(news);
    return news;
  }
  void kill() {
    if (process_ == 0) return;
    ::kill(process_, SIGKILL);
    died_ = exit_code_of(std::exchange(process_, 0));
    while (next()) continue;
  }
  int died() const { return died_; }
  const Role& role() const { return role_; }
  const std::vector<News>& heard() const { return heard_; }

 private:
  [[noreturn]] void play(const std::string& root, int told) const {
    ClusterHabits habits;
    if (role_.disk) habits.harmless = harness::DiskHabits::drawn(role_.disk);
    if (role_.disk && !role_.saves) habits.list_age = static_cast<int64_t>(role_.disk % 3);
    ClusterDisk disk(habits, role_.disk);
    const auto say = [&](const News& news) {
      if (::write(told, &news, sizeof news) != sizeof news) std::_Exit(3);
    };
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      Stamped run(comm, kWidths);
      for (;;) {
        const std::string error = error_of([&] { play_once(root, disk, run, *comm, say); });
        News news{.kind = News::refused};
        error.copy(news.text, sizeof news.text - 1);
        if (comm->rank() == 0) say(news);
      }
    });
    std::_Exit(4);
  }
  void play_once(const std::string& root, FileSystem& disk, Stamped& run, Comm& comm, const auto& say) const {
    Manager manager(root, {.keep = 2, .async = role_.async, .lost = [](const std::string&) {}, .files = &disk});
    for (;;) {
      const auto loaded = manager.load_latest(*run.sharded, &*run.optimizer, {.files = &disk});
      int64_t step = loaded ? loaded->trainer.step : 0;
      if (loaded && !run.has(step)) std::_Exit(12);
      if (comm.rank() == 0) say({.kind = News::loaded, .step = step});
      if (!role_.saves) continue;
      for (;;) {
        run.stamp(++step);
        manager.save(*run.sharded, &*run.optimizer, {.step = step});
        run.stamp(step + 1000);
        manager.wait();
        if (comm.rank() == 0) say({.kind = News::committed, .step = step});
      }
    }
  }

  Role role_;
  pid_t process_ = 0;
  int end_ = -1, died_ = 0;
  std::vector<News> heard_;
};

// The news of this kind, or another player's end.
std::optional<News> wait_for(Player& player, News::Kind kind) {
  for (;;)
    if (const auto news = player.next(); !news || news->kind == kind) return news;
}

// One saves, and another reads or tries to resume. At a random moment one of them is killed, or both.
class TwoOnOneFolder {
 public:
  TwoOnOneFolder(Random& random, const std::string& root) : random_(random), root_(root) {}

  void round(bool over_the_double) {
    const auto disk = [&] { return over_the_double ? 1 + static_cast<uint64_t>(draw(random_, 1'000'000)) : 0; };
    Player saver(root_, {.async = draw(random_, 2) == 0, .disk = disk()});
    ASSERT_TRUE(wait_for(saver, News::committed)) << "code " << saver.died();
    Player second(root_, {.saves = draw(random_, 2) == 0, .async = draw(random_, 2) == 0, .disk = disk()});
    ASSERT_TRUE(second.next());
    const auto began = std::chrono::steady_clock::now();
    ASSERT_TRUE(wait_for(saver, News::committed));
    const auto usual = std::chrono::steady_clock::now() - began;
    std::this_thread::sleep_for(usual * (static_cast<double>(draw(random_, 1500)) / 1000));
    const int64_t who = draw(random_, 3);
    if (who != 0) second.kill();
    if (who != 1) saver.kill();
    // The one that is left goes on: the second takes over from one that is dead.
    if (who == 0) {
      ASSERT_TRUE(wait_for(second, second.role().saves ? News::committed : News::loaded));
    }
    if (who == 1) {
      ASSERT_TRUE(wait_for(saver, News::committed));
    }
    saver.kill();
    second.kill();
    EXPECT_EQ(saver.died(), -SIGKILL);
    EXPECT_EQ(second.died(), -SIGKILL) << "12: what it loaded is a mix";
    look_at(saver);
    look_at(second);
    const pid_t checker = ::fork();
    if (checker == 0) std::_Exit(check(root_, committed_));
    ASSERT_EQ(exit_code_of(checker), 0) << "committed " << committed_;
  }

  int64_t committed() const { return committed_; }
  std::map<std::string, int64_t> counts;  // of news

 private:
  // Whoever loads finds a step that was committed before, and every error says whose the folder is, or which file is not there.
  void look_at(const Player& player) {
    for (const News& news : player.heard()) {
      if (news.kind == News::committed) committed_ = std::max(committed_, news.step);
      if (news.kind == News::loaded) {
        EXPECT_GT(news.step, is_first_ ? -1 : 0) << "it seemed empty";
      }
      is_first_ = false;
      const std::string text = news.text;
      if (news.kind != News::refused) ++counts[news.kind == News::committed ? "commits" : "loads"];
      if (news.kind != News::refused) continue;
      const bool another = text.find("another run saves in " + root_) != std::string::npos;
      const bool removed = text.find(root_ + "/step_") != std::string::npos && text.find("No such file") != std::string::npos;
      const bool behind = text.find("does not come after") != std::string::npos;  // it loaded before the other's last commit
      EXPECT_TRUE(removed || (player.role().saves && (another || behind))) << text;
      ++counts[another ? "refusals" : removed ? "reads of what was removed" : "late resumes"];
    }
  }
  Random& random_;
  const std::string root_;
  int64_t committed_ = 0;
  bool is_first_ = true;
};

TEST(Killed, of_two_processes_on_one_folder_one_saves_and_nothing_is_lost_or_mixed_whoever_is_killed) {
  const char* asked = std::getenv("SHARDPROOF_KILLS");
  const int64_t kills = asked ? std::atoll(asked) : 12;
  const uint64_t seed = asked ? 4 : 3;
  Random random(seed);
  const Scratch on_disk, on_double;
  TwoOnOneFolder plain(random, on_disk.path()), cluster(random, on_double.path());
  for (int64_t i = 0; i < kills && !HasFailure(); ++i) {
    (i % 2 == 0 ? plain : cluster).round(i % 2 != 0);
    if (HasFailure())
      std::printf("in round %lld of seed %llu\n", static_cast<long long>(i), static_cast<unsigned long long>(seed));
  }
  for (const auto& [where, two] : {std::pair("the disk", &plain), std::pair("the double", &cluster)}) {
    std::string text;
    for (const auto& [what, count] : two->counts) text += fmt::format(", {} {}", count, what);
    std::printf("on %s: %lld rounds%s\n", where, static_cast<long long>(kills / 2), text.c_str());
  }
}

}  // namespace
}  // namespace shardproof::checkpoint
