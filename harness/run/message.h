// What an exception says to a reader, and what it is known by.
#pragma once

#include <exception>
#include <string>

namespace harness {

// Without the stack of frames that LibTorch's errors carry.
std::string message_of(const std::exception& error);

// Of the library's errors where they come from (shardproof/base/check.h). Of others the words of their first line, but for
// numbers, names and paths: nothing else is known of them.
std::string origin_of(const std::exception& error);
std::string words_of(const std::string& text);

}  // namespace harness
