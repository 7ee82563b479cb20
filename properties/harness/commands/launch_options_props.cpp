// What a command that started its ranks ends with, and how it is asked to end.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "harness/commands/launch_options.h"
#include "harness/train/stop_request.h"

TEST(LaunchOptions, a_command_ends_as_its_ranks_do_or_with_2_where_that_would_mean_nothing) {
  for (const int code : {0, 1, 2, harness::kStoppedAsAsked}) EXPECT_EQ(harness::exit_code_of_ranks(code), code);
  for (const int code : {3, 74, 76, 127, 128 + 9}) EXPECT_EQ(harness::exit_code_of_ranks(code), 2) << code;
}

TEST(StopRequests, signals_within_a_second_are_one_request_and_a_later_one_ends_the_process) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const harness::StopRequests stops;
        if (harness::stop_requested()) std::exit(1);
        for (const int signal : {SIGTERM, SIGTERM, SIGINT}) ::raise(signal);
        if (!harness::stop_requested()) std::exit(2);
        std::this_thread::sleep_for(std::chrono::milliseconds(1100));
        ::raise(SIGINT);
        std::exit(3);
      },
      testing::KilledBySignal(SIGINT), "");
}
