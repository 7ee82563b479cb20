// Calls that fully_shard makes before there is anything to train.
#pragma once

#include "shardproof/comm/traced.h"

// Of fully_shard, whose ranks ask whether all run the same.
inline bool of_set_up(const shardproof::TraceRecord& record) { return record.call == "all_reduce(max, int64 x 2)"; }
