// Two kinds of failure. A caller's mistake is a `shardproof::Error`: it says where, what was expected, what was found,
// who (rank, parameter) and what to do. A broken invariant of our own is a `BrokenInvariant`; its checks stay on in
// release builds. No Torch in this header.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

#include "shardproof/base/escape.h"

namespace shardproof {

// The caller, the input or the environment is wrong; the message says how to mend it. Messages repeat text that comes from
// files, so they are escaped: see escape.h.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(escaped_lines(message)) {}
};

// A loss, a gradient or a parameter is NaN or infinite; the message names step, rank and tensor.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

// This library is wrong.
class BrokenInvariant : public std::logic_error {
 public:
  explicit BrokenInvariant(const std::string& message) : std::logic_error(escaped_lines(message)) {}
};

}  // namespace shardproof

// SHARD_REQUIRE(sizes > 0, "mesh", "axis {} must have a size of at least 1, got {}", name, size)
#define SHARD_REQUIRE(condition, area, ...)                                                     \
  do {                                                                                          \
    if (!(condition)) [[unlikely]]                                                              \
      throw ::shardproof::Error("[" area "] " + ::fmt::format(__VA_ARGS__));                    \
  } while (false)

// SHARD_CHECK(offset % alignment == 0, "bucket", "offset {} of {} is not aligned", offset, name)
#define SHARD_CHECK(condition, area, ...)                                                                    \
  do {                                                                                                       \
    if (!(condition)) [[unlikely]]                                                                           \
      throw ::shardproof::BrokenInvariant("[" area "] broken invariant `" #condition "`: " +                 \
                                          ::fmt::format(__VA_ARGS__));                                       \
  } while (false)
