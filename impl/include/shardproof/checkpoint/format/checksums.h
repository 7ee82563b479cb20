// The sidecar `.shardproof` of a checkpoint: a checksum of every entry and of `.metadata`. Checkpoints are verified against it.
// This header does not include Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
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
// A part of the entries of a checkpoint. The entries of the wanted tensors are dealt out to `count` parts of about as many
// bytes each, and this is part `index`. Every entry is in exactly one part. What is not an entry, such as `.metadata`, is in
// every part.
struct VerifiedPart {
  std::function<bool(const std::string& tensor)> wanted = {};  // empty: all tensors, and values too
  int64_t index = 0, count = 1;
};
// Reads and checks every byte of the part. Damage is reported as a problem. It throws Error only when the folder cannot be read
// at all. `progress` is called with the fraction that is done.
Verified verify_checkpoint(FileSystem& files, const std::string& folder, const std::function<void(double)>& progress = {},
                           const VerifiedPart& part = {});

}  // namespace shardproof::checkpoint
