// Saves and loads a sharded model with its optimizer and whatever else a resumed run needs. A checkpoint can be loaded on any
// mesh and under any strategy.
//
//   save("run/step_100", sharded, &optimizer, {.step = 100, .scaler = scaler.state()});
//   TrainerState resumed = load("run/step_100", sharded, &optimizer).trainer;
//
// The format is PyTorch's Distributed Checkpoint (format/dcp.h). Names are those of FSDP2's get_state_dict:
// "model.<parameter>", "optim.state.<parameter>.exp_avg", "optim.param_groups.0.lr". The saved parameters are the main
// parameters; a tied one is there under each of its names. Averages of parameters (optim/ema.h) are "ema.<parameter>", under
// the first name of a tied one. Parameters that are not sharded, and buffers of state (nn/state_buffers.h), are saved once.
// Each rank may have values of its own there; all that are saved are rank 0's, as those of a transfer, and a load gives them to
// every rank. All functions are collective over the mesh. What fails on one rank throws Error on every rank.
#pragma once

#include <cstdint>
#include <functional>
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
  int64_t step = 0;           // the step of the run, as the caller counts
  int64_t schedule_step = 0;  // the position in the learning rate schedule
  int64_t data_position = 0;  // how many samples all ranks together have read
  std::optional<LossScaler::State> scaler = {};
  std::map<std::string, Value> values = {};  // anything else that is the same on every rank; rank 0's values are saved
  // The next two are each rank's own. After loading they are empty on ranks that the checkpoint does not have.
  std::optional<RandomStream> random = {};
  std::map<std::string, Value> of_rank = {};
  bool operator==(const TrainerState&) const;
};

struct SavePlan;
// What a save works out before it has seen a value: who writes what, and where it will lie. It is kept for the next save, which
// uses it if every tensor has the name, dtype, shape and placement that it had, on as many ranks. Otherwise that save makes a
// new one, whichever model and optimizer it saves. Each rank has its own.
struct KeptPlan {
  std::shared_ptr<const SavePlan> last;
  int64_t made = 0;  // how many plans were made
};

struct SaveOptions {
  bool overwrite = false;  // whether to replace a directory that exists, atomically; else it is an Error
  FileSystem* files = &system_files();
  // Rank 0 runs them: before anything is written, when all of it is written, and after the checkpoint has its name. Their
  // errors are errors of the save, on every rank.
  std::function<void()> before = {}, written = {}, after = {};
  KeptPlan* plan = nullptr;  // null: the save makes a plan for itself
};

// Saves the checkpoint. Afterwards it is there, whole and durable; when the save fails it is not there at all. The directory
// lies on a disk that all ranks see: rank 0 looks for what each of them wrote.
void save(const std::string& directory, Sharded& sharded, const OptimizerState* optimizer, const TrainerState& trainer = {},
          const SaveOptions& options = {});

// A save in parts: the constructor, `copy` and `end_copy` when copies come later, `write` and `commit`. Only one save may be
// under way in a directory.
class SaveJob {
 public:
  // When parameters, averages and the optimizer's state are copied to the snapshot. The rest is small and may change in a
  // forward, so it is copied at once. Values on a device are copied at once too.
  enum class Copies { at_once, later };
  // Memory for copies of the values. It can be kept from one save to the next.
  struct Snapshot {
    std::vector<char> bytes;
  };
  // Plans the save. With a snapshot the values are copied, now or by `copy`; without one `write` reads them. Collective.
  SaveJob(const std::string& directory, Sharded& sharded, const OptimizerState* optimizer, const TrainerState& trainer,
          const SaveOptions& options, Snapshot* snapshot, Copies copies = Copies::at_once);
  ~SaveJob();
  // Whether values are left to copy.
  bool copies_later() const;
  // Copies them. Any thread may call it, once. Nothing may change them until it returns. It does not communicate or throw.
  void copy();
  // Comes behind `copy`. When somebody did change a value, the save fails in `commit`, with a message that names a tensor in
  // the same buffer. It does not communicate or throw.
  void end_copy();
  // Writes this rank's file. Any thread may call it. It does not communicate and does not throw.
  void write();
  // The message of the error of `write`; "" when it did not fail.
  const std::string& error() const;
  // Makes the checkpoint visible. Throws the error of any rank, and then nothing is saved. There is one exception: when only
  // the last call fails, which flushes the parent folder, the checkpoint is there and whole, but a power failure may take it
  // away. Collective.
  void commit();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

struct LoadOptions {
  // Whether to load what fits and list the rest in Loaded::skipped: names that are missing in the checkpoint or in the model,
  // and names whose shape or dtype differs. Averages that are missing begin as the parameters that were loaded.
  bool partial = false;
  bool needs_scaler = false;  // whether a TrainerState::scaler that the checkpoint lacks is one of the names that are missing
  // Whether each wanted entry is compared with its checksum before anything is changed. What a rank is to hold is read into
  // memory beside the model first, and summed on the way; it is put into place when all ranks have found all of it whole. When
  // false, files are read straight into the model. An entry of which a rank reads only a part is then not checked, unless
  // ReadOptions::check_parts is set, and an error while reading leaves the model loaded in part; its message says so.
  bool check_before = true;
  // The most memory that a rank takes for that, besides ReadOptions::bytes_max. What finds no room there is read twice: once by
  // one of the ranks for its checksum, and once into the model.
  uint64_t staging_bytes_max = uint64_t{2} << 30;
  ReadOptions read = {};
  FileSystem* files = &system_files();
};

struct Loaded {
  TrainerState trainer;
  std::vector<std::string> skipped;  // the names that were not loaded, each with the reason
  ReadCounts counts;                 // what this rank read of what it holds
  uint64_t bytes_only_checked = 0;   // what it read for checksums alone
};

// Loads the checkpoint; each rank reads the boxes that it holds, and rank 0 looks at the files for all. Throws Error on every
// rank, and changes nothing, when the checkpoint is damaged, when ranks see different ones in the directory, or when its names,
// shapes or dtypes are not the model's and loading is not partial. Without an optimizer, the state of one in the checkpoint is
// ignored, and so are averages that the model does not keep. The optimizer keeps the settings that the caller gave it, unless
// OptimizerState::takes_settings. Save and load throw Error while averages are in the place of the parameters.
Loaded load(const std::string& directory, Sharded& sharded, OptimizerState* optimizer, const LoadOptions& options = {});

}  // namespace shardproof::checkpoint
