// Zip files as torch.save writes them: records stored, each payload aligned to 64 bytes. No Torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "shardproof/checkpoint/format/file_system.h"

namespace shardproof::checkpoint {

struct ZipRecord {
  std::string name;
  uint64_t offset = 0;  // of the payload in the source
  uint64_t bytes = 0;
  uint32_t crc = 0;
};

// The records of a zip that fills the source. Throws Error naming the source when it is torn, when a record is compressed or
// encrypted, lies outside, overlaps another or has the name of another. Payloads are neither read nor checked.
std::vector<ZipRecord> read_zip(const ByteSource& source);

// Null when absent. The first record of torch.save's zips is "ARCHIVE/data.pkl"; `name` is what follows "ARCHIVE/".
const ZipRecord* find_record(const std::vector<ZipRecord>& records, std::string_view name);

// The payload, its CRC checked. Throws Error when it has more than `bytes_max` or its CRC is wrong.
std::string read_record(const ByteSource& source, const ZipRecord& record, uint64_t bytes_max);
// Only the check, in pieces.
void check_record(const ByteSource& source, const ZipRecord& record);
// The CRC-32 of the bytes [begin, end) of a source, which are read in pieces.
uint32_t crc_of(const ByteSource& source, uint64_t begin, uint64_t end);

// Writes a zip from front to back into `sink`. CRCs follow payloads, so that those need not be known ahead.
class ZipWriter {
 public:
  using Sink = std::function<void(const void* data, size_t bytes)>;
  explicit ZipWriter(Sink sink) : sink_(std::move(sink)) {}
  void add(const std::string& name, std::string_view data);

  // A record in parts: begin, then `payload` as often as wanted, in all `bytes`, then end.
  void begin(const std::string& name, uint64_t bytes);
  void payload(const void* data, size_t bytes);
  // Instead of payload: the caller puts the bytes there himself, and their CRC is this.
  void payload_elsewhere(uint32_t crc);
  void end();

  void finish();
  uint64_t position() const { return position_; }

 private:
  void emit(std::string_view data);
  Sink sink_;
  struct Written {
    std::string name;
    uint64_t header_offset, bytes;
    uint32_t crc;
  };
  std::vector<Written> records_;
  uint64_t position_ = 0, left_ = 0;
};

}  // namespace shardproof::checkpoint
