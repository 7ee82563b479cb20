// torch.save files of {name: tensor or value}, flat or nested, that torch.load(weights_only=True) reads. No Torch.
#pragma once

#include <map>
#include <string>

#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/safetensors.h"

namespace shardproof::checkpoint {

// One durable file. Tensors are streamed one at a time in the order of names; paths say where in nested dicts an item lies
// (lists for integer elements). Throws Error.
void write_torch_file(FileSystem& files, const std::string& path, const std::map<std::string, SafeTensorSpec>& tensors,
                      const std::map<std::string, Value>& values, const std::map<std::string, Path>& paths,
                      const TensorBytes& data);

}  // namespace shardproof::checkpoint
