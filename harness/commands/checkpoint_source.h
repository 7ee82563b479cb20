// What the `checkpoint` command reads: a PyTorch Distributed Checkpoint, safetensors or files of torch.save, as one.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/checkpoint/box_read.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/format/weight_names.h"
#include "shardproof/checkpoint/format/weights_file.h"

namespace harness {

// Throws Error, naming the newest checkpoint in it, when the path is a folder of checkpoints, as a run leaves them.
void require_no_run(const std::string& path);

class CheckpointSource {
 public:
  // Which tensors are made of those that are there, and how.
  using Recipes = std::map<std::string, shardproof::checkpoint::WeightRecipe>;
  using MakeRecipes = std::function<Recipes(CheckpointSource& stored)>;

  // A folder with `.metadata`, or what open_weights takes; `entry` is of a file of torch.save. With recipes the tensors are
  // those that they make, and what no recipe uses is left out, as all values are. With a dtype floating tensors are rounded to
  // it. Throws Error.
  explicit CheckpointSource(std::string path, const MakeRecipes& recipes = {}, const std::string& entry = "",
                            const shardproof::DtypeInfo* dtype = nullptr);

  const std::string& path() const { return path_; }
  // Of a file: one chunk a tensor, values absent.
  const shardproof::checkpoint::Checkpoint& checkpoint() const { return checkpoint_; }
  const std::map<std::string, shardproof::checkpoint::SafeTensorSpec>& tensors() const { return tensors_; }
  uint64_t bytes() const;  // of all tensors
  size_t left_out() const { return left_out_; }  // tensors and values that no recipe uses

  // What the recipe makes of the tensors that are there. Throws Error when they do not fit each other. `name` is for messages.
  shardproof::checkpoint::SafeTensorSpec made_by(const std::string& name,
                                                 const shardproof::checkpoint::WeightRecipe& recipe) const;

  // Contiguous bytes of a tensor or of a box of it; what is damaged is an Error, and so is a value that its dtype does not
  // hold.
  std::string read(const std::string& name);
  std::string read(const std::string& name, const shardproof::Box& box);
  shardproof::checkpoint::Value value(const std::string& name);

 private:
  void open(const std::string& entry);
  void make(const Recipes& recipes);
  std::unique_ptr<shardproof::checkpoint::BoxReader> make_reader(const shardproof::checkpoint::Checkpoint& checkpoint) const;
  std::string read_stored(const std::string& name, const shardproof::Box& box);
  std::string read_part(const shardproof::checkpoint::WeightPart& part);
  std::string read_made(const std::string& name, const shardproof::Box& box);

  std::string path_;
  size_t left_out_ = 0;
  Recipes recipes_;                                       // of the tensors that are made
  shardproof::checkpoint::Checkpoint checkpoint_, kept_;  // kept: as it is in the file, for the reader
  std::map<std::string, shardproof::checkpoint::SafeTensorSpec> tensors_, stored_;  // stored: as they are in the file
  shardproof::checkpoint::StoredWeights weights_;                                   // of a file
  shardproof::checkpoint::WeightReader weight_reader_;
  std::unique_ptr<shardproof::checkpoint::BoxReader> reader_;  // null for a file
};

}  // namespace harness
