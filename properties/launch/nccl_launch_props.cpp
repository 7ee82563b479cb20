// What is decided before NCCL is used, as whole tables, and processes that nobody else starts.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <set>
#include <thread>

#include "harness/run/beside_program.h"
#include "properties/kit/environment.h"
#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/agree.h"
#include "shardproof/launch/nccl_launch.h"

using namespace shardproof;
using Verdict = Advice::Verdict;
using Way = GpuSharing::Way;

namespace {

std::string driver() { return harness::beside_program("nccl_driver").string(); }

// Exit code and what was printed.
std::pair<int, std::string> run(const std::string& arguments) {
  std::FILE* out = ::popen((driver() + " " + arguments).c_str(), "r");
  std::string text;
  for (char block[4096]; const size_t count = std::fread(block, 1, sizeof block, out);) text.append(block, count);
  const int status = ::pclose(out);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
}

RankPlace place(const std::string& host, std::vector<std::string> gpus, int64_t local_rank = -1) {
  return {.host = host, .gpus = std::move(gpus), .local_rank = local_rank};
}

std::vector<std::string> numbered_gpus(const std::string& host, int64_t count) {
  std::vector<std::string> gpus;
  for (int64_t gpu = 0; gpu < count; ++gpu) gpus.push_back(fmt::format("{}:{}", host, gpu));
  return gpus;
}

}  // namespace

TEST(NcclLaunch, connections_are_refused_or_warned_of_exactly_as_the_two_overlaps_need) {
  for (const char* value : {static_cast<const char*>(nullptr), "", "1", "2", "8", "32"})
    for (const int64_t major : {7, 8, 9, 10, 12})
      for (const bool sharding : {false, true})
        for (const bool tensor : {false, true}) {
          const Advice advice = check_device_connections(value, major, sharding, tensor);
          const bool one = value && std::string(value) == "1";
          const Verdict expected = sharding && one                ? Verdict::refuse
                                   : tensor && major < 10 && !one ? Verdict::warn
                                                                  : Verdict::ok;
          EXPECT_EQ(advice.verdict, expected) << (value ? value : "unset") << " " << major << sharding << tensor;
          EXPECT_EQ(advice.text.empty(), expected == Verdict::ok);
          if (sharding && tensor && expected == Verdict::warn) expect_says(advice.text, {"both cannot be had"});
          if (!sharding && expected == Verdict::warn) expect_says(advice.text, {"Set it to 1"});
          if (expected == Verdict::refuse) expect_says(advice.text, {"unset it"});
        }
  for (const char* value : {"0", "33", "-1", "many", "1 "})
    EXPECT_EQ(check_device_connections(value, 9, false, false).verdict, Verdict::refuse) << value;
}

TEST(NcclLaunch, ranks_share_gpus_as_the_version_of_nccl_can) {
  EXPECT_EQ(share_gpus(23005, 0, 1).way, Way::impossible);
  for (const int64_t version : {22304, 22809, 22907, 23003, 23100})
    for (const int64_t gpus : {1, 2, 8})
      for (const int64_t ranks : {1, 2, 3, 8, 9}) {
        const GpuSharing sharing = share_gpus(version, gpus, ranks);
        const Way expected = ranks <= gpus     ? Way::none
                             : version < 22800 ? Way::impossible
                             : version < 23000 ? Way::host_ids
                                               : Way::multi_rank;
        EXPECT_EQ(sharing.way, expected) << version << " " << gpus << " " << ranks;
        EXPECT_EQ(sharing.text.empty(), expected == Way::none);
        EXPECT_EQ(sharing.text.find("NCCL_MAX_CTAS") != std::string::npos, expected == Way::multi_rank && ranks > 2 * gpus);
      }
}

