// How a program becomes ranks: what launchers say, and what is refused.
#include <ATen/Version.h>
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

// A task of a step of Slurm, whose nodes have these tasks.
Variables srun(int64_t rank, int64_t tasks, int64_t local, int64_t node, const std::string& tasks_per_node) {
  return {{"SLURM_STEP_ID", "0"},
          {"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_NTASKS", std::to_string(tasks)},
          {"SLURM_STEP_NUM_TASKS", std::to_string(tasks)},
          {"SLURM_LOCALID", std::to_string(local)},
          {"SLURM_NODEID", std::to_string(node)},
          {"SLURM_STEP_TASKS_PER_NODE", tasks_per_node}};
}

Variables torchrun(int64_t rank, int64_t world, int64_t local, int64_t local_world, int64_t agents) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world)},
          {"LOCAL_RANK", std::to_string(local)},
          {"LOCAL_WORLD_SIZE", std::to_string(local_world)},
          {"GROUP_WORLD_SIZE", std::to_string(agents)},
          {"MASTER_ADDR", "head"},
          {"MASTER_PORT", "29500"}};
}

Variables mpirun(int64_t rank, int64_t world, int64_t local, int64_t local_world) {
  return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_SIZE", std::to_string(world)},
          {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(local)},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(local_world)}};
}

Variables together(Variables one, const Variables& other) {
  one.insert(other.begin(), other.end());
  return one;
}

// As "launcher rank/world local_rank/local_world", or the error.
std::string place(const Variables& variables) {
  std::string text;
  const std::string error = error_of([&] {
    const Launch l = read_launch(environment(variables));
    text = fmt::format("{} {}/{} {}/{}", to_string(l.launcher), l.rank, l.world, l.local_rank, l.local_world);
  });
  return error.empty() ? text : error;
}

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

TEST(Launch, the_rank_of_a_launcher_that_is_not_known_is_refused_unless_another_says_it) {
  for (const char* name : {"MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE",
                           "FLUX_TASK_RANK", "HOROVOD_RANK"}) {
    expect_says(refusal([&] { read_launch(environment({{name, "1"}})); }), {name, "not known", "unset"});
    EXPECT_EQ(read_launch(environment(together(kMpirun, {{name, "1"}}))).launcher, Launcher::mpirun) << name;
  }
}

TEST(Launch, an_environment_set_by_half_is_refused_naming_what_is_missing) {
  for (const Variables& whole : {kMpirun, kTorchrun, kSlurm, kPmi})
    for (const auto& [name, value] : whole) {
      if (name == "SLURM_STEP_ID") continue;
      Variables half = whole;
      half.erase(name);
      if (name.find("LOCAL") == std::string::npos)
        expect_says(refusal([&] { read_launch(environment(half)); }), {"by half", name.c_str(), "not"});
      half[name] = "many";
      if (name != "MASTER_ADDR" && name != "MASTER_PORT")
        expect_says(refusal([&] { read_launch(environment(half)); }), {name.c_str(), "'many'"});
    }
  Variables contradiction = kMpirun;
  contradiction["OMPI_COMM_WORLD_RANK"] = "4";
  expect_says(refusal([&] { read_launch(environment(contradiction)); }), {"contradicts itself", "rank 4 of 4"});
}

TEST(Launch, the_script_of_a_batch_job_and_the_shell_of_salloc_are_no_tasks) {
  Variables batch = kSlurm;
  batch.erase("SLURM_STEP_ID");
  EXPECT_EQ(read_launch(environment(batch)).launcher, Launcher::none);
  for (const char* step : {"4294967291", "4294967290", "batch", "interactive", "extern"}) {
    batch["SLURM_STEP_ID"] = step;
    EXPECT_EQ(read_launch(environment(batch)).launcher, Launcher::none) << step;
  }
}

TEST(Launch, srun_says_how_many_tasks_are_on_this_node) {
  EXPECT_EQ(place(srun(8, 16, 0, 1, "8(x2)")), "srun 8/16 0/8");
  EXPECT_EQ(place(srun(17, 20, 1, 2, "8(x2),4")), "srun 17/20 1/4");
  EXPECT_EQ(place(srun(3, 4, 3, 0, "4")), "srun 3/4 3/4");
  EXPECT_EQ(place(srun(13, 16, 0, 4, "3,2(x3),7(x1)")), "srun 13/16 0/7");
  Variables silent = srun(8, 16, 0, 1, "8(x2)");
  silent.erase("SLURM_STEP_TASKS_PER_NODE");
  EXPECT_EQ(place(silent), "srun 8/16 0/0");
  expect_says(place(srun(3, 4, 0, 2, "2(x2)")), {"contradicts itself", "SLURM_STEP_TASKS_PER_NODE=2(x2)", "no node 2"});
}

