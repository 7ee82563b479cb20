// Cases of the harness that have to hold.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "harness/run/run_case.h"

namespace harness {

inline void expect_held(const Case& c, Ranks& ranks = thread_ranks()) {
  const Verdict verdict = run_case(c, ranks);
  EXPECT_TRUE(verdict.held()) << c.str() << "\n" << verdict.str();
}
inline void expect_held(const std::string& text, Ranks& ranks = thread_ranks()) { expect_held(Case::parse(text), ranks); }

// For drawn cases, whose golden run may itself end in NaN or infinity (see Verdict::diverged). Returns whether the case held.
inline bool expect_held_or_diverged(const Case& c, Ranks& ranks = thread_ranks()) {
  const Verdict verdict = run_case(c, ranks);
  EXPECT_TRUE(verdict.held() || verdict.diverged()) << c.str() << "\n" << verdict.str();
  return verdict.held();
}

}  // namespace harness
