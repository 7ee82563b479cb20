#include "shardproof/checkpoint/manager.h"

#include <ATen/ATen.h>

#include <cstdio>
#include <exception>

#include "internal/base/disk_work.h"
#include "checkpoint/run_owner.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/base/host_work.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/comm/agree.h"

namespace shardproof::checkpoint {

// A save whose files a thread writes. Where it copies later, another thread copies the values before that.
struct Manager::Pending {
  Pending(Comm& comm, int64_t its_step, std::unique_ptr<SaveJob> its_job)
      : world(comm), step(its_step), job(std::move(its_job)) {
    if (job->copies_later())
      copying = start_host_job([this] { job->copy(); });
    else
      start_writing();
  }
  // Waits for the copies, once. Then the files are written.
  void finish_copy() {
    if (!copying) return;
    wait_for(*copying);
    copying.reset();
    job->end_copy();
    start_writing();
  }
  void join() {
    finish_copy();
    wait_for(*writing);
  }
  bool is_over() {
    if (copying && copying->is_over()) finish_copy();
    return writing && writing->is_over();
  }

  Comm& world;  // which the job keeps, for the model may be gone before the save is committed
  int64_t step;
  std::unique_ptr<SaveJob> job;
  std::exception_ptr broken;                  // an invariant
  std::unique_ptr<HostJob> copying, writing;  // the last members: they use the others

 private:
  void start_writing() {
    writing = start_host_job([this] { job->write(); });
  }
  void wait_for(HostJob& work) {
    try {
      work.wait();
    } catch (...) {
      broken = std::current_exception();
    }
  }
};

void print_lost(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
}

Manager::Manager(std::string directory, ManagerOptions options) : directory_(std::move(directory)), options_(options) {
  SHARD_REQUIRE(!directory_.empty(), "checkpoint", "the directory of checkpoints has no name");
  SHARD_REQUIRE(options_.lost, "checkpoint", "ManagerOptions::lost is no function; print_lost is the default");
  SHARD_REQUIRE(options_.keep >= 0, "checkpoint", "keep must be at least 1, or 0 to keep all, got {}", options_.keep);
}

Manager::~Manager() {
  if (!pending_) return;
  pending_->join();
  const std::string why = pending_->broken ? "an invariant is broken" : pending_->job->error();
  options_.lost(fmt::format("[checkpoint] {} was not committed and is lost{}{}: call Manager::wait before the manager goes",
                            step_folder(directory_, pending_->step), why.empty() ? "" : "; writing it failed: ", why));
}

void Manager::begin(Comm& world) {
  if (begun_) return;
  owner_ = RunOwner::take(world, *options_.files, directory_);
  begun_ = true;
}

// Before each save, on rank 0: that the folder is this run's, and that it comes after those that are there.
void Manager::require_next(int64_t step) const {
  owner_->require();
  const std::optional<int64_t> last = latest();
  SHARD_REQUIRE(step >= 0, "checkpoint", "a step to save must not be negative, got {}", step);
  SHARD_REQUIRE(!last || step > *last || (step == *last && options_.overwrite), "checkpoint",
                "step {} does not come after step {}, which {} has already; resume from it, or save elsewhere", step, *last,
                directory_);
}

bool Manager::save(Sharded& sharded, const OptimizerState* optimizer, const TrainerState& trainer) {
  if (options_.when_busy == WhenBusy::wait) wait();
  if (!poll()) return false;
  Comm& world = sharded.impl().comms->world();
  begin(world);
  const SaveOptions how{.overwrite = options_.overwrite,
                        .files = options_.files,
                        .before = [&] { require_next(trainer.step); },
                        .written = [owner = owner_] { owner->require(); },
                        .after =
                            [files = options_.files, keep = options_.keep, directory = directory_] {
                              if (keep > 0) clean_if_possible([&] { retain_steps(*files, directory, keep); });
                            },
                        .plan = &plan_};
  auto job = std::make_unique<SaveJob>(step_folder(directory_, trainer.step), sharded, optimizer, trainer, how,
                                       options_.async ? &snapshot_ : nullptr,
                                       options_.copy_in_background ? SaveJob::Copies::later : SaveJob::Copies::at_once);
  if (options_.async) {
    pending_ = std::make_shared<Pending>(world, trainer.step, std::move(job));
    if (pending_->copying)
      sharded.impl().reads.push_back([save = std::weak_ptr(pending_)] {
        if (const auto copying = save.lock()) copying->finish_copy();
      });
    return true;
  }
  const DiskWork saving;
  job->write();
  job->commit();
  return true;
}

bool Manager::poll() {
  if (!pending_) return true;
  at::Tensor busy = at::full({1}, static_cast<int64_t>(!pending_->is_over()), at::kLong);
  pending_->world.all_reduce(busy, Reduce::max).wait();
  if (busy.item<int64_t>() != 0) return false;
  commit();
  return true;
}

void Manager::wait() {
  if (pending_) commit();
}

void Manager::commit() {
  const DiskWork saving;
  // Whatever becomes of it, it is reported once.
  const std::shared_ptr<Pending> pending = std::move(pending_);
  pending->join();
  if (pending->broken) {
    error_of([&] { pending->job->commit(); });  // in which the other ranks fail as well
    std::rethrow_exception(pending->broken);
  }
  pending->job->commit();
}

std::optional<Loaded> Manager::load_latest(Sharded& sharded, OptimizerState* optimizer, const LoadOptions& options) {
  wait();
  Comm& world = sharded.impl().comms->world();
  const auto find = [&] {  // so that all load the same
    return from_rank_0(world, [&] {
      const std::optional<int64_t> last = latest();
      return last ? std::to_string(*last) : std::string();
    });
  };
  for (std::string found = find(); !found.empty();) {
    const std::string folder = step_folder(directory_, std::stoll(found));
    try {
      return load(folder, sharded, optimizer, options);
    } catch (const Error& error) {
      // A run that saves there may have removed it meanwhile, and then has a later one.
      const std::string next = find();
      if (next.empty() || next == found) throw Error(error.what() + before_it(folder, *options_.files));
      found = next;
    }
  }
  return std::nullopt;
}

std::vector<int64_t> Manager::steps() const {
  return committed_steps(directory_, *options_.files);
}

std::optional<int64_t> Manager::latest() const {
  return latest_step(directory_, *options_.files);
}

}  // namespace shardproof::checkpoint
