#include "internal/checkpoint/format/zip_file.h"

#include <algorithm>
#include <set>

#include "checkpoint/format/zip_format.h"
#include "shardproof/base/check.h"
#include "internal/checkpoint/format/crc32.h"

namespace shardproof::checkpoint {
namespace {

using namespace zip;

constexpr uint64_t kDirectoryBytesMax = uint64_t{1} << 30;
constexpr uint64_t kSummedBytes = uint64_t{256} << 10;  // summed while it lies in the cache

// Little-endian numbers out of bytes, none behind their end.
class Fields {
 public:
  Fields(std::string_view data, const std::string& name) : data_(data), name_(name) {}
  uint64_t number(size_t bytes) {
    const std::string_view text = take(bytes);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(static_cast<unsigned char>(text[i])) << (8 * i);
    return value;
  }
  std::string_view take(uint64_t bytes) {
    SHARD_REQUIRE(bytes <= data_.size() - at_, "zip", "{}: its directory is cut off", name_);
    const std::string_view text = data_.substr(at_, bytes);
    at_ += bytes;
    return text;
  }
  bool done() const { return at_ == data_.size(); }
  size_t left() const { return data_.size() - at_; }

 private:
  std::string_view data_;
  const std::string& name_;
  size_t at_ = 0;
};

struct Directory {
  uint64_t offset = 0, bytes = 0, records = 0;
};

// The end record may be followed by nothing: torch.save writes no comment.
Directory find_directory(const ByteSource& source) {
  const std::string& name = source.name();
  const uint64_t size = source.size();
  SHARD_REQUIRE(size >= kEndBytes, "zip", "{}: {} bytes are too few for a zip file", name, size);
  const uint64_t end_at = size - kEndBytes;
  const std::string end = source.read_string(end_at, kEndBytes, kEndBytes);
  Fields fields(end, name);
  SHARD_REQUIRE(fields.number(4) == kEndMagic, "zip", "{}: no zip file ends here. Was it cut off?", name);
  SHARD_REQUIRE(fields.number(2) == 0 && fields.number(2) == 0, "zip", "{}: a zip in several volumes", name);
  Directory found;
  const uint64_t records_here = fields.number(2);
  found.records = fields.number(2);
  found.bytes = fields.number(4);
  found.offset = fields.number(4);
  SHARD_REQUIRE(records_here == found.records && fields.number(2) == 0, "zip", "{}: its end record is damaged", name);
  uint64_t directory_end = end_at;
  // torch.save writes the wide end record always, needed or not.
  const std::string locator =
      end_at >= kLocatorBytes ? source.read_string(end_at - kLocatorBytes, kLocatorBytes, kLocatorBytes) : std::string(4, '\0');
  Fields where(locator, name);
  const bool is_wide = where.number(4) == kLocatorMagic;
  SHARD_REQUIRE(is_wide || (found.records != 0xFFFF && found.bytes != kNoBytes && found.offset != kNoBytes), "zip",
                "{}: its zip64 locator is damaged", name);
  if (is_wide) {
    where.number(4);
    directory_end = where.number(8);
    const std::string end64 = source.read_string(directory_end, kEnd64Bytes, kEnd64Bytes);
    Fields wide(end64, name);
    SHARD_REQUIRE(wide.number(4) == kEnd64Magic, "zip", "{}: its zip64 end record is damaged", name);
    wide.take(8 + 2 + 2 + 4 + 4 + 8);
    found.records = wide.number(8);
    found.bytes = wide.number(8);
    found.offset = wide.number(8);
  }
  SHARD_REQUIRE(found.offset <= directory_end && found.bytes == directory_end - found.offset, "zip",
                "{}: its directory of {} bytes at {} does not end where it should, at {}", name, found.bytes, found.offset,
                directory_end);
  SHARD_REQUIRE(found.records <= found.bytes / kCentralBytes, "zip", "{}: {} records do not fit its directory", name,
                found.records);
  return found;
}

struct Central {
  ZipRecord record;
  uint64_t header_offset = 0;
};

void read_wide_sizes(Central& entry, std::string_view extra, const std::string& name, uint64_t& stored_bytes) {
  Fields fields(extra, name);
  while (fields.left() >= 4) {
    const uint64_t id = fields.number(2), bytes = fields.number(2);
    const std::string_view data = fields.take(bytes);
    if (id != kWideId) continue;
    Fields wide(data, name);
    if (entry.record.bytes == kNoBytes) entry.record.bytes = wide.number(8);
    if (stored_bytes == kNoBytes) stored_bytes = wide.number(8);
    if (entry.header_offset == kNoBytes) entry.header_offset = wide.number(8);
  }
}

Central read_central(Fields& fields, const std::string& name) {
  SHARD_REQUIRE(fields.number(4) == kCentralMagic, "zip", "{}: its directory is damaged", name);
  fields.take(4);
  const uint64_t flags = fields.number(2), method = fields.number(2);
  fields.take(4);
  Central entry;
  entry.record.crc = static_cast<uint32_t>(fields.number(4));
  uint64_t stored_bytes = fields.number(4);
  entry.record.bytes = fields.number(4);
  const uint64_t name_bytes = fields.number(2), extra_bytes = fields.number(2), comment_bytes = fields.number(2);
  fields.take(8);
  entry.header_offset = fields.number(4);
  entry.record.name = fields.take(name_bytes);
  const std::string_view extra = fields.take(extra_bytes);
  fields.take(comment_bytes);
  read_wide_sizes(entry, extra, name, stored_bytes);
  SHARD_REQUIRE((flags & 1) == 0 && method == 0 && stored_bytes == entry.record.bytes, "zip",
                "{}: record {} is compressed or encrypted; torch.save stores records as they are", name, entry.record.name);
  return entry;
}

// Where the payload begins, out of the header before it.
void locate(const ByteSource& source, Central& entry, uint64_t directory_offset) {
  const std::string name = source.name();
  ZipRecord& record = entry.record;
  SHARD_REQUIRE(entry.header_offset <= directory_offset && directory_offset - entry.header_offset >= kLocalBytes, "zip",
                "{}: record {} lies outside", name, record.name);
  const std::string header = source.read_string(entry.header_offset, kLocalBytes, kLocalBytes);
  Fields fields(header, name);
  SHARD_REQUIRE(fields.number(4) == kLocalMagic, "zip", "{}: the header of record {} is damaged", name, record.name);
  fields.take(22);
  const uint64_t name_bytes = fields.number(2), extra_bytes = fields.number(2);
  record.offset = entry.header_offset + kLocalBytes + name_bytes + extra_bytes;
  SHARD_REQUIRE(record.offset <= directory_offset && record.bytes <= directory_offset - record.offset, "zip",
                "{}: record {} of {} bytes lies outside", name, record.name, record.bytes);
  SHARD_REQUIRE(source.read_string(entry.header_offset + kLocalBytes, name_bytes, 0xFFFF) == record.name, "zip",
                "{}: record {} has another name in its header", name, record.name);
}

void require_apart(const std::vector<Central>& entries, const std::string& name) {
  std::vector<const Central*> order;
  std::set<std::string_view> names;
  for (const Central& entry : entries) {
    order.push_back(&entry);
    SHARD_REQUIRE(names.insert(entry.record.name).second, "zip", "{}: two records are called {}", name, entry.record.name);
  }
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->header_offset < b->header_offset; });
  for (size_t i = 1; i < order.size(); ++i)
    SHARD_REQUIRE(order[i - 1]->record.offset + order[i - 1]->record.bytes <= order[i]->header_offset, "zip",
                  "{}: records {} and {} overlap", name, order[i - 1]->record.name, order[i]->record.name);
}

}  // namespace

