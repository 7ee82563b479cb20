// A run, trained by somebody else's sharded training instead of by the golden run, in a process of Python
// (python/shardproof/check/server.py).
#pragma once

#include <string>
#include <vector>

#include "golden/golden.h"

namespace golden {

// Who trains, and how. `setup` is JSON, whose form shardproof.check.given describes.
struct EngineRun {
  std::string package;  // the folder that the Python package shardproof lies in
  std::string setup;
  const Run* run = nullptr;
};

// Of each step what each rank holds, as [step][rank]: its losses as [round][0], the norm that it measured, and whole tensors.
// Replicas that hold the same bits are listed on the first of their ranks only; `skipped` and `loss_scale` are not set.
using EngineTrace = std::vector<std::vector<StepTrace>>;

struct EngineFacts {
  std::string why_not;    // why the engine cannot run here, in a sentence; empty if it can
  bool takes_ep = false;  // whether it is told how many ranks share the experts of a layer
};

// Both throw EnvironmentError when Python cannot be loaded, std::runtime_error with the engine's words when it fails: ranks
// raise, hang or die.
EngineFacts facts_of_engine(const std::string& package, const std::string& engine);
EngineTrace train_in_engine(const EngineRun& run);

}  // namespace golden
