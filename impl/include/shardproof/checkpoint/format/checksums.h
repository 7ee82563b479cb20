// The sidecar `.shardproof`: a checksum of every entry and of `.metadata`, and what a checkpoint is verified against. No Torch.
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
  std::map<std::pair<std::string, uint64_t>, uint32_t> entries;  // (file, offset) -> crc32 of the extent's bytes
  std::map<std::string, uint64_t> file_bytes;                    // length of every data file
  uint32_t metadata_crc = 0;
  uint64_t metadata_bytes = 0;
  bool operator==(const Checksums&) const = default;
};

void add(Checksums& checksums, const EntryFile::Written& written);
// `metadata`: the bytes of `.metadata`. The text has a checksum of itself.
std::string write_checksums(const Checksums& checksums);
// Throws Error naming `name`.
Checksums read_checksums(std::string_view text, const std::string& name);

// Writes `.metadata` and the sidecar, both durable, into a folder whose entry files are written.
void write_metadata_files(FileSystem& files, const std::string& folder, const Checkpoint& checkpoint, Checksums checksums);

struct Problem {
  std::string file, tensor;  // "" when it is about no tensor
  std::string box;           // "[0:2, 0:4]"
  std::string what;
  std::string str() const;
};

struct Verified {
  std::vector<Problem> problems;
  bool sidecar = false;  // without it (foreign checkpoints) zip CRCs stand in
  int64_t entries = 0;
  uint64_t bytes = 0;
};
// Which entries: those of the tensors that are wanted, and of these the bytes' `index`th of `count` equal parts, cut between
// entries. Every entry is in one part. What is no entry is in all of them.
struct VerifiedPart {
  std::function<bool(const std::string& tensor)> wanted = {};  // none: all, and values
  int64_t index = 0, count = 1;
};
// Reads every byte of the part. Damage is a problem, not an exception; Error only when the folder cannot be read at all.
// `progress` is told the fraction done.
Verified verify_checkpoint(FileSystem& files, const std::string& folder, const std::function<void(double)>& progress = {},
                           const VerifiedPart& part = {});

}  // namespace shardproof::checkpoint
