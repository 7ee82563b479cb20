// The timeline of a run as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open: Chrome's trace events in JSON.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shardproof/comm/timeline.h"

namespace harness {

using SpansOfRanks = std::map<int64_t, std::vector<shardproof::Span>>;

// Writes the spans of these ranks to PREFIX.RANK each, for a process that reads them with `read_spans`. What a rank began
// before its span `first` is left out.
void write_spans(const SpansOfRanks& ranks, const std::string& first, const std::string& prefix);
SpansOfRanks read_spans(const std::string& prefix, int64_t ranks);

// A rank is a process of the trace. Its first thread has the computations and, within them, the waits. Each group of ranks has
// a thread with its collectives. Spans of one thread nest, and collectives of one thread do not overlap; where they would,
// there is a further thread, such as "collectives along dp_shard (2)". Times begin at 0.
nlohmann::json chrome_trace(const SpansOfRanks& ranks);

}  // namespace harness