TEST(NcclLaunch, ranks_of_one_gpu_pose_as_different_hosts_and_others_may_meet) {
  for (const int64_t gpus : {1, 2, 3})
    for (const int64_t ranks : {2, 4, 7}) {
      const GpuSharing sharing = share_gpus(22809, gpus, ranks);
      std::set<std::pair<int64_t, std::string>> hosts_of_gpus;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto variables = sharing_variables(sharing, gpus, rank, "node7");
        if (ranks <= gpus) {
          EXPECT_TRUE(variables.empty());
          continue;
        }
        ASSERT_EQ(variables.size(), 1u);
        EXPECT_EQ(variables[0].first, "NCCL_HOSTID");
        expect_says(variables[0].second, {"node7"});
        EXPECT_TRUE(hosts_of_gpus.insert({rank % gpus, variables[0].second}).second) << "one host has one rank of a GPU";
        if (rank < gpus) {
          EXPECT_EQ(variables[0].second, sharing_variables(sharing, gpus, 0, "node7")[0].second);
        }
      }
    }
  EXPECT_EQ(sharing_variables(share_gpus(23003, 1, 2), 1, 1, "node7")[0].first, "NCCL_MULTI_RANK_GPU_ENABLE");
}

TEST(NcclLaunch, ranks_that_see_one_gpu_each_share_none) {
  std::vector<RankPlace> places;
  for (int64_t rank = 0; rank < 8; ++rank) places.push_back(place("a", {fmt::format("gpu {}", rank)}, rank));
  for (int64_t rank = 0; rank < 8; ++rank) {
    const GpuChoice choice = choose_gpu(rank, places);
    EXPECT_EQ(choice.device, 0);
    EXPECT_EQ(choice.ranks_of_gpu, 1);
    EXPECT_TRUE(choice.one_host);
    EXPECT_EQ(share_gpus(22304, 1, choice.ranks_of_gpu).way, Way::none);
  }
  places[7].gpus = {"gpu 2"};
  EXPECT_EQ(choose_gpu(0, places).ranks_of_gpu, 2);
  EXPECT_EQ(choose_gpu(7, places).nth, 1);
  places[7].gpus = {};
  expect_says(refusal([&] { choose_gpu(0, places); }), {"rank 7 on a sees no GPU"});
}

TEST(NcclLaunch, local_ranks_that_no_launcher_says_are_counted_by_host) {
  // Two hosts of 8 GPUs, whose ranks are dealt in turn, and none of whose ranks knows its number there.
  std::vector<RankPlace> places;
  for (int64_t rank = 0; rank < 16; ++rank) {
    const std::string host = rank % 2 ? "b" : "a";
    places.push_back(place(host, numbered_gpus(host, 8)));
  }
  for (int64_t rank = 0; rank < 16; ++rank) {
    EXPECT_EQ(choose_gpu(rank, places).device, rank / 2);
    EXPECT_EQ(choose_gpu(rank, places).ranks_of_gpu, 1);
    EXPECT_FALSE(choose_gpu(rank, places).one_host);
  }
}

TEST(NcclLaunch, ranks_meet_in_the_store_or_say_who_did_not_come_or_what_ended_the_world) {
  const auto served = std::make_shared<TcpStore>(TcpStoreOptions{.serves = true});
  const auto rank_of_3 = [](int64_t rank) { return Launch{.launcher = Launcher::torchrun, .rank = rank, .world = 3}; };
  expect_says(refusal([&] { meet(*served, rank_of_3(0), place("a", {"x"}), 0.1); }), {"ranks 1, 2 of 3 did not come"});
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] {
      TcpStore store({.port = served->port()});
      const std::string host = rank < 2 ? "a" : "b";
      const auto places = meet(store, rank_of_3(rank), place(host, {host + "0", host + "1"}, rank == 1 ? 1 : -1), 60);
      ASSERT_EQ(places.size(), 3u);
      EXPECT_EQ(places[1].host + places[2].host, "ab");
      EXPECT_EQ(places[1].local_rank, 1);
      EXPECT_EQ(places[2].local_rank, -1);
      EXPECT_EQ(places[2].gpus, (std::vector<std::string>{"b0", "b1"}));
    });
  for (std::thread& rank : ranks) rank.join();
  Launch of_4 = rank_of_3(0);
  of_4.world = 4;
  end_world(served, "rank 3: it has no GPU");
  expect_says(refusal([&] { meet(*served, of_4, place("a", {"x"}), 60); }), {"rank 3: it has no GPU", "rank 0 waited"});
}

