// Hugging Face's safetensors format: one file, or several files with an index `model.safetensors.index.json`. This header does
// not include Torch.
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
  std::string file;     // the path of the file
  uint64_t offset = 0;  // where the first element lies in the file
  uint64_t bytes = 0;
};

struct SafeTensors {
  std::map<std::string, SafeTensor> tensors;
  std::map<std::string, std::string> metadata;  // "__metadata__", when there is only one file
};

// Reads the header of one file. Throws Error unless it keeps all rules of the format: offsets tile the buffer, sizes agree, and
// no name occurs twice.
SafeTensors read_safetensors_header(const ByteSource& source);
// Reads all headers. `path` is a .safetensors file, an index .json, or a folder with either of them. Throws Error when it
// cannot.
SafeTensors open_safetensors(FileSystem& files, const std::string& path);

// What write_safetensors needs to know about a tensor, and how it gets its contiguous bytes. It asks for each tensor once.
struct SafeTensorSpec {
  Dtype dtype = Dtype::Float;
  Shape sizes;
};
using TensorBytes = std::function<std::string(const std::string& name)>;
// Writes the tensors into a folder, in the order of names: as one file, or as several and their index when it would have more
// than `file_bytes_max` bytes. The files are durable when it returns. Throws Error when it cannot.
void write_safetensors(FileSystem& files, const std::string& folder, const std::map<std::string, SafeTensorSpec>& tensors,
                       const TensorBytes& data, uint64_t file_bytes_max = uint64_t{5} << 30,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});
// Writes one file of this path, however large. The file is durable when it returns. Throws Error when it cannot.
void write_safetensors_file(FileSystem& files, const std::string& path, const std::map<std::string, SafeTensorSpec>& tensors,
                            const TensorBytes& data, const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace shardproof::checkpoint
