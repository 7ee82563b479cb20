// The bytes that a sharded module holds on this rank, by purpose. They are counted where memory is allocated and freed, so
// memory that an alias keeps alive still counts. docs/strategies.md states what each strategy needs.
#pragma once

#include <array>
#include <cstdint>

namespace shardproof {

enum class MemoryKind {
  parameter,      // held between steps: parameters in the strategy's `parameter` layout, and main parameters that lie apart
  gathered,       // whole parameters of units that run, and what is kept of them between forward and backward
  gradient,       // produced, accumulated and final gradients
  optimizer,      // the optimizer's state
  communication,  // buffers of collectives whose dtype or layout differs from that of what is kept
  activation,     // what units with ShardOptions::offload_activations keep for their backward, and what delayed gradients are
                  // made of (delayed_gradient_bytes_max); other activations are not counted
};
constexpr int kMemoryKinds = 6;
const char* to_string(MemoryKind kind);

struct MemoryBytes {
  std::array<int64_t, kMemoryKinds> now_bytes{};
  std::array<int64_t, kMemoryKinds> peak_bytes{};  // the peak of each kind by itself since the last reset
  int64_t peak_total_bytes = 0;                    // the peak of all kinds together
  int64_t now(MemoryKind kind) const { return now_bytes[static_cast<int>(kind)]; }
  int64_t peak(MemoryKind kind) const { return peak_bytes[static_cast<int>(kind)]; }
  int64_t now_total() const;
};

// The memory of the device that holds the parameters. `host` counts the host's memory that ShardOptions::offload and
// offload_activations use.
struct MemoryUse : MemoryBytes {
  MemoryBytes host;
};

}  // namespace shardproof
