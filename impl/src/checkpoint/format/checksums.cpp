#include "shardproof/checkpoint/format/checksums.h"

#include <iterator>

#include "checkpoint/format/json_text.h"
#include "shardproof/base/check.h"
#include "internal/checkpoint/format/crc32.h"

namespace shardproof::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "shardproof checksums 1";

uint32_t sum(std::string_view text) {
  return crc32(0, text.data(), text.size());
}

// As nlohmann::json would print it, but without making an object for each entry.
std::string body_of(const Checksums& checksums) {
  std::string text = "{\"files\":{";
  auto entry = checksums.entries.begin();
  for (const auto& [file, bytes] : checksums.file_bytes) {
    text += fmt::format("{}{}:{{\"bytes\":{},\"entries\":[", text.ends_with('{') ? "" : ",", json(file).dump(), bytes);
    for (; entry != checksums.entries.end() && entry->first.first == file; ++entry)
      fmt::format_to(std::back_inserter(text), "{}[{},{}]", text.ends_with('[') ? "" : ",", entry->first.second, entry->second);
    text += "]}";
  }
  SHARD_CHECK(entry == checksums.entries.end(), "checkpoint", "the length of {} is missing", entry->first.first);
  fmt::format_to(std::back_inserter(text), "}},\"format\":\"{}\",\"metadata\":{{\"bytes\":{},\"crc32\":{}}}}}", kFormat,
                 checksums.metadata_bytes, checksums.metadata_crc);
  return text;
}

}  // namespace

void add(Checksums& checksums, const EntryFile::Written& written) {
  const Extent& extent = written.extent;
  checksums.entries[{extent.file, extent.offset}] = written.crc;
  uint64_t& bytes = checksums.file_bytes[extent.file];
  bytes = std::max(bytes, extent.offset + extent.length);
}

std::string write_checksums(const Checksums& checksums) {
  const std::string body = body_of(checksums);
  return fmt::format("{{\"body\":{},\"crc32\":{}}}\n", body, sum(body));
}

Checksums read_checksums(std::string_view text, const std::string& name) {
  const json whole = parse_json(text, name);
  Checksums checksums;
  try {
    const json& body = whole.at("body");
    SHARD_REQUIRE(body.at("format") == kFormat, "checkpoint", "{}: its format is not '{}'", name, kFormat);
    checksums.metadata_bytes = body.at("metadata").at("bytes").get<uint64_t>();
    checksums.metadata_crc = body.at("metadata").at("crc32").get<uint32_t>();
    for (const auto& [file, entry] : body.at("files").items()) {
      checksums.file_bytes[file] = entry.at("bytes").get<uint64_t>();
      for (const json& pair : entry.at("entries"))
        checksums.entries.insert_or_assign(checksums.entries.end(), {file, pair.at(0).get<uint64_t>()},
                                           pair.at(1).get<uint32_t>());
    }
  } catch (const json::exception& error) {
    throw Error(message("[checkpoint] {}: is no sidecar of checksums: {}", name, error.what()));
  }
  // Byte for byte what would be written: so its own sum covers every bit.
  SHARD_REQUIRE(write_checksums(checksums) == text, "checkpoint", "{}: is damaged, its own checksum does not agree", name);
  return checksums;
}

void write_metadata_files(FileSystem& files, const std::string& folder, const Checkpoint& given, Checksums checksums) {
  Checkpoint checkpoint = given;
  checkpoint.has_checksums = true;
  validate(checkpoint, folder + "/" + kMetadataFile);
  const std::string metadata = write_metadata(checkpoint);
  checksums.metadata_bytes = metadata.size();
  checksums.metadata_crc = sum(metadata);
  write_file(files, folder + "/" + kSidecarFile, write_checksums(checksums));
  write_file(files, folder + "/" + kMetadataFile, metadata);
}

}  // namespace shardproof::checkpoint
