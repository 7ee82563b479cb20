// The sharded side of cases on the processes of a job: rank 0 asks, and judges; the others train what it asks for.
#pragma once

#include <string>

#include "harness/run/case_checkpoints.h"
#include "harness/run/ranks.h"
#include "shardproof/comm/process/process_world.h"

namespace harness {

class ProcessRanks final : public Ranks {
 public:
  // `device`: this process' part of models is there. Not `shares_memory`: what cases ask to lie side by side is gathered, which
  // changes no bit.
  explicit ProcessRanks(shardproof::ProcessWorld& world, c10::Device device = c10::kCPU, bool shares_memory = true)
      : world_(world), device_(device), shares_memory_(shares_memory) {}

  c10::Device device() const override { return device_; }

  // On rank 0. Throws Error when the case has more ranks than there are processes.
  std::vector<std::vector<RankStep>> train(const Case& c, const golden::Run& run) override;

  // On the other ranks: trains until rank 0 ends it, and returns the number that it ended it with.
  int serve();
  // On rank 0: ends the others. Nothing to do when they are lost.
  void end(int exit_code);

 private:
  // Every process: its part in the case's worlds, of which each takes the first processes.
  std::vector<std::vector<RankStep>> train_part(Case c, const golden::Run& run, CaseCheckpoints& checkpoints,
                                                shardproof::Comm& comm) const;

  shardproof::ProcessWorld& world_;
  c10::Device device_;
  bool shares_memory_;
};

}  // namespace harness
