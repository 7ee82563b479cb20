// What the `checkpoint` command reads: a PyTorch Distributed Checkpoint or safetensors, as one.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/checkpoint/box_read.h"
#include "shardproof/checkpoint/safetensors.h"

namespace harness {

class CheckpointSource {
 public:
  // A folder with `.metadata`, or what open_safetensors takes. Throws Error.
  explicit CheckpointSource(std::string path);

  // Of safetensors: one chunk a tensor, values absent.
  const shardproof::checkpoint::Checkpoint& checkpoint() const { return checkpoint_; }
  const std::map<std::string, shardproof::checkpoint::SafeTensorSpec>& tensors() const { return tensors_; }
  uint64_t bytes() const;  // of all tensors

  // Contiguous bytes of a tensor or of a box of it; what is damaged is an Error.
  std::string read(const std::string& name);
  std::string read(const std::string& name, const shardproof::Box& box);
  shardproof::checkpoint::Value value(const std::string& name);

 private:
  std::string path_;
  shardproof::checkpoint::Checkpoint checkpoint_;
  std::map<std::string, shardproof::checkpoint::SafeTensorSpec> tensors_;
  shardproof::checkpoint::SafeTensors safe_;
  std::unique_ptr<shardproof::checkpoint::BoxReader> reader_;  // null for safetensors
};

}  // namespace harness
