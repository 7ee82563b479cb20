// What every rank of a training run does.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>

#include "harness/compare/step_exchange.h"
#include "harness/data/batch_rule.h"
#include "harness/data/training_data.h"
#include "harness/train/train_checkpoint.h"
#include "harness/train/train_options.h"
#include "shardproof/comm/comm.h"

namespace harness {

// Thrown by a rank whose steps nobody reads any more.
class ReaderStopped : public std::runtime_error {
 public:
  ReaderStopped() : std::runtime_error("the reader of this run stopped") {}
};

// Of the unsharded model, when the run began. Throws Error when it began with weights that are no longer there.
struct InitialValues {
  golden::Named parameters;
  golden::Named buffers;  // those of the weights; empty where the run began without
};
InitialValues initial_values(const TrainOptions& options, const TrainHistory& history);

// One microbatch: weight 1 / (tokens of the global batch), so that losses and gradients add up to those of
// the mean, however the batch is cut.
golden::Microbatch training_microbatch(const TrainingData& data, const BatchRule& rule, int64_t step,
                                       int64_t round, int64_t rank);

// One microbatch of held-out sequences; weights are as above, of all that are validated with.
golden::Microbatch validation_microbatch(const TrainingData& data, const ValidationRule& rule, SampleRange samples);
// How many sequences are validated with, and how they are cut.
ValidationRule validation_rule(const TrainOptions& options, const TrainingData& data, int64_t ranks);
// Whether the loss of held-out data is taken after this step.
bool validates_after(const TrainOptions& options, const TrainingData& data, int64_t step);

// Takes a rank's step; false when nobody reads any more.
using PutStep = std::function<bool(RankStep)>;

// Collective over the world. Trains the steps from the history's first on, saving as asked, and puts each, with its tensors if
// the run is checked. Where stop_requested() on any rank it ends before the first step, or saves and ends after the step that
// is under way, without or instead of a validation. Throws ReaderStopped when nobody reads.
void train_rank(const TrainOptions& options, const TrainingData& data, const BatchRule& rule, const TrainHistory& history,
                const std::shared_ptr<shardproof::Comm>& comm, const PutStep& put);

}  // namespace harness
