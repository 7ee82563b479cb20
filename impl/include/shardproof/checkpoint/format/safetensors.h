// The safetensors format: one file, or several under `model.safetensors.index.json`. No Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "shardproof/algebra/layout.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

struct SafeTensor {
  Dtype dtype = Dtype::Float;
  Shape sizes;
  std::string file;     // path of the file
  uint64_t offset = 0;  // of its first element in the file
  uint64_t bytes = 0;
};

struct SafeTensors {
  std::map<std::string, SafeTensor> tensors;
  std::map<std::string, std::string> metadata;  // of one file: "__metadata__"
};

// The header of one file: all the format asks for is checked (offsets tile the buffer, sizes agree, names once). Throws Error.
SafeTensors read_safetensors_header(const ByteSource& source);
// `path`: a .safetensors file, an index .json, or a folder with either.
SafeTensors open_safetensors(FileSystem& files, const std::string& path);

// Writes one file, or when it has more than `file_bytes_max` several and their index, durable, into a folder: names, then data
// in the order of names. `data(name)` gives a tensor's contiguous bytes, asked once each.
struct SafeTensorSpec {
  Dtype dtype = Dtype::Float;
  Shape sizes;
};
using TensorBytes = std::function<std::string(const std::string& name)>;
void write_safetensors(FileSystem& files, const std::string& folder, const std::map<std::string, SafeTensorSpec>& tensors,
                       const TensorBytes& data, uint64_t file_bytes_max = uint64_t{5} << 30,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace shardproof::checkpoint