TEST(NcclLaunch, a_job_that_comes_to_the_store_of_another_is_refused_and_leaves_nothing_there) {
  const TcpStore first({.serves = true, .job = "2 ranks of train", .rank = 0});
  const int64_t port = first.port();
  expect_says(refusal([&] { TcpStore({.port = port, .job = "2 ranks of train --seed 1", .rank = 1}); }),
              {"of another job", "nothing was changed", "'2 ranks of train'", "rank 1", "--seed 1", "MASTER_PORT"});
  expect_says(refusal([&] { TcpStore({.port = port, .serves = true, .job = "2 ranks of train --seed 1", .rank = 0}); }),
              {"no other program or job has", "MASTER_PORT", std::to_string(port).c_str()});
  const TcpStore other({.port = port, .job = "2 ranks of train", .rank = 1});  // whose place nobody took
  expect_says(refusal([&] { TcpStore({.port = port, .job = "2 ranks of train", .rank = 1}); }),
              {"rank 1 has come", "already", std::to_string(::getpid()).c_str(), "a rank of its own"});
}

TEST(NcclLaunch, two_rank_0_of_one_store_that_torchrun_serves_are_told_apart) {
  const TcpStore agent({.serves = true});
  const TcpStore first({.port = agent.port(), .job = "2 ranks of train", .rank = 0});
  expect_says(refusal([&] { TcpStore({.port = agent.port(), .job = "2 ranks of train", .rank = 0}); }), {"rank 0 has come"});
  expect_says(refusal([&] { TcpStore({.port = agent.port(), .job = "4 ranks of train", .rank = 0}); }), {"of another job"});
  expect_says(
      refusal([&] { TcpStore({.port = agent.port(), .timeout_seconds = 0.1, .attempt = "x/1", .job = "any", .rank = 1}); }),
      {"rank 0 did not come", "rank 1 did"});
}

TEST(NcclLaunch, an_attempt_of_torchrun_does_not_see_how_the_one_before_ended) {
  const TcpStore agent({.serves = true});
  Variables variables = {{"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", std::to_string(agent.port())},
                         {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                         {"TORCHELASTIC_RUN_ID", "job"}};
  for (const char* restarts : {"0", "1", "2"}) {
    variables["TORCHELASTIC_RESTART_COUNT"] = restarts;
    const Launch launch{.launcher = Launcher::torchrun, .rank = 0, .world = 1};
    const auto store = std::make_shared<TcpStore>(store_address(launch, environment(variables), "train"));
    EXPECT_EQ(world_end(*store), std::nullopt);
    EXPECT_EQ(store->get("id/1"), std::nullopt);
    store->set("id/1", "of NCCL");
    end_world(store, "rank 0: the loss is NaN");
  }
}

TEST(NcclLaunch, who_serves_the_store_stays_until_the_others_have_read_what_ended_the_world) {
  auto first = std::make_shared<TcpStore>(TcpStoreOptions{.serves = true, .job = "2 ranks", .rank = 0});
  auto other = std::make_unique<TcpStore>(TcpStoreOptions{.port = first->port(), .job = "2 ranks", .rank = 1});
  end_world(first, "rank 0: out of memory");
  std::optional<std::string> read;
  std::thread reader([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // as a rank that looks now and then
    const std::string error = error_of([&] { read = world_end(*other); });
    EXPECT_EQ(error, "");
    other.reset();
  });
  first.reset();
  reader.join();
  EXPECT_EQ(read, "rank 0: out of memory");
}

TEST(NcclLaunch, a_program_that_is_no_store_ends_the_wait_for_its_answer) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{.sin_family = AF_INET};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  expect_says(refusal([&] { TcpStore({.port = ntohs(address.sin_port), .timeout_seconds = 0.5}); }),
              {"no answer within 0.5 s", "is no store", "MASTER_PORT"});
  ::close(listener);
}

