#include "shardproof/nn/sequence_lengths.h"

#include <atomic>

namespace shardproof {

std::map<int64_t, int64_t>& sequence_lengths() {
  thread_local std::map<int64_t, int64_t> lengths;
  return lengths;
}

int64_t new_sequence_number() {
  static std::atomic<int64_t> numbers = 0;
  return ++numbers;
}

}  // namespace shardproof
