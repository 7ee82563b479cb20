// Hands each training step from the rank threads to the thread that reports and compares it, at most two
// steps ahead, so that a long checked run needs the memory of a few steps.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/sharding/piece.h"

namespace torch::nn {
class Module;
}

namespace harness {

// What a property (harness/run/property.h) has against a run.
struct PropertyComplaint {
  std::string property, what;
};

// What one rank can say about one step. The tensors are copies, and there are none unless the run is checked.
struct RankStep {
  std::vector<double> losses;  // [round], the weighted losses of this rank's microbatches
  std::vector<double> evaluated = {};  // the weighted loss of an evaluation before the step, if there was one
  double gradient_norm = 0;            // of the whole gradient, before clipping
  double seconds = 0;
  double compute_seconds = 0;  // those of the step that were not spent in collectives
  std::vector<double> validation_losses = {};  // of this rank's microbatches of held-out data, weighted
  double parameter_norm = 0;                   // of the whole model, after the step
  int64_t zero_gradients = 0;                  // elements of the whole gradient
  int64_t held_bytes = 0;                      // at most, by this rank's part of the model
  bool stopped = false;                        // this was the last step because somebody asked to stop
  bool skipped = false;   // by loss scaling, which has no gradients and no norm then
  double loss_scale = 0;  // 0: none
  std::vector<shardproof::Piece> gradients = {};  // as the optimizer read them
  std::vector<shardproof::Piece> parameters = {};          // main ones, if there are others to compute with
  std::vector<shardproof::Piece> compute_parameters = {};  // those
  std::vector<std::pair<std::string, std::vector<shardproof::Piece>>> state = {};  // {"exp_avg", ...}
  std::vector<std::pair<std::string, at::Tensor>> buffers = {};  // that are state, after the step
  std::vector<PropertyComplaint> complaints = {};
};

// Copies of the module's buffers that are state, of float32.
std::vector<std::pair<std::string, at::Tensor>> state_buffers(const torch::nn::Module& module);

class StepExchange {
 public:
  explicit StepExchange(size_t ranks) : queues_(ranks) {}

  // A rank's side. Blocks while the reader is two steps behind; false when it reads no more.
  bool put(size_t rank, RankStep step);

  // The reader's side: the next step of every rank, or nothing when the exchange was closed before all had
  // it.
  std::optional<std::vector<RankStep>> take();

  // From either side: nobody waits any longer.
  void close();

 private:
  bool complete() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<RankStep>> queues_;
  bool closed_ = false;
};

}  // namespace harness