TEST(NcclLaunch, what_symmetric_kernels_will_not_take_is_known_before_nccl_starts) {
  const auto note = [](const std::string& why, Way way, bool one_host, bool native, const Variables& variables = {}) {
    return symmetric_kernels_note(why, way, one_host, native, environment(variables));
  };
  EXPECT_EQ(note("", Way::none, true, true), "");
  EXPECT_EQ(note("", Way::none, true, true, {{"NCCL_WIN_ENABLE", "1"}}), "");
  expect_says(note("NCCL 2.26 has no windows", Way::none, true, true), {"2.26", "ncclCommRegister", "no call"});
  expect_says(note("", Way::none, true, true, {{"NCCL_WIN_ENABLE", "0"}}), {"NCCL_WIN_ENABLE=0", "no call"});
  expect_says(note("", Way::none, true, true, {{"NCCL_CUMEM_ENABLE", "0"}}), {"NCCL_CUMEM_ENABLE=0", "no call"});
  expect_says(note("", Way::host_ids, true, true), {"pose as other hosts", "no call"});
  expect_says(note("", Way::none, false, true), {"take only calls among ranks of one host"});
  expect_says(note("", Way::none, true, false), {"take only gathers", "--sum native"});
  expect_says(note("", Way::none, false, false), {"ranks of one host, and of these only gathers"});
}

TEST(NcclLaunch, gpus_that_ctest_has_dealt_are_those_that_are_visible) {
  EXPECT_EQ(dealt_gpus(environment({})), "");
  EXPECT_EQ(dealt_gpus(environment({{"CTEST_RESOURCE_GROUP_COUNT", "3"},
                                    {"CTEST_RESOURCE_GROUP_0_GPUS", "id:2,slots:1"},
                                    {"CTEST_RESOURCE_GROUP_1_GPUS", "id:0,slots:1;id:3,slots:2"},
                                    {"CTEST_RESOURCE_GROUP_2_GPUS", "id:2,slots:1"}})),
            "0,2,3");
}

TEST(NcclLaunch, the_store_is_where_torchrun_says_and_elsewhere_where_all_ranks_look_for_it) {
  const Launch torchrun{.launcher = Launcher::torchrun, .rank = 0, .world = 4, .local_world = 4};
  Variables address = {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}};
  TcpStoreOptions store = store_address(torchrun, environment(address));
  EXPECT_EQ(store.host, "head");
  EXPECT_EQ(store.port, 29500);
  EXPECT_TRUE(store.serves);
  Launch other = torchrun;
  other.rank = 3;
  EXPECT_FALSE(store_address(other, environment(address)).serves);
  address["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_FALSE(store_address(torchrun, environment(address)).serves) << "torchrun serves it";

  const Launch mpirun{.launcher = Launcher::mpirun, .rank = 1, .world = 4, .local_world = 4};
  Launch first = mpirun;
  first.rank = 0;
  const auto job = environment({{"PMIX_NAMESPACE", "prterun-host-17@1"}}),
             next = environment({{"PMIX_NAMESPACE", "prterun-18@1"}});
  EXPECT_EQ(store_address(mpirun, job).port, store_address(first, job).port);
  EXPECT_NE(store_address(mpirun, job).port, store_address(first, next).port);
  EXPECT_TRUE(store_address(first, job).serves && !store_address(mpirun, job).serves);
  Launch spread = mpirun;
  spread.local_world = 2;
  expect_says(refusal([&] { store_address(spread, job); }), {"not all of them on this host", "MASTER_ADDR", "MASTER_PORT"});
  EXPECT_EQ(store_address(spread, environment(address)).host, "head");
  expect_says(refusal([&] { store_address(spread, environment({{"MASTER_ADDR", "head"}})); }), {"MASTER_PORT is not"});
  expect_says(refusal([&] { store_address(spread, environment({{"MASTER_ADDR", "h"}, {"MASTER_PORT", "x"}})); }), {"'x'"});

  Launch slurm{.launcher = Launcher::slurm, .rank = 0, .world = 2, .local_world = 2};
  EXPECT_EQ(store_address(slurm, environment({{"SLURM_JOB_ID", "9"}})).host, "127.0.0.1");
  slurm.local_world = 0;  // not known
  expect_says(refusal([&] { store_address(slurm, environment({{"SLURM_JOB_ID", "9"}})); }), {"srun", "MASTER_ADDR"});
}