TEST(Launch, a_step_of_one_task_is_alone_whatever_its_job_has_and_may_start_ranks_itself) {
  Variables shell = srun(0, 1, 0, 0, "1");
  shell["SLURM_NTASKS"] = "8";
  EXPECT_EQ(place(shell), "srun 0/1 0/1");
  EXPECT_EQ(launch({}, {"program"}, environment(shell)).world, 1);
  EXPECT_EQ(launch({.backend = "nccl", .ranks = 4, .gpus = 1}, {"program"}, environment(shell)).starts, 4);
  EXPECT_EQ(place(together(mpirun(5, 8, 5, 8), shell)), "mpirun 5/8 5/8");
  EXPECT_EQ(place(together(torchrun(5, 8, 1, 4, 2), shell)).substr(0, 35), "[launch] two launchers disagree: to");
  EXPECT_EQ(place(together(torchrun(5, 8, 5, 8, 1), shell)), "torchrun 5/8 5/8");
  Variables job = shell;  // and not in a step, as in the shell of salloc
  job["SLURM_STEP_ID"] = "4294967290";
  EXPECT_EQ(place(job), "nobody 0/1 0/1");
}

TEST(Launch, where_a_launcher_does_not_say_the_local_rank_it_is_unknown) {
  Variables kubeflow = kTorchrun;
  kubeflow.erase("LOCAL_RANK"), kubeflow.erase("LOCAL_WORLD_SIZE");
  EXPECT_EQ(place(kubeflow), "torchrun 5/8 -1/0");
  kubeflow["LOCAL_RANK"] = "1";
  EXPECT_EQ(place(kubeflow), "torchrun 5/8 1/0");
  EXPECT_EQ(place({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "1"}}), "torchrun 0/1 0/1");
  EXPECT_EQ(place(kPmi), "a launcher with PMI 1/4 -1/0");
  EXPECT_EQ(place(together(kPmi, {{"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}})), "a launcher with PMI 1/4 1/2");
  // Another launcher, which agrees, may know it.
  EXPECT_EQ(place(together({{"PMI_RANK", "8"}, {"PMI_SIZE", "16"}}, srun(8, 16, 0, 1, "8(x2)"))), "srun 8/16 0/8");
  kubeflow.erase("LOCAL_RANK");
  EXPECT_EQ(place(together(kubeflow, srun(5, 8, 1, 1, "4(x2)"))), "torchrun 5/8 1/4");
}

TEST(Launch, launchers_that_disagree_are_refused_by_name_and_known_nestings_take_the_inner_one) {
  // torchrun in a step with a task a host, with agents in another order than the tasks, and Open MPI's daemons in such a step.
  EXPECT_EQ(place(together(torchrun(9, 16, 1, 8, 2), srun(0, 2, 0, 0, "1(x2)"))), "torchrun 9/16 1/8");
  const Variables pmi2 = together(srun(0, 2, 0, 0, "1(x2)"), {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}});  // srun --mpi=pmi2
  EXPECT_EQ(place(together(torchrun(9, 16, 1, 8, 2), pmi2)), "torchrun 9/16 1/8");
  EXPECT_EQ(place(together(mpirun(9, 16, 1, 8), srun(0, 1, 0, 0, "1"))), "mpirun 9/16 1/8");
  EXPECT_EQ(place(together(mpirun(9, 24, 1, 8), srun(0, 2, 0, 0, "1(x2)"))), "mpirun 9/24 1/8");
  EXPECT_EQ(place(together({{"PMI_RANK", "9"}, {"PMI_SIZE", "16"}}, srun(1, 2, 0, 1, "1(x2)"))),
            "a launcher with PMI 9/16 -1/0");
  // In the shell of `srun --mpi=pmi2 --pty -n1`, and torchrun started by MPICH.
  const Variables shell = together(srun(0, 1, 0, 0, "1"), {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}});
  EXPECT_EQ(place(shell), "srun 0/1 0/1");
  EXPECT_EQ(place(together(mpirun(3, 4, 3, 4), shell)), "mpirun 3/4 3/4");
  Variables step = srun(3, 4, 3, 0, "4");
  EXPECT_EQ(place(together(step, {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}})), "srun 3/4 3/4");
  const Variables mpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}};
  EXPECT_EQ(place(together(torchrun(3, 16, 3, 8, 2), mpich)), "torchrun 3/16 3/8");
  // A script that tells PyTorch what mpirun or srun has said.
  EXPECT_EQ(place(together(torchrun(3, 4, 1, 2, 2), mpirun(3, 4, 1, 2))), "mpirun 3/4 1/2");

  const std::vector<Variables> refused = {
      together(torchrun(3, 4, 1, 2, 2), mpirun(1, 2, 0, 1)),         // torchrun in mpirun
      together(torchrun(0, 2, 0, 2, 1), srun(2, 4, 2, 0, "4")),      // srun in torchrun
      together(torchrun(0, 2, 0, 2, 1), srun(1, 2, 0, 1, "1(x2)")),  // the same with a task a host
      together(mpirun(0, 1, 0, 1), srun(1, 2, 0, 1, "1(x2)")),       // srun in mpirun
      together({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}, mpirun(0, 2, 0, 2)),
      together({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}, torchrun(0, 2, 0, 2, 1)),
      together(mpirun(1, 4, 1, 4), srun(0, 4, 0, 0, "4")),  // the same size, and other ranks
  };
  const std::vector<std::vector<std::string>> named = {
      {"torchrun says that this is rank 3 of 4 (RANK=3, WORLD_SIZE=4)", "mpirun says", "OMPI_COMM_WORLD_RANK=1"},
      {"RANK=0, WORLD_SIZE=2", "srun says that this is rank 2 of 4 (SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4)"},
      {"torchrun says", "srun says"},
      {"mpirun says", "srun says"},
      {"mpirun says", "PMI_RANK=1, PMI_SIZE=4"},
      {"torchrun says", "PMI_RANK=1, PMI_SIZE=4"},
      {"OMPI_COMM_WORLD_RANK=1", "SLURM_PROCID=0"}};
  for (size_t i = 0; i < refused.size(); ++i) {
    const std::string error = place(refused[i]);
    expect_says(error, {"two launchers disagree", "unset"});
    for (const std::string& words : named[i]) expect_says(error, {words});
  }
}

