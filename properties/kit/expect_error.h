// What a caller's mistake is answered with: the message of an Error, and the words that it must contain.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>

#include "shardproof/base/check.h"

namespace shardproof {

// The message of the Error that the action throws. The test fails when it throws none.
inline std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return "";
}

inline void expect_says(const std::string& message, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' in: " << message;
}

inline void expect_error(const std::function<void()>& action, std::initializer_list<std::string> parts) {
  expect_says(refusal(action), parts);
}

}  // namespace shardproof
