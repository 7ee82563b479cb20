#include "testing/device/free_ranges.h"

#include <iterator>

#include "shardproof/base/check.h"

namespace shardproof {

char* FreeRanges::take(size_t bytes) {
  const auto smallest = by_size_.lower_bound({bytes, nullptr});
  if (smallest == by_size_.end()) return nullptr;
  const auto [size, begin] = *smallest;
  erase(by_address_.find(begin));
  if (size > bytes) insert(begin + bytes, size - bytes);
  return begin;
}

void FreeRanges::give(char* begin, size_t bytes) {
  auto next = by_address_.lower_bound(begin);
  const auto previous = next == by_address_.begin() ? by_address_.end() : std::prev(next);
  SHARD_CHECK(next == by_address_.end() || begin + bytes <= next->first, "host pool", "{} bytes are given back twice", bytes);
  if (previous != by_address_.end()) {
    char* const end = previous->first + previous->second;
    SHARD_CHECK(end <= begin, "host pool", "{} bytes are given back twice", bytes);
    if (end == begin) {
      begin = previous->first;
      bytes += previous->second;
      erase(previous);
    }
  }
  if (next != by_address_.end() && begin + bytes == next->first) {
    bytes += next->second;
    erase(next);
  }
  insert(begin, bytes);
}

size_t FreeRanges::bytes_before(const char* end) const {
  auto next = by_address_.lower_bound(const_cast<char*>(end));
  if (next == by_address_.begin()) return 0;
  --next;
  return next->first + next->second == end ? next->second : 0;
}

void FreeRanges::each(const std::function<void(char*, size_t)>& visit) const {
  for (const auto& [begin, bytes] : by_address_) visit(begin, bytes);
}

void FreeRanges::erase(ByAddress::iterator range) {
  bytes_ -= range->second;
  by_size_.erase({range->second, range->first});
  by_address_.erase(range);
}

void FreeRanges::insert(char* begin, size_t bytes) {
  bytes_ += bytes;
  by_size_.insert({bytes, begin});
  by_address_[begin] = bytes;
}

}  // namespace shardproof
