// Schedules of the learning rate, against values worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "properties/kit/expect_error.h"
#include "shardproof/optim/lr_schedule.h"

using namespace shardproof;

namespace {

std::vector<double> factors(int64_t steps, const std::function<double(int64_t)>& schedule) {
  std::vector<double> found;
  for (int64_t step = 0; step < steps; ++step) found.push_back(schedule(step));
  return found;
}

}  // namespace

TEST(LrSchedule, rises_to_one_and_stays_there) {
  EXPECT_EQ(factors(6, [](int64_t step) { return warmup_constant(step, 4); }), (std::vector<double>{0.25, 0.5, 0.75, 1, 1, 1}));
  EXPECT_EQ(warmup_constant(0, 0), 1);
}

TEST(LrSchedule, is_stable_until_it_decays_in_a_straight_line) {
  EXPECT_EQ(factors(12, [](int64_t step) { return warmup_stable_decay(step, 2, 10, 4, 0.5); }),
            (std::vector<double>{0.5, 1, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5}));
  // Without a decay it stays at 1 until the end, and without a stable part it is linear.
  EXPECT_EQ(factors(4, [](int64_t step) { return warmup_stable_decay(step, 1, 3, 0); }), (std::vector<double>{1, 1, 1, 0}));
  for (int64_t step = 0; step < 12; ++step)
    EXPECT_EQ(warmup_stable_decay(step, 3, 10, 7, 0.1), warmup_linear(step, 3, 10, 0.1)) << step;
}

TEST(LrSchedule, falls_as_the_inverse_of_the_root_of_the_step) {
  EXPECT_EQ(factors(4, [](int64_t step) { return warmup_inverse_sqrt(step, 4); }), (std::vector<double>{0.25, 0.5, 0.75, 1}));
  EXPECT_EQ(warmup_inverse_sqrt(15, 4), 0.5);
  EXPECT_EQ(warmup_inverse_sqrt(63, 4), 0.25);
  EXPECT_EQ(warmup_inverse_sqrt(0, 0), 1);
  EXPECT_EQ(warmup_inverse_sqrt(3, 0), 0.5);
}

TEST(LrSchedule, numbers_that_make_no_sense_are_an_error) {
  expect_error([] { warmup_stable_decay(0, 4, 10, 7); }, {"decay <= total - warmup, got decay 7, total 10 and warmup 4"});
  expect_error([] { warmup_stable_decay(0, 4, 10, -1); }, {"0 <= decay"});
  expect_error([] { warmup_stable_decay(0, 4, 10, 3, 2); }, {"last"});
  expect_error([] { warmup_constant(0, -1); }, {"got -1 and 0"});
  expect_error([] { warmup_inverse_sqrt(-2, 1); }, {"got 1 and -2"});
}
