// The two kinds of failure. A caller's mistake throws a `shardproof::Error`, which says where it happened, what was expected,
// what was found, on which rank and for which parameter, and what to do. A defect of this library throws a `BrokenInvariant`;
// these checks stay on in release builds. This header does not include Torch.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "shardproof/base/escape.h"

namespace shardproof {

namespace detail {

template <class Value>
inline constexpr bool is_text = std::is_convertible_v<const std::remove_cvref_t<Value>&, std::string_view>;

// What a message shows of an argument: a text is escaped, and anything else is shown as it is.
template <class Value>
using Shown = std::conditional_t<is_text<Value>, std::string, Value>;
template <class Value>
decltype(auto) shown(Value&& value) {
  if constexpr (is_text<Value>)
    return escaped(value);
  else
    return std::forward<Value>(value);
}

}  // namespace detail

// fmt::format for messages. Texts among the arguments are escaped (escape.h), so a name from a file cannot add lines to a
// message.
template <class... Values>
std::string message(fmt::format_string<detail::Shown<Values>...> format, Values&&... values) {
  return fmt::format(format, detail::shown(std::forward<Values>(values))...);
}

// What a failure is known by, whatever numbers and names its message has: the area and the condition of a check, or the place
// in the source that throws.
class Origin {
 public:
  Origin(const char* check) : text_(check) {}
  Origin(std::string text) : text_(std::move(text)) {}
  // Of whoever calls what has this for a default. std::source_location would say the same; Clang has it from 16 on.
  static Origin here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return fmt::format("{}:{}", name_of(file), line);
  }
  const std::string& str() const { return text_; }

 private:
  static std::string_view name_of(std::string_view path) { return path.substr(path.rfind('/') + 1); }

  std::string text_;
};

// The caller, the input or the environment is wrong. The message says how to mend it. Messages repeat text that comes from
// files, so they are escaped (escape.h).
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, Origin origin = Origin::here())
      : std::runtime_error(escaped_lines(message)), origin_(std::move(origin)) {}
  const Origin& origin() const { return origin_; }

 private:
  Origin origin_;
};

// A loss, a gradient or a parameter is NaN or infinite. The message names the step, the rank and the tensor.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

// This library has a defect.
class BrokenInvariant : public std::logic_error {
 public:
  explicit BrokenInvariant(const std::string& message, Origin origin = Origin::here())
      : std::logic_error(escaped_lines(message)), origin_(std::move(origin)) {}
  const Origin& origin() const { return origin_; }

 private:
  Origin origin_;
};

}  // namespace shardproof

// Throws Error unless the condition holds:
//   SHARD_REQUIRE(size > 0, "mesh", "axis {} must have a size of at least 1, got {}", name, size)
#define SHARD_REQUIRE(condition, area, ...)                                                                    \
  do {                                                                                                         \
    if (!(condition)) [[unlikely]]                                                                             \
      throw ::shardproof::Error("[" area "] " + ::shardproof::message(__VA_ARGS__), "[" area "] " #condition); \
  } while (false)

// Throws BrokenInvariant unless the condition holds:
//   SHARD_CHECK(offset % alignment == 0, "bucket", "offset {} of {} is not aligned", offset, name)
#define SHARD_CHECK(condition, area, ...)                                                                                   \
  do {                                                                                                                      \
    if (!(condition)) [[unlikely]]                                                                                          \
      throw ::shardproof::BrokenInvariant(                                                                                  \
          "[" area "] broken invariant `" #condition "`: " + ::shardproof::message(__VA_ARGS__), "[" area "] " #condition); \
  } while (false)
