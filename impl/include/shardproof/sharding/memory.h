// Bytes that a sharded module holds on this rank, by what they are for. Counted where they are allocated and freed, so what an
// alias keeps alive still counts. docs/strategies.md states what each strategy needs.
#pragma once

#include <array>
#include <cstdint>

namespace shardproof {

enum class MemoryKind {
  parameter,      // between steps: the strategy's `parameter` layout in `compute`, and main parameters that lie apart
  gathered,       // whole parameters of units that run, and what stays of them between forward and backward
  gradient,       // produced, accumulated and final gradients
  optimizer,      // its state
  communication,  // what is on the wire in another dtype or layout than it is kept in
};
constexpr int kMemoryKinds = 5;
const char* to_string(MemoryKind kind);

struct MemoryBytes {
  std::array<int64_t, kMemoryKinds> now_bytes{};
  std::array<int64_t, kMemoryKinds> peak_bytes{};  // of each kind by itself, since the last reset
  int64_t peak_total_bytes = 0;                    // of all kinds together
  int64_t now(MemoryKind kind) const { return now_bytes[static_cast<int>(kind)]; }
  int64_t peak(MemoryKind kind) const { return peak_bytes[static_cast<int>(kind)]; }
  int64_t now_total() const;
};

// Where the parameters are; and, of ShardOptions::offload, in the host's memory.
struct MemoryUse : MemoryBytes {
  MemoryBytes host;
};

}  // namespace shardproof
