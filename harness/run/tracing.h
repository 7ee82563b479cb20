// How ranks write down what their modules do in one step.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "shardproof/comm/comm.h"
#include "shardproof/comm/timeline.h"
#include "shardproof/hooks/module_watch.h"

namespace harness {

// What the modules of a rank did in one microbatch.
struct MicrobatchTrace {
  std::vector<shardproof::ModuleCall> calls;
  at::Tensor positions = {};     // those of its sequences that the rank computes, int64; undefined where it computes all
  double scale = 1;              // of the loss, and so of its gradients
  golden::Named gradients = {};  // of the parameters, where the model is unsharded
};
using ModuleTraces = std::vector<std::vector<MicrobatchTrace>>;  // [rank][round]

struct Tracing {
  size_t step = 0;
  ModuleTraces* ranks = nullptr;  // null: they write nothing down
  std::shared_ptr<shardproof::Timeline> timeline = std::make_shared<shardproof::Timeline>();

  // The world of a rank, whose collectives the timeline then has.
  std::shared_ptr<shardproof::Comm> around(std::shared_ptr<shardproof::Comm> comm) const;
  // "all_gather of unit 'h.0' in 'dp_shard'"; "" before the first one.
  std::string last_collective(int64_t rank) const;
};

// What the watch saw, after a call of the model itself that reads all buffers.
std::vector<shardproof::ModuleCall> calls_of(const shardproof::ModuleWatch& watch, const torch::nn::Module& root);

}  // namespace harness
