#include "harness/case/case_scanner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "shardproof/base/check.h"

namespace harness {
namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

template <class Number>
bool read_whole(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

void Scanner::fail(size_t column, const std::string& expected) const {
  throw shardproof::Error(fmt::format("[case] column {}: expected {}\n  {}\n  {}^", column + 1, expected, text_,
                                      std::string(column, ' ')));
}

void Scanner::skip_spaces() {
  while (position_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[position_]))) ++position_;
}

bool Scanner::at_end() {
  skip_spaces();
  return position_ == text_.size();
}

bool Scanner::comes(char c) {
  skip_spaces();
  return position_ < text_.size() && text_[position_] == c;
}

bool Scanner::accept(char c) {
  if (position_ >= text_.size() || text_[position_] != c) return false;
  ++position_;
  return true;
}

void Scanner::expect(char c, const char* what) {
  if (!accept(c)) fail(position_, fmt::format("'{}' {}", c, what));
}

std::string Scanner::word(const char* expected) {
  skip_spaces();
  const size_t begin = position_;
  while (position_ < text_.size() && is_word(text_[position_])) ++position_;
  if (begin == position_) fail(begin, expected);
  return std::string(text_.substr(begin, position_ - begin));
}

std::vector<Scanner::Argument> Scanner::arguments() {
  std::vector<Argument> list;
  if (!accept('(')) return list;
  if (accept(')')) return list;
  do {
    skip_spaces();
    Argument argument;
    argument.column = position_;
    argument.key = word("a name");
    for (const Argument& earlier : list)
      if (earlier.key == argument.key) fail(argument.column, fmt::format("'{}' once only", argument.key));
    argument.has_value = accept('=');
    argument.value_column = position_;
    if (argument.has_value) {
      const size_t begin = position_;
      while (position_ < text_.size() && std::string_view(",) ").find(text_[position_]) == std::string_view::npos) ++position_;
      argument.value = std::string(text_.substr(begin, position_ - begin));
    }
    list.push_back(std::move(argument));
    if (position_ < text_.size() && text_[position_] == ' ') fail(position_, "')' or ',' after an argument");
  } while (accept(','));
  expect(')', "or ',' after an argument");
  return list;
}

int64_t Scanner::integer(const char* what) {
  const size_t begin = position_;
  while (position_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[position_]))) ++position_;
  int64_t value = 0;
  if (!read_whole(text_.substr(begin, position_ - begin), value)) fail(begin, what);
  return value;
}

int64_t Scanner::integer(const Argument& argument) const {
  int64_t value = 0;
  if (!read_whole(argument.value, value)) fail(argument.value_column, fmt::format("{}=INTEGER", argument.key));
  return value;
}

double Scanner::number(const Argument& argument) const {
  double value = 0;
  if (!read_whole(argument.value, value) || !std::isfinite(value))
    fail(argument.value_column, fmt::format("{}=NUMBER", argument.key));
  return value;
}

bool Scanner::flag(const Argument& argument) const {
  if (argument.has_value && argument.value != "0" && argument.value != "1")
    fail(argument.value_column, fmt::format("{0}, {0}=1 or {0}=0", argument.key));
  return !argument.has_value || argument.value == "1";
}

std::vector<int64_t> Scanner::integers(const Argument& argument) const {
  std::vector<int64_t> values;
  size_t begin = 0;
  while (begin <= argument.value.size()) {
    const size_t end = std::min(argument.value.find('-', begin), argument.value.size());
    int64_t value = 0;
    if (!read_whole(std::string_view(argument.value).substr(begin, end - begin), value))
      fail(argument.value_column + begin, fmt::format("an integer, as in {}=5-7-3", argument.key));
    values.push_back(value);
    begin = end + 1;
  }
  return values;
}

size_t Scanner::choice(const Argument& argument, const std::vector<std::string>& names) const {
  const auto found = std::ranges::find(names, argument.value);
  if (found == names.end()) fail(argument.value_column, fmt::format("{}={}", argument.key, fmt::join(names, "|")));
  return static_cast<size_t>(found - names.begin());
}

}  // namespace harness
