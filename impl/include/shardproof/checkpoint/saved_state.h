// Saves and loads a sharded model with its optimizer and what else a resumed run needs, on any mesh and under any strategy.
//
//   save("run/step_100", sharded, &optimizer, {.step = 100, .scaler = scaler.state()});
//   TrainerState resumed = load("run/step_100", sharded, &optimizer).trainer;
//
// Names are those of FSDP2's get_state_dict: "model.<parameter>", "optim.state.<parameter>.exp_avg",
// "optim.param_groups.0.lr". Parameters are the main ones; tied ones are there
// under every name. Parameters that are not sharded, and buffers, are saved once.
// All functions are collective over the mesh. What fails on one rank is an Error on every rank.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/checkpoint/box_read.h"
#include "shardproof/checkpoint/format/file_system.h"
#include "shardproof/checkpoint/format/pickle.h"
#include "shardproof/nn/random.h"
#include "shardproof/optim/loss_scaler.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof::checkpoint {

struct TrainerState {
  int64_t step = 0;           // of the run; the caller's count
  int64_t schedule_step = 0;  // position of the learning rate schedule
  int64_t data_position = 0;  // samples read, over all ranks
  std::optional<LossScaler::State> scaler = {};
  std::map<std::string, Value> values = {};  // whatever else is the same on every rank; rank 0's are saved
  // This rank's own. Loaded where the checkpoint has a rank of this number, empty elsewhere.
  std::optional<RandomStream> random = {};
  std::map<std::string, Value> of_rank = {};
  bool operator==(const TrainerState&) const;
};

struct SaveOptions {
  bool overwrite = false;  // atomically; otherwise a directory that exists is an Error
  FileSystem* files = &system_files();
};

// Written whole and durable, or not there at all.
void save(const std::string& directory, Sharded& sharded, const Optimizer* optimizer, const TrainerState& trainer = {},
          const SaveOptions& options = {});

// A save whose three parts are called one by one. Several may not be under way in one directory.
class SaveJob {
 public:
  // Memory of snapshots, kept from one save to the next.
  struct Snapshot {
    std::vector<char> bytes;
  };
  // Collective. With a snapshot, the values are those of this call; without, those of `write`.
  SaveJob(const std::string& directory, Sharded& sharded, const Optimizer* optimizer, const TrainerState& trainer,
          const SaveOptions& options, Snapshot* snapshot);
  ~SaveJob();
  // Writes this rank's file. Does not communicate, does not throw, on any thread.
  void write();
  // Of `write`; "" when it did not fail.
  const std::string& error() const;
  // Collective. Throws what went wrong anywhere; then nothing is saved, but for the very last call, the flush of the parent
  // folder: when that fails, the checkpoint is there and whole, and a power failure may take it away.
  void commit();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

struct LoadOptions {
  // Load what fits, and list the rest in Loaded::skipped: missing and extra names, and those of another shape or dtype.
  bool partial = false;
  // Every entry that is wanted is compared with its checksum, by one of the ranks, before anything is changed; then each rank
  // reads its boxes. False: read once; entries of which a rank reads a part only are then not checked unless
  // ReadOptions::check_parts says so, and an error while reading leaves the model in part loaded, and says so.
  bool check_before = true;
  ReadOptions read = {};
  FileSystem* files = &system_files();
};

struct Loaded {
  TrainerState trainer;
  std::vector<std::string> skipped;  // by name, and why
  ReadCounts counts;                 // of this rank, of the last pass
};

// Each rank reads the boxes that it holds. Throws Error, on every rank and with nothing changed, when the checkpoint is damaged
// or, unless loading is partial, does not fit: names, shapes and dtypes must be the model's. Without an optimizer, its state in
// the checkpoint is ignored. Settings of the optimizer stay the caller's.
Loaded load(const std::string& directory, Sharded& sharded, Optimizer* optimizer, const LoadOptions& options = {});

}  // namespace shardproof::checkpoint
