// Processes that save are killed at random instants. Nothing here starts a thread before it forks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/checkpoint_stamped.h"
#include "shardproof/checkpoint/format/durable.h"

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
    if (!name.starts_with("step_")) return 13;
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

}  // namespace
}  // namespace shardproof::checkpoint
