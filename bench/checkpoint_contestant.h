// Saves and loads the benchmark's model, optimizer included, and measures itself in a process of its own.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/model.h"

namespace bench {

struct CheckpointTask {
  Size size;
  std::string folder;  // empty; gone afterwards is what lies in it
  int64_t ranks = 2, load_ranks = 4;
  int64_t repeats = 3;  // timed, after one that is not
};

// Milliseconds of each repeat, until the last rank is done: {"save": [...], "async_blocking": [...], "load": [...],
// "load_once": of a load that does not check before it changes anything, "load_resharded": on load_ranks}; "disk_bytes";
// "losses": of the next step, of the run that saved and of both that loaded. Files are in the page cache when they are loaded.
nlohmann::json run_checkpoint(const CheckpointTask& task);

}  // namespace bench
