// Reads any box of a stored tensor, with few large reads and bounded memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {

struct ReadOptions {
  uint64_t bytes_max = uint64_t{32} << 20;  // the largest number of bytes in buffers at a time
  uint64_t gap_max = 16 << 10;              // a gap of at most so many unwanted bytes between wanted ones is read too
  // Whether the CRC of an entry is checked when all of the entry is read. Turn it off where the entries were checked before.
  bool check = true;
  // Whether the CRC of an entry that is read only in part is checked too. The rest of the entry is then read as well.
  bool check_parts = false;
  // Whether what surrounds the payload of an entry is checked too: against the sidecar's checksum of the whole entry, or where
  // there is no sidecar, against the CRCs in the entry.
  bool check_around = false;
};

// An entry of which less was read than its checksum covers.
struct PartlyRead {
  Extent entry;
  uint64_t payload_bytes = 0;
  std::vector<SummedRun> runs;  // of the payload, as they were read; none when they were too many to keep
};

struct ReadCounts {
  int64_t reads = 0;          // how many reads of payloads there were
  uint64_t bytes_read = 0;    // how many bytes they read
  uint64_t bytes_used = 0;    // how many of these bytes were wanted
  uint64_t buffer_bytes = 0;  // the largest number of bytes in buffers at a time
  uint64_t staged_bytes = 0;  // `load` only: the bytes that waited for the check of all before they were put into place
};

// Reads from one checkpoint. It keeps files open and remembers parsed entries. One thread at a time may use it.
class BoxReader {
 public:
  // `sums` is the content of the sidecar; null where there is none. It is used by `check_around`.
  BoxReader(FileSystem& files, std::string folder, const Checkpoint& checkpoint, ReadOptions options = {},
            const Checksums* sums = nullptr);
  ~BoxReader();

  // Reads the box of the tensor `name` into `destination`, a tensor of the box's sizes and the stored dtype on any device.
  // Throws Error, which names tensor, box and file, when that fails; the destination's values are then undefined. Law: the
  // result equals that slice of the whole tensor.
  void read(const std::string& name, const Box& box, const at::Tensor& destination);
  // Does the same for host memory, in which the elements of each dim lie `strides` elements apart.
  void read(const std::string& name, const Box& box, void* destination, const Shape& strides);
  // Returns the whole tensor.
  at::Tensor read(const std::string& name);

  // Opens the tensor's entries that have no elements. No box reads them, so nobody else would find them damaged.
  void check_without_elements(const std::string& name);
  // The entries whose payload was read and not compared with its checksum, because not all of it was read.
  std::vector<PartlyRead> partly_read() const;
  // Compares the CRC-32 of the payload of an entry, which the caller knows, with its checksum. Throws Error when they differ.
  // An entry that this reader did not read from is left alone.
  void compare(const Extent& entry, uint32_t payload_crc);

  const ReadCounts& counts() const { return counts_; }
  // A file of the checkpoint's folder, which it opens once.
  const FileSource& source(const std::string& file);

 private:
  struct Entry;
  void check_surroundings(Entry& entry, const Extent& extent, const SliceSource& slice);
  static void compare(const Entry& entry, uint32_t payload_crc);
  Entry& entry(const std::string& name, const StoredTensor& tensor, size_t chunk);
  void read_part(const std::string& name, const StoredTensor& tensor, size_t chunk, const Box& box, char* destination,
                 const Shape& strides);

  FileSystem& files_;
  std::string folder_;
  const Checkpoint& checkpoint_;
  ReadOptions options_;
  const Checksums* sums_;
  ReadCounts counts_;
  std::map<std::string, std::unique_ptr<FileSource>> sources_;
  std::map<std::pair<std::string, uint64_t>, std::unique_ptr<Entry>> entries_;
};

}  // namespace shardproof::checkpoint
