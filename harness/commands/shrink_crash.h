// A smaller case for one that crashes.
#pragma once

#include "harness/commands/shrink.h"

namespace harness {

// Replays the case by this program in a process of its own, so that this one goes on. The verdict is that it holds, unless that
// process crashes (crash_report.h), whatever else goes wrong in it.
Verdict crash_verdict(const Case& c);

// The case crashes. Each simpler one is tried in a process of its own, and those that crash by the same signal fail alike.
Shrunk shrink_crash(const Case& crashing, const Verdict& verdict, double seconds, int64_t runs);

}  // namespace harness
