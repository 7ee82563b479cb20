// The processes of `--backend nccl --ranks N`.
#include "shardproof/launch/nccl_launch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "shardproof/base/check.h"
#include "shardproof/comm/nccl/nccl_api.h"

namespace shardproof {
namespace {

using Running = std::map<pid_t, int64_t>;  // ranks by process

// The signals that ask a run to stop.
constexpr std::array kStopSignals{SIGINT, SIGTERM, SIGUSR1};
std::array<std::atomic<bool>, kStopSignals.size()> signal_came{};
static_assert(std::atomic<bool>::is_always_lock_free);

// While it lives, these signals wait for `hand_on`.
class SignalsForRanks {
 public:
  SignalsForRanks() {
    struct sigaction action {};
    action.sa_handler = [](int signal) {
      for (size_t i = 0; i < kStopSignals.size(); ++i)
        if (kStopSignals[i] == signal) signal_came[i] = true;
    };
    action.sa_flags = SA_RESTART;
    for (size_t i = 0; i < kStopSignals.size(); ++i) {
      signal_came[i] = false;
      ::sigaction(kStopSignals[i], &action, &before_[i]);
    }
  }
  ~SignalsForRanks() {
    for (size_t i = 0; i < kStopSignals.size(); ++i) ::sigaction(kStopSignals[i], &before_[i], nullptr);
  }
  SignalsForRanks(const SignalsForRanks&) = delete;

  // Gives the ranks what came since the last call.
  void hand_on(const Running& running) {
    for (size_t i = 0; i < kStopSignals.size(); ++i)
      if (signal_came[i].exchange(false))
        for (const auto& [process, rank] : running) ::kill(process, kStopSignals[i]);
  }

