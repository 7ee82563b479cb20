#include "checkpoint/format/zip_format.h"
#include "shardproof/base/check.h"
#include "internal/checkpoint/format/crc32.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

using namespace zip;

constexpr uint64_t kFlags = 0x0808;  // sizes and CRC follow the payload; names are UTF-8

class Bytes {
 public:
  Bytes& number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) text_.push_back(static_cast<char>(value >> (8 * i)));
    return *this;
  }
  Bytes& text(std::string_view text) {
    text_.append(text);
    return *this;
  }
  const std::string& str() const { return text_; }

 private:
  std::string text_;
};

bool wide(uint64_t number) {
  return number >= kNoBytes;
}
uint64_t narrow(uint64_t number) {
  return wide(number) ? kNoBytes : number;
}

}  // namespace

void ZipWriter::emit(std::string_view data) {
  sink_(data.data(), data.size());
  position_ += data.size();
}

void ZipWriter::add(const std::string& name, std::string_view data) {
  begin(name, data.size());
  payload(data.data(), data.size());
  end();
}

void ZipWriter::begin(const std::string& name, uint64_t bytes) {
  SHARD_CHECK(left_ == 0 && name.size() < 0x8000, "zip", "record {} cannot begin here", name);
  Bytes extra;
  if (wide(bytes)) extra.number(kWideId, 2).number(16, 2).number(bytes, 8).number(bytes, 8);
  const uint64_t before = position_ + kLocalBytes + name.size() + extra.str().size() + 4;
  const uint64_t padding = (kAlignment - before % kAlignment) % kAlignment;
  extra.number(kPaddingId, 2).number(padding, 2).text(std::string(padding, 'Z'));
  Bytes header;
  header.number(kLocalMagic, 4).number(wide(bytes) ? 45 : 20, 2).number(kFlags, 2).number(0, 2).number(0, 4).number(0, 4);
  header.number(narrow(bytes), 4).number(narrow(bytes), 4).number(name.size(), 2).number(extra.str().size(), 2);
  records_.push_back({name, position_, bytes, 0});
  emit(header.text(name).text(extra.str()).str());
  left_ = bytes;
}

void ZipWriter::payload(const void* data, size_t bytes) {
  SHARD_CHECK(bytes <= left_, "zip", "{} bytes more than announced", bytes - left_);
  records_.back().crc = crc32(records_.back().crc, data, bytes);
  emit({static_cast<const char*>(data), bytes});
  left_ -= bytes;
}

void ZipWriter::payload_elsewhere(uint32_t crc) {
  SHARD_CHECK(left_ == records_.back().bytes, "zip", "a part of the payload was written already");
  records_.back().crc = crc;
  position_ += left_;
  left_ = 0;
}

void ZipWriter::end() {
  SHARD_CHECK(left_ == 0, "zip", "{} bytes of the payload are missing", left_);
  const Written& record = records_.back();
  const int size = wide(record.bytes) ? 8 : 4;
  emit(Bytes().number(kDescriptorMagic, 4).number(record.crc, 4).number(record.bytes, size).number(record.bytes, size).str());
}

void ZipWriter::finish() {
  const uint64_t directory = position_;
  for (const Written& record : records_) {
    Bytes extra;
    if (wide(record.bytes)) extra.number(record.bytes, 8).number(record.bytes, 8);
    if (wide(record.header_offset)) extra.number(record.header_offset, 8);
    Bytes field;
    if (!extra.str().empty()) field.number(kWideId, 2).number(extra.str().size(), 2).text(extra.str());
    Bytes entry;
    const int version = field.str().empty() ? 20 : 45;
    entry.number(kCentralMagic, 4).number(version, 2).number(version, 2).number(kFlags, 2).number(0, 2).number(0, 4);
    entry.number(record.crc, 4).number(narrow(record.bytes), 4).number(narrow(record.bytes), 4);
    entry.number(record.name.size(), 2).number(field.str().size(), 2).number(0, 2).number(0, 8);
    emit(entry.number(narrow(record.header_offset), 4).text(record.name).text(field.str()).str());
  }
  const uint64_t bytes = position_ - directory, count = records_.size(), end64 = position_;
  const bool needs_wide = wide(directory) || wide(bytes) || count >= 0xFFFF;
  if (needs_wide) {
    Bytes record;
    record.number(kEnd64Magic, 4).number(kEnd64Bytes - 12, 8).number(45, 2).number(45, 2).number(0, 8);
    emit(record.number(count, 8).number(count, 8).number(bytes, 8).number(directory, 8).str());
    emit(Bytes().number(kLocatorMagic, 4).number(0, 4).number(end64, 8).number(1, 4).str());
  }
  const uint64_t short_count = needs_wide ? 0xFFFF : count;
  Bytes end;
  end.number(kEndMagic, 4).number(0, 4).number(short_count, 2).number(short_count, 2);
  emit(end.number(narrow(bytes), 4).number(narrow(directory), 4).number(0, 2).str());
}

}  // namespace shardproof::checkpoint
