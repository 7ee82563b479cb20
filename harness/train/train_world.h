// The ranks of a training run, and what they say after each step.
#pragma once

#include <exception>
#include <optional>
#include <thread>
#include <vector>

#include "harness/compare/step_exchange.h"
#include "harness/data/batch_rule.h"
#include "harness/data/training_data.h"
#include "harness/train/train_checkpoint.h"
#include "harness/train/train_options.h"
#include "shardproof/comm/process/process_world.h"

namespace harness {

// Trains on a thread of its own until the ranks are through or the reader has seen enough: rank-threads, or this process' part
// of `processes`.
class TrainWorld {
 public:
  TrainWorld(const TrainOptions& options, const TrainingData& data, const BatchRule& rule, const TrainHistory& history,
             shardproof::ProcessWorld* processes);
  ~TrainWorld() { stop(); }

  // The next step of every rank; nothing when there is none, or this is not rank 0.
  std::optional<std::vector<RankStep>> take() { return exchange_.take(); }

  // Ends the ranks; rethrows what ended them if it was not this.
  void finish();
  // Waits for their own end instead.
  void join();

 private:
  void stop();

  StepExchange exchange_;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace harness
