// The bytes of a pickle, which are read from front to back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {

// Whatever is wrong throws Error, which names the pickle and the position of the opcode that is being read.
class PickleBytes {
 protected:
  PickleBytes(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  [[noreturn]] void fail(std::string_view what) const {
    throw Error(message("[pickle] {}: at byte {} it {}", name_, opcode_at_, what));
  }
  void require(bool condition, std::string_view what) const {
    if (!condition) [[unlikely]]
      fail(what);
  }

  std::string_view take(uint64_t bytes) {
    require(bytes <= bytes_.size() - at_, "is cut off");
    const std::string_view text = bytes_.substr(at_, bytes);
    at_ += bytes;
    return text;
  }
  uint64_t number(size_t bytes) {
    const std::string_view text = take(bytes);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(static_cast<unsigned char>(text[i])) << (8 * i);
    return value;
  }
  std::string line() {
    const size_t end = bytes_.find('\n', at_);
    require(end != std::string_view::npos, "is cut off");
    const std::string text(bytes_.substr(at_, end - at_));
    at_ = end + 1;
    return text;
  }

  std::string_view bytes_;
  const std::string& name_;
  size_t at_ = 0, opcode_at_ = 0;
};

}  // namespace shardproof::checkpoint
