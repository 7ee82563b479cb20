// A copy past the caches copies what memcpy does, wherever both lie.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "internal/base/stream_copy.h"

RC_GTEST_PROP(StreamCopy, copies_every_byte_and_no_other, ()) {
  const auto bytes = *rc::gen::inRange<size_t>(0, 400), from = *rc::gen::inRange<size_t>(0, 70),
             to = *rc::gen::inRange<size_t>(0, 70);
  std::vector<unsigned char> source(from + bytes + 1), target(to + bytes + 70, 0xee);
  std::iota(source.begin(), source.end(), static_cast<unsigned char>(1));
  std::vector<unsigned char> wanted = target;
  std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), bytes, wanted.begin() + static_cast<std::ptrdiff_t>(to));
  shardproof::stream_copy(target.data() + to, source.data() + from, bytes);
  RC_ASSERT(target == wanted);
}
