// What a check of a running program found wrong: not the caller's mistake, as Error is, but an answer that is no.
#pragma once

#include "shardproof/base/check.h"

namespace shardproof {

// Commands end with exit code 1. Worlds of threads and of processes hand it on as what it is.
class FailedCheck : public Error {
 public:
  using Error::Error;
};

}  // namespace shardproof
