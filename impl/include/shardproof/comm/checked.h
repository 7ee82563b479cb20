// A decorator for any backend. It compares the signature of every collective across ranks before the collective runs. When
// ranks disagree, every rank throws an Error that names two ranks and both calls. A backend by itself might hang or corrupt
// memory.
#pragma once

#include <memory>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Each collective costs one small all_gather more. Sends and receives are not checked, because they match by tag. Groups that
// are split from the result are checked too.
std::shared_ptr<Comm> checked(std::shared_ptr<Comm> inner);

}  // namespace shardproof
