// Reads the words of a case's text and knows the column of each.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace harness {

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  // A key with an optional value, inside parentheses.
  struct Argument {
    std::string key, value;
    size_t column;        // of the key
    size_t value_column;  // of the value; where it should be if there is none
    bool has_value;
  };

  std::string word(const char* expected);  // [A-Za-z_][A-Za-z0-9_]*
  // "(key=value,flag,...)" or nothing; no key twice. A mesh is the same.
  std::vector<Argument> arguments();
  bool accept(char c);
  bool comes(char c);  // next, after spaces
  void expect(char c, const char* what);
  void skip_spaces();
  bool at_end();
  size_t column() const { return position_; }

  int64_t integer(const char* what);
  [[noreturn]] void fail(size_t column, const std::string& expected) const;

  // Values of arguments.
  int64_t integer(const Argument& argument) const;
  double number(const Argument& argument) const;
  bool flag(const Argument& argument) const;  // "tied" or "tied=0|1"
  std::vector<int64_t> integers(const Argument& argument) const;  // "5-7-3"
  size_t choice(const Argument& argument, const std::vector<std::string>& names) const;  // which of the names

 private:
  std::string_view text_;
  size_t position_ = 0;
};

}  // namespace harness
