// What a `Sharded` is made of.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hooks/attachments.h"
#include "sharding/schedule.h"
#include "sharding/shard_plan.h"
#include "sharding/unit.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

class ParallelState;

class ShardedState {
 public:
  // Builds the units; see fully_shard.
  ShardedState(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options,
               const std::vector<Sharding::Entry>& entries);
  ~ShardedState();

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  MeshComm& comms() const { return *comms_; }
  const ShardOptions& options() const { return options_; }
  const Strategy& strategy() const { return strategy_; }  // on this mesh
  Schedule& schedule() { return schedule_; }
  MemoryLedger& memory() { return *memory_; }
  c10::Device device() const { return memory_->device(); }  // of all parameters
  // Of final gradients and what the optimizer works on.
  c10::Device state_device() const { return options_.offload == Offload::none ? device() : c10::Device(at::kCPU); }
  const std::vector<std::pair<std::string, std::string>>& aliases() const { return aliases_; }
  Unit& unit(const std::string& name) const;
  // Null when the module is not tensor parallel.
  const ParallelState* parallel() const { return parallel_.get(); }
  // The whole parameter of what a slot holds. Collective along the tensor-parallel axis.
  at::Tensor join(const Slot& slot, const at::Tensor& local) const;

  int64_t tokens = 0;  // of this rank, in this step

  struct FinishingStep {
    std::string name;
    int64_t order = 0;
    std::function<void(Sharded&)> run;
  };
  void add_finishing_step(FinishingStep step);
  // Runs them on the gradients of a last backward.
  void finish(const std::shared_ptr<ShardedState>& self);

 private:
  void build_unit(const UnitPlan& plan);
  std::unique_ptr<Bucket> make_bucket(const UnitPlan& plan, const std::vector<NamedParameter>& parameters,
                                      const Precision& precision);
  void sum_parallel_terms();
  void relate_units(const std::vector<UnitPlan>& plans);
  void choose_prefetch();
  void reset_meta_buffers();

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<MeshComm> comms_;
  ShardOptions options_;
  Strategy strategy_;
  std::shared_ptr<ParallelState> parallel_;
  std::vector<std::shared_ptr<void>> rules_;  // of the sequence parts: without them ranks would train on without each other
  std::shared_ptr<MemoryLedger> memory_;
  std::shared_ptr<HostTransfers> transfers_;
  std::vector<std::pair<std::string, std::string>> aliases_;
  Schedule schedule_;
  UnitAttachments attached_;
  std::vector<FinishingStep> finishing_;
  std::unique_ptr<SequentialEntries> sequential_;
};

}  // namespace shardproof
