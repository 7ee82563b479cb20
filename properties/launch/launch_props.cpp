// How a program becomes ranks: what launchers say, and what is refused.
#include <gtest/gtest.h>

#include <map>

#include "properties/doubles/comm_worlds.h"
#include "properties/kit/environment.h"
#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/agree.h"
#include "shardproof/comm/require_same.h"
#include "shardproof/launch/launch.h"

using namespace shardproof;

namespace {

const Variables kMpirun = {{"OMPI_COMM_WORLD_RANK", "3"},
                           {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kTorchrun = {{"RANK", "5"},           {"WORLD_SIZE", "8"},     {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}};
const Variables kSlurm = {{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "6"}, {"SLURM_LOCALID", "0"}, {"SLURM_STEP_ID", "0"}};
const Variables kPmi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}};

}  // namespace

TEST(Launch, each_launchers_variables_say_rank_and_world) {
  const Launch none = read_launch(environment({})), mpirun = read_launch(environment(kMpirun)),
               torchrun = read_launch(environment(kTorchrun)), slurm = read_launch(environment(kSlurm));
  EXPECT_EQ(none.launcher, Launcher::none);
  EXPECT_EQ(none.world, 1);
  EXPECT_EQ(mpirun.launcher, Launcher::mpirun);
  EXPECT_EQ((std::vector{mpirun.rank, mpirun.world, mpirun.local_rank, mpirun.local_world}),
            (std::vector<int64_t>{3, 4, 1, 2}));
  EXPECT_EQ(torchrun.launcher, Launcher::torchrun);
  EXPECT_EQ((std::vector{torchrun.rank, torchrun.world, torchrun.local_rank}), (std::vector<int64_t>{5, 8, 1}));
  EXPECT_EQ(torchrun.master, "head:29500");
  EXPECT_EQ(slurm.launcher, Launcher::slurm);
  EXPECT_EQ((std::vector{slurm.rank, slurm.world}), (std::vector<int64_t>{2, 6}));
}

TEST(Launch, an_environment_set_by_half_is_refused_naming_what_is_missing) {
  for (const Variables& whole : {kMpirun, kTorchrun, kSlurm, kPmi})
    for (const auto& [name, value] : whole) {
      if (name == "SLURM_STEP_ID" || name == "OMPI_COMM_WORLD_LOCAL_SIZE" || name == "LOCAL_WORLD_SIZE") continue;
      Variables half = whole;
      half.erase(name);
      expect_says(refusal([&] { read_launch(environment(half)); }), {"by half", name.c_str(), "not"});
      half[name] = "many";
      if (name != "MASTER_ADDR" && name != "MASTER_PORT")
        expect_says(refusal([&] { read_launch(environment(half)); }), {name.c_str(), "'many'"});
    }
  Variables contradiction = kMpirun;
  contradiction["OMPI_COMM_WORLD_RANK"] = "4";
  expect_says(refusal([&] { read_launch(environment(contradiction)); }), {"contradicts itself", "rank 4 of 4"});
}

TEST(Launch, the_script_of_a_batch_job_and_the_shell_of_salloc_are_no_tasks_and_mpirun_counts_before_the_others) {
  Variables batch = kSlurm;
  batch.erase("SLURM_STEP_ID");
  EXPECT_EQ(read_launch(environment(batch)).launcher, Launcher::none);
  for (const char* step : {"4294967291", "4294967290", "batch", "interactive", "extern"}) {
    batch["SLURM_STEP_ID"] = step;
    EXPECT_EQ(read_launch(environment(batch)).launcher, Launcher::none) << step;
  }
  Variables both = kSlurm;
  both.insert(kPmi.begin(), kPmi.end());
  EXPECT_EQ(read_launch(environment(both)).launcher, Launcher::slurm);
  both.insert(kMpirun.begin(), kMpirun.end());
  EXPECT_EQ(read_launch(environment(both)).launcher, Launcher::mpirun);
}

TEST(Launch, processes_of_a_launcher_that_mpi_did_not_join_do_not_train_alone) {
  const auto error = [](int64_t joined, const Variables& variables) {
    return error_of([&] { require_joined(joined, environment(variables)); });
  };
  for (const Variables& launcher : {kMpirun, kTorchrun, kSlurm, kPmi}) {
    const Launch launch = read_launch(environment(launcher));
    EXPECT_EQ(error(launch.world, launcher), "");
    expect_says(error(1, launcher), {to_string(launch.launcher), fmt::format("{} processes", launch.world).c_str(),
                                     "joined 1 of them", "train alone"});
    expect_says(error_of([&] { shardproof::launch({}, {"program"}, environment(launcher)); }),
                {to_string(launch.launcher), "--backend threads runs all ranks in each of them"});
  }
  EXPECT_EQ(error(1, {}), "");
}

