// What `train` puts into its checkpoints besides the library's own: what run it is, and how each of its steps was summed, so
// that the golden run can be trained again from the start.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/data/training_data.h"
#include "harness/train/train_options.h"
#include "shardproof/checkpoint/format/pickle.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/checkpoint/saved_state.h"

namespace harness {

// Steps up to `end` were taken so.
struct Stretch {
  int64_t end = 0;
  shardproof::Mesh mesh;
  std::string strategy;
  int64_t microbatch = 0;
  bool canonical = false;
};

// Of the whole run: those of the checkpoint that it goes on from, if any, then its own.
struct TrainHistory {
  std::vector<Stretch> stretches;
  std::string weights;     // the folder that the run started from, where it did
  shardproof::checkpoint::HuggingFaceModel described;  // by the files in that folder; without a family: there is none
  int64_t first_step = 0;  // of the last stretch
  const Stretch& of(int64_t step) const;
};

// The step at which the run goes on: that of the last checkpoint when it resumes and there is one, else 0. Throws Error when
// options of checkpoints do not fit each other, when there are checkpoints and the run does not resume, or the last one is of
// another run. A run is its model, data, batches, optimizer and seed, and its data are the contents of the files, whatever
// these are called; mesh, strategy, microbatch and the kind of gradient sums may change.
int64_t first_step(const TrainOptions& options, const TrainingData& data);

// As `first_step` says. Throws Error as it does.
TrainHistory read_history(const TrainOptions& options, const TrainingData& data);

// What the model of a checkpoint is.
struct SavedModel {
  std::string folder;        // of the checkpoint, or of the weights
  bool are_weights = false;  // of a Hugging Face folder
  golden::Model model;  // with native arithmetic, whatever it was trained with
  shardproof::checkpoint::HuggingFaceModel described;  // of the folder that a run started from; without a family: of none
  TokenType type = TokenType::uint8;
};
// `path`: a checkpoint that `train` wrote, or a folder of them, of which the last one is taken. Throws Error when it is
// neither.
SavedModel saved_model(const std::string& path);
// That of the last checkpoint, from which a run with these options goes on; nothing when it starts.
std::optional<SavedModel> model_to_resume(const TrainCheckpoints& checkpoints);
// That of a Hugging Face folder.
SavedModel model_in_weights(const std::string& folder);
// That of one checkpoint; nothing when `train` did not write it.
std::optional<SavedModel> model_if_trained(const std::string& folder);

// After `step` steps.
shardproof::checkpoint::TrainerState trainer_state(const TrainOptions& options, const TrainingData& data,
                                                   const TrainHistory& history, int64_t step);

}  // namespace harness
