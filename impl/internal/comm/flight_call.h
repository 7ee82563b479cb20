// A call as the flight record of any backend holds it.
#pragma once

#include <memory>
#include <string>

#include "shardproof/comm/comm.h"
#include "internal/comm/flight_record.h"

namespace shardproof {

FlightCall flight_call(const Call& call, std::shared_ptr<const FlightGroup> group, int64_t sequence, std::string label);

}  // namespace shardproof