TEST(NcclLaunch, a_job_is_known_by_its_number_its_size_and_its_command) {
  const auto job = [](const Launch& launch, const Variables& variables, const std::string& command) {
    Variables all = {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "1"}};
    all.insert(variables.begin(), variables.end());
    return store_address(launch, environment(all), command).job;
  };
  Launch slurm{.launcher = Launcher::slurm, .rank = 0, .world = 2};
  const Variables step = {{"SLURM_JOB_ID", "9"}, {"SLURM_STEP_ID", "1"}};
  const std::string one = job(slurm, step, "train");
  slurm.rank = 1;
  EXPECT_EQ(job(slurm, step, "train"), one);
  EXPECT_NE(job(slurm, step, "verify"), one);
  EXPECT_NE(job(slurm, {{"SLURM_JOB_ID", "9"}, {"SLURM_STEP_ID", "2"}}, "train"), one);
  slurm.world = 3;
  EXPECT_NE(job(slurm, step, "train"), one);
  // What a shell of Slurm left over says nothing of ranks that torchrun started, maybe over ssh.
  const Launch torchrun{.launcher = Launcher::torchrun, .rank = 1, .world = 2};
  EXPECT_EQ(job(torchrun, step, "train"), job(torchrun, {}, "train"));
  EXPECT_EQ(store_address(torchrun, environment({{"MASTER_ADDR", "head"}, {"MASTER_PORT", "1"}})).job,
            job(torchrun, {}, own_command()));
}

TEST(NcclLaunch, processes_that_nobody_else_starts_meet_in_the_store_that_their_parent_serves) {
  const auto [code, text] = run("start 3 meet");
  EXPECT_EQ(code, 0);
  for (int64_t rank = 0; rank < 3; ++rank) expect_says(text, {fmt::format("rank {} of 3 met all", rank).c_str()});
}

TEST(NcclLaunch, the_others_are_told_at_once_of_a_process_that_died_or_ended_badly) {
  const auto [killed_code, killed] = run("start 3 kill");
  EXPECT_EQ(killed_code, 128 + 9);
  for (const int64_t rank : {0, 2})
    expect_says(killed,
                {fmt::format("rank {}: [nccl] rank 1 was killed by signal 9; this rank was in ncclComm", rank).c_str()});
  const auto [failed_code, failed] = run("start 3 fail");
  EXPECT_EQ(failed_code, 7);
  for (const int64_t rank : {0, 2})
    expect_says(failed, {fmt::format("rank {}: [nccl] rank 1 ended with exit code 7", rank).c_str()});
}

TEST(NcclLaunch, a_signal_that_asks_to_stop_reaches_each_process_once_and_their_exit_code_is_kept) {
  std::FILE* out = ::popen(("echo $$; exec " + driver() + " start 3 signals").c_str(), "r");
  std::string text;
  const auto next_line = [&] {
    char line[256] = {};
    if (!std::fgets(line, sizeof line, out)) return std::string();
    return std::string(line);
  };
  const pid_t parent = static_cast<pid_t>(std::stol(next_line()));
  for (int64_t waiting = 0; waiting < 3; ++waiting) expect_says(next_line(), {"waits"});
  ASSERT_EQ(::kill(parent, SIGUSR1), 0);
  for (std::string line = next_line(); !line.empty(); line = next_line()) text += line;
  const int status = ::pclose(out);
  ASSERT_TRUE(WIFEXITED(status)) << "the parent was ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 75);
  for (int64_t rank = 0; rank < 3; ++rank) expect_says(text, {fmt::format("rank {} had 1", rank).c_str()});
}

TEST(NcclLaunch, a_process_that_fails_is_told_from_those_that_stopped_as_asked_before) {
  EXPECT_EQ(run("start 3 stop").first, 7);
}