std::vector<ZipRecord> read_zip(const ByteSource& source) {
  const std::string name = source.name();
  const Directory directory = find_directory(source);
  const std::string text = source.read_string(directory.offset, directory.bytes, kDirectoryBytesMax);
  Fields fields(text, name);
  std::vector<Central> entries;
  for (uint64_t i = 0; i < directory.records; ++i) {
    entries.push_back(read_central(fields, name));
    locate(source, entries.back(), directory.offset);
  }
  SHARD_REQUIRE(fields.done(), "zip", "{}: its directory holds more than its {} records", name, directory.records);
  require_apart(entries, name);
  std::vector<ZipRecord> records;
  for (Central& entry : entries) records.push_back(std::move(entry.record));
  return records;
}

const ZipRecord* find_record(const std::vector<ZipRecord>& records, std::string_view name) {
  for (const ZipRecord& record : records) {
    const size_t slash = record.name.find('/');
    if (slash != std::string::npos && std::string_view(record.name).substr(slash + 1) == name) return &record;
  }
  return nullptr;
}

std::string read_record(const ByteSource& source, const ZipRecord& record, uint64_t bytes_max) {
  std::string data = source.read_string(record.offset, record.bytes, bytes_max);
  SHARD_REQUIRE(crc32(0, data.data(), data.size()) == record.crc, "zip", "{}: record {} is damaged, its CRC does not agree",
                source.name(), record.name);
  return data;
}

uint32_t crc_of(const ByteSource& source, uint64_t begin, uint64_t end) {
  std::string piece(std::min(end - begin, kSummedBytes), '\0');
  uint32_t crc = 0;
  while (begin < end) {
    const uint64_t bytes = std::min<uint64_t>(piece.size(), end - begin);
    source.read(begin, piece.data(), bytes);
    crc = crc32(crc, piece.data(), bytes);
    begin += bytes;
  }
  return crc;
}

void check_record(const ByteSource& source, const ZipRecord& record) {
  SHARD_REQUIRE(crc_of(source, record.offset, record.offset + record.bytes) == record.crc, "zip",
                "{}: record {} is damaged, its CRC does not agree", source.name(), record.name);
}

}  // namespace shardproof::checkpoint
