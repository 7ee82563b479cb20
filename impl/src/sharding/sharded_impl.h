// What a `Sharded` is made of. `shard_build` makes it; methods of Sharded, the optimizer and checkpoints work on it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "internal/hooks/attachments.h"
#include "sharding/schedule.h"
#include "sharding/unit.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/nn/state_buffers.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

class ParallelState;

struct Sharded::Impl {
  // Checks options, mesh and module. Without units yet.
  Impl(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options);
  ~Impl();

  const std::shared_ptr<torch::nn::Module> module;
  const std::shared_ptr<MeshComm> comms;  // of the mesh as strategies see it
  const ShardOptions options;
  const Strategy strategy;                        // on this mesh; of all units that have none of their own
  const std::shared_ptr<ParallelState> parallel;  // null when the module is not tensor parallel
  // Of the sequence parts, without which ranks would train on without each other, and of adapters.
  const std::vector<std::shared_ptr<void>> rules;
  const std::shared_ptr<MemoryLedger> memory;
  const std::shared_ptr<HostTransfers> transfers;
  const std::shared_ptr<LateChecks> checks;  // whoever hands out gradients reads them first
  std::vector<std::pair<std::string, std::string>> aliases;  // as UnitPlans has them
  Schedule schedule;
  UnitAttachments attached;

  int64_t tokens = 0;  // of this rank, in this step

  c10::Device device() const { return memory->device(); }  // of all parameters
  // Of final gradients and what the optimizer works on.
  c10::Device state_device() const { return options.offload == Offload::none ? device() : c10::Device(at::kCPU); }
  Unit& unit(const std::string& name) const;
  // What this rank holds between steps of every parameter; of gradients, of those that are final and whose parameters train.
  // Waits until it is there.
  enum class Kind { parameter, main, gradient };
  std::vector<Shard> shards(Kind kind) const;
  // Waits until final gradients are where the optimizer reads them.
  void await_gradients() const;
  std::vector<Piece> pieces(Kind kind) const;
  // Parameters that are not sharded, with the buffers of state; and the other buffers. Whole on every rank, by name.
  ModuleBuffers plain_tensors() const;
  // Those of the units on this mesh.
  MeshComm& comms_of(const Mesh& mesh) const;
  // The whole tensors, by name, on every rank. Collective.
  std::map<std::string, at::Tensor> gather(const std::vector<Shard>& shards) const;
  // That of one parameter, by any of its names. `where` is for messages. Throws Error on every rank when the name has no shard
  // on some rank, or when ranks ask for different names. Collective.
  at::Tensor gather_one(const char* where, const std::vector<Shard>& shards, const std::string& name) const;
  // The reverse: each rank copies its part of whole tensors, which are the same on every rank. `where` is for messages. Throws
  // Error on every rank, before anything is written, when a name or a size does not fit on some rank. Collective.
  void write(const char* where, const std::vector<Shard>& shards, const std::map<std::string, at::Tensor>& values);
  // Of a parameter by its first name.
  bool trains(const std::string& first) const;
  // The shard of a parameter, by any of its names. Throws Error, which suggests a near name, when there is none.
  const Shard& shard_of(const char* where, const std::vector<Shard>& shards, const std::string& name) const;
  // Throws Error, which names `what`, while averages are in the place of the parameters; and inside a backward, too.
  void require_no_averages(const char* what) const;
  void require_own_values(const char* what) const;
  // The whole parameter of what a member holds. Collective along the tensor-parallel axis.
  at::Tensor join(const BucketParameter& member, const at::Tensor& local) const;

  struct FinishingStep {
    std::string name;
    int64_t order = 0;
    std::function<void(Sharded&)> run;
  };
  void add_finishing_step(FinishingStep step);
  // Runs them on the gradients of a last backward.
  void finish(const std::shared_ptr<Impl>& self);

  std::vector<FinishingStep> finishing;
  std::vector<std::function<void()>> before_update;  // called by the optimizer's step
  // Each waits for another thread that is copying parameters, averages or the optimizer's state. Whatever changes one of these
  // calls `finish_reads` first, or `begin_update`, which does.
  std::vector<std::function<void()>> reads;
  void finish_reads();
  // The one door to main parameters: an optimizer's step, ours or another's, a load and a user's hand write to them behind it.
  // It waits for whatever reads them: a save, the device, and ranks of which they are neighbours (Gather::side_by_side). Only
  // with those is it collective over the mesh.
  void begin_update();
  // State that lies as main parameters do and goes into checkpoints with them, by the first part of its names there.
  std::map<std::string, std::function<std::vector<Shard>()>> kept_along;
  // Fingerprints of adapters that were merged into the weights. Checkpoints have them.
  std::vector<std::string> merged_adapters;
  std::string averages_in_place;  // whose; empty: parameters are their own
  std::unique_ptr<SequentialEntries> sequential;
};

}  // namespace shardproof
