// A PyTorch Distributed Checkpoint: a folder with `.metadata` and files of entries. No Torch.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "shardproof/algebra/layout.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/file_system.h"
#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {

// Bytes [offset, offset + length) of a file of the checkpoint's folder.
struct Extent {
  std::string file;
  uint64_t offset = 0, length = 0;
  bool operator==(const Extent&) const = default;
};

// A rectangular part of a tensor, and the entry that holds it.
struct Chunk {
  Shape offsets, sizes;
  Extent extent;
  Box box() const;
  bool operator==(const Chunk&) const = default;
};

struct StoredTensor {
  Dtype dtype = Dtype::Float;
  Shape sizes;
  std::vector<Chunk> chunks;  // a 0-dim tensor has one, with empty offsets and sizes
  bool operator==(const StoredTensor&) const = default;
};

// Where a name lies in the nested dict that it stands for: ("optim", "param_groups", 0, "lr").
using PathElement = std::variant<std::string, int64_t>;
using Path = std::vector<PathElement>;

struct Checkpoint {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, Extent> values;  // what is no tensor: one entry each
  std::map<std::string, Path> paths;     // names that are absent here are their own path
  bool has_checksums = false;            // a sidecar belongs to it; see checksums.h
  bool operator==(const Checkpoint&) const = default;
};

inline constexpr const char* kMetadataFile = ".metadata";

// `.metadata` of PyTorch 2.1 to 2.11; fields that are unknown are ignored, missing ones defaulted. Law: read_metadata(
// write_metadata(c)) == c. Throws Error naming `name` and the tensor; see also `validate`.
Checkpoint read_metadata(std::string_view bytes, const std::string& name);
// As torch.distributed.checkpoint.load reads it.
std::string write_metadata(const Checkpoint& checkpoint);

// Throws Error naming tensor, box and file unless: chunks lie inside their tensors, do not overlap and fill them; files stay
// inside the folder; extents do not overlap unless equal.
void validate(const Checkpoint& checkpoint, const std::string& name);
// That files exist and are long enough for their extents.
void validate_files(const Checkpoint& checkpoint, const std::string& folder);
// Reads and validates, files included.
Checkpoint open_checkpoint(FileSystem& files, const std::string& folder);

// Where the entry of a value is read: its plain value.
Value read_value(FileSystem& files, const std::string& folder, const std::string& name, const Extent& extent);

// One rank's file of entries, written front to back; values first, as PyTorch does. Every member throws Error naming the path.
class EntryFile {
 public:
  // `file`: the name in the folder, "__0_0.distcp" for rank 0.
  EntryFile(FileSystem& files, const std::string& folder, std::string file);
  struct Written {
    Extent extent;
    uint32_t crc;  // of the extent's bytes, for the sidecar
  };
  Written add_value(const Value& value);
  // `data`: contiguous elements.
  Written add_tensor(Dtype dtype, const Shape& sizes, const void* data);
  // Durable when this returns.
  void finish();

 private:
  std::string file_;
  OutputFile output_;
};
std::string entry_file_name(int64_t rank, int64_t index = 0);

}  // namespace shardproof::checkpoint
