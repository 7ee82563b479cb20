// For what a program does to a sharded model by itself, such as an update by an optimizer of its own.
#pragma once

#include <string>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

// Notes what every rank does in this step besides what it exchanges, e.g. "RMSprop lr=0.1". Where ranks did different things in
// a step, their next exchange of parameters or gradients throws Error, which says who did what. It does not communicate.
void note(Sharded& sharded, const std::string& done);

}  // namespace shardproof
