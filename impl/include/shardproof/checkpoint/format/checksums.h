// The sidecar `.shardproof` of a checkpoint: a checksum of every entry and of `.metadata`. Checkpoints are verified against it.
// This header does not include Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/checkpoint/format/dcp.h"

namespace shardproof::checkpoint {

inline constexpr const char* kSidecarFile = ".shardproof";

struct Checksums {
  std::map<std::pair<std::string, uint64_t>, uint32_t> entries;  // (file, offset) -> the CRC-32 of the extent's bytes
  std::map<std::string, uint64_t> file_bytes;                    // the length of every data file
  uint32_t metadata_crc = 0;
  uint64_t metadata_bytes = 0;
  bool operator==(const Checksums&) const = default;
};

void add(Checksums& checksums, const EntryFile::Written& written);
// Returns the text of the sidecar, which includes a checksum of itself.
std::string write_checksums(const Checksums& checksums);
// Reads the text of a sidecar. Throws Error, which names `name`, when it is damaged.
Checksums read_checksums(std::string_view text, const std::string& name);

// Writes `.metadata` and the sidecar into a folder whose entry files are written already. Both are durable when it returns.
void write_metadata_files(FileSystem& files, const std::string& folder, const Checkpoint& checkpoint, Checksums checksums);

// The CRC-32 of the bytes [begin, begin + bytes) of something.
struct SummedRun {
  uint64_t begin = 0, bytes = 0;
  uint32_t crc = 0;
  uint64_t end() const { return begin + bytes; }
  bool operator==(const SummedRun&) const = default;
};
// The CRC-32 of the bytes [0, bytes) of `name`, found without reading them: from runs that lie end to end. There is none when
// the runs do not reach from 0 to `bytes`, or when one of them lies in no such row. Throws Error when two rows disagree: then
// somebody read other bytes than are there.
std::optional<uint32_t> joined_crc(uint64_t bytes, std::vector<SummedRun> runs, const std::string& name);

// A checkpoint whose `.metadata` and sidecar were compared with their checksums, and whose files have the lengths that these
// say.
struct CheckedCheckpoint {
  Checkpoint checkpoint;
  std::optional<Checksums> sums;  // none in checkpoints of PyTorch
  uint32_t metadata_crc = 0;      // of `.metadata` as it is read: two saves never have the same
};
// What one rank does for all may be left out on the others.
struct OpenOptions {
  bool sums = true;   // the sidecar is read, and `.metadata` compared with it
  bool files = true;  // files have the lengths that they should have
};
// Reads no entry. Throws Error at the first thing that is wrong.
CheckedCheckpoint open_checked(FileSystem& files, const std::string& folder, const OpenOptions& options = {});

struct Problem {
  std::string file, tensor;  // the tensor is "" when the problem is not about a tensor
  std::string box;           // e.g. "[0:2, 0:4]"
  std::string what;
  std::string str() const;
};

struct Verified {
  std::vector<Problem> problems;
  bool sidecar = false;  // whether there is a sidecar; without one, as in checkpoints of PyTorch, the CRCs of the zips are used
  int64_t entries = 0;
  uint64_t bytes = 0;
};
// A part of the entries of a checkpoint. The wanted entries of tensors are dealt out to `count` parts of about as many bytes
// each, and this is part `index`. Every wanted entry is in exactly one part. What is not an entry, such as `.metadata`, is in
// every part.
struct VerifiedPart {
  std::function<bool(const Extent& entry)> wanted = {};  // asked once for each name of each entry; empty: all, and values too
  int64_t index = 0, count = 1;
};
// Reads and checks every byte of the part. Damage is reported as a problem. It throws Error only when the folder cannot be read
// at all. `progress` is called with the fraction that is done.
Verified verify_checkpoint(FileSystem& files, const std::string& folder, const std::function<void(double)>& progress = {},
                           const VerifiedPart& part = {});

}  // namespace shardproof::checkpoint
