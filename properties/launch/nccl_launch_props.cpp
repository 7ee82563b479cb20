// What is decided before NCCL is used, as whole tables, and processes that nobody else starts.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdio>
#include <map>
#include <set>

#include "properties/kit/environment.h"
#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"
#include "shardproof/launch/nccl_launch.h"

using namespace shardproof;
using Verdict = Advice::Verdict;
using Way = GpuSharing::Way;

namespace {

// Exit code and what was printed.
std::pair<int, std::string> run(const std::string& arguments) {
  std::FILE* out = ::popen((std::string(NCCL_DRIVER) + " " + arguments).c_str(), "r");
  std::string text;
  for (char block[4096]; const size_t count = std::fread(block, 1, sizeof block, out);) text.append(block, count);
  const int status = ::pclose(out);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
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
  expect_says(refusal([&] { store_address(spread, job); }), {"several hosts", "MASTER_ADDR", "MASTER_PORT"});
  EXPECT_EQ(store_address(spread, environment(address)).host, "head");
  expect_says(refusal([&] { store_address(spread, environment({{"MASTER_ADDR", "head"}})); }), {"MASTER_PORT is not"});
  expect_says(refusal([&] { store_address(spread, environment({{"MASTER_ADDR", "h"}, {"MASTER_PORT", "x"}})); }), {"'x'"});

  const Launch slurm{.launcher = Launcher::slurm, .rank = 0, .world = 2, .local_world = 2};
  EXPECT_EQ(store_address(slurm, environment({{"SLURM_NNODES", "1"}, {"SLURM_JOB_ID", "9"}})).host, "127.0.0.1");
  expect_says(refusal([&] { store_address(slurm, environment({{"SLURM_NNODES", "2"}})); }), {"srun", "several hosts"});
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
  std::FILE* out = ::popen(("echo $$; exec " + std::string(NCCL_DRIVER) + " start 3 signals").c_str(), "r");
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
