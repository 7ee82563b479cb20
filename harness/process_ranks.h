// The sharded side of cases on the processes of a job: rank 0 asks, and judges; the others train what it asks for.
#pragma once

#include <string>

#include "harness/ranks.h"
#include "shardproof/process_world.h"

namespace harness {

class ProcessRanks final : public Ranks {
 public:
  // `device`: this process' part of models is there.
  explicit ProcessRanks(shardproof::ProcessWorld& world, c10::Device device = c10::kCPU) : world_(world), device_(device) {}

  c10::Device device() const override { return device_; }

  // On rank 0. Throws Error when the case has more ranks than there are processes.
  std::vector<std::vector<RankStep>> train(const Case& c, const golden::Run& run) override;

  // On the other ranks: trains until rank 0 ends it, and returns the number that it ended it with.
  int serve();
  // On rank 0: ends the others. Nothing to do when they are lost.
  void end(int exit_code);

 private:
  shardproof::ProcessWorld& world_;
  c10::Device device_;
};

}  // namespace harness