TEST(Launch, an_address_alone_makes_nobody_a_rank_of_torchrun) {
  Variables slurm = kSlurm;
  slurm.insert({{"MASTER_ADDR", "head"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(read_launch(environment(slurm)).launcher, Launcher::slurm);
  EXPECT_EQ(read_launch(environment({{"MASTER_PORT", "29500"}})).launcher, Launcher::none);
}

TEST(Launch, what_this_build_or_launcher_cannot_do_is_refused_with_the_way_out) {
  const auto refused = [](const LaunchOptions& options, const Variables& variables) {
    return error_of([&] { launch(options, {"program"}, environment(variables)); });
  };
  expect_says(refused({.backend = "nccl"}, {}), {"--backend nccl needs a GPU", "shows none", "mpi"});
  expect_says(refused({.backend = "nccl", .gpus = 1}, {}), {"--backend nccl needs processes", "torchrun", "--ranks N"});
  expect_says(refused({.backend = "nccl", .ranks = 3, .gpus = 1}, kTorchrun), {"--ranks 3", "8 processes"});
  expect_says(refused({.backend = "nccl", .gpus = 1}, kPmi), {"PMI_RANK", "GPUs", "torchrun"});
  expect_says(refused({.backend = "gloo"}, {}), {"threads, mpi or nccl", "gloo"});
  expect_says(refused({.backend = "mpi", .device = "cuda", .gpus = 1}, {}), {"host memory", "--backend nccl", "threads"});
  expect_says(refused({.device = "tpu"}, {}), {"cpu or cuda", "tpu"});
  expect_says(refused({}, kMpirun), {"mpirun started 4 processes", "--backend mpi"});
  expect_says(refused({.ranks = 2}, {}), {"--ranks", "--backend mpi"});
  expect_says(refused({.backend = "mpi"}, {}), {"mpirun -n N", "--ranks N"});
  expect_says(refused({.backend = "mpi"}, kTorchrun), {"torchrun", "rank 5 of 8", "head:29500", "mpirun -n 8"});
  expect_says(refused({.backend = "mpi", .ranks = 3}, kMpirun), {"--ranks 3", "4 processes"});
  EXPECT_EQ(launch({.backend = "mpi", .ranks = 4}, {"program"}, environment(kMpirun)).rank, 3);
  EXPECT_EQ(launch({}, {"program"}, environment({})).world, 1);
  EXPECT_EQ(launch({.backend = "nccl", .gpus = 1}, {"program"}, environment(kTorchrun)).local_rank, 1);
  EXPECT_EQ(launch({.backend = "nccl", .ranks = 4, .gpus = 1}, {"program"}, environment({})).starts, 4);
}

TEST(Launch, ranks_are_started_by_mpirun_as_root_only_where_that_is_what_one_is) {
  const std::vector<std::string> expected = {"mpirun", "-n", "3", "--oversubscribe", "--bind-to", "none", "program", "verify"};
  EXPECT_EQ(mpirun_command(3, {"program", "verify"}, false), expected);
  const std::vector<std::string> as_root = mpirun_command(3, {"program", "verify"}, true);
  EXPECT_NE(std::find(as_root.begin(), as_root.end(), "--allow-run-as-root"), as_root.end());
}

TEST(Launch, ranks_that_differ_in_program_arguments_or_mesh_are_refused_on_every_rank_with_both_values) {
  for (const std::string fact : {"program", "command line", "mesh"})
    for (int64_t different = 1; different < 4; ++different)
      run_threads(4, [&](std::shared_ptr<Comm> comm) {
        std::vector<std::pair<std::string, std::string>> facts = {
            {"program", "hash"}, {"command line", "train"}, {"mesh", "dp_shard=4"}};
        require_same(*comm, facts);
        const std::string common(300, 'x');  // what differs may lie beyond what is shown
        for (auto& [name, value] : facts)
          if (name == fact) value = comm->rank() == different ? common + "mine" : common + "yours";
        const std::string message = error_of([&] { require_same(*comm, facts); });
        expect_says(message, {"ranks 0 and", fact.c_str(), "on rank 0", "Start all ranks alike"});
        EXPECT_NE(message.find(fmt::format("on rank {}", different)), std::string::npos) << message;
      });
  EXPECT_EQ(program_hash(), program_hash());
}
