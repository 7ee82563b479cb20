// Which communicators compare what their calls are for.
#pragma once

#include "shardproof/comm/comm.h"

namespace shardproof {

// A base of communicators whose ranks tell each other with every collective what it is for (CallLabel), so that a call for
// something else is an error, as threads and MPI do. Others see data alone.
class ComparingComm {
 public:
  virtual ~ComparingComm() = default;
};

// Of a decorator (decorated.h), whether what it wraps does. A group of one rank has nothing to compare.
bool compares_purposes(const Comm& comm);

}  // namespace shardproof
