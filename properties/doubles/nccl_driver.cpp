// Processes of `start_ranks`, for nccl_launch_props:
//
//   nccl_driver start RANKS WHAT     starts them and returns what they end with
//   nccl_driver rank WHAT            is one of them. All meet in the store. Then `meet` ends well, and `signals` says how often
//                                    SIGUSR1 came. In `stop` all end with 75, but the last one with 7, later. In `kill` and
//                                    `fail` rank 1 dies or fails, while the others begin a world that cannot come about
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "properties/doubles/nccl_double.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/nccl/nccl.h"
#include "shardproof/launch/nccl_launch.h"

using namespace shardproof;

namespace {

using std::chrono::milliseconds;

constexpr int kStopped = 75;
std::atomic<int> signals_came{0};

int be_asked_to_stop(int64_t rank) {
  std::printf("rank %ld waits\n", static_cast<long>(rank));
  std::fflush(stdout);
  for (int looks = 0; signals_came == 0 && looks < 1000; ++looks) std::this_thread::sleep_for(milliseconds(10));
  std::this_thread::sleep_for(milliseconds(100));  // time for a second one, which should not come
  std::printf("rank %ld had %d\n", static_cast<long>(rank), signals_came.load());
  return kStopped;
}

int be_rank(const std::string& what) {
  ::signal(SIGUSR1, [](int) { ++signals_came; });
  const Launch launch = read_launch(process_environment());
  const auto store = std::make_shared<TcpStore>(store_address(launch, process_environment()));
  store->set(fmt::format("here/{}", launch.rank), fmt::format("{} of {}", launch.local_rank, launch.local_world));
  for (int64_t rank = 0; rank < launch.world; ++rank)
    while (!store->get(fmt::format("here/{}", rank))) std::this_thread::yield();
  if (what == "meet") {
    std::printf("rank %ld of %ld met all\n", static_cast<long>(launch.rank), static_cast<long>(launch.world));
    return 0;
  }
  if (what == "signals") return be_asked_to_stop(launch.rank);
  if (what == "stop" && launch.rank < launch.world - 1) return kStopped;
  if (what == "stop") std::this_thread::sleep_for(milliseconds(300));
  if (what == "stop" || (launch.rank == 1 && what == "fail")) return 7;
  if (launch.rank == 1) ::raise(SIGKILL);
  // Each process has a double of its own, so that its communicators wait for the others for ever.
  const auto cluster = std::make_shared<nccl_double::Cluster>(nccl_double::Plan{});
  NcclWorld world(launch.rank, launch.world, store, std::make_shared<nccl_double::Api>(cluster, launch.rank),
                  {.timeout_seconds = 20});
  try {
    world.run([](std::shared_ptr<Comm>) {});
  } catch (const WorldLostError& error) {
    std::printf("rank %ld: %s\n", static_cast<long>(launch.rank), error.what());
    return 3;
  }
  return 4;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  if (argc == 3 && arguments[1] == "rank") return be_rank(arguments[2]);
  if (argc != 4 || arguments[1] != "start") return 2;
  return start_ranks(std::stoll(arguments[2]), {arguments[0], "rank", arguments[3]}, kStopped);
}
