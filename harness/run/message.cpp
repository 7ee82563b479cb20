#include "harness/run/message.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <new>
#include <sstream>

#include "shardproof/base/check.h"
#include "shardproof/base/escape.h"

namespace harness {

std::string message_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return "out of memory; use a smaller model, mesh or batch";
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return shardproof::escaped_lines(torch_error ? torch_error->what_without_backtrace() : error.what());
}

std::string words_of(const std::string& text) {
  const auto is_plain = [](unsigned char letter) {
    return std::isalpha(letter) || letter == ',' || letter == ':' || letter == '_';
  };
  std::istringstream words(text.substr(0, text.find('\n')));
  std::string plain;
  for (std::string word; words >> word;)
    if (std::ranges::all_of(word, is_plain)) plain += (plain.empty() ? "" : " ") + word;
  return plain;
}

std::string origin_of(const std::exception& error) {
  std::string origin;
  if (const auto* own = dynamic_cast<const shardproof::Error*>(&error)) origin = own->origin().str();
  if (const auto* broken = dynamic_cast<const shardproof::BrokenInvariant*>(&error)) origin = broken->origin().str();
  return origin.empty() ? words_of(message_of(error)) : origin;
}

}  // namespace harness
