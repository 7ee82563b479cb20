// How the threads of a case take turns: a schedule as a value that prints and parses, part of the case's text.
//
//   threads(eager)   threads(latest)   threads(random=7)   threads(pct=7,depth=2,steps=300)   threads(choices=0-0-1)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/case/case_scanner.h"

namespace harness {

struct Interleaving {
  enum class Kind {
    eager,    // work in the background happens as soon as it can, and a thread runs until it has to wait
    latest,   // work in the background happens only when no rank can go on without it
    random,   // each choice is drawn
    pct,      // probabilistic concurrency testing (Burckhardt et al. 2010), see policies.h
    choices   // the given choices, and then as eager threads without background work
  };
  Kind kind = Kind::eager;
  uint64_t seed = 0;                 // of random and pct
  int64_t depth = 2, steps = 1;      // of pct
  std::vector<int64_t> choices = {};

  std::string str() const;
  bool operator==(const Interleaving&) const = default;
};

// What stands between the parentheses.
Interleaving read_interleaving(const Scanner& scanner, const std::vector<Scanner::Argument>& arguments, size_t column);

}  // namespace harness
