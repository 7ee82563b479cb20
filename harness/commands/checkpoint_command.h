// What `shardproof checkpoint` does. Each returns the exit code: 0 ok, 1 a difference or damage; Error is 2.
#pragma once

#include <cstdint>
#include <string>

#include "shardproof/checkpoint/format/file_system.h"

namespace harness {

struct CheckpointArguments {
  std::string one, two;  // folders or files
  std::string to = "dcp", mesh = "", json = "", family = "", entry = "", dtype = "", config = "";
  std::string projections = "family";
  bool overwrite = false, boxes = false;
  uint64_t file_bytes_max = uint64_t{5} << 30;
  shardproof::checkpoint::FileSystem* files = &shardproof::checkpoint::system_files();  // what is written goes there
};

int checkpoint_inspect(const CheckpointArguments& arguments);
int checkpoint_verify(const CheckpointArguments& arguments);
int checkpoint_diff(const CheckpointArguments& arguments);
// `to`: dcp, safetensors or torch. With `family`, one of weight_families, safetensors are those of Hugging Face's transformers
// package, with a config.json where the model is known: that of `config`, or of a checkpoint of `train`.
int checkpoint_convert(const CheckpointArguments& arguments);
// A DCP folder whose files are those that ranks of the mesh would write: dim 0 cut along dp_shard.
int checkpoint_reshard(const CheckpointArguments& arguments);

}  // namespace harness
