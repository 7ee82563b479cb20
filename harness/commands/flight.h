// What the ranks' flight records say together: where their calls first part.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace harness {

struct FlightLine {
  std::string group, name, call, label, state;  // `call`: op, sum, dtype, elements, as one text
  std::vector<int64_t> ranks;
  int64_t sequence = 0;
};

struct Flight {
  int64_t rank = 0, world = 1;
  std::string why;
  std::vector<FlightLine> calls;  // the last ones, in order
};

// DIRECTORY/rank_N.jsonl of every rank that left one. Throws Error when there is none, or one cannot be read.
std::map<int64_t, Flight> read_flights(const std::string& directory);

// The first call of a group that its ranks made differently, or that some never made or finished; "" when the records agree.
std::string first_disagreement(const std::map<int64_t, Flight>& flights);

// All of it in words: why each rank ended, who left no record, the first disagreement.
std::string describe(const std::map<int64_t, Flight>& flights);

}  // namespace harness
