#include "checkpoint/format/pickle_writer.h"

#include <bit>
#include <limits>

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {

PickleWriter::PickleWriter(int protocol) : protocol_(protocol) {
  SHARD_REQUIRE(protocol == 2 || protocol == 4, "pickle", "protocol 2 and 4 are written, not {}", protocol);
  out_ = {'\x80', static_cast<char>(protocol)};
}

std::string PickleWriter::finish() {
  out_ += '.';
  return std::move(out_);
}

void PickleWriter::number(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i));
}

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value < 0x100) {
    out_ += 'K';
    number(static_cast<uint64_t>(value), 1);
  } else if (value >= 0 && value < 0x10000) {
    out_ += 'M';
    number(static_cast<uint64_t>(value), 2);
  } else if (value == static_cast<int32_t>(value)) {
    out_ += 'J';
    number(static_cast<uint64_t>(value), 4);
  } else {
    out_ += "\x8a\x08";
    number(static_cast<uint64_t>(value), 8);
  }
}

void PickleWriter::real(double value) {
  out_ += 'G';
  const auto bits = std::bit_cast<uint64_t>(value);
  for (int i = 7; i >= 0; --i) out_ += static_cast<char>(bits >> (8 * i));
}

// Whether the memo had it; else the caller writes it and it is remembered behind that.
bool PickleWriter::recall(const Memo& memo, std::string_view key) {
  const auto found = memo.find(key);
  if (found == memo.end()) return false;
  recall(found->second);
  return true;
}

void PickleWriter::remember(Memo& memo, std::string_view key) {
  memo.emplace(key, remember());
}

void PickleWriter::recall(size_t index) {
  if (index < 256) {
    out_ += 'h';
    number(index, 1);
  } else {
    out_ += 'j';
    number(index, 4);
  }
}

size_t PickleWriter::remember() {
  const size_t index = remembered_++;
  if (protocol_ == 4) {
    out_ += '\x94';
  } else if (index < 256) {
    out_ += 'q';
    number(index, 1);
  } else {
    out_ += 'r';
    number(index, 4);
  }
  return index;
}

void PickleWriter::string(std::string_view text) {
  SHARD_REQUIRE(text.size() <= std::numeric_limits<uint32_t>::max(), "pickle", "a string of {} bytes", text.size());
  if (recall(strings_, text)) return;
  if (protocol_ == 4 && text.size() < 256) {
    out_ += '\x8c';
    number(text.size(), 1);
  } else {
    out_ += 'X';
    number(text.size(), 4);
  }
  out_ += text;
  remember(strings_, text);
}

void PickleWriter::bytes(std::string_view bytes) {
  SHARD_REQUIRE(bytes.size() <= std::numeric_limits<uint32_t>::max(), "pickle", "{} bytes in one value", bytes.size());
  if (protocol_ == 4) {
    out_ += 'B';
    number(bytes.size(), 4);
    out_ += bytes;
    return;
  }
  std::string text;
  for (const char byte : bytes) {
    const auto code = static_cast<unsigned char>(byte);
    if (code >= 0x80) text += static_cast<char>(0xC0 | code >> 6);
    text += static_cast<char>(code < 0x80 ? code : 0x80 | (code & 0x3F));
  }
  constexpr std::string_view kEncode = "_codecs.encode";
  global(kEncode, kEncode.find('.'));
  string(own_strings_.emplace_back(std::move(text)));
  string("latin1");
  out_ += "\x86R";
}

void PickleWriter::global(std::string_view name, size_t module_chars) {
  if (recall(globals_, name)) return;
  out_ += 'c';
  out_ += name.substr(0, module_chars);
  out_ += '\n';
  out_ += name.substr(module_chars + 1);
  out_ += '\n';
  remember(globals_, name);
}

void PickleWriter::begin_tuple(size_t count) {
  if (count > 3) out_ += '(';
}
void PickleWriter::end_tuple(size_t count) {
  static constexpr char kTuples[] = {')', '\x85', '\x86', '\x87'};
  out_ += count > 3 ? 't' : kTuples[count];
}
void PickleWriter::begin_list(size_t count) {
  out_ += ']';
  if (count > 0) out_ += '(';
}
void PickleWriter::end_list(size_t count) {
  if (count > 0) out_ += 'e';
}
void PickleWriter::begin_dict(size_t count) {
  out_ += '}';
  if (count > 0) out_ += '(';
}
void PickleWriter::end_dict(size_t count) {
  if (count > 0) out_ += 'u';
}

}  // namespace shardproof::checkpoint
