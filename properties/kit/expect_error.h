// Expects the caller's mistake to be refused by a message that contains every one of `parts`.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "shardproof/base/check.h"

namespace shardproof {

template <typename Action>
void expect_error(Action action, std::initializer_list<std::string> parts) {
  try {
    action();
    ADD_FAILURE() << "nothing was refused; expected an error with \"" << *parts.begin() << "\"";
  } catch (const Error& error) {
    for (const std::string& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << error.what() << "\n lacks: " << part;
  }
}

}  // namespace shardproof
