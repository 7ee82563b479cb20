// What a command that started its ranks ends with.
#include <gtest/gtest.h>

#include "harness/commands/launch_options.h"
#include "harness/train/stop_request.h"

TEST(LaunchOptions, a_command_ends_as_its_ranks_do_or_with_2_where_that_would_mean_nothing) {
  for (const int code : {0, 1, 2, harness::kStoppedAsAsked}) EXPECT_EQ(harness::exit_code_of_ranks(code), code);
  for (const int code : {3, 74, 76, 127, 128 + 9}) EXPECT_EQ(harness::exit_code_of_ranks(code), 2) << code;
}
