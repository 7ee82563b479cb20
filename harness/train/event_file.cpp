#include "harness/train/event_file.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "shardproof/base/check.h"

namespace harness {
namespace {

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string little_endian(uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

// The checksum of a record's length or data.
std::string masked_crc(const std::string& data) {
  uint32_t crc = ~uint32_t{0};
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) * 0x82f63b78);
  }
  return little_endian(std::rotr(~crc, 15) + 0xa282ead8, 4);
}

// Fields of protocol buffers: a key, which is the field's number and the kind of what follows, and that.
enum Kind : uint64_t { varint = 0, eight_bytes = 1, with_length = 2, four_bytes = 5 };
std::string number(uint64_t value) {
  std::string text;
  for (; value >= 0x80; value >>= 7) text += static_cast<char>(value | 0x80);
  return text + static_cast<char>(value);
}
std::string field(uint64_t id, Kind kind, const std::string& bytes) {
  return number(id << 3 | kind) + (kind == with_length ? number(bytes.size()) : "") + bytes;
}

std::string event(int64_t step, const std::string& what) {
  return field(1, eight_bytes, little_endian(std::bit_cast<uint64_t>(wall_time()), 8)) +
         field(2, varint, number(static_cast<uint64_t>(step))) + what;
}

std::unique_ptr<std::FILE, int (*)(std::FILE*)> new_file(const std::string& directory) {
  if (directory.empty()) return {nullptr, std::fclose};
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::string path =
      fmt::format("{}/events.out.tfevents.{:010.0f}.{}.{}.0", directory, wall_time(), host.data(), ::getpid());
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  SHARD_REQUIRE(file, "train", "cannot write {}: {}; name another folder with --tensorboard", path, std::strerror(errno));
  return {file, std::fclose};
}

}  // namespace

EventFile::EventFile(const std::string& directory, int64_t begins_with) : file_(new_file(directory)) {
  if (!file_) return;
  record(event(0, field(3, with_length, "brain.Event:2")));
  if (begins_with > 1) record(event(begins_with, field(7, with_length, field(1, varint, number(1)))));
}

void EventFile::scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  if (!file_) return;
  std::string summary;
  for (const auto& [tag, value] : values) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(value));
    summary += field(1, with_length, field(1, with_length, tag) + field(2, four_bytes, little_endian(bits, 4)));
  }
  record(event(step, field(5, with_length, summary)));
}

void EventFile::record(const std::string& data) {
  const std::string length = little_endian(data.size(), 8), bytes = length + masked_crc(length) + data + masked_crc(data);
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) == bytes.size();
  SHARD_REQUIRE(written && std::fflush(file_.get()) == 0, "train", "cannot write the event file of --tensorboard: {}",
                std::strerror(errno));
}

}  // namespace harness