 private:
  std::array<struct sigaction, kStopSignals.size()> before_{};
};

// While it lives, signals to stop are held back. A child that is made meanwhile has the handlers of its parent, which would
// only write down its signals in memory of its own. `end_in_child` makes them end it instead, as they end any program.
class StopSignalsBlocked {
 public:
  StopSignalsBlocked() {
    sigset_t signals;
    ::sigemptyset(&signals);
    for (const int signal : kStopSignals) ::sigaddset(&signals, signal);
    ::pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~StopSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  StopSignalsBlocked(const StopSignalsBlocked&) = delete;

  void end_in_child() const {
    for (const int signal : kStopSignals) ::signal(signal, SIG_DFL);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t before_{};
};

// A process that ends with an error has told the others why, if it could: they have so long to end by themselves.
constexpr auto kGrace = std::chrono::seconds(2);
constexpr auto kLook = std::chrono::milliseconds(20);

std::vector<std::string> environment_of(int64_t rank, int64_t ranks, int64_t port) {
  std::vector<std::string> variables = {fmt::format("RANK={}", rank),
                                        fmt::format("WORLD_SIZE={}", ranks),
                                        fmt::format("LOCAL_RANK={}", rank),
                                        fmt::format("LOCAL_WORLD_SIZE={}", ranks),
                                        "MASTER_ADDR=127.0.0.1",
                                        fmt::format("MASTER_PORT={}", port),
                                        "TORCHELASTIC_USE_AGENT_STORE=True"};
  for (char** variable = environ; *variable; ++variable) {
    const std::string text = *variable;
    bool replaced = false;
    for (const std::string& own : variables) replaced |= text.starts_with(own.substr(0, own.find('=') + 1));
    if (!replaced) variables.push_back(text);
  }
  return variables;
}

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> all;
  for (const std::string& word : words) all.push_back(const_cast<char*>(word.c_str()));
  all.push_back(nullptr);
  return all;
}

pid_t start(const std::string& program, const std::vector<std::string>& arguments, const std::vector<std::string>& variables) {
  const std::vector<char*> argv = pointers(arguments), envp = pointers(variables);
  const StopSignalsBlocked blocked;
  const pid_t parent = ::getpid(), child = ::fork();
  SHARD_REQUIRE(child >= 0, "launch", "cannot start a process: {}", std::strerror(errno));
  if (child > 0) return child;
  // From here on only what is safe after a fork of a program with threads.
  blocked.end_in_child();
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);
  ::execve(program.c_str(), argv.data(), envp.data());
  ::_exit(127);
}

std::string how_ended(int64_t rank, int status) {
  if (WIFSIGNALED(status)) return fmt::format("rank {} was killed by signal {}", rank, WTERMSIG(status));
  return fmt::format("rank {} ended with exit code {}", rank, WEXITSTATUS(status));
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  std::string start;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> start;
  return fmt::format("{}/{}", ::gethostname(name, sizeof name - 1) == 0 ? name : "host", start.substr(0, start.find('-')));
}

std::string own_command() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words.empty() ? "" : fmt::format("{}", fmt::join(words.begin() + 1, words.end(), " "));
}

RankPlace own_place(const Launch& launch) {
  RankPlace place{.host = host_name(), .local_rank = launch.local_rank};
  for (int64_t device = 0; device < nccl_devices(); ++device) place.gpus.push_back(nccl_device_id(device));
  return place;
}

std::vector<RankPlace> meet(NcclStore& store, const Launch& launch, const RankPlace& own, double timeout_seconds) {
  const auto name_of = [](int64_t rank) { return fmt::format("place/{}", rank); };
  store.set(name_of(launch.rank), fmt::format("{} {} {}", own.host, own.local_rank, fmt::join(own.gpus, " ")));
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds);
  std::vector<RankPlace> places;
  while (std::ssize(places) < launch.world) {
    if (const auto text = store.get(name_of(std::ssize(places)))) {
      std::istringstream words(*text);
      RankPlace place;
      words >> place.host >> place.local_rank;
      for (std::string gpu; words >> gpu;) place.gpus.push_back(gpu);
      places.push_back(std::move(place));
      continue;
    }
    if (const auto end = world_end(store))
      throw Error(fmt::format("[launch] {}; rank {} waited for others", *end, launch.rank));
    if (std::chrono::steady_clock::now() > until) {
      std::vector<int64_t> missing;
      for (int64_t rank = 0; rank < launch.world; ++rank)
        if (!store.get(name_of(rank))) missing.push_back(rank);
      throw Error(
          fmt::format("[launch] ranks {} of {} did not come within {} s. They were not started, or ended: what they have "
                      "said themselves tells why",
                      fmt::join(missing, ", "), launch.world, timeout_seconds));
    }
    std::this_thread::sleep_for(kLook);
  }
  return places;
}

int start_ranks(int64_t ranks, const std::vector<std::string>& arguments, int stopped_as_asked) {
  SHARD_REQUIRE(ranks > 0 && !arguments.empty(), "launch", "--ranks must be at least 1, got {}", ranks);
  const auto store = std::make_shared<TcpStore>(TcpStoreOptions{.serves = true, .attempt = attempt_of(process_environment())});
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  SignalsForRanks signals;
  Running running;
  for (int64_t rank = 0; rank < ranks; ++rank)
    running[start(program, arguments, environment_of(rank, ranks, store->port()))] = rank;
  int exit_code = 0;
  std::string lost;
  auto tell_at = std::chrono::steady_clock::time_point::max();
  while (!running.empty()) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    if (const auto found = running.find(ended); ended > 0 && found != running.end()) {
      const bool killed = WIFSIGNALED(status);
      const int code = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      if (code != 0 && code != stopped_as_asked && lost.empty()) {
        lost = how_ended(found->second, status);
        tell_at = std::chrono::steady_clock::now() + (killed ? std::chrono::seconds(0) : kGrace);
        exit_code = code;
      }
      if (exit_code == 0) exit_code = code;
      running.erase(found);
      continue;
    }
    if (std::chrono::steady_clock::now() >= tell_at) {
      end_world(store, lost);
      tell_at = std::chrono::steady_clock::time_point::max();
    }
    signals.hand_on(running);
    std::this_thread::sleep_for(kLook);
  }
  return exit_code;
}

}  // namespace shardproof
