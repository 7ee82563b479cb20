// The format of PyTorch's Distributed Checkpoint (torch.distributed.checkpoint): a folder with `.metadata` and files of
// entries. This header does not include Torch.
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

// The bytes [offset, offset + length) of a file in the checkpoint's folder.
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
  std::vector<Chunk> chunks;  // a 0-dim tensor has one chunk, with empty offsets and sizes
  bool operator==(const StoredTensor&) const = default;
};

// The place of a name in the nested dict that was flattened, e.g. ("optim", "param_groups", 0, "lr").
using PathElement = std::variant<std::string, int64_t>;
using Path = std::vector<PathElement>;

struct Checkpoint {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, Extent> values;  // the entry of each item that is not a tensor
  std::map<std::string, Path> paths;     // a name that is missing here is its own path
  bool has_checksums = false;            // whether a sidecar belongs to the checkpoint (checksums.h)
  bool operator==(const Checkpoint&) const = default;
};

inline constexpr const char* kMetadataFile = ".metadata";

// Reads `.metadata` as PyTorch 2.1 to 2.11 write it. Unknown fields are ignored, and missing ones get their defaults. Throws
// Error, which names `name` and the tensor, when it cannot be read; `validate` checks what it says. Law:
// read_metadata(write_metadata(c)) == c.
Checkpoint read_metadata(std::string_view bytes, const std::string& name);
// Returns the bytes of a `.metadata` that torch.distributed.checkpoint.load can read.
std::string write_metadata(const Checkpoint& checkpoint);

// Throws Error, which names tensor, box and file, unless all of this holds: chunks lie inside their tensors, do not overlap and
// fill the tensors; files lie inside the folder; two extents are equal or do not overlap.
void validate(const Checkpoint& checkpoint, const std::string& name);
// Throws Error unless every file exists and is long enough for its extents.
void validate_files(FileSystem& files, const Checkpoint& checkpoint, const std::string& folder);
// Reads the checkpoint in the folder and validates it and its files.
Checkpoint open_checkpoint(FileSystem& files, const std::string& folder);

// Reads the entry of an item that is not a tensor, out of its file.
Value read_value(const ByteSource& file, const std::string& name, const Extent& extent);
Value read_value(FileSystem& files, const std::string& folder, const std::string& name, const Extent& extent);

// Writes one rank's file of entries from front to back. Values come first, as in PyTorch. Every member throws Error, which
// names the path, when it fails.
class EntryFile {
 public:
  // `file` is the name in the folder, "__0_0.distcp" for rank 0.
  EntryFile(FileSystem& files, const std::string& folder, std::string file);
  struct Written {
    Extent extent;
    uint32_t crc;  // the CRC-32 of the extent's bytes, for the sidecar
  };
  Written add_value(const Value& value);
  // Bytes that are such an entry already.
  Written add_entry(std::string_view entry);
  // `data` points to contiguous elements in host memory.
  Written add_tensor(Dtype dtype, const Shape& sizes, const void* data);
  // Completes the file, which is durable when this returns.
  void finish();

 private:
  std::string file_;
  OutputFile output_;
};
std::string entry_file_name(int64_t rank, int64_t index = 0);

}  // namespace shardproof::checkpoint
