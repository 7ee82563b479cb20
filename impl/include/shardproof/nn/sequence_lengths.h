// The whole lengths of the sequences of which a forward has pieces. Modules that see a piece ask for them, and a forward that
// runs again in a backward finds those of its first run, whatever other microbatches were cut to meanwhile.
#pragma once

#include <cstdint>
#include <map>

namespace shardproof {

// Those of the calling thread, by the number of the object that cuts them.
std::map<int64_t, int64_t>& sequence_lengths();

// A number that nobody had before.
int64_t new_sequence_number();

}  // namespace shardproof
