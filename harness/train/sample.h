// Tokens from a model that `train` saved, or of a Hugging Face folder, one after the other.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness/case/axes.h"
#include "harness/train/train_checkpoint.h"
#include "shardproof/algebra/mesh.h"
#include "shardproof/comm/process/process_world.h"

namespace harness {

struct SampleOptions {
  SavedModel saved;
  shardproof::Mesh mesh{{{axes::dp_shard, 1}}};  // parameters are cut over it, and every rank computes the same
  std::string strategy = "zero3";
  std::vector<int64_t> prompt;  // at least one token
  int64_t length = 200;         // how many tokens follow
  double temperature = 1;       // logits are divided by it; 0: always the likeliest token
  int64_t top_k = 0;            // draw among so many of the likeliest; 0: among all
  uint64_t seed = 1;
  c10::Device device{c10::kCPU};
};

// Which token follows, of float64 logits. The likeliest come first, the lower token before the higher where they are alike.
// `unit` is in [0, 1): the token taken is the first one for which the probabilities up to it add up to more.
int64_t drawn_token(const std::vector<double>& logits, double temperature, int64_t top_k, double unit);

// Calls `put` with each token as it comes, on rank 0. The model sees as many of the last tokens as it has positions. With
// `processes` it is collective over them. Throws Error for options that do not fit each other or the model, and where the
// checkpoint cannot be loaded.
void sample(const SampleOptions& options, const std::function<void(int64_t token)>& put,
            shardproof::ProcessWorld* processes = nullptr);

}  // namespace harness
