// A stated machine: what its devices and its network do in a second. plan computes the time of a step from it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace harness {

// A message of B bytes takes `seconds` and then B / bytes_per_second.
struct Link {
  double seconds = 0;
  double bytes_per_second = 0;  // of one rank, in one direction; infinity: it costs nothing
};

struct Machine {
  std::string name;
  std::string source;                        // where the numbers are from
  std::map<std::string, double> flops = {};  // of matrix products in a second, by dtype: float32, bf16, fp16
  double efficiency = 1;                     // the part of these that products reach
  double memory_bytes = 0;                   // of a rank
  double memory_bytes_per_second = 0;        // read or written by operators
  double operator_seconds = 0;               // no operator takes less
  int64_t ranks_per_host = 1;
  int64_t ranks_at_once = 0;       // of a host that can compute at a time; 0: all
  bool overlaps = true;            // collectives go on while operators run
  Link inside = {}, between = {};  // of a host, and of two hosts
};

// Those that the program knows.
const std::vector<Machine>& known_machines();

// The file that `plan --calibrate` writes: one JSON object. Throws Error, which names the file and the field that is missing or
// wrong.
Machine read_machine(const std::string& path);
void write_machine(const Machine& machine, const std::string& path);
// Throws Error, which names the field.
void validate(const Machine& machine);

}  // namespace harness
