// What `shardproof plan` prints, and writes as JSON.
#pragma once

#include <string>

#include "harness/commands/json_lines.h"
#include "harness/plan/dry_run.h"
#include "harness/plan/machine.h"
#include "harness/plan/search.h"
#include "harness/plan/timeline.h"

namespace harness {

// What the rank holds in one place: between steps, and at most during one.
void report_memory(const char* place, const shardproof::MemoryBytes& use, JsonLines& out);
// What the library's ledger does not count: activations, and whatever else operators make.
void report_activations(const DryRunResult& result, JsonLines& out);
void report_traffic(const DryRunResult& result, JsonLines& out);
void report_pieces(const DryRunResult& result, JsonLines& out);
// The time of the step, and what it consists of.
void report_time(const DryRun& run, const DryRunResult& result, const StepTime& time, const Machine& machine, JsonLines& out);
// At most so many rows.
void report_search(const SearchResult& result, size_t rows, double memory_max, JsonLines& out);

}  // namespace harness