TEST(Launch, a_heterogeneous_job_of_slurm_is_named_and_mpirun_runs_in_it) {
  Variables task = srun(5, 4, 1, 0, "4");
  task["SLURM_HET_SIZE"] = "2";
  expect_says(place(task), {"heterogeneous job of 2 components", "SLURM_HET_SIZE", "mpirun"});
  EXPECT_EQ(place(together(mpirun(5, 6, 1, 2), task)), "mpirun 5/6 1/2");
}

TEST(Launch, processes_of_a_launcher_that_mpi_did_not_join_do_not_train_alone) {
  const auto error = [](int64_t rank, int64_t joined, const Variables& variables) {
    return error_of([&] { require_joined(rank, joined, environment(variables)); });
  };
  for (const Variables& launcher : {kMpirun, kTorchrun, kSlurm, kPmi}) {
    const Launch launch = read_launch(environment(launcher));
    EXPECT_EQ(error(launch.rank, launch.world, launcher), "");
    expect_says(error(0, 1, launcher), {to_string(launch.launcher), fmt::format("{} processes", launch.world).c_str(),
                                        "joined 1 of them", "train alone"});
    expect_says(error(0, launch.world, launcher), {fmt::format("this is rank {},", launch.rank).c_str(), "as rank 0"});
    expect_says(error_of([&] { shardproof::launch({}, {"program"}, environment(launcher)); }),
                {to_string(launch.launcher), "--backend threads runs all ranks in each of them"});
  }
  EXPECT_EQ(error(0, 1, {}), "");
}

TEST(Launch, ranks_that_compute_with_another_pytorch_or_other_vector_instructions_are_refused) {
  const auto [capability, build] = std::pair(torch_facts().at(0), torch_facts().at(1));
  expect_says(capability.first, {"ATEN_CPU_CAPABILITY"});
  EXPECT_EQ(capability.second, at::get_cpu_capability());
  expect_says(build.second, {"TORCH_VERSION="});
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    Facts facts = torch_facts();
    require_same(*comm, facts);
    if (comm->rank() == 1) facts[0].second = "another";
    expect_says(refusal([&] { require_same(*comm, facts); }), {"the CPU capability", "'another' on rank 1"});
  });
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
  EXPECT_EQ(refused({.backend = "nccl", .gpus = 1}, kPmi), "") << "its GPU is found by the names of hosts";
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
