// The free ranges of an allocator's memory: which one a request gets, and how those that touch become one. No Torch.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <utility>

namespace shardproof {

// Addresses are only counted with, never read. Not safe for several threads.
class FreeRanges {
 public:
  // The start of so many bytes, which are free no more; null where no range has as many. They come from the smallest range
  // that has them, and of ranges of one size from the one that lies lowest. They are its lowest addresses.
  char* take(size_t bytes);
  // A range that is free from now on. It becomes one with those that touch it. Throws BrokenInvariant where it overlaps one.
  void give(char* begin, size_t bytes);

  size_t bytes() const { return bytes_; }                                        // of all ranges
  size_t bytes_before(const char* end) const;                                    // of the range that ends there; 0: none does
  void each(const std::function<void(char* begin, size_t bytes)>& visit) const;  // from the lowest

 private:
  using ByAddress = std::map<char*, size_t>;
  void erase(ByAddress::iterator range);
  void insert(char* begin, size_t bytes);

  ByAddress by_address_;
  std::set<std::pair<size_t, char*>> by_size_;
  size_t bytes_ = 0;
};

}  // namespace shardproof
