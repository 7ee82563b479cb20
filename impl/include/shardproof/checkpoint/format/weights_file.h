// Weights in the files of other programs: safetensors, and what torch.save writes of a dict of tensors. Nothing of such a file
// is ever run (pickle.h). This header does not include Torch.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "shardproof/algebra/layout.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

// A tensor in a file: the element at `index` lies at offset + (sum of index * stride) * the size of an element.
struct StoredWeight {
  Dtype dtype = Dtype::Float;
  Shape sizes, strides;  // strides count elements
  std::string file;
  uint64_t offset = 0;

  // Of a matrix: the same elements as columns x rows. Throws Error, which calls the tensor `name`, when it has not two dims.
  StoredWeight turned(const std::string& name) const;
  // The rows [begin, begin + count) of dim 0.
  StoredWeight rows(int64_t begin, int64_t count) const;
};
using StoredWeights = std::map<std::string, StoredWeight>;

// Reads what describes the tensors, and none of them. `path` is
// - a .safetensors file, or a file of torch.save with a dict of tensors (.bin, .pt, .pth),
// - an index, *.index.json, of files of one of these kinds,
// - a folder with model.safetensors.index.json, model.safetensors, pytorch_model.bin.index.json or pytorch_model.bin, of which
//   the first that is there is taken.
// Of nested dicts in a file of torch.save the keys are joined by dots. `entry` is the key of the dict to take, such as "model"
// or "state_dict"; "": that of the file. Throws Error, which names the file, when there is something else than tensors in that
// dict, when a file is missing or damaged, or when its pickle asks for anything that is no tensor.
StoredWeights open_weights(FileSystem& files, const std::string& path, const std::string& entry = "");

// Reads boxes of such tensors, and no byte besides. It keeps files open. One thread at a time may use it.
class WeightReader {
 public:
  explicit WeightReader(FileSystem& files) : files_(files) {}
  // Reads the box into contiguous memory of the stored dtype. Throws Error, which names the file, when that fails.
  void read(const StoredWeight& weight, const Box& box, void* destination);
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  const FileSource& source(const std::string& file);

  FileSystem& files_;
  std::map<std::string, std::unique_ptr<FileSource>> sources_;
  uint64_t bytes_read_ = 0;
};

}  // namespace shardproof::checkpoint
