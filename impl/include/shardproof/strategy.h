// A strategy is five layouts of a bucket, the one-dimensional address space that holds a unit's parameters. Everything a
// strategy does follows from three transitions between them, each one `lower` step; equal layouts give no step, so no code
// above asks which strategy it is.
//
//   unshard   parameter -> compute                 before a unit's forward and backward
//   reduce    produced -> accumulated              after every microbatch
//             accumulated -> state                 after the last one
//   publish   state -> parameter                   after the optimizer
//
//             parameter  compute  produced      accumulated   state
//   ddp       b          b        b, partial s  b, partial s  b
//   zero1     b          b        b, partial s  b, partial s  b+s
//   zero2     b          b        b, partial s  b+s           b+s
//   zero3     b+s        b        b, partial s  b+s           b+s
//
// b: replicated; +s: split flat over the mesh axis `dp_shard`; partial s: its ranks hold terms of a sum.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardproof/layout.h"

namespace shardproof {

struct Strategy {
  std::string name;
  Layout parameter;    // between steps
  Layout compute;      // while the unit runs
  Layout produced;     // a gradient as backward makes it
  Layout accumulated;  // a gradient between microbatches
  Layout state;        // the optimizer's state, and the gradient that the optimizer reads
};

// The table above. A new strategy is a new row here: the harness draws from this list.
const std::vector<Strategy>& strategies();

// Throws Error listing the names there are.
const Strategy& strategy(std::string_view name);

// True when gradients are added over microbatches before they are reduced over ranks (ddp, zero1): the order of sums that
// a reference run has to follow.
bool accumulates_before_reducing(const Strategy& strategy);

}  // namespace shardproof
