#include "harness/train/train_world.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "harness/run/comm_texts.h"
#include "harness/run/step_bytes.h"
#include "harness/train/train_rank.h"
#include "shardproof/comm/threads/threads.h"

namespace harness {
namespace {

using shardproof::Comm;

// Steps of processes come together on rank 0, which says whether anybody reads on.
bool put_on_rank_0(Comm& steps, StepExchange& exchange, RankStep step) {
  std::vector<RankStep> mine;
  mine.push_back(std::move(step));
  const std::vector<std::string> all = collect_bytes(steps, to_bytes(mine));
  at::Tensor reads = at::ones({1}, at::kLong);
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (!exchange.put(rank, std::move(steps_from(all[rank]).front()))) reads.zero_();
  steps.broadcast(reads, 0).wait();
  return reads.item<int64_t>() != 0;
}

}  // namespace

TrainWorld::TrainWorld(const TrainOptions& options, const TrainingData& data, const BatchRule& rule,
                       const TrainHistory& history, shardproof::ProcessWorld* processes)
    : exchange_(static_cast<size_t>(options.mesh.size())), thread_([&options, &data, &rule, &history, processes, this] {
        // A new thread begins with LibTorch's own number of threads, and more than one round differently.
        at::set_num_threads(1);
        const auto train_as = [&](const std::shared_ptr<Comm>& comm) {
          train_rank(options, data, rule, history, comm,
                     [&](RankStep step) { return exchange_.put(static_cast<size_t>(comm->rank()), std::move(step)); });
        };
        const auto train_process = [&](const std::shared_ptr<Comm>& comm) {
          const auto steps = comm->split(0, comm->rank(), "steps");
          try {
            train_rank(options, data, rule, history, comm,
                       [&](RankStep step) { return put_on_rank_0(*steps, exchange_, std::move(step)); });
          } catch (const ReaderStopped&) {  // on every rank at once
          }
        };
        try {
          if (processes)
            processes->run(train_process);
          else
            shardproof::run_threads(options.mesh.size(), train_as, {.device = options.device});
        } catch (const ReaderStopped&) {
        } catch (...) {
          error_ = std::current_exception();
        }
        exchange_.close();
      }) {}

void TrainWorld::stop() {
  exchange_.close();
  join();
}

void TrainWorld::join() {
  if (thread_.joinable()) thread_.join();
}

void TrainWorld::finish() {
  stop();
  if (error_) std::rethrow_exception(error_);
}

}  // namespace harness
