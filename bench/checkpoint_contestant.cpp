#include "bench/checkpoint_contestant.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>

#include "shardproof/checkpoint/manager.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/shardproof.h"

namespace bench {
namespace {

using namespace shardproof;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

// One rank's model in training.
struct Run {
  Run(const Size& size, std::shared_ptr<Comm> world, uint64_t seed) : size(size), comm(world), model(size) {
    initialize_parameters(*model, seed);
    sharded.emplace(fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", comm->size()}})),
                                {.strategy = strategy("zero3"),
                                 .units = by_type<BlockImpl>(),
                                 .buffers = Buffers::pooled,
                                 .numerics = Numerics::fast,
                                 .broadcast_initial_values = false}));
    optimizer.emplace(adamw(*sharded, {.lr = 3e-4}));
  }

  // The mean loss of all ranks.
  double train(int64_t step) {
    const int64_t per_rank = size.batch / comm->size();
    const at::Tensor tokens = tokens_of(size, step).narrow(0, comm->rank() * per_rank, per_rank);
    const at::Tensor logits = call(model, tokens.narrow(1, 0, tokens.size(1) - 1).contiguous());
    const at::Tensor targets = tokens.narrow(1, 1, tokens.size(1) - 1).reshape({-1});
    const at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1), targets);
    loss.backward();
    optimizer->step();
    at::Tensor sum = loss.detach().to(at::kDouble).view({1});
    comm->all_reduce(sum, Reduce::sum).wait();
    return sum.item<double>() / static_cast<double>(comm->size());
  }

  // Until every rank has done it. Rank 0 keeps the times; the first is not kept.
  void repeat(int64_t times, std::vector<double>& milliseconds, const std::function<void(int64_t)>& timed,
              const std::function<void(int64_t)>& untimed = {}) {
    for (int64_t i = 0; i <= times; ++i) {
      comm->barrier().wait();
      const auto start = Clock::now();
      timed(i);
      comm->barrier().wait();
      if (comm->rank() == 0 && i > 0)
        milliseconds.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      if (untimed) untimed(i);
    }
  }

  Size size;
  std::shared_ptr<Comm> comm;
  Model model;
  std::optional<Sharded> sharded;
  std::optional<Optimizer> optimizer;
};

struct Times {
  std::vector<double> save, async_blocking, async_copied_later, load, load_once, load_resharded, losses;
  std::vector<double> step, step_with_save, step_with_save_copied_later;
};

void remove_on_rank_0(Run& run, const std::string& folder) {
  if (run.comm->rank() == 0) fs::remove_all(folder);
  run.comm->barrier().wait();
}

void save_all(const CheckpointTask& task, Run& run, Times& times) {
  const auto path = [&](const char* kind, int64_t i) { return fmt::format("{}/{}{}", task.folder, kind, i); };
  run.repeat(
      task.repeats, times.save,
      [&](int64_t i) { checkpoint::save(path("save", i), *run.sharded, &*run.optimizer, {.step = 2}); },
      [&](int64_t i) {
        if (i > 0) remove_on_rank_0(run, path("save", i));
      });
  checkpoint::SaveJob::Snapshot memory;
  std::unique_ptr<checkpoint::SaveJob> job;
  run.repeat(
      task.repeats, times.async_blocking,
      [&](int64_t i) {
        job = std::make_unique<checkpoint::SaveJob>(path("async", i), *run.sharded, &*run.optimizer,
                                                    checkpoint::TrainerState{.step = 2}, checkpoint::SaveOptions{}, &memory);
      },
      [&](int64_t i) {
        job->write();
        job->commit();
        remove_on_rank_0(run, path("async", i));
      });
}

// What an asynchronous save costs the run: its call, and with it the step behind it.
void save_between_steps(const CheckpointTask& task, Run& run, Times& times) {
  int64_t step = 3;
  run.repeat(task.repeats, times.step, [&](int64_t) { run.train(step++); });
  const auto timed = [&](const std::string& kind, bool copied_later, bool with_step, std::vector<double>& milliseconds) {
    checkpoint::Manager manager(task.folder + "/" + kind, {.keep = 1, .async = true, .copy_in_background = copied_later});
    run.repeat(
        task.repeats, milliseconds,
        [&](int64_t) {
          manager.save(*run.sharded, &*run.optimizer, {.step = step});
          if (with_step) run.train(step);
        },
        [&](int64_t) {
          manager.wait();
          ++step;
        });
    remove_on_rank_0(run, manager.directory());
  };
  timed("later", true, false, times.async_copied_later);
  timed("later_step", true, true, times.step_with_save_copied_later);
  timed("step", false, true, times.step_with_save);
}

void load_all(const CheckpointTask& task, int64_t ranks, std::vector<double>& checked, std::vector<double>* once,
              Times& times) {
  run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
    Run run(task.size, comm, 99);
    run.train(0);  // so that the optimizer's state is there
    run.repeat(task.repeats, checked,
               [&](int64_t) { checkpoint::load(task.folder + "/save0", *run.sharded, &*run.optimizer); });
    if (once)
      run.repeat(task.repeats, *once, [&](int64_t) {
        checkpoint::load(task.folder + "/save0", *run.sharded, &*run.optimizer, {.check_before = false});
      });
    const double loss = run.train(2);
    if (comm->rank() == 0) times.losses.push_back(loss);
  });
}

}  // namespace

nlohmann::json run_checkpoint(const CheckpointTask& task) {
  at::set_num_threads(1);
  Times times;
  run_threads(task.ranks, [&](std::shared_ptr<Comm> comm) {
    Run run(task.size, comm, 1234);
    for (int64_t step = 0; step < 2; ++step) run.train(step);
    save_all(task, run, times);
    const double loss = run.train(2);
    if (comm->rank() == 0) times.losses.push_back(loss);
    save_between_steps(task, run, times);
  });
  uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(task.folder + "/save0")) bytes += entry.file_size();
  load_all(task, task.ranks, times.load, &times.load_once, times);
  load_all(task, task.load_ranks, times.load_resharded, nullptr, times);
  fs::remove_all(task.folder + "/save0");
  return {{"save", times.save},
          {"async_blocking", times.async_blocking},
          {"async_copied_later", times.async_copied_later},
          {"load", times.load},
          {"load_once", times.load_once},
          {"load_resharded", times.load_resharded},
          {"step", times.step},
          {"step_with_save", times.step_with_save},
          {"step_with_save_copied_later", times.step_with_save_copied_later},
          {"losses", times.losses},
          {"disk_bytes", bytes}};
}

}  // namespace bench
