// Files as torch.save writes them, of a flat or nested dict of tensors and values. torch.load(weights_only=True) can read them.
// This header does not include Torch.
#pragma once

#include <map>
#include <string>

#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/safetensors.h"

namespace shardproof::checkpoint {

// Writes one file, which is durable when it returns. Tensors are written one at a time in the order of names. `paths` say where
// in the nested dict an item lies; an integer element of a path is an index of a list. Throws Error when it cannot.
void write_torch_file(FileSystem& files, const std::string& path, const std::map<std::string, SafeTensorSpec>& tensors,
                      const std::map<std::string, Value>& values, const std::map<std::string, Path>& paths,
                      const TensorBytes& data);

}  // namespace shardproof::checkpoint
