// One program under many schedules of its threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "harness/case/case.h"
#include "harness/case/interleaving.h"
#include "harness/run/sharded_run.h"
#include "shardproof/comm/threads/schedule_policy.h"

namespace harness {

// The number-th schedule of a case: eager, latest, and then random ones and PCT with d = 2 and 3 in turn, drawn from the case's
// seed. `steps` is how many choices the eager schedule has.
Interleaving drawn_interleaving(const Case& c, int64_t number, int64_t steps);

// The first bits in which two runs of a case differ, or what one of them complains of.
std::optional<std::string> first_change(const Steps& before, const Steps& after);

// What became of the schedules of a program.
struct Schedules {
  int64_t runs = 0;
  int64_t distinct = 0;
  std::optional<Interleaving> failing;  // the first that failed; no other ran after it
  std::string what;
  bool all = true;  // every_schedule: none was left out
};

// Trains the case so many times, each time under another schedule, and demands the bits that it has without one.
Schedules try_schedules(const Case& c, int64_t count);

// What runs a program under a policy, and returns what is wrong.
using Scheduled = std::function<std::optional<std::string>(const std::shared_ptr<shardproof::SchedulePolicy>&)>;
// The same for a program that runs the case in another way.
Schedules try_schedules(const Case& c, int64_t count, const Scheduled& program);

// Every schedule of a small program, one by one, depth first, as in delay-bounded scheduling (Emmi, Qadeer, Rakamaric, POPL
// 2011): the first schedule lets a thread run until it has to wait, and then the first one that can go on. Those that choose
// otherwise at more than `delays_max` places are left out, and all after `most` runs.
Schedules every_schedule(const Scheduled& program, int64_t delays_max, int64_t most);
// The same for a case.
Schedules every_schedule(const Case& c, int64_t delays_max, int64_t most);

}  // namespace harness
