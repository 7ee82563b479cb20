// Any box of a stored tensor, read with few large reads and bounded memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {

struct ReadOptions {
  uint64_t bytes_max = uint64_t{32} << 20;  // of buffers at a time
  uint64_t gap_max = 16 << 10;              // unwanted bytes that are read rather than skipped by another call
  // The CRC of an entry is checked whenever all of it is read. False: never, where somebody has done so already.
  bool check = true;
  // Of one that is read in part too, by reading the rest.
  bool check_parts = false;
};

struct ReadCounts {
  int64_t reads = 0;          // of payloads
  uint64_t bytes_read = 0;    // by them
  uint64_t bytes_used = 0;    // of them
  uint64_t buffer_bytes = 0;  // most held at a time
};

// Reads out of one checkpoint. Files stay open, entries stay parsed. One thread at a time.
class BoxReader {
 public:
  BoxReader(FileSystem& files, std::string folder, const Checkpoint& checkpoint, ReadOptions options = {});
  ~BoxReader();

  // Elements of `box` of tensor `name` into `destination`: a tensor of the box's sizes and the stored dtype, on any device.
  // Law: equals that slice of the whole tensor. Throws Error naming tensor, box and file; the destination is then undefined.
  void read(const std::string& name, const Box& box, const at::Tensor& destination);
  // The same into memory whose elements lie `strides` apart.
  void read(const std::string& name, const Box& box, void* destination, const Shape& strides);
  // The whole tensor.
  at::Tensor read(const std::string& name);

  const ReadCounts& counts() const { return counts_; }

 private:
  struct Entry;
  Entry& entry(const std::string& name, const StoredTensor& tensor, size_t chunk);
  const FileSource& source(const std::string& file);
  void read_part(const std::string& name, const StoredTensor& tensor, size_t chunk, const Box& box, char* destination,
                 const Shape& strides);

  FileSystem& files_;
  std::string folder_;
  const Checkpoint& checkpoint_;
  ReadOptions options_;
  ReadCounts counts_;
  std::map<std::string, std::unique_ptr<FileSource>> sources_;
  std::map<std::pair<std::string, uint64_t>, std::unique_ptr<Entry>> entries_;
};

}  // namespace shardproof::checkpoint
