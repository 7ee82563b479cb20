// How a rank's body ended, as processes tell each other, and whose error all of them throw.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "shardproof/base/check.h"

namespace shardproof {

// What another rank's failure makes of this one's call.
class RelayedError : public Error {
 public:
  using Error::Error;
};

// Of fixed size and without pointers, so that its bytes can be sent.
struct Ending {
  enum Kind : int64_t { well, error, non_finite, failed_check, invariant };
  int64_t failed = 0, relayed = 0, kind = well;
  char origin[500] = {};
  char text[3500] = {};
};

// What it threw; null for nothing. A WorldLostError goes on: nobody is left to be told.
std::exception_ptr thrown_by(const std::function<void()>& body);
// Throws Error when the body left calls (in words) that it never waited for. `part` is of messages.
void require_all_waited(const char* part, const std::vector<std::string>& open);
// Throws Error when there are not so many ranks.
void require_ranks(const char* part, int64_t ranks, int64_t size);

// `thrown` may be null: it ended well. `last_call` of this rank, in words, or "".
Ending ending_of(const std::exception_ptr& thrown, const std::string& last_call);
// Of several that failed the rank whose error came first: one that was no answer to another's.
size_t culprit(const std::vector<Ending>& endings);
[[noreturn]] void rethrow(const Ending& ending, size_t rank, size_t world);

}  // namespace shardproof
