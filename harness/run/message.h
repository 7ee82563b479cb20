// What an exception says to a reader.
#pragma once

#include <exception>
#include <string>

namespace harness {

// Without the stack of frames that LibTorch's errors carry.
std::string message_of(const std::exception& error);

}  // namespace harness
