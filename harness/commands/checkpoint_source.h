// What the `checkpoint` command reads: a PyTorch Distributed Checkpoint or safetensors, as one.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/commands/hugging_face_names.h"
#include "shardproof/checkpoint/box_read.h"
#include "shardproof/checkpoint/format/safetensors.h"

namespace harness {

class CheckpointSource {
 public:
  using Rename = std::function<std::optional<OtherName>(const std::string& name)>;

  // A folder with `.metadata`, or what open_safetensors takes. With `rename` tensors go by their other names and layouts, and
  // those without one are left out, as all values are. Throws Error.
  explicit CheckpointSource(std::string path, const Rename& rename = {});

  // Of safetensors: one chunk a tensor, values absent.
  const shardproof::checkpoint::Checkpoint& checkpoint() const { return checkpoint_; }
  const std::map<std::string, shardproof::checkpoint::SafeTensorSpec>& tensors() const { return tensors_; }
  uint64_t bytes() const;  // of all tensors
  size_t left_out() const { return left_out_; }  // tensors and values, by `rename`

  // Contiguous bytes of a tensor or of a box of it; what is damaged is an Error.
  std::string read(const std::string& name);
  std::string read(const std::string& name, const shardproof::Box& box);
  shardproof::checkpoint::Value value(const std::string& name);

 private:
  void open();
  void rename(const Rename& rename);
  std::unique_ptr<shardproof::checkpoint::BoxReader> make_reader(const shardproof::checkpoint::Checkpoint& checkpoint) const;
  std::string read_stored(const std::string& name, const shardproof::checkpoint::SafeTensorSpec& spec,
                          const shardproof::Box& box);

  std::string path_;
  size_t left_out_ = 0;
  std::map<std::string, OtherName> stored_as_;            // only of renamed tensors
  shardproof::checkpoint::Checkpoint checkpoint_, kept_;  // kept: as it was before it was renamed, for the reader
  std::map<std::string, shardproof::checkpoint::SafeTensorSpec> tensors_;
  shardproof::checkpoint::SafeTensors safe_;
  std::unique_ptr<shardproof::checkpoint::BoxReader> reader_;  // null for safetensors
};

}  // namespace harness
